"""The registry of ops: importing the package registers every form of every op."""

from hybridtron.ops.attention import flex as attention_flex
from hybridtron.ops.attention import reference as attention_reference
from hybridtron.ops.conv import reference as conv_reference
from hybridtron.ops.conv import triton as conv_triton
from hybridtron.ops.gated_norm import reference as gated_norm_reference
from hybridtron.ops.loss import chunked as loss_chunked
from hybridtron.ops.loss import reference as loss_reference
from hybridtron.ops.norm import reference as norm_reference
from hybridtron.ops.norm import triton as norm_triton
from hybridtron.ops.scan import mamba_ssm as scan_mamba_ssm
from hybridtron.ops.scan import reference as scan_reference
from hybridtron.ops.scan import triton as scan_triton
from hybridtron.ops.softmax import triton as softmax_triton
from hybridtron.ops.span import blocked as span_blocked
from hybridtron.ops.span import choice as span_choice
from hybridtron.ops.span import flex as span_flex
from hybridtron.ops.span import past as span_past
from hybridtron.ops.span import reference as span_reference
from hybridtron.ops.ssd import mamba_ssm as ssd_mamba_ssm
from hybridtron.ops.ssd import reference as ssd_reference
from hybridtron.ops.ssd import triton as ssd_triton
from hybridtron.ops.swiglu import reference as swiglu_reference

__all__ = [
    "attention_flex",
    "attention_reference",
    "conv_reference",
    "conv_triton",
    "gated_norm_reference",
    "loss_chunked",
    "loss_reference",
    "norm_reference",
    "norm_triton",
    "scan_mamba_ssm",
    "scan_reference",
    "scan_triton",
    "softmax_triton",
    "span_blocked",
    "span_choice",
    "span_flex",
    "span_past",
    "span_reference",
    "ssd_mamba_ssm",
    "ssd_reference",
    "ssd_triton",
    "swiglu_reference",
]
