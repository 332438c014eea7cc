"""The export proof on a sample of layers, for models that do not fit into memory twice.

The sampled model has the first and the last layer of every kind, and the full model's embedding, final norm and head.
It is built twice: with our code and weights from the checkpoint, and in transformers with weights from the exported
files. For transformers the layers are renumbered from 0, and config.json gets the sampled layers' number and order.
Both models must compute the same.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from hybridtron.architecture.table import Architecture, architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.interop.config_json import MAX_JSON_BYTES, read_object
from hybridtron.interop.native import Native
from hybridtron.interop.reader import Weights
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.verify import NotTheSame, Proof, same_model
from hybridtron.interop.writer import write_json
from hybridtron.model.lm import LanguageModel
from hybridtron.safe_open import read_regular


def verify_sample(folder: Path, checkpoint: Checkpoint, target: Native) -> Proof:
    """Compare an export with its checkpoint on sampled layers.

    Raises NotTheSame if logits or generated tokens differ.
    """
    whole = checkpoint.plan.arch
    sampled_layers = sampled(whole, target)
    part = part_of(whole, sampled_layers)
    names_in_folder = _names_in_the_folder(whole, part, sampled_layers, target)
    weights = Weights(folder)
    if missing := sorted(set(names_in_folder.values()) - weights.shapes.keys()):
        raise NotTheSame(f"{folder} has no {missing[0]}")
    with tempfile.TemporaryDirectory() as path:
        temporary = Path(path)
        tensors = {name: weights.read(in_folder).contiguous() for name, in_folder in names_in_folder.items()}
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        write_json(temporary / "config.json", _settings(folder, whole, part, target))
        for name in target.files():
            (temporary / name).write_bytes(read_regular(folder / name, MAX_JSON_BYTES))
        return same_model(temporary, _ours(checkpoint, part, sampled_layers))


def sampled(arch: Architecture, target: Native) -> list[int]:
    """Return the indices of our sub-layers that form the sampled layers.

    A layer in transformers can be several sub-layers here. The first and the last layer of every kind are sampled. If
    all layers of a kind share weights, the first two are sampled instead, because a class such as Zamba2 decides by the
    layers' order which layers share weights. In a class such as Jamba, a layer's kind follows from its index, so the
    sample is the first layers, up to the first layer at which every kind has occurred.
    """
    groups = min(target.groups(arch), arch.inseparable, key=len)
    kinds = ["".join(arch.letters[index] for index in group) for group in groups]
    if target.by_place:
        return [index for group in groups[: max(map(kinds.index, kinds)) + 1] for index in group]
    sharing = {kind for kind, group in zip(kinds, groups, strict=True) if arch.shared_names(arch.letters[group[0]])}
    chosen = {kinds.index(kind) for kind in kinds}
    chosen |= {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds if kind not in sharing}
    chosen |= {[n for n, other in enumerate(kinds) if other == kind][:2][-1] for kind in sharing}
    return [index for number in sorted(chosen) for index in groups[number]]


def part_of(arch: Architecture, taken: list[int]) -> Architecture:
    """Return an architecture with only the sub-layers `taken`."""
    pattern = "".join(arch.letters[index] for index in taken)
    layers = {letter: options for letter, options in arch.model.layers.items() if letter in pattern}
    return architecture(replace(arch.model, pattern=pattern, layers=layers))


def sample_size(arch: Architecture, target: Native) -> int:
    """Return the sampled model's parameter count."""
    part = part_of(arch, sampled(arch, target))
    return sum(parameter.size for parameter in part.table.values())


def _names_in_the_folder(whole: Architecture, part: Architecture, taken: list[int], target: Native) -> dict[str, str]:
    """Map each tensor's name in the sampled model to its name in the exported folder."""
    in_whole = {(rule.ours, rule.expert): rule.theirs for rule in target.rules(whole)}

    def moved(rule: TensorRule) -> tuple[tuple[str, ...], int | None]:
        return tuple(_of_whole(key, taken) for key in rule.ours), rule.expert

    return {rule.theirs: in_whole[moved(rule)] for rule in target.rules(part)}


def _of_whole(name: str, taken: list[int]) -> str:
    """Translate a weight's name in our sampled model to its name in our full model: layer n becomes layer taken[n]."""
    return re.sub(r"^layers\.(\d+)", lambda match: f"layers.{taken[int(match[1])]}", name)


def _settings(folder: Path, whole: Architecture, part: Architecture, target: Native) -> dict[str, object]:
    """Return the folder's config.json, changed to the sampled model's values for keys that depend on the layers."""
    settings = read_object(folder / "config.json")
    full_settings = target.config(whole, 1)
    part_settings = target.config(part, 1)
    return settings | {key: value for key, value in part_settings.items() if full_settings.get(key) != value}


def _ours(checkpoint: Checkpoint, part: Architecture, taken: list[int]) -> LanguageModel:
    """Build the sampled model with our code, and with weights from the checkpoint."""
    ours = LanguageModel(part)
    read = checkpoint.weights(checkpoint.plan.arch.table)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(read(_of_whole(name, taken)))
    return ours
