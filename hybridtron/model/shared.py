"""Weights that all places of a letter share: the layers of its first place stand in the others too.

A model registers them under `shared` before its sub-layers, so that each has one name there, that of the parameter
table: `shared.S.mixer.q.weight`. Gradients of all places are summed by autograd, as those of a weight that is used
several times. Where a pipeline cuts the model, every chunk with a place of the letter has a copy (`engine/stage.py`).
"""

from __future__ import annotations

from torch import nn

from hybridtron.architecture.table import Architecture


def share_weights(layers: nn.ModuleDict, arch: Architecture) -> nn.ModuleDict:
    """Tie the places among these sub-layers, given by their index in the whole model; by letter what is shared."""
    shared = nn.ModuleDict()
    for name, layer in layers.items():
        letter = arch.letters[int(name)]
        parts = dict.fromkeys(weight.partition(".")[0] for weight in arch.shared_names(letter))
        mixer = layer.get_submodule("mixer")
        if parts and letter not in shared:
            shared[letter] = nn.ModuleDict({"mixer": nn.Module()})
            for part in parts:
                setattr(shared[letter].get_submodule("mixer"), part, getattr(mixer, part))
        for part in parts:
            setattr(mixer, part, getattr(shared[letter].get_submodule("mixer"), part))
    return shared
