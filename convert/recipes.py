"""Which layer is quantized to how many bits: uniform, mlx-lm's recipes, or the default here."""

from dataclasses import dataclass

from wiola_mlx.errors import WiolaError

from .blocks import Packing
from .options import BITS, GROUP_SIZES, MLX_LM_RECIPES, MODES, RECIPES, SMALL
from .report import Report
from .source import Source

DEFAULTS = {
    "affine": Packing(4, 64),
    "mxfp4": Packing(4, 32, "mxfp4"),
    "nvfp4": Packing(4, 16, "nvfp4"),
    "mxfp8": Packing(8, 32, "mxfp8"),
}
SMALL_HIGH = ("embed_tokens", "v_proj", "down_proj")  # 6 bits in the default recipe


@dataclass(frozen=True)
class Quantize:
    """What ``-q`` asks for.

    Attributes:
        packing: for every layer that no recipe gives another one.
        recipe: one of ``MLX_LM_RECIPES``, ``SMALL``, or None for all layers alike.
    """

    packing: Packing
    recipe: str | None = None

    def choose(self, source: Source, report: Report) -> dict[str, Packing]:
        """A packing for each layer's path; the report names the layers that have none."""
        predicate = self.predicate(source)
        choices = {}
        for path in source.modules:
            shape = source.tensors[f"{path}.weight"].shape
            packing = predicate(path)
            if shape[-1] % packing.group_size:
                report.keep(
                    f"not quantized, because groups of {packing.group_size} do not divide the rows",
                    f"{path} {list(shape)}",
                )
            else:
                choices[path] = packing
        if not choices:
            raise WiolaError("nothing can be quantized: " + "; ".join(report.kept_lines()))
        return choices

    def predicate(self, source: Source):
        if self.recipe in MLX_LM_RECIPES:
            return mlx_lm_predicate(self.recipe, source, self.packing.group_size)
        if self.recipe == SMALL:
            high = self.packing._replace(bits=6)
            return lambda path: high if is_sensitive(path, source) else self.packing
        return lambda path: self.packing


def asked(bits: int | None, group_size: int | None, mode: str, recipe: str | None) -> Quantize:
    """The options of the command line; without any, the default for small models.

    Raises:
        WiolaError: for a combination that MLX has not.
    """
    if mode not in MODES:
        raise WiolaError(f"the mode {mode!r} is not one of {', '.join(MODES)}")
    base = DEFAULTS[mode]
    if mode != "affine":
        if recipe or bits not in (None, base.bits) or group_size not in (None, base.group_size):
            raise WiolaError(
                f"{mode} has {base.bits} bits in groups of {base.group_size}, and no recipes"
            )
        return Quantize(base)
    if recipe is None and bits is None:
        recipe = SMALL
    if recipe is not None and recipe not in RECIPES:
        raise WiolaError(f"the recipe {recipe!r} is not one of {', '.join(RECIPES)}")
    if recipe and bits is not None:
        raise WiolaError(f"the recipe {recipe} chooses the bits itself")
    group_size = group_size or base.group_size
    low = int(recipe.split("_")[1]) if recipe else bits
    if low not in BITS or group_size not in GROUP_SIZES:
        raise WiolaError(f"bits must be one of {BITS} and the group size one of {GROUP_SIZES}")
    return Quantize(Packing(low, group_size), recipe)


def usual_name(path: str, source: Source) -> str:
    """A layer's path with the names that recipes look for."""
    *start, last = path.split(".")
    return ".".join([*start, source.family.recipe_names.get(last, last)])


def is_sensitive(path: str, source: Source) -> bool:
    return usual_name(path, source).endswith(SMALL_HIGH)


def mlx_lm_predicate(recipe: str, source: Source, group_size: int):
    from mlx_lm.convert import mixed_quant_predicate_builder

    view = RecipeView([usual_name(path, source) for path in source.modules], source)
    decide = mixed_quant_predicate_builder(recipe, view, group_size)

    def predicate(path: str) -> Packing:
        chosen = decide(usual_name(path, source), source.modules[path])
        return Packing(chosen["bits"], chosen["group_size"], chosen["mode"])

    return predicate


class RecipeView:
    """What mlx-lm's recipes ask of a model: the names of its layers, and their number."""

    def __init__(self, names: list[str], source: Source):
        self.names = names
        self.layers = range(source.config.get("num_hidden_layers") or layer_count(source))

    def named_modules(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.names]


def layer_count(source: Source) -> int:
    return 1 + max(int(p.split(".")[2]) for p in source.modules if p.startswith("model.layers."))
