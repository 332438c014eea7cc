"""What RWKV's mixers share: each channel of a token takes a share of the same channel of the token before it.

x_t + mix (x_{t-1} - x_t)
"""

from __future__ import annotations

from hybridtron.architecture.base import ModelSizes, Parameter, StatePart
from hybridtron.architecture.inits import Init, Ramp


def mix_start(model: ModelSizes, power: float = 1.0, less: float = 0.0) -> Ramp:
    """1 - less - (i / width)^p: the later the channel, the less it takes; p falls from `power` layer by layer."""
    exponent = power * (1 - model.nth_of_kind / model.layers_of_kind)
    return Ramp(1 - less, 1 - less - ((model.width - 1) / model.width) ** exponent, exponent)


def mix(model: ModelSizes, *shape: int, start: Init) -> Parameter:
    """Shares of all channels; every rank mixes whole tokens, and uses what it makes for its own channels."""
    return Parameter((*shape, model.width), start, decay=False, partial_gradient=True)


def last_token(model: ModelSizes) -> StatePart:
    """The row's last token.

    It is carried where the last inputs of a short convolution are: to the text that follows it, and not where states
    pass to another text, of whose first token it is not the one before.
    """
    return StatePart("conv", (model.width,))
