"""Reads peft's adapter_config.json, and refuses settings whose computation we don't have."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybridtron.interop.config_json import COUNT, NUMBER, TEXT, TEXTS, TRUTH, CannotImport, Kind, read_object

CONFIG = "adapter_config.json"
SHARE = Kind("a number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)
READ: dict[str, Kind] = {
    "r": COUNT,
    "lora_alpha": NUMBER,
    "lora_dropout": SHARE,
    "use_dora": TRUTH,
    "use_rslora": TRUTH,
    "ensure_weight_tying": TRUTH,
    "modules_to_save": TEXTS.or_null(),
    "base_model_name_or_path": TEXT.or_null(),
}
MISSING = {"lora_dropout": 0.0, "use_dora": False, "use_rslora": False, "ensure_weight_tying": False}
"""Defaults for keys that older versions of peft do not write."""
SAID_BY_TENSORS = "target_modules exclude_modules layers_to_transform layers_pattern"
OF_TRAINING = "loftq_config eva_config corda_config lora_ga_config runtime_config init_lora_weights"
OF_OTHERS = "peft_type task_type auto_mapping revision peft_version inference_mode bias megatron_config megatron_core"
UNREAD = {*SAID_BY_TENSORS.split(), *OF_TRAINING.split(), *OF_OTHERS.split(), "qalora_group_size"}
"""Keys that do not affect the computation, or that are checked elsewhere."""
KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that leave the base unchanged; others (such as PiSSA) subtract the adapter from the base weights."""


class LoraSettings(NamedTuple):
    """The settings of a LoRA or DoRA adapter; `base` is the base model's name or path, if given."""

    rank: int
    alpha: float
    dropout: float
    dora: bool
    tied: bool  # a saved embedding is also used as the head
    saved: tuple[str, ...]  # modules_to_save
    base: str | None


def lora_settings(folder: Path) -> LoraSettings:
    """Read adapter_config.json. Raises CannotImport, naming each value that can't be used."""
    path = folder / CONFIG
    values: dict[str, Any] = {**MISSING, **read_object(path)}
    if faults := list(_faults(values)):
        raise CannotImport("\n".join(f"{path} {fault}" for fault in faults))
    rank = values["r"]
    # the adapter's factor is alpha / rank here; rsLoRA has alpha / sqrt(rank)
    alpha = values["lora_alpha"] * (math.sqrt(rank) if values["use_rslora"] else 1.0)
    tied = values["ensure_weight_tying"]
    saved = tuple(values.get("modules_to_save") or ())
    base = values.get("base_model_name_or_path")
    return LoraSettings(rank, float(alpha), float(values["lora_dropout"]), values["use_dora"], tied, saved, base)


def _faults(values: dict[str, Any]) -> Iterator[str]:
    if (kind := values.get("peft_type")) != "LORA":
        yield f"has peft_type {reprlib.repr(kind)}; only LORA can be imported"
        return
    for key, requirement in READ.items():
        if key not in values and not requirement.fits(None):
            yield f"has no {key}"
        elif not requirement.fits(values.get(key)):
            yield f"has {key} {reprlib.repr(values[key])}, must be {requirement.words}"
    if values.get("bias", "none") != "none":
        yield f"has bias {reprlib.repr(values['bias'])}, must be none: our projections have no biases"
    if (start := values.get("init_lora_weights", True)) not in KEEP_THE_BASE:
        cure = "convert it to a plain one (peft's path_initial_model_for_weight_conversion)"
        yield f"has init_lora_weights {reprlib.repr(start)}, which changes the base: {cure}"
    for key in sorted(values.keys() - READ.keys() - UNREAD):
        if values[key]:
            yield f"has {key} {reprlib.repr(values[key])}, which is not imported: train without it, or import it merged"
