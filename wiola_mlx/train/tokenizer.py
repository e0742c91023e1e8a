"""The tokenizer of a run: a folder, a SentencePiece model, or a byte-level BPE of the text."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..checkpoint import read_json
from ..documents import end_token, read_documents
from ..errors import WiolaError
from .data import file_stamps

SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")  # ids 0 to 3, as in the released tokenizers
SPECIAL_NAMES = dict(
    zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIALS, strict=True)
)
SMALLEST_BPE = 256 + len(SPECIALS)
COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def prepare_tokenizer(
    folder: Path,
    source: str | None,
    bpe_size: int | None,
    paths: list[str],
    keep: bool = False,
):
    """Puts a run's tokenizer into ``folder``, as a model folder holds it, and opens it.

    What is there already is taken if it came from the same source, else it is made anew.

    Args:
        source: a folder with a tokenizer, or a SentencePiece ``.model`` file.
        bpe_size: entries of a byte-level BPE to train on the text files ``paths`` instead.
        keep: whether one of another source is an error.

    Returns:
        A Hugging Face tokenizer with an end token.

    Raises:
        WiolaError: for a source that is no tokenizer, or a size below 260.
    """
    origin = {"tokenizer": source, "bpe": bpe_size, "text": file_stamps(paths) if bpe_size else []}
    marker = folder.with_name(f"{folder.name}-origin.json")
    same = folder.is_dir() and marker.is_file() and read_json(marker) == origin
    if keep and not same:
        raise WiolaError(f"the run in {folder.parent} had another tokenizer")
    if not same:
        temporary = folder.with_name(f".{folder.name}-new")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        if bpe_size is not None:
            write_bpe(temporary, bpe_size, read_documents(paths))
        elif source is not None and source.endswith(".model"):
            write_sentencepiece(temporary, Path(source).expanduser())
        else:
            copy_tokenizer(Path(source).expanduser(), temporary)
        marker.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        marker.write_text(json.dumps(origin) + "\n")
    return open_tokenizer(folder)


def write_bpe(folder: Path, size: int, texts: Iterable[str]):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if size < SMALLEST_BPE:
        raise WiolaError(f"a byte-level BPE has {SMALLEST_BPE} entries or more, not {size}")
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, "PreTrainedTokenizerFast", SPECIAL_NAMES)


def write_sentencepiece(folder: Path, path: Path):
    import sentencepiece

    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError, TypeError) as error:
        raise WiolaError(f"{path} is no SentencePiece model") from error
    ids = {"unk": pieces.unk_id(), "bos": pieces.bos_id(), "eos": pieces.eos_id()}
    names = {f"{kind}_token": pieces.id_to_piece(i) for kind, i in ids.items() if i >= 0}
    shutil.copyfile(path, folder / "tokenizer.model")
    write_tokenizer_config(folder, "LlamaTokenizer", {**names, "add_bos_token": False})


def write_tokenizer_config(folder: Path, name: str, more: dict):
    content = {"tokenizer_class": name, "clean_up_tokenization_spaces": False, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2))


def copy_tokenizer(source: Path, folder: Path):
    found = [source / name for name in COPIED if (source / name).is_file()]
    if not any(file.name in ("tokenizer.json", "tokenizer.model") for file in found):
        raise WiolaError(f"there is no tokenizer.json or tokenizer.model in {source}")
    for file in found:
        shutil.copyfile(file, folder / file.name)


def open_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    from ..loading import quiet_transformers

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise bare Exception for a bad file
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WiolaError(f"the tokenizer in {folder} cannot be read: {reason[0]}") from error
    end_token(tokenizer)
    return tokenizer
