"""Imports a peft adapter together with its base model as a checkpoint with adapters.

    hybridtron import ADAPTER --base BASE --output OUTPUT

The base is a folder that could be imported by itself. Modules that peft saved in full replace the base's. If a
tensor is several parts of ours, each part gets a copy of A and its own rows of B. DoRA's row lengths become their
change from the base; the subtraction is exact in fp32 unless a length has more than halved or doubled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtron.architecture.adapters import AdaptersConfig, Adapting, adapter_key, is_adaptable
from hybridtron.architecture.table import parameter_table
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.schema import Config
from hybridtron.interop.config_json import CannotImport
from hybridtron.interop.import_folder import SHOWN, ImportFolder, same_tensors
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
    """A base model and a peft adapter for it. Tensors that peft saved in full replace the base's in `weights`."""

    lora: LoraSettings
    adapter: Weights
    adapted: Mapping[str, TensorRule]  # rules of the adapted tensors, by layer name
    saved: frozenset[str]  # names (`theirs`) of the tensors that peft saved in full

    @classmethod
    def beside(cls, folder: Path, base: ImportFolder) -> AdaptedFolder:
        """Combine an adapter folder with its base. Raises CannotImport, listing all faults."""
        lora = lora_settings(folder)
        adapter = Weights(folder, OF_ADAPTER)
        rules = {name: rule for rule in base.rules for name in (rule.theirs, rule.in_memory)}
        rules |= {old.theirs: new for old, new in zip(base.kind.rules(base.model), base.rules, strict=True)}
        names = {name: name.removeprefix(PREFIX) for name in adapter.shapes}
        layers = {name.rpartition(".lora_")[0] for name in names.values() if ".lora_" in name}
        saved = {rules[name].theirs: stored_name for stored_name, name in names.items() if name in rules}
        combined = cls(
            base.kind,
            base.settings,
            base.model,
            base.rules,
            base.weights.replaced(adapter, saved),
            lora,
            adapter,
            {layer: rules[f"{layer}.weight"] for layer in sorted(layers) if f"{layer}.weight" in rules},
            frozenset(saved),
        )
        faults = [*combined._strange(names), *combined._wrong_layers(layers), *combined._wrong_saved(saved)]
        if faults:
            if len(faults) > SHOWN:
                more = [f"and {len(faults) - SHOWN} more"]
            else:
                more = []
            listed = "\n  ".join([*faults[:SHOWN], *more])
            raise CannotImport(f"{folder} is not an adapter that fits beside {base.weights.folder}:\n  {listed}")
        return combined

    @property
    def adapters(self) -> AdaptersConfig:
        """The adapters' configuration, with the smallest preset that trains the modules saved in full."""
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
        converted = (self._beside(layer, rule).items() for layer, rule in self.adapted.items())
        yield (
            "model-adapters.safetensors",
            {key: tensor.contiguous() for adapter_items in converted for key, tensor in adapter_items},
        )

    def read(self, layer: str, piece: str) -> Tensor:
        """Read one of a layer's adapter tensors; `piece` is DOWN, UP or LENGTHS."""
        return self.adapter.read(f"{PREFIX}{layer}.{piece}")

    def _beside(self, layer: str, rule: TensorRule) -> dict[str, Tensor]:
        """Convert a layer's adapter to our A, B and M, by key."""
        A = self.read(layer, DOWN)
        ours = {adapter_key(part, "A"): A.clone() for part in rule.ours}
        ours |= beside(rule, "B", self.lora.rank).to_ours(self.read(layer, UP))
        if self.lora.dora:
            weight = self.weights.read(rule.theirs)
            lengths = self.read(layer, LENGTHS).float()
            ours |= beside(rule, "M").to_ours(lengths - row_lengths_of(weight, torch.float32))
        return ours

    def _patterns(self) -> list[str]:
        """Return patterns that match the adapted weights.

        A weight that is adapted in every layer that has it becomes `layers.*.NAME`; others are listed one by one.
        """
        adapted_keys = {key for rule in self.adapted.values() for key in rule.ours}
        all_keys = [key for rule in self.rules for key in rule.ours]
        patterns = {key: re.sub(r"^layers\.\d+\.", "layers.*.", key) for key in all_keys}
        unadapted_patterns = {patterns[key] for key in all_keys if key not in adapted_keys}
        return sorted({key if patterns[key] in unadapted_patterns else patterns[key] for key in adapted_keys})

    def _strange(self, names: Mapping[str, str]) -> Iterator[str]:
        """Yield a fault for each adapter tensor that no rule uses; a tied head is allowed."""
        known = {f"{layer}.{piece}" for layer in self.adapted for piece in self._pieces()}
        rules = (*self.rules, *self.kind.rules(self.model))
        places = {name for rule in rules for name in (rule.theirs, rule.in_memory)}
        for stored_name, name in names.items():
            if not stored_name.startswith(PREFIX):
                yield f"{stored_name} does not begin with {PREFIX}"
            elif name not in known and name not in places and not (name == HEAD and self.model.tie_embeddings):
                yield f"{stored_name} is used by no rule"

    def _pieces(self) -> tuple[str, ...]:
        """Return the tensor names that each layer's adapter must have."""
        if self.lora.dora:
            return (DOWN, UP, LENGTHS)
        return (DOWN, UP)

    def _wrong_layers(self, layers: set[str]) -> Iterator[str]:
        """Yield faults in adapted layers: not a projection, also saved in full, missing tensors, wrong shapes."""
        if not layers:
            yield f"no tensor is called LAYER.{DOWN}"
        table = parameter_table(self.model)
        projections = {key for name, weight in table.items() if is_adaptable(weight) for key in weight.stored(name)}
        for layer, rule in self.adapted.items():
            if not projections.issuperset(rule.ours):
                yield f"{layer} has an adapter, and is not a projection of a mixer"
                continue
            if rule.theirs in self.saved:
                yield f"{layer} has an adapter, and is saved whole besides"
            rows, columns = rule.shape
            shapes = {DOWN: (self.lora.rank, columns), UP: (rows, self.lora.rank), LENGTHS: (rows,)}
            for piece in self._pieces():
                shape = self.adapter.shapes.get(f"{PREFIX}{layer}.{piece}")
                if shape != shapes[piece]:
                    yield f"{layer}.{piece} {f'has shape {shape}' if shape else 'is missing'}, not {shapes[piece]}"

    def _wrong_saved(self, saved: Mapping[str, str]) -> Iterator[str]:
        """Yield faults in modules saved in full; `saved` maps tensor names to names in the adapter's file."""
        shapes = {rule.theirs: rule.shape for rule in self.rules}
        for name, stored_name in saved.items():
            if self.adapter.shapes[stored_name] != shapes[name]:
                yield f"{name} has shape {self.adapter.shapes[stored_name]}, not {shapes[name]}"
                return
        names = (*saved, *(stored_name.removeprefix(PREFIX) for stored_name in saved.values()))
        modules = {name.rpartition(".")[0] for name in (*names, *([HEAD] if self.model.tie_embeddings else []))}
        for module in self.lora.saved:
            if not any(f".{name}".endswith(f".{module}") for name in modules):
                yield f"{module} is among modules_to_save, and no tensor of it is there"
        if not self.model.tie_embeddings:
            return
        embedding = next(rule.theirs for rule in self.rules if rule.ours == ("embedding.weight",))
        if (stored_name := f"{PREFIX}{HEAD}") in self.adapter.shapes:
            if not torch.equal(self.adapter.read(stored_name), self.weights.read(embedding)):
                yield f"{HEAD} is not {embedding}, though they are tied"
        elif embedding in self.saved and not self.lora.tied:
            yield f"{embedding} was saved, and the head that is tied to it was not: peft keeps the base's for the head"


