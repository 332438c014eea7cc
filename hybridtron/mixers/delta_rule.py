"""Base of the mixers with the delta rule (`architecture/delta_rule.py`).

These mixers are linear attention whose queries and keys are normalized to length 1. Gated DeltaNet and KDA differ in
their decays and in their output gates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.delta_rule import DeltaRuleSpec
from hybridtron.mixers.linear_attention import HeadInputs, LinearAttention
from hybridtron.ops.delta import DeltaGateInputs, DeltaInputs, delta_gates, delta_scan
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.ops.precision import wide_type
from hybridtron.ops.transition import delta_transition
from hybridtron.parallel.context import contiguous_inputs, sharded_scan
from hybridtron.parallel.linear import TensorGroup

LENGTH_EPS = 1e-6
"""Number added to the squared length of a query or key, as in other implementations of the delta rule."""


class DeltaRule(LinearAttention):
    """Linear attention with the delta rule. Its state `ssm` is (B, H, N, P).

    Legend: B rows (sequences), L tokens, H value heads, K query heads and as many key heads, N key channels per head, P
    value channels per head. G is N if every key channel has its own decay, and 1 if a head has one decay. X = H * G is
    the number of decays. H and K count this rank's heads.
    """

    def __init__(self, spec: DeltaRuleSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.reach = 2.0 if spec.negative_eigenvalues else 1.0
        self.dt_bias = nn.Parameter(torch.empty(tensor.share(spec.decays(sizes))))
        self.A_log = nn.Parameter(torch.empty(self.heads))

    def attend(self, head_inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        q_BLHN = self.for_every_head(of_length(head_inputs.q_BLKN, self.scale))
        k_BLHN = self.for_every_head(of_length(head_inputs.k_BLKN, 1.0))
        a_BLX, b_BLH = (part.transpose(0, 1) for part in self.decays_and_steps(head_inputs.others))
        gates = DeltaGateInputs(a_BLX, b_BLH, self.dt_bias, self.A_log, self.reach)
        beta_BLH, g_BLHG = delta_gates(gates)
        seq = head_inputs.seq
        inputs = DeltaInputs(q_BLHN, k_BLHN, head_inputs.v_BLHP, beta_BLH, g_BLHG, documents_BL=seq.documents_BL)
        inputs = contiguous_inputs(inputs, seq)
        return sharded_scan(
            lambda h_BHNP: delta_scan(inputs._replace(state_BHNP=h_BHNP)),
            head_inputs.state,
            seq,
            lambda: delta_transition(inputs),
        )

    @abstractmethod
    def decays_and_steps(self, others: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the logits for the decays (L, B, X) and for the step sizes (L, B, H), for this rank's heads.

        `others` is as in `HeadInputs`.
        """

    def for_every_head(self, x_BLKN: Tensor) -> Tensor:
        """Repeat each of the K query or key heads for all value heads that it serves."""
        return x_BLKN.unsqueeze(3).expand(-1, -1, -1, self.heads // self.key_heads, -1).flatten(2, 3)


def of_length(x_BLKN: Tensor, length: float) -> Tensor:
    """Scale every head's vector to the L2 norm `length`.

    The op for RMSNorm computes this, since x / |x| is RMSNorm with the weight 1 / sqrt(N). The weight is not rounded to
    bf16, because the rounding error could make all keys longer than 1 by up to 0.4%. Steps near 2 would then enlarge
    the state.
    """
    size = x_BLKN.shape[-1]
    weight_N = torch.full((size,), length * size**-0.5, dtype=wide_type(x_BLKN), device=x_BLKN.device)
    return rms_norm(RMSNormInputs(x_BLKN, weight_N, LENGTH_EPS / size))
