"""What ``mlx_lm.models.wiola`` is once registered: picks the family from the config's keys.

Both published families say ``"model_type": "wiola"``; only their other keys tell them apart.
"""

import importlib

FAMILY_KEYS = {
    "gated_spiral": ("spiral_alpha", "intermediate_size", "gate_pre_rope", "use_attention_gate"),
    "cross_layer": ("gcla_", "dsff_", "srpe_", "atm_"),
}


def family_of(config: dict) -> str:
    """The family whose keys the config has: "gated_spiral" or "cross_layer".

    Raises:
        ValueError: if there are keys of both families or of neither; lists what was found.
    """
    found = {
        family: sorted(key for key in config if key.startswith(prefixes))
        for family, prefixes in FAMILY_KEYS.items()
    }
    families = [family for family, keys in found.items() if keys]
    if len(families) == 1:
        return families[0]
    if families:
        listed = "; ".join(f"{family}: {', '.join(keys)}" for family, keys in found.items())
        raise ValueError(f"the config has keys of both Wiola families ({listed})")
    raise ValueError(
        "the config has keys of neither Wiola family (looked for spiral_alpha, intermediate_size, "
        "gate_pre_rope, or gcla_*, dsff_*, srpe_*); it has: "
        + (", ".join(sorted(config)) or "nothing")
    )


def family_module(config: dict):
    return importlib.import_module(f".{family_of(config)}", __package__)


class ModelArgs:
    """Builds the arguments of the family that the config belongs to."""

    @classmethod
    def from_dict(cls, config: dict):
        return family_module(config).ModelArgs.from_dict(config)


def Model(args):
    """The family's ``Model`` for arguments that ``ModelArgs.from_dict`` made."""
    return importlib.import_module(type(args).__module__).Model(args)
