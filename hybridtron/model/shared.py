"""Share weights among all sub-layers of a letter: all refer to the torch modules of the letter's first sub-layer.

A letter is a symbol in the layer pattern, such as S in `(MS)*6`. A model registers the shared modules under `shared`
before its sub-layers. A shared weight therefore has a single name, as in the parameter table:
`shared.S.mixer.q.weight`. Autograd sums the gradients from all uses. With pipeline parallelism, every stage with a
sub-layer of the letter has a copy of the shared weights (`engine/stage.py`).
"""

from __future__ import annotations

from torch import nn

from hybridtron.architecture.table import Architecture


def share_weights(layers: nn.ModuleDict, arch: Architecture) -> nn.ModuleDict:
    """Make all sub-layers of a letter refer to one object for each shared module; return letter -> shared modules.

    `layers` maps each sub-layer's index in the full model, as a string, to the sub-layer.
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
