"""Streams a story from the built-in model: python examples/story.py"""

import wiola_mlx


def main():
    model, tokenizer = wiola_mlx.load("builtin")
    prompt = "Once upon a time, a little cat"
    print(prompt, end="")
    for piece in wiola_mlx.stream_text(
        model, tokenizer, prompt, temp=0.8, top_p=0.95, max_tokens=80
    ):
        print(piece.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
