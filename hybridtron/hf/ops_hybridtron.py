"""What the layers of `modeling_hybridtron.py` compute with, on torch alone.

Generated from hybridtron/ops by tools/make_hf_ops.py: change it there, and run `make hf-ops`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# ---- norm_rope
# Root-mean-square norm and rotary positions.


def at_least_fp32(x: Tensor) -> Tensor:
    """The tensor in fp32, or as it is where it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def narrower(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """That of two dtypes which the other can hold."""
    return one if torch.promote_types(one, other) == other else other


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in fp32; returned in the narrower dtype of the two."""
    wide = at_least_fp32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(narrower(x.dtype, weight.dtype))


def rope_table(positions_BL: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (B, L, k) in fp32.

    fp32 angles would be off by 0.06 rad at position 1M, so they are formed and reduced in float64 (off by 1e-10).
    """
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=positions_BL.device)
    frequencies_k = base ** (-2.0 * pairs / head_dim)
    angles_BLk = positions_BL.double()[..., None] * frequencies_k
    reduced_BLk = angles_BLk.remainder(2 * math.pi)
    return reduced_BLk.cos().float(), reduced_BLk.sin().float()


def apply_rope(x_BLHK: Tensor, cos_BLk: Tensor, sin_BLk: Tensor) -> Tensor:
    """Turn the channel pairs of every head by their token's angles; fp32 inside, the dtype of `x_BLHK` outside.

    Of more than 2 k channels the first 2 k are turned, and the others left.
    """
    turned = 2 * cos_BLk.shape[-1]
    first, second = at_least_fp32(x_BLHK[..., :turned]).chunk(2, dim=-1)
    cos, sin = cos_BLk[:, :, None].to(first.dtype), sin_BLk[:, :, None].to(first.dtype)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BLHK.dtype)
    return rotated if turned == x_BLHK.shape[-1] else torch.cat((rotated, x_BLHK[..., turned:]), dim=-1)


# ---- swiglu
# The gate of a SwiGLU block.


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the dtype of the inputs."""
    return F.silu(gate) * up


# ---- conv1d
# The short causal convolution before a state space layer: every channel has its own W taps.


def causal_conv(
    x_BLC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tail_BTC: Tensor | None,
    documents_BL: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the tail for the row that follows."""
    wide, width = _wide(x_BLC), weight_CW.shape[1]
    x_BSC = _with_tail(x_BLC, tail_BTC, width).to(wide)
    documents_BS = None if documents_BL is None else _with_tail_documents(documents_BL, width)
    y_BLC = x_BSC.new_zeros(x_BLC.shape)
    for tap in range(width):
        y_BLC = y_BLC + weight_CW[:, tap].to(wide) * _reached(x_BSC, documents_BS, tap, width)
    if bias_C is not None:
        y_BLC = y_BLC + bias_C.to(wide)
    if activation:
        y_BLC = F.silu(y_BLC)
    return y_BLC.to(x_BLC.dtype), new_tail(x_BLC, tail_BTC, documents_BL, width)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _with_tail(x_BLC: Tensor, tail_BTC: Tensor | None, width: int) -> Tensor:
    if tail_BTC is None:
        return F.pad(x_BLC, (0, 0, width - 1, 0))
    return torch.cat([tail_BTC.to(x_BLC.dtype), x_BLC], dim=1)


def _with_tail_documents(documents_BL: Tensor, width: int) -> Tensor:
    """The tail's tokens count to the row's first document."""
    return torch.cat([documents_BL[:, :1].expand(-1, width - 1), documents_BL], dim=1)


def _reached(x_BSC: Tensor, documents_BS: Tensor | None, tap: int, width: int) -> Tensor:
    """What a tap reads for each token: the input W - 1 - tap tokens before, or zero out of another document."""
    end = x_BSC.shape[1] - (width - 1) + tap
    return _cut(x_BSC[:, tap:end], documents_BS, tap, width)


def _cut(tensor_BLC: Tensor, documents_BS: Tensor | None, tap: int, width: int) -> Tensor:
    """Zero where a tap reaches from one document into another."""
    if documents_BS is None or tap == width - 1:
        return tensor_BLC
    length = tensor_BLC.shape[1]
    other_BL = documents_BS[:, tap : tap + length] != documents_BS[:, width - 1 :]
    return tensor_BLC.masked_fill(other_BL.unsqueeze(2), 0)


def new_tail(x_BLC: Tensor, tail_BTC: Tensor | None, documents_BL: Tensor | None, width: int) -> Tensor:
    """The last W - 1 inputs, copied: a view would keep the whole row in memory."""
    recent = slice(max(x_BLC.shape[1] - (width - 1), 0), None)
    x_BTC = _with_tail(x_BLC[:, recent], tail_BTC, width)[:, -(width - 1) :]
    if documents_BL is None:
        return x_BTC.clone()
    documents_BT = _with_tail_documents(documents_BL[:, recent], width)[:, -(width - 1) :]
    return x_BTC.masked_fill((documents_BT != documents_BL[:, -1:]).unsqueeze(2), 0)


# ---- scan
# The selective scan of Mamba-1 (S6): Gu and Dao 2023, section 3.

CHUNK_of_scan = 64  # tokens whose states exist at the same time; backward keeps one state per chunk


