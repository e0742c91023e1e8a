"""Stock mlx-lm with Wiola registered, several prompts at once: python examples/stock_mlx_lm.py"""

import mlx_lm

import wiola_mlx
from wiola_mlx.loading import resolve


def main():
    wiola_mlx.register()
    model, tokenizer = mlx_lm.load(str(resolve("builtin")))
    prompts = ["Once upon a time", "The big dog", "Lily and Tom went to the park because"]
    answers = mlx_lm.batch_generate(
        model, tokenizer, [tokenizer.encode(p) for p in prompts], max_tokens=20
    )
    for prompt, text in zip(prompts, answers.texts, strict=True):
        print(f"{prompt}{text}")


if __name__ == "__main__":
    main()
