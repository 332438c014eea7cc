"""A checkpoint's adapters as peft has them, beside a base model in a folder of transformers.

    adapter_config.json          rank, alpha, the layers that have adapters, the modules that are saved whole
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight (rank, in), .lora_B.weight (out, rank), with DoRA
                                 .lora_magnitude_vector (out,); modules

Whatever differs from the base, but for what adapters add, is saved whole: embedding, norms and convolutions that have
learned. So the base and the adapter are the checkpoint's model, bit for bit, or nothing is written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig, adapter_key, is_adapter
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import appearing
from hybridtron.checkpoint.merged import adapter_pair, merged
from hybridtron.config.exportable import SHIPPED, CannotExport
from hybridtron.interop.import_folder import ImportFolder
from hybridtron.interop.peft_settings import CONFIG
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.writer import write_json

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP, LENGTHS = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


def export_adapter(source: Checkpoint, base: Path, output: Path) -> int:
    """Write the folder; returns how many layers have adapters. Raises CannotExport where peft has no such adapter."""
    adapters, model = source.config.model.adapters, merged(source).config.model
    if adapters is None:
        raise CannotExport(f"{source.folder} has no adapters: leave out --base")
    beside = ImportFolder.open(base)
    rules = beside.kind.rules(model)
    if strange := {rule.theirs for rule in rules} ^ {rule.theirs for rule in beside.rules}:
        raise CannotExport(f"{base} is another model: {min(strange)} is in one of the two")
    of_several = sorted(key for key in source.shapes if key.startswith("shared.") and is_adapter(key))
    if of_several and beside.kind.name != SHIPPED:  # transformers' places share weights, but peft adapts one of them
        raise CannotExport(f"{of_several[0]} is of all places of a letter, and peft's of one of them: export it merged")
    layers = {module_of(rule): made for rule in rules if (made := adapter_tensors(source, rule))}
    changed = {module_of(rule) for rule in rules if not rule.same(rule.to_theirs(source.whole), _theirs(beside, rule))}
    if wrong := sorted(changed & layers.keys()):
        raise CannotExport(f"{base} has another {wrong[0]}.weight than that beside which adapters were trained")
    tensors = {rule.in_memory: rule.to_theirs(source.whole) for rule in rules if module_of(rule) in changed}
    for made in layers.values():
        tensors |= made
    learned = {key for rule in rules if module_of(rule) in changed for key in rule.ours}
    tied = model.tie_embeddings and "embedding.weight" in learned
    if tied:  # peft reads the head's weight, too
        tensors["lm_head.weight"] = source.whole("embedding.weight").clone()
    settings = _settings(adapters, base) | {
        "target_modules": sorted(layers),
        "modules_to_save": sorted(changed) or None,
        "ensure_weight_tying": tied,
    }
    with appearing(output) as folder:
        stored = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        write_json(folder / CONFIG, settings)
    return len(layers)


def _settings(adapters: AdaptersConfig, base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "use_dora": adapters.dora,
        "bias": "none",
        "inference_mode": True,
    }


def module_of(rule: TensorRule) -> str:
    """The module of transformers that a tensor belongs to; peft adapts and saves modules."""
    return rule.in_memory.rpartition(".")[0]


def _theirs(beside: ImportFolder, rule: TensorRule) -> Tensor:
    if beside.weights.shapes[rule.theirs] != rule.shape:
        raise CannotExport(f"{rule.theirs} has shape {beside.weights.shapes[rule.theirs]} in {beside.weights.folder}")
    return beside.weights.read(rule.theirs)


def adapter_tensors(source: Checkpoint, rule: TensorRule) -> dict[str, Tensor]:
    """What peft has beside a tensor of theirs, by its names; nothing where there is no adapter.

    It has one A for a layer. A layer that fuses several of our parts has it where all of these have the same.
    """
    held, layer = source.shapes, module_of(rule)
    A = [source.whole(pair[0]) for part in rule.ours if (pair := adapter_pair(held, part)) is not None]
    if not A:
        return {}
    if len(A) < len(rule.ours) or any(not torch.equal(A[0], other) for other in A[1:]):
        raise CannotExport(
            f"{rule.theirs} has an adapter for each of its parts, and peft one for all: export it merged"
        )
    made = {f"{layer}.{DOWN}": A[0], f"{layer}.{UP}": beside(rule, "B", len(A[0])).to_theirs(source.whole)}
    lengths = {M: _lengths(source, part, M) for part in rule.ours if (M := adapter_key(part, "M")) in held}
    if lengths:
        made[f"{layer}.{LENGTHS}"] = beside(rule, "M").to_theirs(lengths.__getitem__)
    return made


def beside(rule: TensorRule, piece: str, *columns: int) -> TensorRule:
    """The rule of B or M beside a tensor of theirs, whose rows are those of the tensor."""
    ours = tuple(adapter_key(part, piece) for part in rule.ours)
    return replace(rule, shape=(rule.shape[0], *columns), ours=ours, fp32=False, less_one=False)


def row_lengths_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Of a projection without its adapter."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).to(dtype)


def _lengths(source: Checkpoint, W: str, M: str) -> Tensor:
    """Of rows, as they are learned: those of W, and what they have changed by."""
    change = source.whole(M)
    return row_lengths_of(source.whole(W), change.dtype) + change
