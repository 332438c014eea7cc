"""Type stub of the names that the files beside it import from `mixers_hybridtron` (see `interop/shipped_code`)."""

from hybridtron.architecture.base import MixerSpec as MixerSpec
from hybridtron.architecture.base import ModelSizes as ModelSizes
from hybridtron.architecture.base import StatePart as StatePart
from hybridtron.data.batch import SeqInfo as SeqInfo
from hybridtron.mixers.attention import Heads as Heads
from hybridtron.mixers.base import Mixer as Mixer
from hybridtron.mixers.base import State as State
from hybridtron.mixers.norm import RMSNorm as RMSNorm
from hybridtron.model.init import starting_value as starting_value
from hybridtron.model.stack import multiply as multiply
from hybridtron.ops.attention import AttentionInputs as AttentionInputs
from hybridtron.ops.attention import attention as attention
from hybridtron.ops.documents import document_starts as document_starts
from hybridtron.ops.precision import at_least_fp32 as at_least_fp32
from hybridtron.ops.span import span_attention as span_attention

MIXERS: dict[str, tuple[type[MixerSpec], type[Mixer]]]
attention_reference = attention
