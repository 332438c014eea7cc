"""The export proof on a sample of layers, for models too large to be held in memory twice.

The first and the last layer of every kind, with embedding, final norm and head, form a smaller model. Ours loads its
weights from the checkpoint; transformers' loads the same layers from the exported files, renumbered. Its config.json is
the exported one, except for the entries that list the layers.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture, architecture, parameter_table
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.interop.config_json import LARGEST, read_object
from hybridtron.interop.native import Native
from hybridtron.interop.reader import Weights
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.verify import NotTheSame, Proof, same_model
from hybridtron.interop.writer import write_json
from hybridtron.model.lm import LanguageModel
from hybridtron.regular_files import read_regular


def verify_sample(folder: Path, checkpoint: Checkpoint, target: Native) -> Proof:
    """Compare an export with its checkpoint on sampled layers. Raises NotTheSame if logits or tokens differ."""
    full_model = checkpoint.config.model
    sampled_layers = sampled(architecture(full_model), target)
    model = part_of(full_model, sampled_layers)
    names_in_folder = _names_in_the_folder(full_model, model, sampled_layers, target)
    weights = Weights(folder)
    if missing := sorted(set(names_in_folder.values()) - weights.shapes.keys()):
        raise NotTheSame(f"{folder} has no {missing[0]}")
    with tempfile.TemporaryDirectory() as place:
        temporary = Path(place)
        tensors = {name: weights.read(in_folder).contiguous() for name, in_folder in names_in_folder.items()}
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        write_json(temporary / "config.json", _settings(folder, full_model, model, target))
        for name in target.files():
            (temporary / name).write_bytes(read_regular(folder / name, LARGEST))
        return same_model(temporary, model, _ours(checkpoint, model, sampled_layers))


def sampled(arch: Architecture, target: Native) -> list[int]:
    """Return the indices of the sub-layers in the sample: the first and the last layer of every kind.

    A layer can be several sub-layers. If a kind's layers share weights, its first two are taken, because some classes
    (Zamba2) decide by the layers' order which of them share.
    """
    groups = min(target.groups(arch), arch.inseparable, key=len)
    kinds = ["".join(arch.letters[index] for index in group) for group in groups]
    sharing = {kind for kind, group in zip(kinds, groups, strict=True) if arch.shared_names(arch.letters[group[0]])}
    chosen = {kinds.index(kind) for kind in kinds}
    chosen |= {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds if kind not in sharing}
    chosen |= {[n for n, other in enumerate(kinds) if other == kind][:2][-1] for kind in sharing}
    return [index for number in sorted(chosen) for index in groups[number]]


def part_of(model: ModelConfig, taken: list[int]) -> ModelConfig:
    """Return the configuration for a model with only the sub-layers `taken`."""
    letters = architecture(model).letters
    pattern = "".join(letters[index] for index in taken)
    return replace(
        model,
        pattern=pattern,
        layers={letter: options for letter, options in model.layers.items() if letter in pattern},
    )


def sample_size(model: ModelConfig, target: Native) -> int:
    """Count the sampled model's parameters."""
    part = part_of(model, sampled(architecture(model), target))
    return sum(parameter.size for parameter in parameter_table(part).values())


def _names_in_the_folder(whole: ModelConfig, part: ModelConfig, taken: list[int], target: Native) -> dict[str, str]:
    """Map the sampled model's tensor names to those in the exported folder."""
    in_whole = {rule.ours: rule.theirs for rule in target.rules(whole)}

    def moved(rule: TensorRule) -> tuple[str, ...]:
        return tuple(_of_whole(key, taken) for key in rule.ours)

    return {rule.theirs: in_whole[moved(rule)] for rule in target.rules(part)}


def _of_whole(name: str, taken: list[int]) -> str:
    """Translate one of our weight names from the sampled to the full model: layer n there is layer taken[n]."""
    return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{taken[int(match[1])]}", name)


def _settings(folder: Path, whole: ModelConfig, part: ModelConfig, target: Native) -> dict[str, object]:
    """Read the folder's config.json, with the values that differ in a model with fewer layers."""
    settings = read_object(folder / "config.json")
    full_settings = target.config(whole, 1)
    part_settings = target.config(part, 1)
    return settings | {key: value for key, value in part_settings.items() if full_settings.get(key) != value}


def _ours(checkpoint: Checkpoint, model: ModelConfig, taken: list[int]) -> LanguageModel:
    """Build our sampled model, with weights from the checkpoint."""
    ours = LanguageModel(model)
    read = checkpoint.weights(parameter_table(checkpoint.config.model))
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(read(_of_whole(name, taken)))
    return ours
