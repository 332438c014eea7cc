"""Reads adapter_config.json, the settings of a peft adapter, and refuses settings that we can't compute."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hybridtron.interop.config_json import COUNT, NUMBER, TEXT, TEXTS, TRUTH, CannotImport, Kind, read_object

CONFIG = "adapter_config.json"
SHARE = Kind("a number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)
# the keys that an import reads, and their allowed values
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
"""Keys that an import ignores: they do not affect the computation, or other code checks what they describe."""
KEEP_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations of the adapter that do not change the base. PiSSA, for example, changes the weights of the base."""


class LoraSettings(NamedTuple):
    """The settings for a LoRA or DoRA adapter."""

    rank: int
    alpha: float
    dropout: float
    dora: bool
    tied: bool  # ensure_weight_tying: the head uses an embedding that was saved in full
    saved: tuple[str, ...]  # modules_to_save: modules that are saved in full
    base: str | None  # name or path of the base model


def lora_settings(folder: Path) -> LoraSettings:
    """Read adapter_config.json. Raises CannotImport, which lists all values that are not supported."""
    path = folder / CONFIG
    values: dict[str, Any] = {**MISSING, **read_object(path)}
    if faults := list(_faults(values)):
        raise CannotImport("\n".join(f"{path} {fault}" for fault in faults), code="unsupported")
    rank = values["r"]
    # Our factor of B A is alpha / rank. rsLoRA has the factor alpha / sqrt(rank), so alpha is multiplied by sqrt(rank).
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
        yield f"has bias {reprlib.repr(values['bias'])}, must be none: adapters with biases can't be imported"
    if (initialization := values.get("init_lora_weights", True)) not in KEEP_THE_BASE:
        cure = "save the adapter again with path_initial_model_for_weight_conversion of peft's save_pretrained"
        yield f"has init_lora_weights {reprlib.repr(initialization)}, which changes the base: {cure}"
    for key in sorted(values.keys() - READ.keys() - UNREAD):
        if values[key]:
            yield f"has {key} {reprlib.repr(values[key])}, which is not supported: import the model merged by peft"
