"""Makes golden.npz: one AdamW step of the published PyTorch package.

Not run by the tests. In an environment of its own, with torch 2.13.0, transformers 4.45.2 and
wiola13m 1.0.1:

    python tests/reference/training/make_golden.py

The initial weights are those of gsa-base. ``batch`` is [rows, T + 1]: inputs are all but the last
column, targets all but the first. Two steps are made, so that the moments count.
Prefixes: ``grad:`` after clipping, ``one:`` weights after the first step, ``two:`` after the
second, with weight decay on everything but biases; ``all:`` biases after a step with decay on them.
Of arrays larger than 1,024 only every 61st entry is kept.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from wiola13m import WiolaConfig, WiolaForCausalLM

HERE = Path(__file__).parent
BASE = HERE.parent / "gsa-base"
RATE, BETAS, EPSILON, DECAY, CLIP = 1e-2, (0.9, 0.95), 1e-8, 0.1, 1.0
ROWS, LENGTH, SEED = 4, 12, 5


def model():
    torch.manual_seed(0)
    made = WiolaForCausalLM(WiolaConfig.from_pretrained(BASE))
    missing = made.load_state_dict(load_file(BASE / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys
    made.tie_weights()
    return made.train()


def optimizer(made, biases_too: bool):
    named = list(made.named_parameters())
    decayed = [p for name, p in named if biases_too or "bias" not in name]
    others = [p for name, p in named if not biases_too and "bias" in name]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)


def step(made, adamw, batch):
    adamw.zero_grad()
    logits = made(input_ids=batch[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(made.parameters(), CLIP)
    adamw.step()
    return loss.item(), norm.item()


def kept(array) -> np.ndarray:
    flat = array.detach().numpy().reshape(-1)
    return (flat[::61] if flat.size > 1024 else flat).copy()


def main():
    made = model()
    generator = torch.Generator().manual_seed(SEED)
    size = (ROWS, LENGTH + 1)
    first, second = (
        torch.randint(4, made.config.vocab_size, size, generator=generator) for _ in range(2)
    )
    golden = {"batch": first.numpy(), "second": second.numpy()}
    golden["settings"] = np.array([RATE, *BETAS, EPSILON, DECAY, CLIP])
    adamw = optimizer(made, biases_too=False)
    golden["loss"], golden["norm"] = step(made, adamw, first)
    golden |= {f"grad:{n}": kept(p.grad) for n, p in made.named_parameters()}
    golden |= {f"one:{n}": kept(p) for n, p in made.named_parameters()}
    golden["second_loss"], _ = step(made, adamw, second)
    golden |= {f"two:{n}": kept(p) for n, p in made.named_parameters()}
    made = model()
    step(made, optimizer(made, biases_too=True), first)
    golden |= {f"all:{n}": kept(p) for n, p in made.named_parameters() if "bias" in n}
    np.savez_compressed(HERE / "golden.npz", **golden)


if __name__ == "__main__":
    main()