def is_adapter_folder(folder: Path) -> bool:
    """Check that a folder has adapter_config.json and no config.json."""
    return (folder / CONFIG).exists() and not (folder / "config.json").exists()


def adapted_folder(folder: Path, base: Path | None) -> tuple[AdaptedFolder, Path]:
    """Open an adapter and its base; returns both combined, and the folder with the tokenizer.

    With `base` None, the folder that adapter_config.json names is used. The adapter's own tokenizer takes precedence.
    """
    if not (folder / CONFIG).exists():
        raise CannotImport(f"{folder} has no {CONFIG}: leave out --base")
    named_base = lora_settings(folder).base
    if base is None and not (named_base and Path(named_base).is_dir()):
        raise CannotImport(
            f"{folder / CONFIG} names {named_base!r} as its base, which is not a folder here: add --base FOLDER"
        )
    base_folder = base or Path(str(named_base))
    if (folder / "tokenizer.json").exists():
        tokenizer_folder = folder
    else:
        tokenizer_folder = base_folder
    return AdaptedFolder.beside(folder, ImportFolder.open(base_folder)), tokenizer_folder


def prove_adapter(source: AdaptedFolder, checkpoint: Checkpoint) -> None:
    """Check an imported checkpoint against the adapter and its base.

    All tensors must be restored from the checkpoint as they were. For classes of transformers, its model with the
    adapters merged must also give the same logits as ours. Raises CannotImport or NotTheSame.
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
            same_answers(folder, theirs, whole_model(checkpoint), checkpoint.config.model)


def _same(source: AdaptedFolder, piece: str, layer: str, made: Tensor, rule: TensorRule) -> None:
    """Compare one rebuilt adapter tensor bit for bit; DoRA's lengths may differ by fp32 rounding."""
    theirs = source.read(layer, piece)
    if piece == LENGTHS:
        tolerance = ROUNDING * row_lengths_of(source.weights.read(rule.theirs), torch.float32).maximum(
            theirs.float().abs()
        )
        same = bool(((made - theirs.float()).abs() <= tolerance).all())
    else:
        same = made.dtype == theirs.dtype and torch.equal(made, theirs)
    if not same:
        raise CannotImport(f"{layer}.{piece} does not come back from the checkpoint as it was")


@torch.no_grad()
def _merged(source: AdaptedFolder, theirs: Any) -> Any:
    """Merge the adapter into transformers' model in place, as peft would: W + (alpha / rank) B A, rescaled for DoRA."""
    for rule in source.rules:
        if rule.theirs in source.saved:
            theirs.get_parameter(rule.in_memory).copy_(source.weights.read(rule.theirs))
    for layer, rule in source.adapted.items():
        weight = theirs.get_parameter(rule.in_memory)
        scale = source.lora.alpha / source.lora.rank
        merged_weight = weight + scale * source.read(layer, UP).float() @ source.read(layer, DOWN).float()
        if source.lora.dora:
            merged_weight *= (source.read(layer, LENGTHS).float() / merged_weight.norm(dim=1))[:, None]
        weight.copy_(merged_weight)
    return theirs.eval()
