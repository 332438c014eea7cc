"""Imports an adapter of peft (Hugging Face's library for adapters) with its base model, as a checkpoint with adapters.

    hybridtron import ADAPTER --base BASE --output OUTPUT

The base is a folder that could also be imported without an adapter. A low-rank adapter has the matrices A (rank, in)
and B (out, rank) for a weight (out, in). If the weight fuses several of our weights, each of our weights gets a copy of
A and its own rows of B. Modules that peft saved in full replace the base's modules.

For DoRA, peft stores the learned norm of each row in the weight. Our checkpoints store M, the learned norm minus the
row's norm in the base. The subtraction is exact in fp32 if the norm has at most doubled or halved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig, Adapting, adapter_key
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.schema import Config
from hybridtron.interop.config_json import CannotImport
from hybridtron.interop.import_folder import ImportFolder, listed, same_tensors
from hybridtron.interop.native import Native
from hybridtron.interop.peft_adapter import (
    DOWN,
    LENGTHS,
    PREFIX,
    UP,
    WEIGHTS,
    adapter_tensors,
    beside,
    row_lengths_of,
)
from hybridtron.interop.peft_settings import CONFIG, LoraSettings, lora_settings
from hybridtron.interop.reader import WeightFiles, Weights
from hybridtron.interop.rules import ROUNDING, TensorRule
from hybridtron.interop.verify import loaded, quiet, same_answers, whole_model

OF_ADAPTER = WeightFiles(WEIGHTS, "adapter_model.bin")
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class AdaptedFolder(ImportFolder):
    """A base model with a peft adapter.

    lora: the adapter's settings
    adapter: a reader for the adapter's tensors
    adapted: module name -> conversion rule of the module's weight, for each module with an adapter
    saved: names of the tensors that peft saved in full, without an adapter

    `weights` reads the tensors in `saved` from the adapter's file, and all other tensors from the base.
    """

    lora: LoraSettings
    adapter: Weights
    adapted: Mapping[str, TensorRule]
    saved: frozenset[str]

    @classmethod
    def beside(cls, folder: Path, base: ImportFolder) -> AdaptedFolder:
        """Combine an adapter folder with its base. Raises CannotImport, with all faults, if they do not fit."""
        lora = lora_settings(folder)
        adapter = Weights(folder, OF_ADAPTER)
        rules = {name: rule for rule in base.rules for name in (rule.theirs, rule.in_memory)}
        rules |= {old.theirs: new for old, new in zip(base.kind.rules(base.arch), base.rules, strict=True)}
        names = {name: name.removeprefix(PREFIX) for name in adapter.shapes}
        layers = {name.rpartition(".lora_")[0] for name in names.values() if ".lora_" in name}
        saved = {rules[name].theirs: stored_name for stored_name, name in names.items() if name in rules}
        combined = cls(
            base.kind,
            base.settings,
            base.arch,
            base.rules,
            base.weights.replaced(adapter, saved),
            lora,
            adapter,
            {layer: rules[f"{layer}.weight"] for layer in sorted(layers) if f"{layer}.weight" in rules},
            frozenset(saved),
        )
        faults = [*combined._unused_tensors(names), *combined._wrong_layers(layers), *combined._wrong_saved(saved)]
        if faults:
            raise CannotImport(
                f"the adapter {folder} does not fit the base model {base.weights.folder}:{listed(faults)}",
                code="mismatch",
            )
        return combined

    @property
    def adapters(self) -> AdaptersConfig:
        """The adapters' configuration.

        Its preset is the smallest preset that trains all modules which peft saved in full.
        """
        learned = [key for rule in self.rules if rule.theirs in self.saved for key in rule.ours]
        convolutions = any("conv" in key for key in learned)
        if convolutions:
            preset = Adapting.hylora
        elif learned:
            preset = Adapting.lora_plus
        else:
            preset = Adapting.lora
        rank, alpha, dropout, dora, *_ = self.lora
        return AdaptersConfig(preset, self._patterns(), rank, alpha, dropout, dora)

    def config(self, name: str) -> Config:
        config = super().config(name)
        return replace(config, model=replace(config.model, adapters=self.adapters))

    def tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield from super().tensors()
        converted = (self._converted(layer, rule).items() for layer, rule in self.adapted.items())
        yield (
            "model-adapters.safetensors",
            {key: tensor.contiguous() for adapter_items in converted for key, tensor in adapter_items},
        )

    def read(self, layer: str, piece: str) -> Tensor:
        """Read an adapter tensor for the module `layer`: DOWN (A), UP (B) or LENGTHS (DoRA's row norms)."""
        return self.adapter.read(f"{PREFIX}{layer}.{piece}")

    def _converted(self, layer: str, rule: TensorRule) -> dict[str, Tensor]:
        """Convert the adapter of the module `layer`. Return key -> tensor for our A, B and, with DoRA, M."""
        A = self.read(layer, DOWN)
        ours = {adapter_key(part, "A"): A.clone() for part in rule.ours}
        ours |= beside(rule, "B", self.lora.rank).to_ours(self.read(layer, UP))
        if self.lora.dora:
            weight = self.weights.read(rule.theirs)
            lengths = self.read(layer, LENGTHS).float()
            ours |= beside(rule, "M").to_ours(lengths - row_lengths_of(weight, torch.float32))
        return ours

    def _patterns(self) -> list[str]:
        """Return patterns that match the adapted weights, for the adapters' configuration.

        Weights with equal names in several layers are matched by a single pattern, `layers.*.NAME`, if all of them are
        adapted. The pattern for any other adapted weight is its key.
        """
        adapted_keys = {key for rule in self.adapted.values() for key in rule.ours}
        all_keys = [key for rule in self.rules for key in rule.ours]
        patterns = {key: re.sub(r"^layers\.\d+\.", "layers.*.", key) for key in all_keys}
        unadapted_patterns = {patterns[key] for key in all_keys if key not in adapted_keys}
        return sorted({key if patterns[key] in unadapted_patterns else patterns[key] for key in adapted_keys})

    def _unused_tensors(self, names: Mapping[str, str]) -> Iterator[str]:
        """Yield a fault for each tensor in the adapter's file that the import does not use.

        The head of a model with tied embeddings is allowed. `names` maps names in the file to names without PREFIX.
        """
        adapter_names = {f"{layer}.{piece}" for layer in self.adapted for piece in self._pieces()}
        rules = (*self.rules, *self.kind.rules(self.arch))
        model_names = {name for rule in rules for name in (rule.theirs, rule.in_memory)}
        for stored_name, name in names.items():
            if not stored_name.startswith(PREFIX):
                yield f"{stored_name} does not begin with {PREFIX}"
            elif (
                name not in adapter_names
                and name not in model_names
                and not (name == HEAD and self.model.tie_embeddings)
            ):
                yield f"{stored_name} is not a tensor of the model or of an adapter"

    def _pieces(self) -> tuple[str, ...]:
        """Return the names of the tensors that a module's adapter must have."""
        if self.lora.dora:
            return (DOWN, UP, LENGTHS)
        return (DOWN, UP)

    def _wrong_layers(self, layers: set[str]) -> Iterator[str]:
        """Yield faults in the adapters of the modules `layers`.

        The faults are:
        - there is no adapter
        - an adapted module is not a sub-layer's projection
        - an adapted module is also saved in full
        - a tensor is missing or has a wrong shape
        """
        if not layers:
            yield f"there is no adapter: no tensor has a name such as MODULE.{DOWN}"
        table = self.arch.table
        projections = {
            key for name, weight in table.items() if weight.is_mixer_projection for key in weight.stored(name)
        }
        for layer, rule in self.adapted.items():
            if not projections.issuperset(rule.ours):
                yield f"{layer} has an adapter, but only projections of attention, Mamba, MLP and so on can have one"
                continue
            if rule.theirs in self.saved:
                yield f"{layer} has an adapter, but is also saved in full"
            rows, columns = rule.shape
            shapes = {DOWN: (self.lora.rank, columns), UP: (rows, self.lora.rank), LENGTHS: (rows,)}
            for piece in self._pieces():
                shape = self.adapter.shapes.get(f"{PREFIX}{layer}.{piece}")
                if shape != shapes[piece]:
                    yield f"{layer}.{piece} {f'has shape {shape}' if shape else 'is missing'}; must be {shapes[piece]}"

    def _wrong_saved(self, saved: Mapping[str, str]) -> Iterator[str]:
        """Yield faults in modules saved in full. `saved` maps tensor names to the names in the adapter's file."""
        shapes = {rule.theirs: rule.shape for rule in self.rules}
        for name, stored_name in saved.items():
            if self.adapter.shapes[stored_name] != shapes[name]:
                yield f"{name} has shape {self.adapter.shapes[stored_name]}, must have shape {shapes[name]}"
        names = (*saved, *(stored_name.removeprefix(PREFIX) for stored_name in saved.values()))
        modules = {name.rpartition(".")[0] for name in (*names, *([HEAD] if self.model.tie_embeddings else []))}
        for module in self.lora.saved:
            if not any(f".{name}".endswith(f".{module}") for name in modules):
                yield f"{module} is in modules_to_save, but the adapter's file has no tensor of this module"
        if not self.model.tie_embeddings:
            return
        embedding = next(rule.theirs for rule in self.rules if rule.ours == ("embedding.weight",))
        if (stored_name := f"{PREFIX}{HEAD}") in self.adapter.shapes:
            if not torch.equal(self.adapter.read(stored_name), self.weights.read(embedding)):
                yield f"{HEAD} differs from {embedding}, though the base model ties them"
        elif embedding in self.saved and not self.lora.tied:
            yield f"{embedding} is saved, but not {HEAD}: peft uses the head of the base, so the two are no longer tied"


def is_adapter_folder(folder: Path) -> bool:
    """Return True if a folder has an adapter and no model: adapter_config.json, but no config.json."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def adapted_folder(folder: Path, base: Path | None) -> tuple[AdaptedFolder, Path]:
    """Open an adapter with its base model. Returns both combined, and the folder to read the tokenizer from.

    If `base` is None, the base is the folder that adapter_config.json names. The tokenizer is read from the adapter's
    folder, or from the base if the adapter's folder has none. Raises CannotImport if there is no such base folder.
    """
    if not (folder / CONFIG).exists():
        raise CannotImport(f"{folder} has no {CONFIG}: leave out --base", code="no-file")
    named_base = lora_settings(folder).base
    if base is None and not (named_base and Path(named_base).is_dir()):
        raise CannotImport(
            f"{folder / CONFIG} names the base model {named_base!r}, which is not a folder on this machine: give the "
            "base model's folder with --base FOLDER",
            code="no-file",
        )
    base_folder = base or Path(str(named_base))
    if (folder / "tokenizer.json").exists():
        tokenizer_folder = folder
    else:
        tokenizer_folder = base_folder
    return AdaptedFolder.beside(folder, ImportFolder.open(base_folder)), tokenizer_folder


def prove_adapter(source: AdaptedFolder, checkpoint: Checkpoint) -> None:
    """Compare an imported checkpoint with the adapter and its base.

    The checkpoint's tensors are converted back. Raises CannotImport if a converted tensor differs from the imported
    tensor. If transformers has a class for the base, the adapter is also merged into the base in transformers. Raises
    NotTheSame if the merged model gives other logits or another greedy continuation than the checkpoint's model.
    """
    same_tensors(source, checkpoint)
    for layer, rule in source.adapted.items():
        rebuilt = adapter_tensors(checkpoint, replace(rule, theirs=f"{layer}.weight", memory=""))
        for name, tensor in rebuilt.items():
            _same(source, name.removeprefix(f"{layer}."), layer, tensor, rule)
    if isinstance(source.kind, Native):
        with quiet():
            folder = source.weights.folder
            theirs = _merged(source, loaded(folder, source.kind.proven_with))
            same_answers(folder, theirs, whole_model(checkpoint))


def _same(source: AdaptedFolder, piece: str, layer: str, rebuilt: Tensor, rule: TensorRule) -> None:
    """Raise CannotImport if an adapter tensor, converted back from the checkpoint, differs from the imported tensor.

    DoRA's row norms may differ by fp32 rounding. All other tensors must be equal bit for bit.
    """
    theirs = source.read(layer, piece)
    if piece == LENGTHS:
        tolerance = ROUNDING * row_lengths_of(source.weights.read(rule.theirs), torch.float32).maximum(
            theirs.float().abs()
        )
        is_same = bool(((rebuilt - theirs.float()).abs() <= tolerance).all())
    else:
        is_same = rebuilt.dtype == theirs.dtype and torch.equal(rebuilt, theirs)
    if not is_same:
        raise CannotImport(
            f"{layer}.{piece}, converted back from the checkpoint, differs from the imported tensor", code="changed"
        )


@torch.no_grad()
def _merged(source: AdaptedFolder, theirs: Any) -> Any:
    """Merge the adapter into a model of transformers in place, as peft would, and return the model.

    An adapted weight W becomes W + (alpha / rank) * B A. With DoRA, each row is then rescaled to its learned norm.
    """
    values = theirs.state_dict()  # parameters, and a router's correction, which is a buffer
    for rule in source.rules:
        if rule.theirs in source.saved:
            values[rule.in_memory].copy_(source.weights.read(rule.theirs))
    for layer, rule in source.adapted.items():
        weight = theirs.get_parameter(rule.in_memory)
        scale = source.lora.alpha / source.lora.rank
        merged_weight = weight + scale * source.read(layer, UP).float() @ source.read(layer, DOWN).float()
        if source.lora.dora:
            merged_weight *= (source.read(layer, LENGTHS).float() / merged_weight.norm(dim=1))[:, None]
        weight.copy_(merged_weight)
    return theirs.eval()
