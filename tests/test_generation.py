"""The Python API: options, threads, memory, streams of text."""

import copy
import gc
import threading
import warnings
import weakref

import mlx.core as mx
import pytest
import tiny

import wiola_mlx
from wiola_mlx import WiolaError


def generate(loaded, prompt="Once", **options):
    return wiola_mlx.generate_text(*loaded, prompt, **options)


def tokens_of(loaded, prompt="Once", **options):
    return [r.token for r in wiola_mlx.stream_text(*loaded, prompt, **options)]


@pytest.fixture(scope="module")
def endless(loaded):
    model, tokenizer = loaded[0], copy.copy(loaded[1])
    tokenizer._eos_token_ids = set()
    return model, tokenizer


@pytest.mark.parametrize("wrong", [-1, "5", 1.5, True])
def test_issue_J1_a_wrong_max_tokens_is_refused(loaded, wrong):
    with pytest.raises(WiolaError, match="max_tokens"):
        generate(loaded, max_tokens=wrong)


@pytest.mark.filterwarnings("ignore:the text is")
def test_issue_J1_none_zero_and_one_token(endless):
    assert generate(endless, max_tokens=0) == ""
    assert len(tokens_of(endless, max_tokens=1)) == 1
    assert len(tokens_of(endless)) == 256
    assert len(tokens_of(endless, max_tokens=None)) == 256


