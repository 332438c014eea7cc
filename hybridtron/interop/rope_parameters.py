"""Rotary positions as config.json has them: `rope_parameters`, or `rope_scaling` and `rope_theta` before version 5.

Imports read both; exports write what transformers 5 writes. A scale that is none of ours is refused, and so is a key
that we do not know: it might change what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridtron.architecture.rope import NO_POSITIONS, OF_SCALE, RopeOptions

Settings = dict[str, Any]
BASE = 10000.0  # where none is said
PARAMETERS, SCALING, LENGTH = "rope_parameters", "rope_scaling", "original_max_position_embeddings"
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
ELSEWHERE = ("rope_type", "type", "rope_theta", "partial_rotary_factor", LENGTH)
MSCALE = ("mscale", "mscale_all_dim")  # of YaRN: both say what `attention_factor` says in one number


def to_theirs(rope: RopeOptions) -> Settings:
    """What transformers reads the same frequencies from."""
    written: Settings = {"rope_type": rope.scale or "default", "rope_theta": rope.base}
    for name in OF_SCALE.get(rope.scale or "", ()):
        written[NAMES[name]] = getattr(rope, name)
    return {name: value for name, value in written.items() if value is not None}


def to_ours(theirs: Settings) -> Settings | str:
    """Our option, from the whole of config.json. Raises ValueError where it has something that we do not."""
    rope: Settings = theirs.get(SCALING) or theirs.get(PARAMETERS) or {}
    base = rope.get("rope_theta", theirs.get("rope_theta", BASE))
    if base is None:
        return NO_POSITIONS
    scale = rope.get("rope_type") or rope.get("type") or "default"
    used = OF_SCALE.get(scale, ())
    known = {*ELSEWHERE, *(NAMES[name] for name in used), *(MSCALE if scale == "yarn" else ())}
    unknown = [key for key in rope if key not in known]
    if (scale != "default" and not used) or unknown:
        what = f"rope_type={scale}" + "".join(f" and {key}={rope[key]!r}" for key in unknown[:1])
        raise ValueError(f"scales its rotary positions by {what}, which we have not; we have {', '.join(OF_SCALE)}")
    return {"base": base} if not used else {"base": base, "scale": scale, **_scaled(scale, rope, theirs)}


def _scaled(scale: str, rope: Settings, theirs: Settings) -> Settings:
    """The options of a scale, with what transformers takes where config.json is silent."""
    needed = ("factor", "low", "high") if scale == "llama3" else ("factor",)
    if silent := [NAMES[name] for name in needed if NAMES[name] not in rope]:
        raise ValueError(f"scales its rotary positions by rope_type={scale} without {silent[0]}")
    found = {name: rope[NAMES[name]] for name in OF_SCALE[scale] if rope.get(NAMES[name]) is not None}
    if scale == "linear":
        return found
    # as some models have it: beside the rest, where it comes first
    found["original"] = theirs.get(LENGTH) or found.get("original") or theirs["max_position_embeddings"]
    if scale == "llama3":
        return found
    if "factor" not in found:
        found["factor"] = theirs["max_position_embeddings"] / found["original"]
    if "attention" not in found and all(rope.get(name) for name in MSCALE):
        found["attention"] = _of_mscale(rope, found["factor"])
    return found


def _of_mscale(rope: Mapping[str, float], factor: float) -> float:
    one = RopeOptions(scale="yarn", factor=factor).attention_factor - 1
    above, below = (rope[name] * one + 1 for name in MSCALE)
    return above / below
