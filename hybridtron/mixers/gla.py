"""Gated linear attention (equations in `architecture/gla.py`): linear attention with a decay per key channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.gla import GLASpec
from hybridtron.mixers.linear_attention import HeadInputs, LinearAttention
from hybridtron.ops.gla import GLAGateInputs, GLAInputs, gla_gates, gla_scan
from hybridtron.ops.transition import gla_transition
from hybridtron.parallel.context import contiguous_inputs, sharded_scan
from hybridtron.parallel.linear import TensorGroup, column_parallel


class GLA(LinearAttention):
    """Linear attention with a decay per key channel.

    State: `ssm` (B, H, N, P).

    Legend: B rows (sequences), L tokens, H heads, N key channels and P value channels per head, and K = H * N.
    """

    def __init__(self, spec: GLASpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.spec = spec
        self.gate_down = column_parallel(sizes.width, spec.gate_rank, tensor.whole().without_fp8())
        self.gate_up = column_parallel(spec.gate_rank, spec.channels(sizes)[0], tensor.without_fp8())
        self.gate_bias = nn.Parameter(torch.empty(self.keys))

    def other_input_layers(self) -> Sequence[nn.Module]:
        return (self.gate_down,)

    def attend(self, head_inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        others, q_BLHN, k_BLHN, v_BLHP, state, seq = head_inputs
        a_BLK = self.gate_up(others[-1]).transpose(0, 1)
        g_BLK = gla_gates(GLAGateInputs(a_BLK, self.gate_bias, self.spec.gate_divisor))
        g_BLHN = g_BLK.unflatten(-1, (self.heads, -1))
        inputs = GLAInputs(q_BLHN * self.scale, k_BLHN, v_BLHP, g_BLHN, documents_BL=seq.documents_BL)
        inputs = contiguous_inputs(inputs, seq)
        return sharded_scan(
            lambda h_BHNP: gla_scan(inputs._replace(state_BHNP=h_BHNP)), state, seq,
            lambda: gla_transition(inputs),
        )  # fmt: skip
