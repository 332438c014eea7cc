"""Retention (equations in `architecture/retnet.py`): linear attention with fixed decays, run as SSD's recurrence.

Outputs depend only on differences between positions. So positions are counted from each row's start, which keeps angles
small. At a row's end, the state is rotated back by the row's length, so that the row's last token is at position -1.
Every row can therefore start from another row's state, without knowing the other row's length.

Legend: B rows (sequences), L tokens, H heads with N key channels and P value channels, k = N / 2 rotated pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.retnet import RetNetSpec
from hybridtron.mixers.linear_attention import HeadInputs, LinearAttention
from hybridtron.ops.precision import wide_type
from hybridtron.ops.rope import RopeInputs, apply_rope
from hybridtron.ops.ssd import DecayInputs, decay_scan
from hybridtron.ops.transition import decay_transition
from hybridtron.parallel.context import contiguous_inputs, sharded_scan
from hybridtron.parallel.linear import TensorGroup


class RetNet(LinearAttention):
    """Linear attention with fixed decays and rotary positions. Its state `ssm` is (B, H, P, N)."""

    def __init__(self, spec: RetNetSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.rope_base = spec.rope_base

    def attend(self, head_inputs: HeadInputs) -> tuple[Tensor, Tensor]:
        """Run retention as SSD's recurrence; a head's decay is the same at every token."""
        _, q_BLHN, k_BLHN, v_BLHP, state, seq = head_inputs
        rows, length, heads, keys = k_BLHN.shape
        wide = wide_type(v_BLHP)
        device = v_BLHP.device
        # these two tables have L + 1 positions; the angles at the last position rotate the state back at the row's end
        cos_BLk, sin_BLk = seq.rope_in_row(keys, self.rope_base, wide)
        q_BLHN, k_BLHN = (
            apply_rope(RopeInputs(x, cos_BLk[:, :-1], sin_BLk[:, :-1])) for x in (q_BLHN * self.scale, k_BLHN)
        )
        gammas_H = log_gammas(heads, self.tensor.rank * heads, device).to(wide)
        g_BLH = gammas_H.expand(rows, length, heads)
        inputs = DecayInputs(q_BLHN, k_BLHN, v_BLHP, g_BLH, documents_BL=seq.documents_BL)
        inputs = contiguous_inputs(inputs, seq)
        y_BLHP, last_BHPN = sharded_scan(
            lambda h_BHPN: decay_scan(inputs._replace(state_BHPN=h_BHPN)), state, seq,
            lambda: decay_transition(inputs),
        )  # fmt: skip
        back = (table[:, -1:].expand(-1, v_BLHP.shape[3], -1) for table in (cos_BLk, -sin_BLk))
        return y_BLHP, apply_rope(RopeInputs(last_BHPN.transpose(1, 2), *back)).transpose(1, 2)


def log_gammas(heads: int, first: int, device: torch.device) -> Tensor:
    """Return the log decays log(1 - 2^(-5 - h)) for `heads` heads, where the first head's h is `first`.

    Heads are counted over all ranks. The log decays are computed in float64, because bf16 would round 1 - 2^(-5 - h) to
    1 if h is 4 or more.
    """
    head_H = torch.arange(first, first + heads, dtype=torch.float64, device=device)
    return torch.log1p(-torch.exp2(-5 - head_H))
