"""A checkpoint's adapters as peft has them, beside a base model in a folder of transformers.

    adapter_config.json          rank, alpha, the layers that have adapters, the modules that are saved whole
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight (rank, in), .lora_B.weight (out, rank), with DoRA
                                 .lora_magnitude_vector (out,); modules

Whatever differs from the base, but for what adapters add, is saved whole: embedding, norms and convolutions that have
learned. So the base and the adapter are the checkpoint's model, bit for bit, or nothing is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.files import appearing
from hybridtron.checkpoint.merged import adapter_pair, merged
from hybridtron.config.exportable import CannotExport
from hybridtron.interop.import_folder import ImportFolder
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.writer import write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
LENGTHS = "lora_magnitude_vector"


def export_adapter(source: Checkpoint, base: Path, output: Path) -> int:
    """Write the folder; returns how many layers have adapters. Raises CannotExport where peft has no such adapter."""
    adapters, model = source.config.model.adapters, merged(source).config.model
    if adapters is None:
        raise CannotExport(f"{source.folder} has no adapters: leave out --base")
    beside = ImportFolder.open(base)
    rules = beside.kind.rules(model)
    if strange := {rule.theirs for rule in rules} ^ {rule.theirs for rule in beside.rules}:
        raise CannotExport(f"{base} is another model: {min(strange)} is in one of the two")
    pairs = {module_of(rule): pair for rule in rules if (pair := _pair(source, rule)) is not None}
    changed = {module_of(rule) for rule in rules if not rule.same(rule.to_theirs(source.whole), _theirs(beside, rule))}
    if wrong := sorted(changed & pairs.keys()):
        raise CannotExport(f"{base} has another {wrong[0]}.weight than that beside which adapters were trained")
    tensors = {rule.theirs: rule.to_theirs(source.whole) for rule in rules if module_of(rule) in changed}
    for layer, pair in pairs.items():
        tensors |= {f"{layer}.lora_{piece}.weight": source.whole(key) for piece, key in zip("AB", pair, strict=True)}
        if adapters.dora:
            tensors[f"{layer}.{LENGTHS}"] = _lengths(source, pair[1])
    learned = {key for rule in rules if module_of(rule) in changed for key in rule.ours}
    tied = model.tie_embeddings and "embedding.weight" in learned
    if tied:  # peft reads the head's weight, too
        tensors["lm_head.weight"] = source.whole("embedding.weight").clone()
    settings = _settings(adapters, base) | {
        "target_modules": sorted(pairs),
        "modules_to_save": sorted(changed) or None,
        "ensure_weight_tying": tied,
    }
    with appearing(output) as folder:
        stored = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        write_json(folder / CONFIG, settings)
    return len(pairs)


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
    return rule.theirs.rpartition(".")[0]


def _theirs(beside: ImportFolder, rule: TensorRule) -> Tensor:
    if beside.weights.shapes[rule.theirs] != rule.shape:
        raise CannotExport(f"{rule.theirs} has shape {beside.weights.shapes[rule.theirs]} in {beside.weights.folder}")
    return beside.weights.read(rule.theirs)


def _lengths(source: Checkpoint, B: str) -> Tensor:
    """Of rows, as they are learned: those of W, and what they have changed by."""
    W, M = B.replace(".adapter.B", ".weight"), B.replace(".adapter.B", ".adapter.M")
    change = source.whole(M)
    return torch.linalg.vector_norm(source.whole(W), dim=1, dtype=torch.float64).to(change.dtype) + change


def _pair(source: Checkpoint, rule: TensorRule) -> tuple[str, str] | None:
    """The keys of A and B beside a tensor of theirs; peft has one pair for a layer."""
    adapted = [pair for key in rule.ours if (pair := adapter_pair(source.shapes, key)) is not None]
    if adapted and len(rule.ours) > 1:
        raise CannotExport(
            f"{rule.theirs} has an adapter for each of its parts, and peft one for all: export it merged"
        )
    return adapted[0] if adapted else None