def selective_scan(
    x_BLE: Tensor,
    dt_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    z_BLE: Tensor | None,
    dt_bias_E: Tensor,
    state_BEN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the state after the last token in fp32 (float64 for float64 inputs)."""
    wide = wide_type(x_BLE)
    x, delta, B, C = x_BLE.to(wide), step_sizes(dt_BLE, dt_bias_E), B_BLN.to(wide), C_BLN.to(wide)
    h_BEN = initial_state(x_BLE, A_EN, state_BEN)
    starts_BL = document_starts(documents_BL)
    outputs = []
    for t in range(x.shape[1]):
        decay_BEN = torch.exp(delta[:, t, :, None] * A_EN)
        if starts_BL is not None:
            h_BEN = h_BEN.masked_fill(starts_BL[:, t, None, None], 0)
        h_BEN = decay_BEN * h_BEN + (delta[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        outputs.append((h_BEN * C[:, t, None, :]).sum(-1) + D_E * x[:, t])
    y_BLE = torch.stack(outputs, dim=1)
    if z_BLE is not None:
        y_BLE = y_BLE * F.silu(z_BLE.to(wide))
    return y_BLE.to(x_BLE.dtype), h_BEN


def wide_type(x: Tensor) -> torch.dtype:
    """What states and sums are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def step_sizes(dt_BLE: Tensor, dt_bias_E: Tensor) -> Tensor:
    """delta, in the wide type."""
    wide = wide_type(dt_BLE)
    return F.softplus(dt_BLE.to(wide) + dt_bias_E.to(wide))


def initial_state(x_BLE: Tensor, A_EN: Tensor, state_BEN: Tensor | None) -> Tensor:
    """The state before the row in the wide type, zeros where there is none."""
    if state_BEN is None:
        return x_BLE.new_zeros(x_BLE.shape[0], *A_EN.shape, dtype=wide_type(x_BLE))
    return state_BEN.to(wide_type(x_BLE))


def document_starts(documents_BL: Tensor | None) -> Tensor | None:
    """Which tokens begin a document inside their row; a row's first token continues what came before the row."""
    if documents_BL is None:
        return None
    return F.pad(documents_BL[:, 1:] != documents_BL[:, :-1], (1, 0), value=False)


@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def chunked_selective_scan(
    x_BLE: Tensor,
    dt_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    z_BLE: Tensor | None,
    dt_bias_E: Tensor,
    state_BEN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Few operations on the states of a whole chunk, which backward computes again instead of keeping them."""
    if x_BLE.shape[1] == 1:  # decoding: one step of the loop is all there is to do
        return selective_scan(x_BLE, dt_BLE, A_EN, B_BLN, C_BLN, D_E, z_BLE, dt_bias_E, state_BEN, documents_BL)
    state_BNE = initial_state(x_BLE, A_EN, state_BEN).transpose(1, 2)
    starts_BL = document_starts(documents_BL)
    with torch.autocast(x_BLE.device.type, enabled=False):  # the products with B and C stay in fp32
        y_BLE, last_BNE = _ChunkedScan_of_scan.apply(
            x_BLE, dt_BLE, B_BLN, C_BLN, z_BLE, A_EN.t().contiguous(), D_E, dt_bias_E, starts_BL, state_BNE
        )
    return y_BLE, last_BNE.transpose(1, 2)


class _ChunkedScan_of_scan(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *fields, state_BNE = inputs
        row = _Row_of_scan(*fields)
        y_BLE = torch.empty_like(row.x_BLE, memory_format=torch.contiguous_format)
        states_before = []
        for tokens in row.chunks():
            chunk = row.chunk(tokens)
            states_before.append(state_BNE)
            h_TBNE = chunk.states(chunk.decays()[:-1], state_BNE)
            y_TBE = chunk.outputs(h_TBNE)
            if chunk.z_TBE is not None:
                y_TBE *= F.silu(chunk.z_TBE)
            y_BLE[:, tokens] = y_TBE.transpose(0, 1)
            state_BNE = h_TBNE[-1].clone()
        ctx.save_for_backward(*fields, torch.stack(states_before))
        return y_BLE, state_BNE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLE: Tensor, grad_state_BNE: Tensor) -> tuple[Tensor | None, ...]:
        *fields, states_before = ctx.saved_tensors
        row = _Row_of_scan(*fields)
        per_token, parameters = fields[:5], fields[5:8]
        token_grads = [None if t is None else torch.empty_like(t) for t in per_token]
        parameter_grads = [torch.zeros_like(p, dtype=states_before.dtype) for p in parameters]
        for tokens, state_BNE in reversed(list(zip(row.chunks(), states_before, strict=True))):
            grad_y_TBE = grad_y_BLE[:, tokens].transpose(0, 1).to(states_before.dtype)
            of_tokens, of_parameters, grad_state_BNE = row.chunk(tokens).backward(state_BNE, grad_y_TBE, grad_state_BNE)
            for grad_BL, grad_TB in zip(token_grads, of_tokens, strict=True):
                if grad_BL is not None and grad_TB is not None:
                    grad_BL[:, tokens] = grad_TB.transpose(0, 1)
            for total, grad in zip(parameter_grads, of_parameters, strict=True):
                total += grad
        parameter_grads = [grad.to(p.dtype) for grad, p in zip(parameter_grads, parameters, strict=True)]
        return (*token_grads, *parameter_grads, None, grad_state_BNE)


@dataclass
class _Row_of_scan:
    """The inputs of `chunked`."""

    x_BLE: Tensor
    dt_BLE: Tensor
    B_BLN: Tensor
    C_BLN: Tensor
    z_BLE: Tensor | None
    A_NE: Tensor
    D_E: Tensor
    dt_bias_E: Tensor
    starts_BL: Tensor | None

    def chunks(self) -> list[slice]:
        return [slice(start, start + CHUNK_of_scan) for start in range(0, self.x_BLE.shape[1], CHUNK_of_scan)]

    def chunk(self, tokens: slice) -> _Chunk:
        """A few tokens, time first and in the type to compute in."""
        wide = wide_type(self.x_BLE)

        def part(tensor_BL: Tensor) -> Tensor:
            return tensor_BL[:, tokens].transpose(0, 1).to(wide)

        return _Chunk(
            part(self.x_BLE),
            part(self.dt_BLE) + self.dt_bias_E.to(wide),
            part(self.B_BLN),
            part(self.C_BLN),
            None if self.z_BLE is None else part(self.z_BLE),
            self.A_NE.to(wide),
            self.D_E.to(wide),
            None if self.starts_BL is None else self.starts_BL[:, tokens].t(),
        )


@dataclass
class _Chunk:
    """T tokens, and what one computes from them and the state before them."""

    x_TBE: Tensor
    shifted_TBE: Tensor  # dt + dt_bias
    B_TBN: Tensor
    C_TBN: Tensor
    z_TBE: Tensor | None
    A_NE: Tensor
    D_E: Tensor
    starts_TB: Tensor | None

    def __post_init__(self) -> None:
        self.delta_TBE = F.softplus(self.shifted_TBE)
        self.step_TBE = self.delta_TBE * self.x_TBE
        if self.starts_TB is not None:
            self.begun = self.starts_TB.nonzero(as_tuple=True)  # few: a mask would cost a pass over all tokens

    def decays(self) -> Tensor:
        """exp(delta A) of each token, 0 where a document begins, then ones for what follows: (T + 1, B, N, E)."""
        length, batch, _ = self.x_TBE.shape
        decay_TBNE = self.A_NE.new_empty(length + 1, batch, *self.A_NE.shape)
        torch.mul(self.delta_TBE.unsqueeze(2), self.A_NE, out=decay_TBNE[:-1]).exp_()
        if self.starts_TB is not None:
            decay_TBNE[:-1][self.begun] = 0
        decay_TBNE[-1] = 1
        return decay_TBNE

    def states(self, decay_TBNE: Tensor, state_BNE: Tensor) -> Tensor:
        """The state before the chunk, then after each token: (T + 1, B, N, E)."""
        h_TBNE = decay_TBNE.new_empty(len(decay_TBNE) + 1, *state_BNE.shape)
        h_TBNE[0] = state_BNE
        added = self.step_TBE.unsqueeze(2), self.B_TBN.unsqueeze(3)
        torch.mul(*added, out=h_TBNE[1:])
        recur(decay_TBNE, *added, h_TBNE[1:], state_BNE, self.starts_TB)
        return h_TBNE

    def outputs(self, h_TBNE: Tensor) -> Tensor:
        """C h + D x, before the gate."""
        return (self.C_TBN.unsqueeze(2) @ h_TBNE[1:]).squeeze(2).addcmul_(self.D_E, self.x_TBE)

    def backward(
        self, state_BNE: Tensor, grad_y_TBE: Tensor, grad_state_BNE: Tensor
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...], Tensor]:
        """Gradients of (x, dt, B, C, z), of (A, D, dt_bias), and of the state before the chunk."""
        decay_TBNE = self.decays()
        h_TBNE = self.states(decay_TBNE[:-1], state_BNE)
        grad_z_TBE = None
        if self.z_TBE is not None:
            gate_TBE = torch.sigmoid(self.z_TBE)
            slope_TBE = gate_TBE * (1 + self.z_TBE * (1 - gate_TBE))
            grad_z_TBE = grad_y_TBE * self.outputs(h_TBNE) * slope_TBE
            grad_y_TBE = grad_y_TBE * self.z_TBE * gate_TBE

        read = grad_y_TBE.unsqueeze(2), self.C_TBN.unsqueeze(3)
        grad_h_TBNE = torch.mul(*read)
        next_starts_TB = None if self.starts_TB is None else F.pad(self.starts_TB[1:], (0, 0, 0, 1))
        recur(decay_TBNE[1:], *read, grad_h_TBNE, grad_state_BNE, next_starts_TB, back=True)
        grad_C_TBN = (h_TBNE[1:] @ grad_y_TBE.unsqueeze(3)).squeeze(3)
        grad_B_TBN = (grad_h_TBNE @ self.step_TBE.unsqueeze(3)).squeeze(3)
        grad_step_TBE = (self.B_TBN.unsqueeze(2) @ grad_h_TBNE).squeeze(2)

        grad_state_BNE = decay_TBNE[0] * grad_h_TBNE[0]
        grad_exponent_TBNE = decay_TBNE[:-1].mul_(h_TBNE[:-1]).mul_(grad_h_TBNE)
        if self.starts_TB is not None:
            grad_state_BNE.masked_fill_(self.starts_TB[0, :, None, None], 0)
            grad_exponent_TBNE[self.begun] = 0
        grad_A_NE = torch.mul(grad_exponent_TBNE, self.delta_TBE.unsqueeze(2), out=grad_h_TBNE).sum((0, 1))
        grad_delta_TBE = grad_exponent_TBNE.mul_(self.A_NE).sum(2).addcmul_(grad_step_TBE, self.x_TBE)
        grad_dt_TBE = grad_delta_TBE * torch.sigmoid(self.shifted_TBE)
        grad_x_TBE = (grad_step_TBE * self.delta_TBE).addcmul_(self.D_E, grad_y_TBE)
        of_tokens = grad_x_TBE, grad_dt_TBE, grad_B_TBN, grad_C_TBN, grad_z_TBE
        of_parameters = grad_A_NE, (grad_y_TBE * self.x_TBE).sum((0, 1)), grad_dt_TBE.sum((0, 1))
        return of_tokens, of_parameters, grad_state_BNE


# ---- recurrence
# A linear recurrence over the tokens of a chunk, with a factor for every entry of the state:

GROUP = 8  # tokens of a chunk that advance one after another while all groups go side by side

LARGE_STATE = 2**15  # values in all rows' states from which a CPU gains nothing by going side by side


def recur(
    a_TBNE: Tensor,
    u_TB1E: Tensor,
    v_TBN1: Tensor,
    h_TBNE: Tensor,
    carry_BNE: Tensor,
    cut_TB: Tensor | None,
    back: bool = False,
) -> None:
    """h comes as u v, and is replaced; the carry comes before the first token, or after the last one if `back`."""
    _recur(a_TBNE, h_TBNE, carry_BNE, None, back)
    if cut_TB is not None and not h_TBNE[0 if back else -1].sum().isfinite():  # what is not finite remains to the end
        torch.mul(u_TB1E, v_TBN1, out=h_TBNE)
        _recur(a_TBNE, h_TBNE, carry_BNE, cut_TB, back)


def _recur(a_TBNE: Tensor, h_TBNE: Tensor, carry_BNE: Tensor, cut_TB: Tensor | None, back: bool) -> None:
    """The same in one go.

    Few large operations instead of one small one per token: groups of tokens advance side by side, each from zero;
    then a state is handed from group to group; then every group adds its share of what it was handed.
    """
    one_by_one = h_TBNE.device.type == "cpu" and carry_BNE.numel() >= LARGE_STATE
    size = 1 if one_by_one or len(h_TBNE) % GROUP != 0 else GROUP
    direction = -1 if back else 1
    a, h = a_TBNE.unflatten(0, (-1, size)), h_TBNE.unflatten(0, (-1, size))
    since_start = a if size == 1 else a.clone()  # product of the factors since the group's first token
    cut = None if cut_TB is None else cut_TB.unflatten(0, (-1, size))
    passed = None if cut is None else (cut.flip(1).cumsum(1).flip(1) if back else cut.cumsum(1)) > 0  # since then too
    order = range(size)[::direction]
    for before, now in itertools.pairwise(order):
        _add(h, a, (slice(None), now), h[:, before], cut)
        since_start[:, now].mul_(since_start[:, before])
    handed = []
    for group in range(len(h))[::direction]:
        handed.append(carry_BNE)
        carry_BNE = _add(h, since_start, (group, order[-1]), carry_BNE, passed)
    if size > 1:
        others = slice(1, None) if back else slice(None, -1)
        _add(h, since_start, (slice(None), others), torch.stack(handed[::direction]).unsqueeze(1), passed)


def _add(h: Tensor, factor: Tensor, place: tuple[int | slice, ...], before: Tensor, cut: Tensor | None) -> Tensor:
    """h += factor * before at a place, but where a cut lies between; its part of h."""
    if cut is None:
        return h[place].addcmul_(factor[place], before)
    mask = cut[place]
    kept = h[place][mask]
    h[place].addcmul_(factor[place], before)[mask] = kept
    return h[place]


# ---- ssd
# The scan of Mamba-2 (SSD, state space duality): Dao and Gu 2024.

CHUNK_of_ssd = 128  # tokens that see each other through a matrix; backward keeps one state per chunk


def ssd_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state_BHPN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y in the type of x, and the state after the last token in fp32 (float64 for float64 inputs)."""
    wide, heads_of_group = wide_type(x_BLHP), x_BLHP.shape[2] // B_BLGN.shape[2]
    x, delta_BLH = x_BLHP.to(wide), step_sizes(dt_BLH, dt_bias_H).to(wide)
    B_BLHN, C_BLHN = (t.to(wide).repeat_interleave(heads_of_group, dim=2) for t in (B_BLGN, C_BLGN))
    h_BHPN = _initial_state(x_BLHP, B_BLGN, state_BHPN)
    starts_BL = document_starts(documents_BL)
    outputs = []
    for t in range(x.shape[1]):
        if starts_BL is not None:
            h_BHPN = h_BHPN.masked_fill(starts_BL[:, t, None, None, None], 0)
        decay_BH = torch.exp(delta_BLH[:, t] * A_H)
        step_BHP = delta_BLH[:, t, :, None] * x[:, t]
        h_BHPN = decay_BH[:, :, None, None] * h_BHPN + step_BHP.unsqueeze(3) * B_BLHN[:, t].unsqueeze(2)
        outputs.append((h_BHPN * C_BLHN[:, t].unsqueeze(2)).sum(-1) + D_H[:, None] * x[:, t])
    return torch.stack(outputs, dim=1).to(x_BLHP.dtype), h_BHPN


def _initial_state(x_BLHP: Tensor, B_BLGN: Tensor, state_BHPN: Tensor | None) -> Tensor:
    """The state before the row in the wide type, zeros where there is none."""
    if state_BHPN is None:
        rows, _, heads, size = x_BLHP.shape
        return x_BLHP.new_zeros(rows, heads, size, B_BLGN.shape[3], dtype=wide_type(x_BLHP))
    return state_BHPN.to(wide_type(x_BLHP))


@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def chunked_ssd_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    state_BHPN: Tensor | None,
    documents_BL: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Matrix products over whole chunks, which backward computes again instead of keeping what is between them."""
    if x_BLHP.shape[1] == 1:  # decoding: one step of the loop is all there is to do
        return ssd_scan(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, state_BHPN, documents_BL)
    groups = B_BLGN.shape[2]
    state_BGRPN = _initial_state(x_BLHP, B_BLGN, state_BHPN).unflatten(1, (groups, -1))
    state_BGNV = state_BGRPN.permute(0, 1, 4, 2, 3).flatten(3)
    starts_BL = document_starts(documents_BL)
    with torch.autocast(x_BLHP.device.type, enabled=False):  # the products stay in fp32
        y_BLHP, last_BGNV = _ChunkedScan_of_ssd.apply(
            x_BLHP, dt_BLH, B_BLGN, C_BLGN, A_H, D_H, dt_bias_H, starts_BL, state_BGNV
        )
    last_BGNRP = last_BGNV.unflatten(3, state_BGRPN.shape[2:4])
    return y_BLHP, last_BGNRP.permute(0, 1, 3, 4, 2).flatten(1, 2)


class _ChunkedScan_of_ssd(torch.autograd.Function):
    """Keeps the inputs and the state before each chunk."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *fields, state_BGNV = inputs
        row = _Row_of_ssd(*fields)
        y_BLHP = torch.empty_like(row.x_BLHP, memory_format=torch.contiguous_format)
        states_before = []
        for tokens in row.chunks():
            chunk = _Discrete.of(row, tokens)
            states_before.append(state_BGNV)
            y_BLHP[:, tokens] = chunk.outputs(state_BGNV)
            state_BGNV = chunk.core.next_state(state_BGNV)
        ctx.save_for_backward(*fields, torch.stack(states_before))
        return y_BLHP, state_BGNV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BLHP: Tensor, grad_state_BGNV: Tensor) -> tuple[Tensor | None, ...]:
        *fields, states_before = ctx.saved_tensors
        row = _Row_of_ssd(*fields)
        token_grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in fields[:4]]
        parameters = fields[4:7]
        parameter_grads = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        for tokens, state_BGNV in reversed(list(zip(row.chunks(), states_before, strict=True))):
            chunk = _Discrete.of(row, tokens)
            of_tokens, of_parameters, grad_state_BGNV = chunk.backward(
                state_BGNV, grad_y_BLHP[:, tokens].to(states_before.dtype), grad_state_BGNV
            )
            for grad_BL, grad_BT in zip(token_grads, of_tokens, strict=True):
                grad_BL[:, tokens] = grad_BT
            for total, grad in zip(parameter_grads, of_parameters, strict=True):
                total += grad
        parameter_grads = [grad.to(p.dtype) for grad, p in zip(parameter_grads, parameters, strict=True)]
        return (*token_grads, *parameter_grads, None, grad_state_BGNV)


