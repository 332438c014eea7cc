"""Token shift in RWKV's mixers: each channel is interpolated with its value at the previous token.

x_t + mix (x_{t-1} - x_t)
"""

from __future__ import annotations

from hybridtron.architecture.base import ModelSizes, Parameter, StatePart
from hybridtron.architecture.inits import Init, Ramp


def mix_start(model: ModelSizes, power: float = 1.0, less: float = 0.0) -> Ramp:
    """Return the initial mix 1 - less - (i / width)^p of channel i, where p falls from `power` layer by layer."""
    exponent = power * (1 - model.nth_of_kind / model.layers_of_kind)
    return Ramp(1 - less, 1 - less - ((model.width - 1) / model.width) ** exponent, exponent)


def mix(model: ModelSizes, *shape: int, start: Init) -> Parameter:
    """Return a mix parameter with the given leading shape.

    Every rank mixes full tokens, but uses them for its own channels only, so its gradient is partial.
    """
    return Parameter((*shape, model.width), start, decay=False, partial_gradient=True)


def last_token(model: ModelSizes) -> StatePart:
    """Return the state part that holds the row's last token.

    Its kind is `conv`, so it is carried as a short convolution's last inputs are: to the text that continues the row,
    but not under state passing, where the next text's first token does not follow it.
    """
    return StatePart("conv", (model.width,))