@pytest.mark.parametrize(
    "options, name",
    [
        ({"temp": -0.1}, "temp"),
        ({"temp": float("nan")}, "temp"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"kv_bits": 7}, "kv_bits"),
        ({"kv_group_size": 32}, "kv_group_size needs kv_bits"),
        ({"kv_bits": 8, "kv_group_size": 64}, "does not divide the head size 32"),
        ({"max_kv_size": 16}, "max_kv_size"),
        ({"max_kv_size": 16, "kv_bits": 8}, "max_kv_size"),
        ({"temp": None}, "temp"),
        ({"top_k": "5"}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"prompt_cache": []}, "2 layers"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"prompt": "a\udcff"}, "not valid text"),
        ({"prompt": [300]}, "300"),
        ({"prompt": [-1]}, "-1"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_first_token(loaded, options, name):
    with pytest.raises(WiolaError, match=name):
        wiola_mlx.stream_text(*loaded, **{"prompt": "Once", **options})


def test_issue_B7_kv_bits_shrink_the_cache_from_the_first_token(endless):
    model, _ = endless
    sizes, texts = {}, {}
    for bits in (None, 8, 4):
        cache = model.make_cache()
        texts[bits] = tokens_of(endless, max_tokens=50, kv_bits=bits, prompt_cache=cache)
        sizes[bits] = sum(layer[0].nbytes for layer in cache)
    assert sizes[4] < sizes[8] < 0.5 * sizes[None]
    assert texts[8][:5] == texts[None][:5]
    small_heads = tiny.random_model(num_attention_heads=4)
    with pytest.raises(WiolaError, match="head size 16"):
        generate((small_heads, endless[1]), kv_bits=8)


def test_issue_B7_stock_mlx_lm_shrinks_the_cache_too(endless):
    from mlx_lm import stream_generate

    model, tokenizer = endless
    cache = model.make_cache()
    options = dict(max_tokens=20, kv_bits=8, quantized_kv_start=0, prompt_cache=cache)
    with pytest.warns(UserWarning, match="group size 64 does not divide the head size 32"):
        list(stream_generate(model, tokenizer, "Once", **options))
    assert type(cache[0][0]).__name__ == "QuantizedKVCache"


@pytest.mark.filterwarnings("ignore:the text is")
def test_the_same_seed_gives_the_same_text_and_none_a_new_one(endless):
    sampled = dict(temp=1.0, max_tokens=20)
    for seed in (0, 7):
        texts = {tuple(tokens_of(endless, seed=seed, **sampled)) for _ in range(2)}
        assert len(texts) == 1
    assert tokens_of(endless, seed=0, **sampled) != tokens_of(endless, seed=7, **sampled)
    assert tokens_of(endless, **sampled) != tokens_of(endless, **sampled)
    assert tokens_of(endless, temp=0.0) == tokens_of(endless, temp=0.0, seed=3)


def test_each_way_of_choosing_tokens_has_its_effect(endless):
    greedy = tokens_of(endless, max_tokens=20)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert tokens_of(endless, max_tokens=20, temp=1.0, **narrow) == greedy
    assert tokens_of(endless, max_tokens=20, repetition_penalty=3.0) != greedy
    assert len(tokens_of(endless, max_tokens=20, temp=1.0, top_k=10**6)) == 20


def test_issue_H1_past_the_trained_length_with_one_notice_of_both_numbers(endless):
    for length, noticed in ((63, False), (64, False), (65, True), (74, True)):
        prompt = [10 + i % 200 for i in range(length)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            response = next(iter(wiola_mlx.stream_text(*endless, prompt, max_tokens=1)))
        assert mx.isfinite(response.logprobs).all().item()
        lengths = [str(w.message) for w in caught if "trained" in str(w.message)]
        assert len(lengths) == noticed
        assert not noticed or (str(length) in lengths[0] and "64" in lengths[0])
    with pytest.warns(UserWarning, match="65 tokens .* 64"):
        tokens_of(endless, [10] * 60, max_tokens=20)


def test_a_prompt_cache_goes_on_where_it_ended(endless):
    model, _ = endless
    prompt = [10 + 7 * i for i in range(20)]
    whole = tokens_of(endless, prompt, max_tokens=10)
    cache = model.make_cache()
    model(mx.array([prompt[:12]]), cache=cache)
    assert tokens_of(endless, prompt[12:], max_tokens=10, prompt_cache=cache) == whole


def test_a_quantized_prompt_cache_is_known_to_hold_tokens(endless):
    cache = endless[0].make_cache()
    tokens_of(endless, [10] * 30, max_tokens=10, kv_bits=8, prompt_cache=cache)
    with pytest.warns(UserWarning, match="7. tokens .* 64"):
        tokens_of(endless, [10] * 30, max_tokens=2, kv_bits=8, prompt_cache=cache)
    with pytest.raises(WiolaError, match="8 bits already"):
        tokens_of(endless, [10], kv_bits=4, prompt_cache=cache)


def test_progress_of_a_long_prompt_is_told(endless):
    seen = []
    progress = lambda read, total: seen.append((read, total))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens_of(endless, [10] * 1100, max_tokens=1, progress=progress)
    assert seen[0] == (0, 1100) and seen[-1] == (1100, 1100)
    assert (512, 1100) in seen


def test_issue_J3_another_thread_gives_the_same_text(checkpoint):
    loaded = wiola_mlx.load(checkpoint)
    said = []
    thread = threading.Thread(target=lambda: said.append(tokens_of(loaded, max_tokens=5)))
    thread.start()
    thread.join()
    assert said == [tokens_of(loaded, max_tokens=5)]


def test_issue_I2_a_dropped_model_leaves_nothing_behind(checkpoint):
    memory, first = [], None
    for _ in range(10):
        model, tokenizer = wiola_mlx.load(checkpoint)
        first = first or weakref.ref(model)
        wiola_mlx.generate_text(model, tokenizer, "Once", max_tokens=20)
        del model, tokenizer
        gc.collect()
        mx.clear_cache()
        memory.append(mx.get_active_memory())
    assert first() is None
    assert max(memory[1:]) <= memory[1] + 1024


@pytest.mark.parametrize(
    "text", ["🙂🙃", "नमस्ते दुनिया", "你好，世界", "déjà vu à Öland", " a  b\n\n c ", "\0x"]
)
def test_issue_G1_the_stream_is_the_text_character_by_character(checkpoint, text):
    detokenizer = wiola_mlx.load_tokenizer(checkpoint)
    ids = detokenizer.encode(text, add_special_tokens=False)
    assert len(ids) >= len(text.encode())
    for end in range(1, len(ids) + 1):
        pieces = []
        stream = detokenizer.detokenizer
        stream.reset()
        for token in ids[:end]:
            stream.add_token(token)
            pieces.append(stream.last_segment)
        assert "\ufffd" not in "".join(pieces)
        stream.finalize()
        pieces.append(stream.last_segment)
        assert "".join(pieces) == detokenizer.decode(ids[:end])
        assert "Ġ" not in "".join(pieces)


def test_the_space_before_the_first_word_is_kept(loaded):
    _, tokenizer = loaded
    ids = tokenizer.encode(" then", add_special_tokens=False)
    stream = tokenizer.detokenizer
    stream.reset()
    for token in ids:
        stream.add_token(token)
    stream.finalize()
    assert stream.text == " then"


def test_issue_A2_every_documented_route_gives_equal_logits(checkpoint, tmp_path):
    import mlx_lm
    from mlx_lm.utils import load_model

    wiola_mlx.register()
    ids = mx.array([[5, 6, 7, 8]])
    models = [
        wiola_mlx.load(checkpoint)[0],
        wiola_mlx.load_model(checkpoint)[0],
        mlx_lm.load(str(checkpoint))[0],
        load_model(checkpoint)[0],
    ]
    logits = [model(ids) for model in models]
    assert all(mx.array_equal(logits[0], other).item() for other in logits[1:])