@dataclass
class _Row_of_ssd:
    """The inputs of `chunked`."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    starts_BL: Tensor | None

    def chunks(self) -> list[slice]:
        return [slice(start, start + CHUNK_of_ssd) for start in range(0, self.x_BLHP.shape[1], CHUNK_of_ssd)]


@dataclass
class _Discrete:
    """T tokens in the type to compute in, and the recurrence that their steps make of them."""

    x_BTHP: Tensor
    shifted_BTH: Tensor  # dt + dt_bias
    delta_BTH: Tensor
    A_H: Tensor
    D_H: Tensor
    core: Chunk

    @staticmethod
    def of(row: _Row_of_ssd, tokens: slice) -> _Discrete:
        wide, groups = wide_type(row.x_BLHP), row.B_BLGN.shape[2]
        x_BTHP, shifted_BTH = row.x_BLHP[:, tokens].to(wide), row.dt_BLH[:, tokens].to(wide) + row.dt_bias_H.to(wide)
        delta_BTH = F.softplus(shifted_BTH)
        A_H, D_H = row.A_H.to(wide), row.D_H.to(wide)
        sight = Sight.of(x_BTHP.shape[1], x_BTHP.device, None if row.starts_BL is None else row.starts_BL[:, tokens])
        core = Chunk(
            row.C_BLGN[:, tokens].to(wide).transpose(1, 2),
            row.B_BLGN[:, tokens].to(wide).transpose(1, 2),
            _grouped(x_BTHP * delta_BTH.unsqueeze(3), groups),
            (delta_BTH.double() * A_H.double()).transpose(1, 2).unflatten(1, (groups, -1)),
            sight,
        )
        return _Discrete(x_BTHP, shifted_BTH, delta_BTH, A_H, D_H, core)

    def outputs(self, state_BGNV: Tensor) -> Tensor:
        """C h + D x."""
        y_BTHP = self.core.outputs(state_BGNV).transpose(1, 2).reshape(self.x_BTHP.shape)
        return y_BTHP.addcmul_(self.D_H.unsqueeze(1), self.x_BTHP)

    def backward(
        self, state_BGNV: Tensor, grad_y_BTHP: Tensor, grad_state_BGNV: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Gradients of (x, dt, B, C), of (A, D, dt_bias), and of the state before the chunk."""
        grad_y_BGTV = _grouped(grad_y_BTHP, state_BGNV.shape[1])
        of = self.core.backward(state_BGNV, grad_y_BGTV, grad_state_BGNV)
        grad_v_BTHP = of.v_BGTV.transpose(1, 2).reshape(self.x_BTHP.shape)
        grad_g_BTH = of.g_BGRT.flatten(1, 2).transpose(1, 2)
        grad_delta_BTH = (grad_v_BTHP * self.x_BTHP).sum(-1) + grad_g_BTH * self.A_H
        grad_dt_BTH = grad_delta_BTH * torch.sigmoid(self.shifted_BTH)
        grad_x_BTHP = (grad_v_BTHP * self.delta_BTH.unsqueeze(3)).addcmul_(self.D_H.unsqueeze(1), grad_y_BTHP)
        of_tokens = grad_x_BTHP, grad_dt_BTH, of.k_BGTN.transpose(1, 2), of.q_BGTN.transpose(1, 2)
        of_parameters = (
            (grad_g_BTH * self.delta_BTH).sum((0, 1)),
            (grad_y_BTHP * self.x_BTHP).sum((0, 1, 3)),
            grad_dt_BTH.sum((0, 1)),
        )
        return of_tokens, of_parameters, of.state_BGNV


