"""The registry of mixer specs by the `kind` that a recipe writes. One line a mixer, as in `mixers.MIXERS`."""

from hybridtron.specs.attention import AttentionSpec
from hybridtron.specs.base import MixerSpec
from hybridtron.specs.mamba import MambaSpec
from hybridtron.specs.mamba2 import Mamba2Spec
from hybridtron.specs.span import SpanSpec
from hybridtron.specs.swiglu import SwiGLUSpec

SPECS: dict[str, type[MixerSpec]] = {
    "mamba": MambaSpec,
    "mamba2": Mamba2Spec,
    "attention": AttentionSpec,
    "span": SpanSpec,
    "swiglu": SwiGLUSpec,
}
