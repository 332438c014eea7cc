"""The registry of mixer modules by `kind`. One line a mixer; the same keys as `specs.SPECS`."""

from hybridtron.mixers.attention import Attention
from hybridtron.mixers.base import Mixer
from hybridtron.mixers.mamba import Mamba
from hybridtron.mixers.mamba2 import Mamba2
from hybridtron.mixers.span import SpanAttention
from hybridtron.mixers.swiglu import SwiGLU

MIXERS: dict[str, type[Mixer]] = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "attention": Attention,
    "span": SpanAttention,
    "swiglu": SwiGLU,
}
