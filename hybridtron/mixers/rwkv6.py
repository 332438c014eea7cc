"""RWKV-6's time mix (equations in `architecture/rwkv6.py`), which uses the gated linear attention recurrence.

Legend: B rows (sequences), L tokens, D width, H heads of N key channels and P value channels, S streams (r, w, k, v,
g), R inner channels of the low-rank projection to a stream's interpolation weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.rwkv6 import STREAMS, RWKV6Spec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.mixers.token_shift import tokens_at_ends
from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.token_mix import TokenMixInputs, token_mix
from hybridtron.ops.transition import gla_transition
from hybridtron.parallel.context import contiguous_inputs, sharded_scan
from hybridtron.parallel.linear import TensorGroup, column_parallel, gather_input, row_parallel


class RWKV6(Mixer):
    """RWKV-6's time mix. State: `ssm` (B, H, N, P) in fp32; `shift` (B, D), the last token's input."""

    def __init__(self, spec: RWKV6Spec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.spec, self.tensor, width, inner = spec, tensor, sizes.width, len(STREAMS) * spec.mix_rank
        channels = tensor.share(width)
        whole = tensor.whole().without_fp8()
        self.heads = channels // spec.head_dim
        self.mix_input = nn.Parameter(torch.empty(width))
        self.mix_down = column_parallel(width, inner, whole)
        self.mix_up = nn.Parameter(torch.empty(width, inner))
        self.mix = nn.Parameter(torch.empty(len(STREAMS), width))
        self.r_proj = column_parallel(width, width, tensor)
        self.k_proj = column_parallel(width, width, tensor)
        self.v_proj = column_parallel(width, width, tensor)
        self.g_proj = column_parallel(width, width, tensor)
        self.decay_down = column_parallel(width, spec.decay_rank, whole)
        self.decay_up = column_parallel(spec.decay_rank, width, tensor.without_fp8())
        self.decay_bias = nn.Parameter(torch.empty(channels))
        self.bonus = nn.Parameter(torch.empty(self.heads, spec.head_dim))
        self.norm_weight = nn.Parameter(torch.empty(channels))
        self.norm_bias = nn.Parameter(torch.empty(channels))
        self.out_proj = row_parallel(width, width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        before = state or {}
        new = State()
        x_LBD = gather_input(x_LBD, self.tensor)
        first_BD, new["shift"] = tokens_at_ends(x_LBD, before.get("shift"), seq)
        r_LBD, w_LBD, k_LBD, v_LBD, g_LBD = self.streams(x_LBD, first_BD, seq)
        projections = self.r_proj(r_LBD), self.k_proj(k_LBD), self.v_proj(v_LBD), self.log_decays(w_LBD)
        r_BLHN, k_BLHN, v_BLHP, g_BLHN = (part.transpose(0, 1).unflatten(-1, (self.heads, -1)) for part in projections)
        inputs = GLAInputs(r_BLHN, k_BLHN, v_BLHP, g_BLHN, documents_BL=seq.documents_BL)
        inputs = contiguous_inputs(inputs, seq)
        y_BLHP, new["ssm"] = sharded_scan(
            lambda h_BHNP: read_before_step(inputs._replace(state_BHNP=h_BHNP), self.bonus), before.get("ssm"), seq,
            lambda: gla_transition(inputs),
        )  # fmt: skip
        return MixerOutput(self.out_proj(self.normed(y_BLHP).to(x_LBD.dtype) * F.silu(self.g_proj(g_LBD))), new, {})

    def streams(self, x_LBD: Tensor, first_BD: Tensor | None, seq: SeqInfo) -> tuple[Tensor, ...]:
        """Return the five streams: five interpolations between every token and its predecessor.

        Each stream has its own interpolation weights, which depend on the token. `first_BD` holds the predecessors of
        the rows' first tokens.
        """
        inputs = TokenMixInputs(x_LBD, self.mix_input.unsqueeze(0), None, first_BD, seq.documents_BL)
        (mixed_LBD,) = token_mix(inputs)
        inner_LBSR = torch.tanh(self.mix_down(mixed_LBD)).unflatten(-1, (len(STREAMS), -1))
        up_DSR = self.mix_up.unflatten(-1, (len(STREAMS), -1))
        change_SLBD = torch.einsum("lbsr,dsr->slbd", inner_LBSR, up_DSR)
        return token_mix(inputs._replace(mix_SD=self.mix, change_SLBD=change_SLBD))

    def log_decays(self, w_LBD: Tensor) -> Tensor:
        """Return the log decays for this rank's key channels, in fp32.

        The op sums the log decays of many tokens. For such sums, bf16 is too coarse.
        """
        return -torch.exp(at_least_fp32(self.decay_up(torch.tanh(self.decay_down(w_LBD)))) + self.decay_bias)

    def normed(self, y_BLHP: Tensor) -> Tensor:
        """Apply LayerNorm to each head by itself, and return the heads concatenated, (L, B, channels), in fp32."""
        wide_LBHP = at_least_fp32(y_BLHP.transpose(0, 1))
        normed_LBHP = F.layer_norm(wide_LBHP, wide_LBHP.shape[-1:], eps=self.spec.norm_eps)
        return normed_LBHP.flatten(2) * self.norm_weight + self.norm_bias


def read_before_step(inputs: GLAInputs, bonus_HN: Tensor) -> tuple[Tensor, Tensor]:
    """Return y_t = (h_{t-1} + diag(bonus) k_t v_t^T)^T q_t in fp32, and the state h after the last token.

    The queries q are RWKV's r; the bonus has one entry per key channel.

    The op `gla_scan` reads the state after a token's step, but RWKV-6 reads the state before the step, which is the
    state after the previous token's step. So each query is moved to the previous token, and each output is moved back.
    The row's first token reads the initial state. A later token that begins a document reads a state of zero,
    because the state before it belongs to another document.
    """
    q_BLHN, k_BLHN, v_BLHP = (at_least_fp32(tensor) for tensor in inputs[:3])
    next_BLHN = F.pad(inputs.q_BLHN[:, 1:], (0, 0, 0, 0, 0, 1))
    if (starts_BL := document_starts(inputs.documents_BL)) is not None:
        next_BLHN = next_BLHN.masked_fill(F.pad(starts_BL[:, 1:], (0, 1))[:, :, None, None], 0)
    past_BLHP, state_BHNP = gla_scan(inputs._replace(q_BLHN=next_BLHN))
    first_B1HP = torch.zeros_like(v_BLHP[:, :1])
    if inputs.state_BHNP is not None:
        first_B1HP = torch.einsum("blhn,bhnp->blhp", q_BLHN[:, :1], inputs.state_BHNP.to(q_BLHN.dtype))
    bonus_BLH1 = (q_BLHN * bonus_HN * k_BLHN).sum(-1, keepdim=True)
    return torch.cat((first_B1HP, past_BLHP[:, :-1].to(v_BLHP.dtype)), dim=1) + bonus_BLH1 * v_BLHP, state_BHNP
