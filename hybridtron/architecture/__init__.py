"""Registry of mixer specs: the spec class for each `kind` in a recipe's `model.layers`.

A spec describes a mixer without torch. It names the torch module in `mixers/` that implements the mixer.
"""

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.gated_deltanet import GatedDeltaNetSpec
from hybridtron.architecture.gla import GLASpec
from hybridtron.architecture.kda import KDASpec
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.mamba3 import Mamba3Spec
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.retnet import RetNetSpec
from hybridtron.architecture.rwkv6 import RWKV6Spec
from hybridtron.architecture.rwkv6_channel_mix import RWKV6ChannelMixSpec
from hybridtron.architecture.shared_attention import SharedAttentionSpec, SharedSpanSpec
from hybridtron.architecture.span import SpanSpec
from hybridtron.architecture.squared_relu import SquaredReLUSpec
from hybridtron.architecture.swiglu import SwiGLUSpec

SPECS: dict[str, type[MixerSpec]] = {
    "mamba": MambaSpec,
    "mamba2": Mamba2Spec,
    "mamba3": Mamba3Spec,
    "gla": GLASpec,
    "retnet": RetNetSpec,
    "gated_deltanet": GatedDeltaNetSpec,
    "kda": KDASpec,
    "rwkv6": RWKV6Spec,
    "rwkv6_channel_mix": RWKV6ChannelMixSpec,
    "attention": AttentionSpec,
    "span": SpanSpec,
    "shared_attention": SharedAttentionSpec,
    "shared_span": SharedSpanSpec,
    "swiglu": SwiGLUSpec,
    "squared_relu": SquaredReLUSpec,
    "moe": MoESpec,
}
