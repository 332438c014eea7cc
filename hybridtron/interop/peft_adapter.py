"""Exports a checkpoint's low-rank adapters in the format of peft, Hugging Face's library for adapters.

The base model, to which the adapters belong, is a Hugging Face folder. The exported folder has two files:

    adapter_config.json          rank, alpha, target_modules (modules with adapters), modules_to_save (modules that
                                 training has changed and that have no adapters)
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight              (rank, in)
                                 base_model.model.MODULE.lora_B.weight              (out, rank)
                                 base_model.model.MODULE.lora_magnitude_vector      (out,), with DoRA: the norm of each
                                                                                    row in the adapted weight
                                 base_model.model.MODULE.weight                     for modules_to_save

Training may have changed weights without adapters: embedding, norms, convolutions. Their modules are saved in full, so
that base and adapter together give the checkpoint's model exactly.
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
from hybridtron.checkpoint.merged import adapter_pair, merge_adapters
from hybridtron.config.export_class import SHIPPED, CannotExport
from hybridtron.interop.import_folder import ImportFolder
from hybridtron.interop.peft_settings import CONFIG
from hybridtron.interop.rules import TensorRule, remembering
from hybridtron.interop.writer import write_json

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN = "lora_A.weight"
UP = "lora_B.weight"
LENGTHS = "lora_magnitude_vector"


def export_adapter(source: Checkpoint, base: Path, output: Path) -> int:
    """Write the folder `output` with a checkpoint's adapters for the model in the folder `base`.

    Returns how many modules have adapters. Raises CannotExport if the checkpoint has no adapters, if `base` is not the
    model that was adapted, or if peft's format can't express the adapters.
    """
    adapters = source.config.model.adapters
    arch = merge_adapters(source).plan.arch
    if adapters is None:
        raise CannotExport(f"{source.folder} has no adapters: leave out --base", code="conflict")
    base_folder = ImportFolder.open(base)
    rules = base_folder.kind.rules_for(arch, base_folder.weights.shapes.keys())
    if different_names := {rule.theirs for rule in rules} ^ {rule.theirs for rule in base_folder.rules}:
        raise CannotExport(
            f"{base} is not the model that was adapted: only one of both models has {min(different_names)}",
            code="mismatch",
        )
    shared_keys = sorted(key for key in source.shapes if key.startswith("shared.") and is_adapter(key))
    # in native classes several layers share these weights, but peft would adapt only one of the layers
    if shared_keys and base_folder.kind.name != SHIPPED:
        raise CannotExport(
            f"several layers share the adapter {shared_keys[0]}, which peft can't express: export without --base, to "
            "merge the adapters",
            code="unsupported",
        )
    layers = {module_of(rule): layer_tensors for rule in rules if (layer_tensors := adapter_tensors(source, rule))}
    read = remembering(source.whole)
    changed_rules = [rule for rule in rules if not rule.same(rule.to_theirs(read), _theirs(base_folder, rule))]
    if changed_experts := [rule for rule in changed_rules if rule.expert is not None]:
        raise CannotExport(
            f"{changed_experts[0].theirs} was trained in full, and peft can't save single experts: export without "
            "--base, to merge the adapters",
            code="unsupported",
        )
    changed = {module_of(rule) for rule in changed_rules}
    if changed_layers := sorted(changed & layers.keys()):
        raise CannotExport(
            f"{base} is not the model that was adapted: its {changed_layers[0]}.weight differs",
            code="mismatch",
        )
    tensors = {rule.in_memory: rule.to_theirs(source.whole) for rule in rules if module_of(rule) in changed}
    for layer_tensors in layers.values():
        tensors |= layer_tensors
    learned_keys = {key for rule in rules if module_of(rule) in changed for key in rule.ours}
    tied = arch.model.tie_embeddings and "embedding.weight" in learned_keys
    if tied:  # peft also reads the weight of the head, which is tied to the embedding
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
    """Return the name of the module in transformers that has this tensor. peft adapts and saves complete modules."""
    return rule.in_memory.rpartition(".")[0]


def _theirs(base: ImportFolder, rule: TensorRule) -> Tensor:
    """Read a tensor from the base folder. Raises CannotExport if the checkpoint's tensor has another shape."""
    if base.weights.shapes[rule.theirs] != rule.shape:
        raise CannotExport(
            f"{rule.theirs} has shape {base.weights.shapes[rule.theirs]} in {base.weights.folder}, but {rule.shape} in "
            "the checkpoint",
            code="mismatch",
        )
    return base.weights.read(rule.theirs)


def adapter_tensors(source: Checkpoint, rule: TensorRule) -> dict[str, Tensor]:
    """Return name without PREFIX -> tensor for one module's adapter; empty if the module has no adapter.

    `rule` is the conversion rule for the module's weight. In peft a module has a single A. So if the module's weight
    fuses several of our weights, they must all have the same A. Otherwise CannotExport is raised.
    """
    shapes = source.shapes
    layer = module_of(rule)
    A = [source.whole(pair[0]) for part in rule.ours if (pair := adapter_pair(shapes, part)) is not None]
    if not A:
        return {}
    if len(A) < len(rule.ours) or any(not torch.equal(A[0], other_A) for other_A in A[1:]):
        raise CannotExport(
            f"the parts of {rule.theirs} have different adapters, which peft can't express: export without --base, to "
            "merge the adapters",
            code="unsupported",
        )
    layer_tensors = {f"{layer}.{DOWN}": A[0], f"{layer}.{UP}": beside(rule, "B", len(A[0])).to_theirs(source.whole)}
    lengths = {M: _lengths(source, part, M) for part in rule.ours if (M := adapter_key(part, "M")) in shapes}
    if lengths:
        layer_tensors[f"{layer}.{LENGTHS}"] = beside(rule, "M").to_theirs(lengths.__getitem__)
    return layer_tensors


def beside(rule: TensorRule, piece: str, *columns: int) -> TensorRule:
    """Return the conversion rule for an adapter's B or M, made from the adapted weight's rule.

    - B, the matrix (out, rank): `piece` is "B" and `columns` is the rank.
    - M, DoRA's learned change to each row's norm: `piece` is "M", without `columns`.

    B and M have as many rows as the adapted weight. If that weight fuses several of our weights, the B or M of these
    weights are concatenated in the same order.
    """
    ours = tuple(adapter_key(part, piece) for part in rule.ours)
    return replace(rule, shape=(rule.shape[0], *columns), ours=ours, fp32=False, less_one=False)


def row_lengths_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each row's L2 norm, computed in fp64 and rounded to `dtype`."""
    return torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).to(dtype)


def _lengths(source: Checkpoint, W: str, M: str) -> Tensor:
    """Return the row norms that peft stores for DoRA: the norm of each row of W, plus the learned change M.

    Our checkpoints store only M. The arguments `W` and `M` are keys in the checkpoint.
    """
    change = source.whole(M)
    return row_lengths_of(source.whole(W), change.dtype) + change