def _grouped(x_BTHP: Tensor, groups: int) -> Tensor:
    """The heads of a group side by side: (B, G, T, V)."""
    return x_BTHP.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)


# ---- decay
# The recurrence with one log-decay per head, a chunk of tokens at a time: the core of SSD, and of others of its kind.


@dataclass(frozen=True)
class Sight:
    """What the tokens of a chunk see; the three fields on documents are None where no document begins in a row."""

    tokens_BTT: Tensor  # j <= i, and of i's document
    first_BT: Tensor | None = None  # of the document that the state before the chunk belongs to
    last_BT: Tensor | None = None  # of the document that the state after the chunk belongs to
    through_B1: Tensor | None = None  # whether the two are one

    @staticmethod
    def of(length: int, device: torch.device, starts_BT: Tensor | None) -> Sight:
        """`starts_BT` says which tokens begin a document."""
        before_1TT = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        if starts_BT is None:
            return Sight(before_1TT)
        document_BT = starts_BT.cumsum(1)
        same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
        last_B1 = document_BT[:, -1:]
        return Sight(before_1TT & same_BTT, document_BT == 0, document_BT == last_B1, last_B1 == 0)


class Gradients(NamedTuple):
    """Of a chunk's inputs, and of the state before it."""

    q_BGTN: Tensor
    k_BGTN: Tensor
    v_BGTV: Tensor
    g_BGRT: Tensor
    state_BGNV: Tensor


