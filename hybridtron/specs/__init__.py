"""The registry of mixer specs by the `kind` that a recipe writes. One line a mixer, as in `mixers.MIXERS`."""

from hybridtron.specs.attention import AttentionSpec
from hybridtron.specs.base import MixerSpec
from hybridtron.specs.mamba import MambaSpec
from hybridtron.specs.swiglu import SwiGLUSpec

SPECS: dict[str, type[MixerSpec]] = {
    "mamba": MambaSpec,
    "attention": AttentionSpec,
    "swiglu": SwiGLUSpec,
}
