"""Exports a checkpoint's low-rank adapters in peft's format, for a base model in a folder of transformers.

    adapter_config.json          rank, alpha, target_modules (layers with adapters), modules_to_save (saved in full)
    adapter_model.safetensors    base_model.model.LAYER.lora_A.weight (rank, in), .lora_B.weight (out, rank), with DoRA
                                 .lora_magnitude_vector (out,); full weights of modules_to_save

Modules without adapters whose weights differ from the base (embedding, norms, convolutions) are saved in full. So base
and adapter together are the checkpoint's model, bit for bit; if they can't be, the export fails.
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
DOWN = "lora_A.weight"
UP = "lora_B.weight"
LENGTHS = "lora_magnitude_vector"


def export_adapter(source: Checkpoint, base: Path, output: Path) -> int:
    """Write an adapter folder for `base`, and return the number of layers with adapters.

    Raises CannotExport if the base is another model, or peft's format can't express the adapters.
    """
    adapters = source.config.model.adapters
    model = merged(source).config.model
    if adapters is None:
        raise CannotExport(f"{source.folder} has no adapters: leave out --base")
    base_folder = ImportFolder.open(base)
    rules = base_folder.kind.rules(model)
    if strange_names := {rule.theirs for rule in rules} ^ {rule.theirs for rule in base_folder.rules}:
        raise CannotExport(f"{base} is another model: {min(strange_names)} is in one of the two")
    shared_keys = sorted(key for key in source.shapes if key.startswith("shared.") and is_adapter(key))
    # native classes share weights among layers; peft would adapt one
    if shared_keys and base_folder.kind.name != SHIPPED:
        raise CannotExport(
            f"{shared_keys[0]} is of all places of a letter, and peft's of one of them: export it merged"
        )
    layers = {module_of(rule): layer_tensors for rule in rules if (layer_tensors := adapter_tensors(source, rule))}
    changed = {
        module_of(rule) for rule in rules if not rule.same(rule.to_theirs(source.whole), _theirs(base_folder, rule))
    }
    if changed_layers := sorted(changed & layers.keys()):
        raise CannotExport(
            f"{base} has another {changed_layers[0]}.weight than that beside which adapters were trained"
        )
    tensors = {rule.in_memory: rule.to_theirs(source.whole) for rule in rules if module_of(rule) in changed}
    for layer_tensors in layers.values():
        tensors |= layer_tensors
    learned_keys = {key for rule in rules if module_of(rule) in changed for key in rule.ours}
    tied = model.tie_embeddings and "embedding.weight" in learned_keys
    if tied:  # peft also reads a weight for the tied head
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
    """Return the name of the transformers module that has this tensor; peft adapts and saves modules."""
    return rule.in_memory.rpartition(".")[0]


def _theirs(beside: ImportFolder, rule: TensorRule) -> Tensor:
    """Read a tensor from the base folder, after checking its shape."""
    if beside.weights.shapes[rule.theirs] != rule.shape:
        raise CannotExport(f"{rule.theirs} has shape {beside.weights.shapes[rule.theirs]} in {beside.weights.folder}")
    return beside.weights.read(rule.theirs)


def adapter_tensors(source: Checkpoint, rule: TensorRule) -> dict[str, Tensor]:
    """Return peft's tensors for one layer, by name without prefix; empty if the layer has no adapter.

    peft has one A per layer. If the layer fuses several of our parts, all of them must have the same A, or CannotExport
    is raised.
    """
    shapes = source.shapes
    layer = module_of(rule)
    A = [source.whole(pair[0]) for part in rule.ours if (pair := adapter_pair(shapes, part)) is not None]
    if not A:
        return {}
    if len(A) < len(rule.ours) or any(not torch.equal(A[0], other_A) for other_A in A[1:]):
        raise CannotExport(
            f"{rule.theirs} has an adapter for each of its parts, and peft one for all: export it merged"
        )
    layer_tensors = {f"{layer}.{DOWN}": A[0], f"{layer}.{UP}": beside(rule, "B", len(A[0])).to_theirs(source.whole)}
    lengths = {M: _lengths(source, part, M) for part in rule.ours if (M := adapter_key(part, "M")) in shapes}
    if lengths:
        layer_tensors[f"{layer}.{LENGTHS}"] = beside(rule, "M").to_theirs(lengths.__getitem__)
    return layer_tensors


def beside(rule: TensorRule, piece: str, *columns: int) -> TensorRule:
    """Return the rule for a layer's B (piece "B", with `columns` = rank) or DoRA's M (piece "M", without columns).

    Both have a row for each row of the adapted tensor, so the same parts are concatenated in the same order.
    """
    ours = tuple(adapter_key(part, piece) for part in rule.ours)
    return replace(rule, shape=(rule.shape[0], *columns), ours=ours, fp32=False, less_one=False)


def row_lengths_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the Euclidean length of each row, computed in fp64 and rounded to `dtype`."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).to(dtype)


def _lengths(source: Checkpoint, W: str, M: str) -> Tensor:
    """Return DoRA's learned row lengths, |W| + M: our checkpoints store the change M, peft the sum."""
    change = source.whole(M)
    return row_lengths_of(source.whole(W), change.dtype) + change