class Chunk:
    """T tokens, and what one computes from them and the state before them."""

    def __init__(self, q_BGTN: Tensor, k_BGTN: Tensor, v_BGTV: Tensor, g_BGRT: Tensor, sight: Sight) -> None:
        self.q_BGTN, self.k_BGTN, self.v_BGTV, self.sight = q_BGTN, k_BGTN, v_BGTV, sight
        self.heads = g_BGRT.shape[2]
        self.sum_BGRT = self._over_tokens(g_BGRT.double(), sight.tokens_BTT.mT)
        last_BGR1 = self.sum_BGRT[..., -1:]
        self.since_start_BGRT = self._decays(self.sum_BGRT, _whole(sight.first_BT))
        self.to_end_BGRT = self._decays(last_BGR1 - self.sum_BGRT, _whole(sight.last_BT))
        self.whole_BGR = self._decays(last_BGR1, _whole(sight.through_B1))[..., 0]

    def outputs(self, state_BGNV: Tensor) -> Tensor:
        """y of every token (B, G, T, V)."""
        y_BGRTP = (self.scores().unsqueeze(2) * self.between()) @ self._by_head(self.v_BGTV)
        y_BGTV = self._seen_state(state_BGNV)
        self._of_heads(y_BGTV).add_(y_BGRTP.transpose(2, 3))
        return y_BGTV

    def next_state(self, state_BGNV: Tensor) -> Tensor:
        """The state after the last token."""
        kept_BGNV = self._times(state_BGNV, self.whole_BGR.unsqueeze(2))
        if self.sight.through_B1 is not None:
            kept_BGNV.masked_fill_(~self.sight.through_B1[:, None, None], 0)
        return kept_BGNV.add_(self.k_BGTN.mT @ self._times(self.v_BGTV, self.to_end_BGRT.mT))

    def backward(self, state_BGNV: Tensor, grad_y_BGTV: Tensor, grad_state_BGNV: Tensor) -> Gradients:
        """From the gradients of y and of the state after the chunk, those of all inputs and of the state before it."""
        grad_scores_BGTT, grad_v_BGTV, gain_BGRT = self._backward_within(grad_y_BGTV)
        seen_BGTV = self._seen_state(state_BGNV)
        gain_BGRT += self._of_heads(seen_BGTV.mul_(grad_y_BGTV)).sum(-1).mT
        decayed_grad_BGTV = self._times(grad_y_BGTV, self.since_start_BGRT.mT)
        grad_q_BGTN = grad_scores_BGTT @ self.k_BGTN + decayed_grad_BGTV @ state_BGNV.mT

        decayed_v_BGTV = self._times(self.v_BGTV, self.to_end_BGRT.mT)
        grad_k_BGTN = grad_scores_BGTT.mT @ self.q_BGTN + decayed_v_BGTV @ grad_state_BGNV.mT
        to_state_BGTV = self.k_BGTN @ grad_state_BGNV
        loss_BGRT = self._of_heads(decayed_v_BGTV.mul_(to_state_BGTV)).sum(-1).mT
        grad_v_BGTV += self._times(to_state_BGTV, self.to_end_BGRT.mT)

        grad_before_BGNV = self._times(grad_state_BGNV, self.whole_BGR.unsqueeze(2))
        through_BGR = self._of_heads(grad_before_BGNV * state_BGNV).sum((2, 4))
        grad_before_BGNV += self.q_BGTN.mT @ decayed_grad_BGTV
        # g_t is in the sums of t and all after it, and in what leads from the tokens before it to the state
        sees_BTT = self.sight.tokens_BTT
        grad_g_BGRT = self._over_tokens(gain_BGRT.double(), sees_BTT) + through_BGR.unsqueeze(-1)
        grad_g_BGRT += self._over_tokens(loss_BGRT.double(), sees_BTT.tril(-1).mT)
        return Gradients(grad_q_BGTN, grad_k_BGTN, grad_v_BGTV, grad_g_BGRT, grad_before_BGNV)

    def _backward_within(self, grad_y_BGTV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the tokens' sight of each other sends back to scores, values and sums of g."""
        grad_y_BGRTP, between_BGRTT = self._by_head(grad_y_BGTV), self.between()
        scores_BG1TT = self.scores().unsqueeze(2)
        grad_v_BGRTP = (scores_BG1TT * between_BGRTT).mT @ grad_y_BGRTP
        grad_mix_BGRTT = (grad_y_BGRTP @ self._by_head(self.v_BGTV).mT).mul_(between_BGRTT)
        grad_scores_BGTT = grad_mix_BGRTT.sum(2)
        grad_exponent_BGRTT = grad_mix_BGRTT.mul_(scores_BG1TT)
        grad_exponent_BGRTT.diagonal(dim1=-2, dim2=-1).zero_()  # S_i - S_i is no function of g
        # in float64, since what goes back from a pair of tokens that both follow t cancels in the gradient of g_t
        gain_BGRT = grad_exponent_BGRTT.sum(-1, dtype=torch.float64) - grad_exponent_BGRTT.sum(-2, dtype=torch.float64)
        return grad_scores_BGTT, grad_v_BGRTP.transpose(2, 3).flatten(3), gain_BGRT

    def scores(self) -> Tensor:
        """q_i . k_j (B, G, T, T)."""
        return self.q_BGTN @ self.k_BGTN.mT

    def between(self) -> Tensor:
        """exp(S_i - S_j) where i sees j (B, G, R, T, T)."""
        exponent_BGRTT = self.sum_BGRT.unsqueeze(-1) - self.sum_BGRT.unsqueeze(-2)
        return self._decays(exponent_BGRTT, self.sight.tokens_BTT[:, None, None])

    def _decays(self, exponent: Tensor, seen: Tensor | None) -> Tensor:
        """exp where something is seen, else 0.

        Exponents end where exp would be too small to matter, and become 0 there: exp of -inf, and products with the
        denormal numbers before it, cost a CPU many times what others do.
        """
        exponent = exponent.to(self.v_BGTV.dtype, copy=True)
        if seen is not None:
            exponent += torch.zeros_like(seen, dtype=exponent.dtype).masked_fill_(~seen, -torch.inf)
        limits = torch.finfo(exponent.dtype)
        smallest = limits.tiny / limits.eps
        exponent.clamp_(min=math.log(smallest) - 1).exp_()
        return F.threshold(exponent, smallest, 0.0, inplace=True)

    def _seen_state(self, state_BGNV: Tensor) -> Tensor:
        """What the state before the chunk adds to y."""
        seen_BGTV = self.q_BGTN @ state_BGNV
        self._of_heads(seen_BGTV).mul_(self.since_start_BGRT.mT.unsqueeze(-1))
        if self.sight.first_BT is not None:
            seen_BGTV.masked_fill_(~self.sight.first_BT[:, None, :, None], 0)
        return seen_BGTV

    def _of_heads(self, x_BGTV: Tensor) -> Tensor:
        """(B, G, T, R, P)."""
        return x_BGTV.unflatten(-1, (self.heads, -1))

    def _by_head(self, x_BGTV: Tensor) -> Tensor:
        """(B, G, R, T, P)."""
        return self._of_heads(x_BGTV).transpose(2, 3)

    def _times(self, x_BGTV: Tensor, factor_BGTR: Tensor) -> Tensor:
        """A factor for each head."""
        return (self._of_heads(x_BGTV) * factor_BGTR.unsqueeze(-1)).flatten(3)

    def _over_tokens(self, x_BGRT: Tensor, weight_BTT: Tensor) -> Tensor:
        """Sums over the tokens that a boolean matrix chooses: sum_i x_i weight_ij."""
        x_BHT = x_BGRT.flatten(1, 2)
        return torch.bmm(x_BHT, weight_BTT.to(x_BHT.dtype).expand(len(x_BHT), -1, -1)).view_as(x_BGRT)


def _whole(seen_BT: Tensor | None) -> Tensor | None:
    return None if seen_BT is None else seen_BT[:, None, None]


# ---- gated_norm
# The gated norm of Mamba-2, in the two steps between which a sum over ranks can stand.


def gated_squares(y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
    """Sums of the squares of y silu(z) over each head (B, L, H), in fp32 or float64."""
    return _gated(y_BLHP, z_BLHP).square().sum(-1)


def gated_scale(y_BLHP: Tensor, z_BLHP: Tensor, scale_BLH: Tensor, weight_HP: Tensor) -> Tensor:
    """y silu(z) times a factor for each head and a weight for each channel, in the type of y."""
    v_BLHP = _gated(y_BLHP, z_BLHP)
    return (v_BLHP * scale_BLH.unsqueeze(-1) * weight_HP.to(v_BLHP.dtype)).to(y_BLHP.dtype)


def _gated(y: Tensor, z: Tensor) -> Tensor:
    return at_least_fp32(y) * F.silu(at_least_fp32(z))


# ---- attention
# Causal softmax attention: full or in a sliding window, with grouped keys, documents and remembered keys.

BLOCK = 256


class Memory(NamedTuple):
    """Keys (rotated) and values of tokens before a row; the last length_B[b] of the M entries of row b are real."""

    keys_BMGK: Tensor
    values_BMGK: Tensor
    length_B: Tensor


def remember(
    memory: Memory | None, k_BLGK: Tensor, v_BLGK: Tensor, documents_BL: Tensor | None, keep: int | None
) -> Memory:
    """The memory after a row: its last `keep` tokens, zeros before them where there are fewer; None keeps every token.

    With `keep` the shape never changes from row to row, without it M grows by L.
    """
    batch, length = k_BLGK.shape[:2]
    if documents_BL is None:
        own_B = torch.full((batch,), length, device=k_BLGK.device)
        whole_B = torch.ones(batch, dtype=torch.bool, device=k_BLGK.device)
    else:
        own_B = (documents_BL == documents_BL[:, -1:]).sum(1)
        whole_B = own_B == length
    keys, values, length_B = k_BLGK, v_BLGK, own_B
    if memory is not None:
        keys = torch.cat((memory.keys_BMGK, keys), dim=1)
        values = torch.cat((memory.values_BMGK, values), dim=1)
        length_B = own_B + torch.where(whole_B, memory.length_B, 0)
    if keep is None:
        return Memory(keys, values, length_B)
    missing = max(0, keep - keys.shape[1])
    start = keys.shape[1] + missing - keep
    keys, values = (F.pad(x[:, start:], (0, 0, 0, 0, missing, 0)) for x in (keys, values))
    return Memory(keys, values, length_B.clamp(max=keep))


class _Keys(NamedTuple):
    """Keys and values with the memory in front, and their documents (None: all are one). The row's tokens are last."""

    keys_BSGK: Tensor
    values_BSGK: Tensor
    documents_BS: Tensor | None


def _with_memory(k_BLGK: Tensor, v_BLGK: Tensor, documents_BL: Tensor | None, memory: Memory | None) -> _Keys:
    """Put the memory before the row; its padding gets a document of its own, so that no query matches it."""
    if memory is None:
        return _Keys(k_BLGK, v_BLGK, documents_BL)
    if documents_BL is None:
        documents_BL = torch.zeros(k_BLGK.shape[:2], dtype=torch.int64, device=k_BLGK.device)
    back_M = torch.arange(memory.keys_BMGK.shape[1], 0, -1, device=k_BLGK.device)
    memory_documents_BM = torch.where(back_M <= memory.length_B[:, None], documents_BL[:, :1], -1)
    return _Keys(
        torch.cat((memory.keys_BMGK, k_BLGK), dim=1),
        torch.cat((memory.values_BMGK, v_BLGK), dim=1),
        torch.cat((memory_documents_BM, documents_BL), dim=1),
    )


def _visible_of_attention(keys: _Keys, start: int, stop: int, queries: int, window: int | None) -> Tensor:
    """The rules: which keys of start:stop each of the last `queries` tokens among them sees, (Q, C) or (B, 1, Q, C)."""
    places_C = torch.arange(stop - start, device=keys.keys_BSGK.device)
    distance_QC = places_C[-queries:, None] - places_C
    visible_QC = distance_QC >= 0
    if window is not None:
        visible_QC &= distance_QC < window
    if keys.documents_BS is None:
        return visible_QC
    documents_BC = keys.documents_BS[:, start:stop]
    same_BQC = documents_BC[:, -queries:, None] == documents_BC[:, None]
    return (visible_QC & same_BQC)[:, None]


def attention(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """Attention by the rules, with a dense mask and an fp32 softmax. Documents count up along a row."""
    keys = _with_memory(k_BLGK, v_BLGK, documents_BL, memory)
    visible = _visible_of_attention(keys, 0, keys.keys_BSGK.shape[1], q_BLHK.shape[1], window)
    share = q_BLHK.shape[2] // k_BLGK.shape[2]
    k_BSHK, v_BSHK = (at_least_fp32(x).repeat_interleave(share, dim=2) for x in (keys.keys_BSGK, keys.values_BSGK))
    scores_BHLS = torch.einsum("blhk,bshk->bhls", at_least_fp32(q_BLHK), k_BSHK) * q_BLHK.shape[-1] ** -0.5
    weights_BHLS = scores_BHLS.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("bhls,bshk->blhk", weights_BHLS, v_BSHK).to(q_BLHK.dtype)


def _sdpa(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """torch's own attention, causal over the whole row."""
    q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BLGK, v_BLGK))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _slices(x_BGSK: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Overlapping spans of keys, as views."""
    return tuple(x_BGSK[:, :, start:stop] for start, stop in spans)


class _Spans(torch.autograd.Function):
    """`_slices`, but their gradients are added up in one buffer.

    A plain slice brings a gradient as long as the row, which is quadratic in L over all blocks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.shape, ctx.spans = x.shape, spans
        return _slices(x, spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for (start, stop), grad in zip(ctx.spans, grads, strict=True):
            total[:, :, start:stop] += grad
        return total, None


def _reach(keys: _Keys, length: int, window: int | None) -> list[tuple[int, int]]:
    """For each block of queries, the span of keys that it can see at most; the block is the end of its span."""
    total = keys.keys_BSGK.shape[1]
    places = range(total - length, total, BLOCK)
    starts = [0 if window is None else max(0, place - window + 1) for place in places]
    if keys.documents_BS is not None and keys.documents_BS.device.type == "cpu":
        # Nothing before the document of a block's first query can be seen. On a GPU, to read this would be to wait.
        documents_BS = keys.documents_BS.contiguous()
        firsts_BN = documents_BS[:, total - length :: BLOCK].contiguous()
        begins = torch.searchsorted(documents_BS, firsts_BN).amin(0).tolist()
        starts = [max(pair) for pair in zip(starts, begins, strict=True)]
    return [(start, min(place + BLOCK, total)) for start, place in zip(starts, places, strict=True)]


@torch.compiler.disable  # a loop of many operations: tracing it takes minutes and gains nothing
def blocked_attention(
    q_BLHK: Tensor,
    k_BLGK: Tensor,
    v_BLGK: Tensor,
    window: int | None,
    documents_BL: Tensor | None,
    memory: Memory | None,
) -> Tensor:
    """Blocks of queries over the keys that they can reach: time and memory linear in L where a window is set."""
    keys = _with_memory(k_BLGK, v_BLGK, documents_BL, memory)
    window = None if window is None or window >= keys.keys_BSGK.shape[1] else window
    if window is None and keys.documents_BS is None:
        return _sdpa(q_BLHK, k_BLGK, v_BLGK, None, None, None)

    spans = _reach(keys, q_BLHK.shape[1], window)
    q_blocks = q_BLHK.transpose(1, 2).split(BLOCK, dim=2)
    # Without a window, spans can be as long as the row: then all their masks or gradients at once would be quadratic.
    wide = window is None and sum(stop - start for start, stop in spans) > 8 * keys.keys_BSGK.shape[1]
    cut = _slices if wide else _Spans.apply
    k_spans, v_spans = (cut(x.transpose(1, 2), spans) for x in (keys.keys_BSGK, keys.values_BSGK))
    masks: dict[tuple[int, int], Tensor] = {}

    def block(q: Tensor, k: Tensor, v: Tensor, start: int, stop: int) -> Tensor:
        shape = (q.shape[2], stop - start)
        if (mask := masks.get(shape)) is None:
            visible = _visible_of_attention(keys, start, stop, q.shape[2], window)
            mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
            if keys.documents_BS is None:  # then all inner blocks have the same
                masks[shape] = mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    y_blocks = []
    for q, k, v, span in zip(q_blocks, k_spans, v_spans, spans, strict=True):
        if wide:  # backward makes the mask again
            y_blocks.append(checkpoint(block, q, k, v, *span, use_reentrant=False, preserve_rng_state=False))
        else:
            y_blocks.append(block(q, k, v, *span))
    return torch.cat(y_blocks, dim=2).transpose(1, 2)


# ---- span
# Span-expanded attention (SE-Attn): chunks of a document that read, besides themselves, blocks of its past.


class Stretch(NamedTuple):
    """Consecutive tokens of one document, in rows that are alike.

    `seen` tokens of the document came before the row, of which the last `kept` stand before the row's own keys and may
    be read; the first of these is the first token of a block.
    """

    rows: slice
    start: int
    stop: int
    seen: int = 0
    kept: int = 0

    @property
    def first_place(self) -> int:
        """The place in the document of the first token whose key is at hand."""
        return self.seen - self.kept

    @property
    def end_place(self) -> int:
        return self.seen + self.stop - self.start

    def keys(self, own: int, total: int) -> slice:
        """Where its keys stand among all of a row, of which `own` are the row's."""
        return slice(total - own + self.start - self.kept, total - own + self.stop)


class Cut(NamedTuple):
    """How rows are cut: into stretches, and these into chunks and blocks."""

    chunk: int
    block: int
    stretches: Sequence[Stretch]
    shift: int = 0

    def chunks(self, stretch: Stretch) -> range:
        """The chunks of its document that a stretch touches."""
        last = (stretch.end_place - 1 + self.shift) // self.chunk
        return range((stretch.seen + self.shift) // self.chunk, last + 1)

    def available(self, stretch: Stretch) -> list[int]:
        """For each of its chunks, how many of the blocks at hand end before the chunk begins."""
        begins = (chunk * self.chunk - self.shift for chunk in self.chunks(stretch))
        return [max(0, begin - stretch.first_place) // self.block for begin in begins]


def chosen_table(chosen_RGTC: Tensor, blocks: int) -> Tensor:
    """Whether each of so many blocks is chosen, (R, G, T, U); entries of -1 stand for none."""
    table = torch.zeros(*chosen_RGTC.shape[:3], blocks + 1, dtype=torch.bool, device=chosen_RGTC.device)
    return table.scatter_(-1, torch.where(chosen_RGTC < 0, blocks, chosen_RGTC), True)[..., :blocks]


def _visible_of_span(cut: Cut, stretch: Stretch, chosen_RGTC: Tensor | None, device: torch.device) -> Tensor:
    """The rules: which of a stretch's keys each of its queries sees, (1, 1, L, S) or (R, G, L, S)."""
    places_S = torch.arange(stretch.first_place, stretch.end_place, device=device)
    chunks_S = (places_S + cut.shift) // cut.chunk
    places_L, chunks_L = places_S[stretch.kept :], chunks_S[stretch.kept :]
    own_LS = (chunks_L[:, None] == chunks_S) & (places_S <= places_L[:, None])
    if chosen_RGTC is None:
        return own_LS[None, None]
    blocks_S = (places_S - stretch.first_place) // cut.block
    table_RGTU = chosen_table(chosen_RGTC, int(blocks_S[-1]) + 1)
    return own_LS | table_RGTU[:, :, chunks_L - cut.chunks(stretch).start][..., blocks_S]


def span_attention(q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, cut: Cut, chosen: Sequence[Tensor | None]) -> Tensor:
    """Attention by the rules, with a dense mask and an fp32 softmax.

    `chosen` holds for each stretch the blocks of each chunk, (R, G, T, C), counted from the first key at hand; -1 where
    there are fewer than C; None where there are none.
    """
    y_BLHK = torch.zeros_like(q_BLHK)
    share, groups = q_BLHK.shape[2] // k_BSGK.shape[2], k_BSGK.shape[2]
    for stretch, chosen_RGTC in zip(cut.stretches, chosen, strict=True):
        here = stretch.keys(q_BLHK.shape[1], k_BSGK.shape[1])
        q_RLGAK = at_least_fp32(q_BLHK[stretch.rows, stretch.start : stretch.stop]).unflatten(2, (groups, share))
        k_RSGK, v_RSGK = (at_least_fp32(x[stretch.rows, here]) for x in (k_BSGK, v_BSGK))
        visible = _visible_of_span(cut, stretch, chosen_RGTC, q_BLHK.device)[:, :, None]
        scores_RGALS = torch.einsum("rlgak,rsgk->rgals", q_RLGAK, k_RSGK) * q_BLHK.shape[-1] ** -0.5
        weights_RGALS = scores_RGALS.masked_fill(~visible, -torch.inf).softmax(-1)
        y_RLHK = torch.einsum("rgals,rsgk->rlgak", weights_RGALS, v_RSGK).flatten(2, 3)
        y_BLHK[stretch.rows, stretch.start : stretch.stop] = y_RLHK.to(q_BLHK.dtype)
    return y_BLHK


# ---- span_past
# What span-expanded attention knows of a document's past, and the choice of blocks from it and from the row.


class Past(NamedTuple):
    """Carried of each row: the queries of its block under way, summaries and query sums of the last whole blocks.

    All stand at the end of their axis, with zeros before them: (B, S - 1, H, K), (B, P, H, K), (B, P', H, K).
    """

    queries_BNHK: Tensor
    summaries_BPHK: Tensor
    sums_BPHK: Tensor


class Rule(NamedTuple):
    """How many blocks a chunk chooses, by the queries of the chunk before it or its own, and who asks the summaries."""

    most: int
    previous: bool
    landmarks_HK: Tensor | None = None


class Held(NamedTuple):
    """Of how many of a document's last blocks summaries are handed on (None: of all), and of how many query sums."""

    summaries: int | None
    sums: int


class _Known(NamedTuple):
    """Of one stretch: its last queries; summaries and sums of its blocks, of those before the row as far as carried."""

    queries_RNHK: Tensor
    summaries_RUHK: Tensor
    sums_RUHK: Tensor


@torch.no_grad()
def choose_by_relevance(
    cut: Cut, rule: Rule, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, past: Past | None, held: Held
) -> tuple[list[Tensor | None], Past]:
    """The blocks of every chunk of every stretch, and the past of what comes after the rows.

    Without a past all rows begin their documents.
    """
    chosen: list[Tensor | None] = []
    ended: list[tuple[Stretch, _Known]] = []
    for stretch in cut.stretches:
        needed = max(cut.available(stretch)) > 0
        ends = stretch.stop == q_BLHK.shape[1]
        if not needed and not ends:
            chosen.append(None)
            continue
        known = _known(cut, rule, stretch, q_BLHK, k_BSGK, v_BSGK, past)
        chosen.append(_choice(cut, rule, stretch, known, k_BSGK.shape[2]) if needed else None)
        if ends:
            ended.append((stretch, known))
    return chosen, _after(ended, cut.block, held)


def choose_at_random(cut: Cut, most: int, key: int, groups: Sequence[int], device: torch.device) -> list[Tensor | None]:
    """Random blocks of the past for every chunk: a function of the key, the row, its group, its chunk and the block."""
    chosen: list[Tensor | None] = []
    for stretch in cut.stretches:
        available = cut.available(stretch)
        first = stretch.first_place // cut.block
        rows, blocks = range(stretch.rows.start, stretch.rows.stop), range(first, first + max(available))
        drawn = random_relevance(key, rows, groups, cut.chunks(stretch), blocks).to(device)
        chosen.append(choose(drawn, available, most) if blocks else None)
    return chosen


def _known(
    cut: Cut, rule: Rule, stretch: Stretch, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, past: Past | None
) -> _Known:
    under_way = stretch.seen % cut.block
    own = stretch.keys(q_BLHK.shape[1], k_BSGK.shape[1])
    here = slice(own.start + stretch.kept - under_way, own.stop)
    row = q_BLHK[stretch.rows, stretch.start : stretch.stop].detach()
    k_RNGK, v_RNGK = (x[stretch.rows, here].detach() for x in (k_BSGK, v_BSGK))
    if past is not None and stretch.seen:
        before = past.queries_BNHK[stretch.rows]
        row = torch.cat((before[:, before.shape[1] - under_way :].to(row.dtype), row), dim=1)
    new = summaries(row, k_RNGK, v_RNGK, cut.block, rule.landmarks_HK), query_sums(row, cut.block)
    if past is None or not stretch.seen:
        return _Known(row, *new)
    carried = past.summaries_BPHK[stretch.rows], past.sums_BPHK[stretch.rows]
    return _Known(row, *(torch.cat(pair, dim=1) for pair in zip(carried, new, strict=True)))


def _last(x: Tensor, count: int) -> Tensor:
    """The last so many entries of the second axis, zeros before them where there are fewer."""
    missing = max(0, count - x.shape[1])
    return F.pad(x[:, x.shape[1] + missing - count :], (0, 0, 0, 0, missing, 0))


def _choice(cut: Cut, rule: Rule, stretch: Stretch, known: _Known, groups: int) -> Tensor | None:
    chunks, per_chunk = cut.chunks(stretch), cut.chunk // cut.block
    unfinished = -(-stretch.end_place // cut.block)
    # the sums of all blocks from the chunk before the first one on, as those of chunks
    sums = _last(known.sums_RUHK, unfinished - (chunks.start - 1) * per_chunk)
    missing = -sums.shape[1] % per_chunk
    sums_RTHK = F.pad(sums, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, per_chunk)).sum(2)
    asking = sums_RTHK[:, : len(chunks)] if rule.previous else sums_RTHK[:, 1 : 1 + len(chunks)]
    whole = stretch.end_place // cut.block - stretch.first_place // cut.block
    of_blocks = _last(known.summaries_RUHK, whole)
    return choose(relevance(asking, of_blocks, groups), cut.available(stretch), rule.most)


def _after(ended: Sequence[tuple[Stretch, _Known]], block: int, held: Held) -> Past:
    """What comes after the rows needs, of the stretches that they end with."""
    count = held.summaries
    if count is None:
        count = max(stretch.end_place // block for stretch, _ in ended)
    parts = []
    for stretch, known in sorted(ended, key=lambda pair: pair[0].rows.start):
        under_way = stretch.end_place % block
        queries = known.queries_RNHK[:, known.queries_RNHK.shape[1] - under_way :]
        sums = known.sums_RUHK[:, :-1] if under_way else known.sums_RUHK
        parts.append((_last(queries, block - 1), _last(known.summaries_RUHK, count), _last(sums, held.sums)))
    return Past(*(torch.cat(part) for part in zip(*parts, strict=True)))


# ---- span_choice
# Which blocks of the past a chunk of span-expanded attention reads: summaries, relevance, and the k most relevant.

MIXED = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)

AT_ONCE = 1024


@torch.no_grad()
def summaries(q_RNHK: Tensor, k_RNGK: Tensor, v_RNGK: Tensor, block: int, landmarks_HK: Tensor | None) -> Tensor:
    """c_j of every whole block, (R, U, H, K), in fp32 at least."""
    whole = k_RNGK.shape[1] // block * block
    # on a CPU so few blocks at a time that all of it stays in the cache
    run = max(block, AT_ONCE // block * block) if q_RNHK.device.type == "cpu" else max(block, whole)
    parts = zip(*(x[:, :whole].split(run, dim=1) for x in (q_RNHK, k_RNGK, v_RNGK)), strict=True)
    return torch.cat([_summaries(q, k, v, block, landmarks_HK) for q, k, v in parts], dim=1)


def _summaries(q_RNHK: Tensor, k_RNGK: Tensor, v_RNGK: Tensor, block: int, landmarks_HK: Tensor | None) -> Tensor:
    groups = k_RNGK.shape[2]
    shape = (k_RNGK.shape[1] // block, block)
    q, k, v = (at_least_fp32(x).unflatten(1, shape).transpose(2, 3) for x in (q_RNHK, k_RNGK, v_RNGK))
    if landmarks_HK is None:
        scores = q.unflatten(2, (groups, -1)).flatten(3, 4) @ k.mT * q.shape[-1] ** -0.5
        weights_RUGAS = scores.softmax(-1).unflatten(3, (-1, block)).mean(4)
    else:
        asking_GAK = at_least_fp32(landmarks_HK).to(k.dtype).unflatten(0, (groups, -1))
        weights_RUGAS = (asking_GAK @ k.mT * k.shape[-1] ** -0.5).softmax(-1)
    return (weights_RUGAS @ v).flatten(2, 3)


@torch.no_grad()
def query_sums(q_RNHK: Tensor, block: int) -> Tensor:
    """The sum of each block's queries, the last of which may be unfinished, (R, U, H, K), in fp32 at least."""
    missing = -q_RNHK.shape[1] % block
    return F.pad(at_least_fp32(q_RNHK), (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, block)).sum(2)


@torch.no_grad()
def relevance(sums_RTHK: Tensor, summaries_RUHK: Tensor, groups: int) -> Tensor:
    """R_tj of each group, (R, G, T, U)."""
    left, right = (x.unflatten(2, (groups, -1)).transpose(1, 2).flatten(3) for x in (sums_RTHK, summaries_RUHK))
    return left @ right.mT


def random_relevance(key: int, rows: range, groups: Sequence[int], chunks: range, blocks: range) -> Tensor:
    """Uniform numbers in [0, 1), (R, G, T, U): a pure function of the key, the row, group, chunk and block."""
    mixed = torch.tensor(key % 2**64 - (2**64 if key % 2**64 >= 2**63 else 0))
    for axis, numbers in enumerate((rows, groups, chunks, blocks)):
        numbers_N = torch.tensor(list(numbers), dtype=torch.int64).view(-1, *[1] * (3 - axis))
        mixed = _mix(mixed + (numbers_N + 1) * MIXED[0])
    return mixed.bitwise_and(2**53 - 1).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, with int64 arithmetic that wraps."""
    for shift, factor in ((30, MIXED[0]), (27, MIXED[1])):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """The logical shift to the right, which int64 does not have."""
    return (x >> places) & (2 ** (64 - places) - 1)


@torch.no_grad()
def choose(relevance_RGTU: Tensor, available: Sequence[int], most: int) -> Tensor | None:
    """The blocks of largest relevance among each chunk's first `available` ones, at most so many.

    (R, G, T, C) in rising order, -1 behind the last where there are fewer than C; None where there are none at all.
    """
    count = min(most, max(available))
    if count == 0:
        return None
    device = relevance_RGTU.device
    places_U = torch.arange(relevance_RGTU.shape[-1], device=device)
    available_TU = places_U < torch.tensor(available, device=device)[:, None]
    scores = relevance_RGTU.masked_fill(~available_TU, -torch.inf)
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    taken = (above | (equal & (equal.cumsum(-1) <= room))) & available_TU  # topk promises no order among equals
    late = places_U.numel()
    chosen = torch.where(taken, places_U, late).topk(count, dim=-1, largest=False, sorted=True).values
    return torch.where(chosen == late, -1, chosen)
