"""Token shift in RWKV's mixers: each channel is interpolated with its value at the previous token.

Token t becomes x_t + mix (x_{t-1} - x_t). `mix` is a learned vector with one weight per channel.
"""

from __future__ import annotations

from hybridtron.architecture.base import ModelSizes, Parameter, StatePart
from hybridtron.architecture.inits import Init, Ramp


def mix_start(model: ModelSizes, power: float = 1.0, less: float = 0.0) -> Ramp:
    """Return the initial mix for channel i: 1 - less - (i / width)^p.

    p is `power` in the first layer with this kind of mixer, and falls linearly towards 0 over the layers of this kind.
    """
    exponent = power * (1 - model.nth_of_kind / model.layers_of_kind)
    return Ramp(1 - less, 1 - less - ((model.width - 1) / model.width) ** exponent, exponent)


def mix(model: ModelSizes, *shape: int, start: Init) -> Parameter:
    """Return a mix parameter with the shape (*shape, width).

    Every tensor-parallel rank interpolates all channels, but uses the result for its own heads or inner channels only.
    The parameter's gradient on a rank is therefore partial.
    """
    return Parameter((*shape, model.width), start, decay=False, partial_gradient=True)


def last_token(model: ModelSizes) -> StatePart:
    """Return the state part that holds the last token of a row (a sequence in the batch).

    The part has the kind `conv`, because it is treated like the last inputs of a short convolution: it is carried to a
    row that continues the same text. With `states.mode=passing`, the next row begins another text, and the part is not
    carried.
    """
    return StatePart("conv", (model.width,))
