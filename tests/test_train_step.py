"""One optimizer step equals PyTorch's, on the published package's own gradients."""

import shutil
import sys

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from conftest import ROOT, relative_difference
from mlx.utils import tree_flatten

import wiola_mlx
from wiola_mlx.train import step
from wiola_mlx.train.settings import Settings

REFERENCE = ROOT / "tests" / "reference"
NEEDS_COMPILER = pytest.mark.skipif(
    sys.platform == "linux" and not shutil.which("g++"), reason="MLX compiles with g++ on Linux"
)
GRADIENT_BOUND, WEIGHT_BOUND = 1e-4, 1e-5


@pytest.fixture(scope="module")
def golden():
    return np.load(REFERENCE / "training" / "golden.npz")


def settings_of(golden, **changes) -> Settings:
    _, beta1, beta2, epsilon, decay, clip = golden["settings"].tolist()
    values = dict(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay, clip=clip)
    values |= dict(batch_size=4, sequence_length=12, dtype="float32", steps=100, warmup_steps=10)
    return Settings(**{**values, **changes})


def trainer_of(golden, compiled=False, **changes) -> step.Trainer:
    model, _ = wiola_mlx.load_model(REFERENCE / "gsa-base")
    settings = settings_of(golden, **changes)
    trainer = step.Trainer(model, settings, compiled=compiled)
    trainer.optimizer = step.make_optimizer(settings, learning_rate=golden["settings"].tolist()[0])
    return trainer


def kept(array) -> np.ndarray:
    flat = np.array(array).reshape(-1)
    return flat[::61] if flat.size > 1024 else flat


def assert_equals(tree, golden, prefix: str, bound: float):
    arrays = dict(tree_flatten(tree))
    names = [key.removeprefix(prefix) for key in golden.files if key.startswith(prefix)]
    assert set(names) <= set(arrays)
    assert len(names) == len(arrays)
    for name in names:
        assert relative_difference(kept(arrays[name]), golden[prefix + name]) <= bound, name


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="whole"),
        pytest.param({"micro_batch_size": 1}, id="accumulated"),
        pytest.param({"checkpoint_layers": True}, id="recomputed"),
        pytest.param({"compiled": True}, id="compiled", marks=NEEDS_COMPILER),
    ],
)
def test_issue_7_loss_gradients_and_weights_of_two_steps_equal_pytorchs_adamw(golden, how):
    trainer = trainer_of(golden, **how)
    first, second = mx.array(golden["batch"]), mx.array(golden["second"])
    _, gradients = trainer.gradients(trainer.model.trainable_parameters(), first)
    clipped, _ = optim.clip_grad_norm(gradients, trainer.settings.clip)
    assert_equals(clipped, golden, "grad:", GRADIENT_BOUND)

    trainer = trainer_of(golden, **how)
    loss, norm, _ = trainer.step(first)
    assert loss == pytest.approx(float(golden["loss"]), rel=1e-5)
    assert norm == pytest.approx(float(golden["norm"]), rel=1e-5)
    assert norm > trainer.settings.clip  # so that clipping is tested, too
    assert_equals(trainer.model.parameters(), golden, "one:", WEIGHT_BOUND)
    loss, _, _ = trainer.step(second)
    assert loss == pytest.approx(float(golden["second_loss"]), rel=1e-4)
    assert_equals(trainer.model.parameters(), golden, "two:", 10 * WEIGHT_BOUND)


def test_biases_do_not_decay_and_with_decay_they_would_be_pytorchs_too(golden, monkeypatch):
    biases = [key.removeprefix("all:") for key in golden.files if key.startswith("all:")]
    assert len(biases) == 3
    plain = trainer_of(golden)
    plain.step(mx.array(golden["batch"]))
    monkeypatch.setattr(step, "decays", lambda *_: True)
    decayed = trainer_of(golden)
    decayed.step(mx.array(golden["batch"]))
    for name in biases:
        with_decay, without = (
            np.array(dict(tree_flatten(t.model.parameters()))[name]) for t in (decayed, plain)
        )
        assert relative_difference(with_decay, golden["all:" + name]) <= WEIGHT_BOUND
        assert relative_difference(without, golden["one:" + name]) <= WEIGHT_BOUND
        assert np.abs(with_decay - without).max() > 10 * WEIGHT_BOUND


def test_the_schedule_is_the_released_runs():
    rate = step.schedule(Settings())
    at = lambda s: float(rate(mx.array(s)))  # noqa: E731
    assert at(0) == 0.0
    assert at(500) == pytest.approx(1.5e-4) and at(1_000) == pytest.approx(3e-4)
    assert at(10_500) == pytest.approx(1.5e-4, rel=1e-3)
    assert at(20_000) == pytest.approx(0.0, abs=1e-12)
    assert step.schedule(Settings(warmup_steps=0))(mx.array(0)).item() == pytest.approx(3e-4)


def test_the_defaults_are_the_released_runs():
    d = Settings()
    assert (d.steps, d.batch_size, d.sequence_length) == (20_000, 32, 512)
    assert (d.beta1, d.beta2, d.epsilon, d.weight_decay, d.clip) == (0.9, 0.95, 1e-8, 0.01, 1.0)
    assert (d.learning_rate, d.warmup_steps, d.dtype, d.seed) == (3e-4, 1_000, "bfloat16", 42)


def test_recomputing_layers_touches_no_other_model(golden):
    ours = trainer_of(golden, checkpoint_layers=True)
    other = trainer_of(golden)
    assert type(ours.model.layers[0]) is not type(other.model.layers[0])
    assert type(other.model.layers[0]).__name__ == "DecoderLayer"
