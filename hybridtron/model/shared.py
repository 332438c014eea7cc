"""Share a letter's weights among all its sub-layers: the first one's layers replace those of the others.

A model registers them under `shared` before its sub-layers, so that each has one name, as in the parameter table:
`shared.S.mixer.q.weight`. Autograd sums the gradients from all uses. With pipeline parallelism, every stage with such a
sub-layer has a copy (`engine/stage.py`).
"""

from __future__ import annotations

from torch import nn

from hybridtron.architecture.table import Architecture


def share_weights(layers: nn.ModuleDict, arch: Architecture) -> nn.ModuleDict:
    """Tie the shared weights in these sub-layers, and return them by letter.

    The sub-layers' names are their indices in the full model.
    """
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
