"""Speculative decoding: the draft changes the speed, never the text."""

import pytest
import tiny

import wiola_mlx

PROMPT = list(range(10, 30))


def greedy(model, tokenizer, **options):
    stream = wiola_mlx.stream_text(model, tokenizer, PROMPT, max_tokens=40, **options)
    return [(response.token, response.from_draft) for response in stream]


@pytest.fixture(scope="module")
def endless(loaded):
    """A tokenizer that never stops the text."""
    import copy

    tokenizer = copy.copy(loaded[1])
    tokenizer._eos_token_ids = set()
    return tokenizer


@pytest.mark.parametrize("drafted", [1, 3, 6])
def test_issue_B2_a_mostly_rejected_draft_gives_the_same_40_tokens(loaded, endless, drafted):
    model = loaded[0]
    plain = [token for token, _ in greedy(model, endless)]
    draft = tiny.random_model(seed=9)
    speculative = greedy(model, endless, draft_model=draft, num_draft_tokens=drafted)
    assert len(plain) == 40
    assert [token for token, _ in speculative] == plain
    assert sum(from_draft for _, from_draft in speculative) < 10


def test_a_perfect_draft_gives_the_same_tokens_too(loaded, endless):
    model = loaded[0]
    speculative = greedy(model, endless, draft_model=model, num_draft_tokens=4)
    assert [token for token, _ in speculative] == [token for token, _ in greedy(model, endless)]
    assert sum(from_draft for _, from_draft in speculative) > 25


def test_a_quantized_cache_rewinds_as_well(loaded, endless):
    model, draft = loaded[0], tiny.random_model(seed=9)
    plain = greedy(model, endless, kv_bits=8)
    speculative = greedy(model, endless, kv_bits=8, draft_model=draft)
    same = [a[0] == b[0] for a, b in zip(plain, speculative, strict=True)]
    assert all(same)


def test_what_does_not_fit_together_is_refused(loaded, endless):
    model = loaded[0]
    small = tiny.random_model(vocab_size=280)
    with pytest.raises(wiola_mlx.WiolaError, match="280"):
        greedy(model, endless, draft_model=small)
    with pytest.raises(wiola_mlx.WiolaError, match="together"):
        greedy(model, endless, draft_model=model, prompt_cache=model.make_cache())
    with pytest.raises(wiola_mlx.WiolaError, match="num_draft_tokens"):
        greedy(model, endless, draft_model=model, num_draft_tokens=0)
