"""``python -m wiola_mlx.generate`` and ``python -m wiola_mlx``, as a person types them."""

import io
import json
import os
import re
import subprocess
import sys

import mlx.core as mx
import pytest
import tiny

import wiola_mlx
from wiola_mlx import __main__, generate


@pytest.fixture
def quick(checkpoint, capsys, monkeypatch):
    """The command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run(*argv, model=checkpoint):
        code = generate.main([*map(str, argv), "--model", str(model)])
        return code, *capsys.readouterr()

    return run


def assert_one_line(result, *words, code=1):
    exit_code, out, err = result
    assert exit_code == code
    assert out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    for word in words:
        assert word in err


def test_issue_M3_stdin_and_argument_give_the_same_and_stdout_only_the_answer(cli, checkpoint):
    common = ("--model", checkpoint, "-m", 12)
    results = [
        cli("-", *common, stdin=b"hi"),
        cli(*common, stdin=b"hi\n"),
        cli("--prompt", "hi", *common),
        cli("hi", *common, module="wiola_mlx.generate"),
        cli("generate", "hi", *common, module="wiola_mlx"),
    ]
    expected = wiola_mlx.generate_text(*wiola_mlx.load(checkpoint), "hi", max_tokens=12)
    for result in results:
        assert result.returncode == 0
        assert result.stdout.decode() == expected + "\n"
        assert b"\r" not in result.stderr
        assert re.search(rb"tokens/s.*peak memory", result.stderr)


@pytest.mark.parametrize("stdin", [b"", b"\n", b"  \n", b"\xff\xfe\x00"])
def test_issue_M3_an_empty_or_broken_stdin_is_one_line(cli, checkpoint, stdin):
    result = cli("--model", checkpoint, stdin=stdin)
    assert_one_line((result.returncode, result.stdout.decode(), result.stderr.decode()), "prompt")


def test_the_config_chooses_the_family(quick, tmp_path):
    import test_cross_layer

    folder = test_cross_layer.write_checkpoint(tmp_path / "cross")
    plain = quick("Hello", "-m", 12, model=folder)
    assert plain[0] == 0
    assert quick("Hello", "-m", 12, "--draft-model", folder, model=folder)[1] == plain[1]
    assert_one_line(quick("Hello", "--kv-bits", 8, model=folder), "head size 16")


def test_issue_M1_seeds(quick):
    sampled = ("hi", "--temp", 1, "-m", 20)
    for _ in range(3):
        assert quick(*sampled)[1] != quick(*sampled)[1]
    assert quick(*sampled, "--seed", 7)[1] == quick(*sampled, "--seed", 7)[1]
    assert quick(*sampled, "--seed", 0)[1] == quick(*sampled, "--seed", 0)[1]
    assert quick("hi", "-m", 20)[1] == quick("hi", "-m", 20)[1]


def test_issue_J1_max_tokens(quick):
    assert quick("hi", "-m", 0)[:2] == (0, "\n")
    assert_one_line(quick("hi", "-m", -1), "max_tokens")
    assert quick("hi", "-m", 1)[0] == 0
    with pytest.raises(SystemExit) as usage:
        quick("hi", "-m", "five")
    assert usage.value.code == 2


def test_bad_input_is_one_line(quick, tmp_path):
    assert_one_line(quick("hi", model=tmp_path / "nowhere"), "nowhere")
    assert_one_line(quick(""), "empty")
    assert_one_line(quick("hi", "--prompt", "ho"), "twice")
    assert_one_line(quick("hi", "--max-kv-size", 16), "max_kv_size")
    assert_one_line(quick("hi", "--kv-bits", 7), "kv_bits")
    assert_one_line(quick("hi", "--temp", -1), "temp")
    assert_one_line(quick("hi", "--top-p", 0.9), "--temp above 0")
    assert_one_line(quick("hi", "--num-draft-tokens", 2), "--draft-model")
    assert_one_line(quick("hi", "--adapter-path", tmp_path), "adapter_config.json")
    assert_one_line(quick("hi", "--draft-model", tmp_path / "no"), "no")
    (tmp_path / "cache.safetensors").write_bytes(b"not a cache")
    cache = tmp_path / "cache.safetensors"
    assert_one_line(quick("hi", "--prompt-cache-file", cache), "no readable prompt cache")
    assert list(tmp_path.iterdir()) == [cache]


def test_issue_A1_an_unknown_model_type_is_one_line(quick, own_checkpoint):
    tiny.edit_json(own_checkpoint / "config.json", model_type="nosuch")
    assert_one_line(quick("hi", model=own_checkpoint), "nosuch")


def test_issue_H1_a_long_prompt_is_noted_with_both_numbers(quick):
    code, _, err = quick("x" * 74, "-m", 5)
    assert code == 0
    assert err.count("note:") == 1
    assert "74" in err and "64" in err


def test_echo_json_and_quiet(quick):
    plain = quick("hi", "-m", 9)[1]
    assert quick("hi", "-m", 9, "--echo")[1] == "hi" + plain
    code, out, err = quick("hi", "-m", 9, "--json")
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert figures["text"] + "\n" == plain
    assert figures["prompt_tokens"] == 2 and figures["generation_tokens"] <= 9
    assert quick("hi", "-m", 9, "--quiet") == (0, plain, "")


def test_kv_bits_draft_model_and_prompt_cache_file_work(quick, checkpoint, tmp_path):
    plain = quick("Hello", "-m", 12)[1]
    assert quick("Hello", "-m", 12, "--draft-model", checkpoint)[1] == plain
    assert quick("Hello", "-m", 12, "--kv-bits", 8)[0] == 0
    model, tokenizer = wiola_mlx.load(checkpoint)
    cache = model.make_cache()
    model(mx.array([tokenizer.encode("Hel")]), cache=cache)
    wiola_mlx.save_prompt_cache(tmp_path / "c.safetensors", cache, model)
    resumed = quick("lo", "-m", 12, "--prompt-cache-file", tmp_path / "c.safetensors")
    assert resumed[1] == plain


def test_a_draft_with_another_tokenizer_is_refused(quick, own_checkpoint):
    content = json.loads((own_checkpoint / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    tiny.write_json(own_checkpoint / "tokenizer.json", content)
    assert_one_line(quick("hi", "--draft-model", own_checkpoint), "another tokenizer")


def test_a_chat_template_is_used_unless_told_otherwise(quick, own_checkpoint):
    tiny.write_tokenizer(own_checkpoint, tiny.CHAT_TEMPLATE)
    templated = json.loads(quick("hi", "-m", 3, "--json", model=own_checkpoint)[1])
    plain = quick("hi", "-m", 3, "--json", "--ignore-chat-template", model=own_checkpoint)[1]
    assert templated["prompt_tokens"] > json.loads(plain)["prompt_tokens"] == 2


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}"])
def test_a_chat_template_that_fails_is_one_line(quick, own_checkpoint, template):
    tiny.write_tokenizer(own_checkpoint, template)
    assert_one_line(quick("hi", model=own_checkpoint), "chat template")


def test_a_prompt_cache_and_a_chat_template_give_the_whole_chat(cli, quick, own_checkpoint):
    tiny.write_tokenizer(own_checkpoint, tiny.CHAT_TEMPLATE)
    saved = own_checkpoint / "cache.safetensors"
    argv = ("cache_prompt", "--model", own_checkpoint, "--prompt", "Hel")
    cli(*argv, "--prompt-cache-file", saved, module="wiola_mlx")
    resumed = quick("lo", "-m", 9, "--prompt-cache-file", saved, model=own_checkpoint)
    assert resumed[:2] == quick("Hello", "-m", 9, model=own_checkpoint)[:2]


def test_a_cache_of_stock_cache_prompt_is_not_taken_by_another_model(cli, quick, tmp_path):
    folders = [tiny.write_checkpoint(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 1))]
    saved = tmp_path / "cache.safetensors"
    argv = ("cache_prompt", "--model", folders[0], "--prompt", "Hel", "--prompt-cache-file", saved)
    cli(*argv, module="wiola_mlx")
    assert quick("lo", "-m", 3, "--prompt-cache-file", saved, model=folders[0])[0] == 0
    assert_one_line(quick("lo", "--prompt-cache-file", saved, model=folders[1]), "was made with")


def test_no_prompt_on_a_terminal(capsys, monkeypatch, checkpoint):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal())
    assert generate.main(["--model", str(checkpoint)]) == 1
    assert "give one" in capsys.readouterr().err
    assert generate.main(["-m", "3"]) == 0
    assert "Once upon a time" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_no_traceback(checkpoint):
    code = (
        "import signal, sys, os\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs lack it\n"
        "from wiola_mlx import generate, generation\n"
        "real = generation.run_generator\n"
        "def slow(*args, **kwargs):\n"
        "    for i, response in enumerate(real(*args, **kwargs)):\n"
        "        yield response\n"
        "        if i == 2: os.kill(os.getpid(), signal.SIGINT)\n"
        "generation.run_generator = slow\n"
        f"sys.exit(generate.main(['hi', '--model', {str(checkpoint)!r}, '-m', '50']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert result.returncode == 130
    assert b"Traceback" not in result.stderr


def test_a_reader_that_has_enough_is_no_error(checkpoint):
    command = f"{sys.executable} -m wiola_mlx.generate hi --model {checkpoint} -m 60 | head -c 1"
    result = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)
    assert result.returncode == 0
    assert b"Traceback" not in result.stderr and b"BrokenPipe" not in result.stderr


def test_a_terminal_that_is_not_utf_8_is_no_error(checkpoint):
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "wiola_mlx.generate",
            "é🙂",
            "--echo",
            "--model",
            checkpoint,
            "-m",
            "3",
        ],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"??")


def test_the_list_of_commands_and_an_unknown_one(capsys):
    assert __main__.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("generate", "lora", "server", "gptq"))
    assert __main__.main([]) == 2
    assert __main__.main(["genrate"]) == 2
    assert "genrate" in capsys.readouterr().err
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("wiola-mlx 0.")


def test_mlx_lms_commands_know_the_model(cli, checkpoint, tmp_path):
    saved = tmp_path / "cache.safetensors"
    argv = ("cache_prompt", "--model", checkpoint, "--prompt", "Hel", "--prompt-cache-file", saved)
    result = cli(*argv, module="wiola_mlx")
    assert result.returncode == 0, result.stderr.decode()
    model, tokenizer = wiola_mlx.load(checkpoint)
    cache = wiola_mlx.load_prompt_cache(saved, model)
    resumed = wiola_mlx.generate_text(model, tokenizer, "lo", prompt_cache=cache, max_tokens=9)
    assert resumed == wiola_mlx.generate_text(model, tokenizer, "Hello", max_tokens=9)


def test_mlx_lms_commands_fail_in_one_line_too(cli, checkpoint, tmp_path):
    for argv, word in (
        (("cache_prompt", "--model", checkpoint, "--max-kv-size", "9"), "--max-kv-size"),
        (("fuse", "--model", checkpoint, "--adapter-path", tmp_path / "none"), "none"),
    ):
        result = cli(*argv, module="wiola_mlx")
        assert result.returncode == 1
        assert b"Traceback" not in result.stderr
        assert word.encode() in result.stderr.splitlines()[-1]
