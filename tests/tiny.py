"""Tiny random checkpoints in the released layout: for tests, no network needed."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wiola_mlx.models import wiola

VOCAB_SIZE = 300  # 256 bytes, specials, and room
CONFIG = {
    "architectures": ["WiolaForCausalLM"],
    "model_type": "wiola",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "spiral_alpha": 0.05,
    "vocab_size": VOCAB_SIZE,
    "torch_dtype": "float32",
}
SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def random_model(seed: int = 0, gate_scale: float = 30.0, **changes):
    """A model with weights of std 1/√in; the gate's are larger, so that a leak of state shows."""
    model = wiola.Model(wiola.ModelArgs.from_dict({**CONFIG, **changes}))
    keys = mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters())))
    weights = []
    for key, (name, array) in zip(keys, tree_flatten(model.parameters()), strict=True):
        scale = array.shape[-1] ** -0.5 * (gate_scale if "gate_fc" in name else 1)
        noise = mx.random.normal(array.shape, scale=scale, key=key)
        weights.append((name, 1 + 0.1 * noise if name.endswith("norm.weight") else noise))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model.eval()


def write_checkpoint(folder: Path, seed: int = 0, tokenizer: bool = True, **changes) -> Path:
    """A folder as ``save_pretrained`` leaves it: config, one safetensors file, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(random_model(seed, **changes).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    write_json(folder / "config.json", {**CONFIG, **changes})
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_json(path: Path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def edit_json(path: Path, **changes):
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def write_tokenizer(folder: Path, chat_template: str | None = None):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIALS, strict=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **dict(names),
    }
    if chat_template:
        config["chat_template"] = chat_template
    write_json(folder / "tokenizer_config.json", config)


def write_shards(folder: Path, count: int = 2):
    """Splits ``model.safetensors`` into shards with an index."""
    weights = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        shard = {key: weights[key] for key in sorted(weights)[i::count]}
        mx.save_safetensors(str(folder / name), shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
