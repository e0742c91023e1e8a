"""Text from a model, by mlx-lm's generator: options are checked first, and none is ignored."""

import numbers
import warnings
from collections.abc import Callable, Iterator

import mlx.core as mx

from .errors import WiolaError
from .models.running_sums import fitting_group_size

DEFAULT_MAX_TOKENS = 256
PREFILL_STEP = 512  # tokens of a prompt read at once: small enough to show progress
KV_BITS = (2, 3, 4, 5, 6, 8)


def generate_text(model, tokenizer, prompt, **options) -> str:
    """The text that ``stream_text`` yields, whole."""
    return "".join(response.text for response in stream_text(model, tokenizer, prompt, **options))


def stream_text(
    model,
    tokenizer,
    prompt: str | list[int],
    *,
    max_tokens: int | None = None,
    temp: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list | None = None,
    draft_model=None,
    num_draft_tokens: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator:
    """Generates text, piece by piece.

    Args:
        prompt: text, or token ids. With ``prompt_cache`` it continues what the cache holds.
        max_tokens: how many tokens at most; None means 256, 0 yields nothing.
        temp: sampling temperature; 0 takes the likeliest token.
        top_p, top_k, min_p: which tokens may be sampled; 1.0, 0 and 0.0 leave all.
        repetition_penalty: above 1 makes the last 20 tokens less likely.
        seed: the same seed gives the same text; None a new one each time. 0 is a seed.
        kv_bits: quantize the cache's K and V from the first token on (2, 3, 4, 5, 6 or 8 bits).
        kv_group_size: values per scale; by default the largest of 64 and 32 that fits.
        max_kv_size: refused: a rotating cache would forget what the running sums remember.
        prompt_cache: from ``model.make_cache()`` or ``load_prompt_cache``; updated in place.
        draft_model: a smaller model with the same tokenizer, for speculative decoding.
        progress: called with the tokens of the prompt that are read, and all of them.

    Yields:
        mlx-lm's ``GenerationResponse``: ``text``, ``token``, speeds, ``finish_reason``.

    Raises:
        WiolaError: for a wrong option or prompt, before the first token.
    """
    max_tokens = checked_max_tokens(max_tokens)
    check_sampling(temp, top_p, top_k, min_p, repetition_penalty, seed)
    if max_kv_size is not None:
        raise WiolaError(
            "max_kv_size is not supported: a rotating cache forgets tokens that the running sums "
            "remember; use kv_bits for a smaller cache"
        )
    if prompt_cache is not None:
        check_cache(model, prompt_cache, kv_bits)
    kv = kv_options(model, draft_model, kv_bits, kv_group_size)
    if draft_model is not None:
        check_draft(model, draft_model, num_draft_tokens, prompt_cache)
    ids = prompt_ids(tokenizer, prompt, model.args.vocab_size, prompt_cache)
    # Options are wrong now, not at the first token: the generator starts below.
    return run_generator(
        model,
        tokenizer,
        ids,
        max_tokens,
        seed,
        sampling=dict(
            temp=temp,
            top_p=top_p,
            top_k=top_k if top_k < model.args.vocab_size else 0,  # mlx-lm takes no more
            min_p=min_p,
        ),
        repetition_penalty=repetition_penalty,
        prompt_cache=prompt_cache,
        draft=dict(draft_model=draft_model, num_draft_tokens=num_draft_tokens),
        more=dict(kv, prefill_step_size=PREFILL_STEP, prompt_progress_callback=progress),
    )


def run_generator(
    model, tokenizer, ids, max_tokens, seed, sampling, repetition_penalty, prompt_cache, draft, more
) -> Iterator:
    from mlx_lm.generate import stream_generate
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    if max_tokens == 0:
        return
    if seed is not None:
        mx.random.seed(seed)
    trained = model.args.max_position_embeddings
    before = cached_tokens(prompt_cache) + len(ids)
    noticed = notice_length(before, trained)
    responses = stream_generate(
        model,
        tokenizer,
        mx.array(ids, mx.uint32),
        max_tokens=max_tokens,
        sampler=make_sampler(**sampling),
        logits_processors=make_logits_processors(repetition_penalty=repetition_penalty),
        prompt_cache=prompt_cache,
        **draft,
        **more,
    )
    for response in responses:
        # The newest token is not read yet.
        noticed = noticed or notice_length(before + response.generation_tokens - 1, trained)
        yield response


def notice_length(length: int, trained: int) -> bool:
    if length > trained:
        warnings.warn(
            f"the text is {length} tokens long by now, longer than the {trained} "
            "that the model was trained on; it goes on, but may get worse",
            stacklevel=3,
        )
    return length > trained


def cached_tokens(prompt_cache: list | None) -> int:
    return 0 if prompt_cache is None else prompt_cache[0][0].offset  # a quantized one has no size()


def checked_max_tokens(value) -> int:
    if value is None:
        return DEFAULT_MAX_TOKENS
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 0:
        raise WiolaError(f"max_tokens must be a whole number, 0 or more, not {value!r}")
    return int(value)


def check_sampling(temp, top_p, top_k, min_p, repetition_penalty, seed):
    check_seed(seed)
    for name, value in (("temp", temp), ("top_p", top_p), ("top_k", top_k), ("min_p", min_p)):
        if not isinstance(value, numbers.Real):
            raise WiolaError(f"{name} must be a number, not {value!r}")
    ranges = (
        ("temp", temp, temp >= 0, "0 or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("top_k", top_k, top_k >= 0 and top_k == int(top_k), "a whole number, 0 or more"),
        ("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1"),
        (
            "repetition_penalty",
            repetition_penalty,
            repetition_penalty is None or 0 < repetition_penalty < float("inf"),
            "above 0",
        ),
        ("temp", temp, temp < float("inf"), "finite"),
    )
    for name, value, fits, rule in ranges:
        if not fits:
            raise WiolaError(f"{name} must be {rule}, not {value!r}")


def check_seed(seed: int | None):
    whole = isinstance(seed, numbers.Integral)
    if seed is not None and not (whole and 0 <= seed < 2**64):
        raise WiolaError(f"seed must be between 0 and 2^64 - 1, not {seed!r}")


def kv_options(model, draft_model, bits, group_size) -> dict:
    if bits is None:
        if group_size is not None:
            raise WiolaError("kv_group_size needs kv_bits")
        return {}
    if bits not in KV_BITS:
        raise WiolaError(f"kv_bits must be one of {', '.join(map(str, KV_BITS))}, not {bits!r}")
    if group_size not in (None, 32, 64, 128):
        raise WiolaError(f"kv_group_size must be 32, 64 or 128, not {group_size!r}")
    sizes = {m.args.head_dim for m in (model, draft_model) if m is not None}
    try:
        fitting = min(fitting_group_size(size, group_size or 64) for size in sizes)
    except ValueError as error:
        raise WiolaError(str(error)) from error
    if group_size not in (None, fitting):
        raise WiolaError(f"kv_group_size {group_size} does not divide the head size {min(sizes)}")
    return dict(kv_bits=bits, kv_group_size=fitting, quantized_kv_start=0)


def check_cache(model, prompt_cache, kv_bits):
    expected = len(model.layers)
    if len(prompt_cache) != expected or not all(hasattr(c, "caches") for c in prompt_cache):
        raise WiolaError(f"the prompt cache is not one of this model's {expected} layers")
    bits = getattr(prompt_cache[0][0], "bits", None)
    if kv_bits is not None and bits not in (None, kv_bits):
        raise WiolaError(
            f"the prompt cache has {bits} bits already, so kv_bits cannot be {kv_bits}"
        )


def check_draft(model, draft_model, num_draft_tokens, prompt_cache):
    if draft_model.args.vocab_size != model.args.vocab_size:
        raise WiolaError(
            f"the draft model has a vocabulary of {draft_model.args.vocab_size} tokens, "
            f"the model one of {model.args.vocab_size}: they must share a tokenizer"
        )
    if not isinstance(num_draft_tokens, numbers.Integral) or num_draft_tokens < 1:
        raise WiolaError(f"num_draft_tokens must be 1 or more, not {num_draft_tokens!r}")
    if prompt_cache is not None:
        raise WiolaError("a prompt cache and a draft model cannot be used together")


def apply_template(tokenizer, messages: list[dict], **options):
    """``apply_chat_template``; a template that fails is a WiolaError."""
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program: jinja raises many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise WiolaError(f"the model's chat template fails: {reason}") from error


def check_text(text: str):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise WiolaError("the prompt is not valid text: it has bytes that are not UTF-8") from error


def prompt_ids(tokenizer, prompt, vocab_size: int, prompt_cache) -> list[int]:
    """Token ids of a prompt: special tokens are added as the tokenizer says, but not mid-text."""
    if isinstance(prompt, str):
        check_text(prompt)
        fresh = cached_tokens(prompt_cache) == 0
        bos = tokenizer.bos_token
        add_special = fresh and not (bos and prompt.startswith(bos))
        ids = tokenizer.encode(prompt, add_special_tokens=add_special)
    else:
        ids = prompt.tolist() if isinstance(prompt, mx.array) else prompt
        if not isinstance(ids, (list, tuple)):
            raise WiolaError(f"the prompt must be text or a list of token ids, not {prompt!r}")
    if not ids:
        raise WiolaError("the prompt is empty")
    wrong = [i for i in ids if not isinstance(i, numbers.Integral) or not 0 <= i < vocab_size]
    if wrong:
        raise WiolaError(f"{wrong[0]!r} in the prompt is no token id (0 to {vocab_size - 1})")
    return [int(i) for i in ids]
