"""Base of the mixers with the delta rule (`architecture/delta_rule.py`).

They are linear attention whose queries and keys are normalized to length 1. Gated DeltaNet and KDA differ in their
decays.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.delta_rule import DeltaRuleSpec
from hybridtron.mixers.linear_attention import HeadInputs, LinearAttention
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.ops.precision import at_least_fp32, wide_type
from hybridtron.ops.transition import delta_transition
from hybridtron.parallel.context import read_twice, scan_from
from hybridtron.parallel.linear import TensorGroup

LENGTH_EPS = 1e-6
"""Added to the squared length of a query or key; the value that other implementations use, for equal results."""


class DeltaRule(LinearAttention):
    """Linear attention with the delta rule. Its state `ssm` is (B, H, N, P).

    Legend: G = N where every key channel has a decay, or 1 where a head has one.
    """

    def __init__(self, spec: DeltaRuleSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.reach = 2.0 if spec.negative_eigenvalues else 1.0
        self.dt_bias = nn.Parameter(torch.empty(tensor.share(spec.decays(sizes))))
        self.A_log = nn.Parameter(torch.empty(self.heads))

    def attend(self, given: HeadInputs) -> tuple[Tensor, Tensor]:
        q_BLHN = self.for_every_head(of_length(given.q_BLKN, self.scale))
        k_BLHN = self.for_every_head(of_length(given.k_BLKN, 1.0))
        a_BLX, b_BLH = (part.transpose(0, 1) for part in self.decays_and_steps(given.x_LBD))
        beta_BLH = self.reach * torch.sigmoid(at_least_fp32(b_BLH))
        # in fp32, since the op sums many of them
        steps_BLHG = F.softplus(at_least_fp32(a_BLX) + self.dt_bias).unflatten(-1, (self.heads, -1))
        g_BLHG = -torch.exp(self.A_log).unsqueeze(-1) * steps_BLHG
        seq = given.seq
        inputs = DeltaInputs(q_BLHN, k_BLHN, given.v_BLHP, beta_BLH, g_BLHG, documents_BL=seq.documents_BL)
        inputs = read_twice(inputs, seq)
        return scan_from(
            lambda h_BHNP: delta_scan(inputs._replace(state_BHNP=h_BHNP)),
            given.state,
            seq,
            lambda: delta_transition(inputs),
        )

    @abstractmethod
    def decays_and_steps(self, x_LBD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of decays (a) and steps (b) for this rank's heads, tokens first.

        Where every key channel has a decay, a's last axis is heads x key channels.
        """

    def for_every_head(self, x_BLKN: Tensor) -> Tensor:
        """Repeat each of the K key heads for all value heads that it serves."""
        return x_BLKN.unsqueeze(3).expand(-1, -1, -1, self.heads // self.key_heads, -1).flatten(2, 3)


def of_length(x_BLKN: Tensor, length: float) -> Tensor:
    """Scale every head's vector to a given length: x / |x| is the RMSNorm whose weight is 1 / sqrt(N).

    The weight is in fp32. Rounded to bf16 it could make all keys too long, by up to 0.4%, and steps near 2 would then
    enlarge the state.
    """
    size = x_BLKN.shape[-1]
    weight_N = torch.full((size,), length * size**-0.5, dtype=wide_type(x_BLKN), device=x_BLKN.device)
    return rms_norm(RMSNormInputs(x_BLKN, weight_N, LENGTH_EPS / size))
