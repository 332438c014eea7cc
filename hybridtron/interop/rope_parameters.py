"""RoPE settings in config.json: `rope_parameters`, or before transformers 5 `rope_scaling` and `rope_theta`.

Imports read both forms; exports write `rope_parameters`. Imports refuse types of scaling that we don't have. They also
refuse unknown keys, which might change the computation. In names, `ours` means hybridtron, and `theirs` means
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtron.architecture.rope import NO_POSITIONS, OF_SCALE, RopeOptions

Settings = dict[str, Any]
BASE = 10000.0  # default rope_theta
PARAMETERS = "rope_parameters"
SCALING = "rope_scaling"
LENGTH = "original_max_position_embeddings"
# name of our option -> key of config.json
NAMES = {
    "factor": "factor",
    "original": LENGTH,
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention": "attention_factor",
    "truncate": "truncate",
}
ELSEWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", LENGTH)  # keys allowed with every scaling
MSCALE = ("mscale", "mscale_all_dim")  # older keys of YaRN, from which `attention_factor` is computed


def to_theirs(rope: RopeOptions) -> Settings:
    """Return the value of `rope_parameters` in config.json for our RoPE options."""
    parameters: Settings = {"rope_type": rope.scale or "default", "rope_theta": rope.base}
    for name in OF_SCALE.get(rope.scale or "", ()):
        parameters[NAMES[name]] = getattr(rope, name)
    return {name: value for name, value in parameters.items() if value is not None}


def to_ours(theirs: Settings) -> Settings | str:
    """Return our option `rope` for `theirs`, the full config.json.

    Raises ValueError for a type of scaling that we don't have, or for an unknown key.
    """
    rope: Settings = theirs.get(SCALING) or theirs.get(PARAMETERS) or {}
    base = rope.get("rope_theta", theirs.get("rope_theta", BASE))
    if base is None:
        return NO_POSITIONS
    scale = rope.get("rope_type") or rope.get("type") or "default"
    scale_options = OF_SCALE.get(scale, ())
    known = {*ELSEWHERE, *(NAMES[name] for name in scale_options), *(MSCALE if scale == "yarn" else ())}
    unknown = [key for key in rope if key not in known]
    if (scale != "default" and not scale_options) or unknown:
        scaling = f"rope_type={scale}" + "".join(f" and {key}={rope[key]!r}" for key in unknown[:1])
        raise ValueError(f"scales rotary positions with {scaling}, which is not supported; use {', '.join(OF_SCALE)}")
    if not scale_options:
        return {"base": base}
    return {"base": base, "scale": scale, **_scaled(scale, rope, theirs)}


def _scaled(scale: str, rope: Settings, theirs: Settings) -> Settings:
    """Return the options for a type of scaling. Missing keys get the values that transformers would use.

    Raises ValueError if a required key is missing.
    """
    if scale == "llama3":
        needed = ("factor", "low", "high")
    else:
        needed = ("factor",)
    if missing := [NAMES[name] for name in needed if NAMES[name] not in rope]:
        raise ValueError(f"scales rotary positions with rope_type={scale}, but has no {missing[0]}")
    options = {name: rope[NAMES[name]] for name in OF_SCALE[scale] if rope.get(NAMES[name]) is not None}
    if scale == "linear":
        return options
    # if config.json has this key at the top level, as in some models, that value takes precedence
    options["original"] = theirs.get(LENGTH) or options.get("original") or theirs["max_position_embeddings"]
    if scale == "llama3":
        return options
    if "factor" not in options:
        options["factor"] = theirs["max_position_embeddings"] / options["original"]
    if "attention" not in options and all(rope.get(name) for name in MSCALE):
        options["attention"] = _of_mscale(rope, options["factor"])
    return options


def _of_mscale(rope: Mapping[str, float], factor: float) -> float:
    """Compute YaRN's attention factor from `mscale` and `mscale_all_dim`, as transformers does."""
    log_term = RopeOptions(scale="yarn", factor=factor).attention_factor - 1
    numerator, denominator = (rope[name] * log_term + 1 for name in MSCALE)
    return numerator / denominator
