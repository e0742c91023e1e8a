"""``python -m wiola_mlx.train``: reproducible, resumed exactly, and nothing is lost."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny
from conftest import relative_difference
from mlx.utils import tree_flatten
from test_cross_layer import CONFIG as CROSS_CONFIG

import wiola_mlx
from wiola_mlx import evaluate
from wiola_mlx.train import __main__ as command
from wiola_mlx.train import checkpoint, loop
from wiola_mlx.train.settings import Settings

WORDS = ("the a cat dog sun big red little saw ran sat said yes no and then to home").split(" ")
SMALL = {
    "model_type": "wiola",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "spiral_alpha": 0.05,
}
CROSS = {k: v for k, v in CROSS_CONFIG.items() if k not in ("vocab_size", "eos_token_id")}
CROSS |= {"num_hidden_layers": 3, "hidden_size": 32}
STEPS = 20


def stories(count: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, random.integers(8, 30))) + "." for _ in range(count)]
    return "\n<|endoftext|>\n".join(texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text(stories(120, seed=0))
    (folder / "valid.txt").write_text(stories(12, seed=1))
    tiny.write_json(folder / "spiral.json", SMALL)
    tiny.write_json(folder / "cross.json", CROSS)
    return folder


@pytest.fixture
def train(corpus, capsys):
    """The command in this process: (exit code, stdout, stderr)."""

    def run(out, *more, config="spiral", steps=STEPS, bpe=True):
        argv = ["--text", corpus / "train.txt", "--valid", corpus / "valid.txt", "--out", out]
        argv += ["--config", corpus / f"{config}.json", "--steps", steps, "--warmup-steps", 4]
        argv += ["--batch-size", 8, "--sequence-length", 16, "--learning-rate", "1e-2"]
        argv += ["--log-every", 1, "--eval-every", 5, *(["--bpe", 270] if bpe else [])]
        capsys.readouterr()
        code = command.main([*map(str, argv), *map(str, more)])
        return code, *capsys.readouterr()

    return run


def rows(out) -> list[dict]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


def losses(out) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def files(folder) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize(
    ("config", "dtype"), [("spiral", "float32"), ("spiral", "bfloat16"), ("cross", "bfloat16")]
)
def test_issue_7_two_runs_are_identical_and_ten_plus_ten_are_twenty(train, tmp_path, config, dtype):
    options = ("--dtype", dtype, "--seed", 7)
    for name in ("one", "two"):
        assert train(tmp_path / name, *options, config=config)[0] == 0
    assert train(tmp_path / "cut", *options, "--stop-at", 10, config=config)[0] == 0
    assert len(losses(tmp_path / "cut")) == 10
    assert train(tmp_path / "cut", *options, "--resume", config=config)[0] == 0
    one = rows(tmp_path / "one")
    assert losses(tmp_path / "one")[-1] < 0.8 * losses(tmp_path / "one")[0]
    for name in ("two", "cut"):
        assert rows(tmp_path / name) == one
        for part in ("last", "best"):
            assert files(tmp_path / name / part) == files(tmp_path / "one" / part)


@pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="needs MLX's ring backend")
def test_issue_7_two_processes_are_one(train, corpus, tmp_path):
    options = ("--dtype", "float32", "--batch-size", 4, "--micro-batch-size", 1)
    assert train(tmp_path / "one", *options, steps=6)[0] == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [Path(sys.executable).parent / "mlx.launch", "-n", 2, "--backend", "ring", "-p", port]
    argv = ["--text", corpus / "train.txt", "--valid", corpus / "valid.txt", "--bpe", 270]
    argv += ["--config", corpus / "spiral.json", "--steps", 6, "--warmup-steps", 4]
    argv += ["--sequence-length", 16, "--learning-rate", "1e-2", "--log-every", 1]
    argv += ["--eval-every", 5, "--out", tmp_path / "two", *options, "--json"]
    whole = [*launch, "--", sys.executable, "-m", "wiola_mlx.train", *argv]
    result = subprocess.run([*map(str, whole)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count('"best_valid_loss"') == 1  # only the first process speaks
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    found, expected = (
        mx.load(str(tmp_path / name / "last" / "model.safetensors")) for name in ("two", "one")
    )
    for name, array in expected.items():
        assert relative_difference(found[name], array) <= 1e-4, name


def test_another_seed_gives_another_run(train, tmp_path):
    for seed in (1, 2):
        train(tmp_path / str(seed), "--seed", seed, steps=5)
    assert losses(tmp_path / "1") != losses(tmp_path / "2")


def test_a_run_that_ends_is_a_model_that_loads_and_scores_as_it_said(train, corpus, tmp_path):
    code, out, _ = train(tmp_path / "run", "--dtype", "float32", "--json")
    result = json.loads(out)
    assert code == 0 and result["step"] == STEPS and result["stopped"] is None
    model, tokenizer = wiola_mlx.load(tmp_path / "run" / "best")
    assert tokenizer.eos_token_ids == {2}
    assert wiola_mlx.generate_text(model, tokenizer, "the cat", max_tokens=5)
    text = (corpus / "valid.txt").read_text().split("\n<|endoftext|>\n")
    found = evaluate.evaluate_model(str(tmp_path / "run" / "best"), text, 16, 16)
    assert found["loss"] == pytest.approx(result["best_valid_loss"], rel=1e-5)
    said = [row for row in rows(tmp_path / "run") if "valid_loss" in row][-1]
    assert found["bits_per_byte"] == pytest.approx(said["bits_per_byte"], rel=1e-5)
    assert not (tmp_path / "run" / "best" / "training").exists()


@pytest.mark.parametrize(
    "options",
    [("--micro-batch-size", 2), ("--checkpoint-layers",)],
    ids=["accumulate", "recompute"],
)
@pytest.mark.parametrize("config", ["spiral", "cross"])
def test_saving_memory_does_not_change_the_losses(train, tmp_path, options, config):
    common = ("--dtype", "float32")
    train(tmp_path / "plain", *common, config=config, steps=6)
    train(tmp_path / "saving", *common, *options, config=config, steps=6)
    assert losses(tmp_path / "saving") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_bfloat16_is_near_float32_and_its_weights_are_float32(train, tmp_path):
    for dtype in ("bfloat16", "float32"):
        train(tmp_path / dtype, "--dtype", dtype)
    half, full = (losses(tmp_path / dtype) for dtype in ("bfloat16", "float32"))
    assert half != full
    assert half == pytest.approx(full, rel=0.02)
    weights = mx.load(str(tmp_path / "bfloat16" / "last" / "model.safetensors"))
    assert {array.dtype for array in weights.values()} == {mx.float32}


def test_ctrl_c_saves_and_the_run_goes_on_exactly(train, tmp_path, monkeypatch):
    train(tmp_path / "whole")
    step = loop.Run.one_step

    def interrupted(self):
        if self.state["step"] == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(loop.Run, "one_step", interrupted)
    code, out, _ = train(tmp_path / "cut")
    assert code == 130 and "by a signal at step 8" in out
    assert signal.getsignal(signal.SIGINT) == before
    monkeypatch.setattr(loop.Run, "one_step", step)
    assert train(tmp_path / "cut", "--resume")[0] == 0
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert files(tmp_path / "cut" / "last") == files(tmp_path / "whole" / "last")


def test_after_a_crash_the_last_checkpoint_and_its_metrics_go_on(train, tmp_path, monkeypatch):
    train(tmp_path / "whole", "--save-every", 4)
    step = loop.Run.one_step

    def crashing(self):
        if self.state["step"] == 11:
            raise RuntimeError("power cut")
        return step(self)

    monkeypatch.setattr(loop.Run, "one_step", crashing)
    monkeypatch.setenv("WIOLA_MLX_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        train(tmp_path / "cut", "--save-every", 4)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")[:11]
    last = tmp_path / "cut" / "last"
    last.rename(tmp_path / "cut" / ".last-old")  # as if it had come between two renames
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    monkeypatch.setattr(loop.Run, "one_step", step)
    assert train(tmp_path / "cut", "--save-every", 4, "--resume")[0] == 0
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert files(last) == files(tmp_path / "whole" / "last")


def test_a_run_ends_early_when_it_gets_no_better(train, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "score_tokens", lambda *a, **k: Worse())

    class Worse:
        loss, standard_error, count = 1.0, 0.1, 0

        def __init__(self):
            Worse.count += 1
            self.loss = 1.0 + (Worse.count > 2) * Worse.count

        def bits_per_byte(self, size):
            return 1.0

    code, out, _ = train(tmp_path / "run", "--patience", 2, "--eval-every", 2, "--json")
    result = json.loads(out)
    assert code == 0 and result["stopped"] == "early"
    assert result["step"] == 6 and result["best_step"] == 2  # no better at 4, at 6
    assert (tmp_path / "run" / "last").is_dir()


def test_a_loss_that_is_no_number_is_one_line_and_keeps_the_checkpoint(train, tmp_path):
    code, out, err = train(
        tmp_path / "run", "--learning-rate", "1e30", "--clip", 0, "--save-every", 2
    )
    assert code == 1 and out == "" and "the loss is nan" in err.lower()
    weights = mx.load(str(tmp_path / "run" / "last" / "model.safetensors"))
    assert weights


def test_the_ngram_losses_and_the_curve_are_there_when_asked_for(train, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curve.png"
    code, out, _ = train(tmp_path / "run", "--ngram", "--plot", picture)
    assert code == 0 and "3-gram model" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_token_merging_says_that_it_leaks(train, tmp_path):
    code, _, err = train(tmp_path / "run", "--token-merging", config="cross", steps=5)
    assert code == 0 and "leaks the future" in err
    train(tmp_path / "plain", config="cross", steps=5)
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", 0], "steps must be 1 or more"),
        (["--warmup-steps", 99], "warmup_steps must be less than the steps"),
        (["--micro-batch-size", 3], "micro batches of 3 do not divide 8"),
        (["--bpe", 20], "260 entries or more"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--sequence-length", 100_000], "less than one sequence"),
        (["--resume"], "no checkpoint"),
        (["--plot", "curve.txt"], "picture's name"),
        (["--eval-every", 0], "--eval-every"),
        (["--token-merging"], "cross-layer"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(train, tmp_path, options, words):
    code, out, err = train(tmp_path / "run", *options)
    assert code == 1 and out == "" and err.count("\n") == 1 and words in err, err


def test_a_run_is_not_overwritten_and_not_resumed_with_other_settings(train, corpus, tmp_path):
    train(tmp_path / "run", "--stop-at", 2)
    before = files(tmp_path / "run" / "last")
    for options, words in (
        ([], "holds a run already"),
        (["--resume", "--seed", 5], "seed was 42 and is 5"),
        (["--resume", "--config", corpus / "cross.json"], "does not fit this run"),
        (["--resume", "--text", corpus / "valid.txt"], "had another tokenizer"),
        (["--resume", "--bpe", 280], "had another tokenizer"),
    ):
        code, _, err = train(tmp_path / "run", *options)
        assert code == 1 and words in err, err
    assert files(tmp_path / "run" / "last") == before


def test_a_tokenizer_that_a_failed_start_left_is_not_taken_for_another(train, tmp_path):
    assert train(tmp_path / "run", "--sequence-length", 100_000)[0] == 1
    assert train(tmp_path / "run", "--bpe", 280, "--stop-at", 1)[0] == 0
    assert len(wiola_mlx.load_tokenizer(tmp_path / "run" / "last").get_vocab()) == 280


def test_a_folder_that_cannot_be_made_is_one_line(train, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = train(tmp_path / "file" / "run")
    assert code == 1 and out == "" and err.count("\n") == 1


def test_a_failed_write_leaves_the_checkpoint_before(train, tmp_path, monkeypatch):
    train(tmp_path / "run", "--stop-at", 2)
    before = files(tmp_path / "run" / "last")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "flat_state", full)
    with pytest.raises(wiola_mlx.WiolaError, match="No space left"):
        checkpoint.save(tmp_path / "run" / "last", *unused_trainer(tmp_path / "run"), {})
    assert files(tmp_path / "run" / "last") == before


def unused_trainer(out):
    class Trainer:
        model, _ = wiola_mlx.load_model(out / "last")

    return Trainer, out / "tokenizer", wiola_mlx.load_tokenizer(out / "last")


def test_signals_are_left_alone_outside_of_the_main_thread(corpus, tmp_path):
    result = {}
    job = loop.Job(
        out=tmp_path / "run",
        text=[corpus / "train.txt"],
        bpe_size=270,
        config=str(corpus / "spiral.json"),
    )
    settings = Settings(steps=2, warmup_steps=1, batch_size=2, sequence_length=8, dtype="float32")

    def work():
        with mx.stream(mx.cpu):
            result.update(loop.Run(job, settings).train_all())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert result["step"] == 2


def test_initial_weights_are_those_of_the_specification():
    from wiola_mlx.models import cross_layer, gated_spiral
    from wiola_mlx.train.settings import build
    from wiola_mlx.train.step import initialize

    spiral = build(gated_spiral.ModelArgs(vocab_size=600))
    cross = build(
        cross_layer.ModelArgs(
            vocab_size=600, hidden_size=128, num_hidden_layers=2, dsff_wide_size=256
        )
    )
    for model, largest, std in ((spiral, 0.04, 0.0176), (cross, 0.12, 0.02)):
        initialize(model, seed=1, pad_id=3)
        for name, array in tree_flatten(model.parameters()):
            if "norm" in name or name.endswith(".bias"):
                assert mx.all(array == (1.0 if name.endswith("norm.weight") else 0.0)), name
            elif name.endswith("blend_logit"):
                assert array.item() == -3.0
            elif array.size > 4000:
                assert mx.abs(array).max().item() <= largest
                assert array.std().item() == pytest.approx(std, rel=0.03), name
        assert not model.model.embed_tokens.weight[3].any()
    twin = build(spiral.args)
    initialize(twin, seed=1, pad_id=3)
    for a, b in zip(
        tree_flatten(spiral.parameters()), tree_flatten(twin.parameters()), strict=True
    ):
        assert mx.array_equal(a[1], b[1])
