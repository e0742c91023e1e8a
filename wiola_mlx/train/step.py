"""One step: initial weights, loss and gradients, clipping, AdamW.

Decision: weight decay applies to every parameter but biases. The released run had it so: its
trainer, transformers 4.45, leaves out names with "bias" and PyTorch's own LayerNorm, but not the
RMSNorm that a model brings along.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

from ..errors import WiolaError
from ..models import gated_spiral
from ..scoring import token_losses
from .settings import Settings

CONSTANTS = {"norm.weight": 1.0, "layernorm.weight": 1.0, ".bias": 0.0, ".offset": 0.0}


def initialize(model, seed: int, pad_id: int | None = None):
    """Sets every weight anew, as the published packages do.

    Gated spiral: normal(0, ``initializer_range``) truncated at two deviations; cross layer: not
    truncated. Norms 1; biases, offsets and the embedding of the pad token 0; blend as configured.
    """
    std = model.args.initializer_range
    truncated = isinstance(model.args, gated_spiral.ModelArgs)
    flat = tree_flatten(model.parameters())
    weights = []
    for key, (name, array) in zip(
        mx.random.split(mx.random.key(seed), len(flat)), flat, strict=True
    ):
        constant = next((v for end, v in CONSTANTS.items() if name.endswith(end)), None)
        if array.ndim == 0:  # the blend's logit
            new = mx.array(float(model.args.gcla_gate_init))
        elif constant is not None:
            new = mx.full(array.shape, constant)
        elif truncated:
            new = std * mx.random.truncated_normal(-2.0, 2.0, array.shape, key=key)
        else:
            new = std * mx.random.normal(array.shape, key=key)
        if name.endswith("embed_tokens.weight") and pad_id is not None:
            new[pad_id] = 0.0
        weights.append((name, new))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())


def schedule(settings: Settings) -> Callable:
    """Linear from 0 in the warm-up, then a cosine to 0; step 0 is the first one."""
    warmup = settings.warmup_steps
    cosine = optim.cosine_decay(settings.learning_rate, settings.steps - warmup)
    if not warmup:
        return cosine
    linear = optim.linear_schedule(0.0, settings.learning_rate, warmup)
    return optim.join_schedules([linear, cosine], [warmup])


def make_optimizer(settings: Settings, learning_rate=None) -> optim.MultiOptimizer:
    """AdamW as PyTorch's: bias correction, decoupled weight decay, none on biases."""

    def adamw(weight_decay: float):
        return optim.AdamW(
            learning_rate=schedule(settings) if learning_rate is None else learning_rate,
            betas=[settings.beta1, settings.beta2],
            eps=settings.epsilon,
            weight_decay=weight_decay,
            bias_correction=True,
        )

    return optim.MultiOptimizer([adamw(settings.weight_decay), adamw(0.0)], [decays])


def decays(name: str, _array) -> bool:
    return "bias" not in name


def checkpoint_layers(model):
    """Keeps only each layer's input for the backward pass. Other models are not touched."""
    for layer in model.layers:
        kind = type(layer)

        class Checkpointed(kind):
            def __call__(self, *args, **kwargs):
                call = super().__call__
                return nn.utils.checkpoint(self, call)(*args, **kwargs)

        layer.__class__ = Checkpointed


class Trainer:
    """A model, its optimizer, and how one step changes both.

    Weights and optimizer state are float32; with ``bfloat16`` the weights are cast in each pass,
    but those that the model keeps in float32.
    """

    def __init__(self, model, settings: Settings, group=None, compiled: bool | None = None):
        self.model, self.settings = model, settings
        self.group = group or mx.distributed.init()
        self.rows, self.micro = settings.micro_batches(self.group.size())
        self.optimizer = make_optimizer(settings)
        self.optimizer.init(model.trainable_parameters())
        if settings.checkpoint_layers:
            checkpoint_layers(model)
        if settings.token_merging:
            if not hasattr(model, "set_token_merging"):
                raise WiolaError("token merging is for cross-layer models only")
            model.set_token_merging()
        self.gradient = mx.value_and_grad(self.loss)
        # On the CPU, compiling would need a C++ compiler and gain little.
        if mx.default_device() == mx.gpu if compiled is None else compiled:
            self.gradient = mx.compile(self.gradient)

    def cast(self, parameters: dict) -> dict:
        dtype, wanted = getattr(mx, self.settings.dtype), self.model.cast_predicate
        return tree_map_with_path(
            lambda name, p: p.astype(dtype) if wanted(name) else p, parameters
        )

    def loss(self, parameters: dict, inputs: mx.array, targets: mx.array) -> mx.array:
        self.model.update(self.cast(parameters))
        return token_losses(self.model, inputs, targets).mean()

    def gradients(self, parameters: dict, batch: mx.array) -> tuple[mx.array, dict]:
        """Mean loss and gradients of this process's ``batch`` [rows, T + 1]."""
        parts = mx.split(batch, len(batch) // self.micro)
        total = None
        for part in parts:  # all of one size, so that means of means are means
            found = self.gradient(parameters, part[:, :-1], part[:, 1:])
            total = found if total is None else tree_map(mx.add, total, found)
            mx.eval(total)
        return tree_map(lambda x: x / len(parts), total) if len(parts) > 1 else total

    def step(self, batch: mx.array, stop: bool = False) -> tuple[float, float, bool]:
        """One update from the global batch [batch_size, T + 1], the same in every process.

        Returns:
            The loss before the update (nats a token), the gradients' norm before clipping, and
            whether any process was asked to stop.
        """
        self.model.train()
        parameters = self.model.trainable_parameters()
        own = batch[self.group.rank() * self.rows :][: self.rows]
        loss, gradients = self.gradients(parameters, own)
        gradients = nn.average_gradients(gradients, self.group)
        shared = mx.stack([loss.astype(mx.float32), mx.array(float(stop))])
        shared = mx.distributed.all_sum(shared, group=self.group)
        clipped, norm = optim.clip_grad_norm(gradients, self.settings.clip or float("inf"))
        self.model.update(self.optimizer.apply_gradients(clipped, parameters))
        mx.eval(self.model.parameters(), self.optimizer.state, shared, norm)
        loss, stops = shared.tolist()
        return loss / self.group.size(), norm.item(), stops > 0

    def computing(self):
        """A context in which the model has the weights that training computes with."""
        return Computing(self)

    @property
    def learning_rate(self) -> float:
        """That of the last step."""
        return self.optimizer.learning_rate.item()


class Computing:
    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def __enter__(self):
        model = self.trainer.model
        self.kept = model.trainable_parameters()
        model.update(self.trainer.cast(self.kept))
        return model.eval()

    def __exit__(self, *_):
        self.trainer.model.update(self.kept)
