"""What stands inside the residual sub-layers: state spaces and gated MLP here, attention beside. Equations: the ops.

Every mixer takes (x_BLD, state, places) and gives (y_BLD, state). A state is a dict of tensors, rows on the first
axis, of what came before the tokens; None is the start. It belongs to a row's first document, what is given back to
its last.

Legend: B rows, L tokens, D width, E inner channels, N state size, H heads, P head size, G groups, T tokens of tail,
C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .ops_hybridtron import (
    ConvInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    RMSNormInputs,
    ScanInputs,
    SSDInputs,
    SwiGLUInputs,
    causal_conv,
    chunked_selective_scan,
    chunked_ssd_scan,
    document_starts,
    gated_scale,
    gated_squares,
    rms_norm,
    rope_table,
    swiglu,
)

State = dict[str, Tensor]
Options = Mapping[str, Any]


@dataclass
class Places:
    """Where each token stands: its position, and which of its row's documents it is of (None: all are of one)."""

    positions_BL: Tensor
    documents_BL: Tensor | None = None
    _rope: dict[tuple[int, float], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _elsewhere: dict[torch.device, Places] = field(default_factory=dict)

    def on(self, device: torch.device) -> Places:
        """The same on another device, for a model that lies on several."""
        if device == self.positions_BL.device:
            return self
        if device not in self._elsewhere:
            documents_BL = None if self.documents_BL is None else self.documents_BL.to(device)
            self._elsewhere[device] = Places(self.positions_BL.to(device), documents_BL)
        return self._elsewhere[device]

    def rope(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary angles, computed once for all layers."""
        if (head_dim, base) not in self._rope:
            self._rope[head_dim, base] = rope_table(self.positions_BL, head_dim, base)
        return self._rope[head_dim, base]

    def spans(self) -> list[list[tuple[int, int]]]:
        """Of each row, where its documents begin and end."""
        rows, length = self.positions_BL.shape
        begins: list[list[int]] = [[0] for _ in range(rows)]
        if (starts_BL := document_starts(self.documents_BL)) is not None:
            for row, token in starts_BL.nonzero().tolist():
                begins[row].append(token)
        return [list(zip(row, [*row[1:], length], strict=True)) for row in begins]

    def borders(self) -> Tensor | None:
        """Where documents begin when all rows stand one after another, and where the last ends; None without any."""
        starts_BL = document_starts(self.documents_BL)
        if starts_BL is None:
            return None
        starts_BL = torch.cat((torch.ones_like(starts_BL[:, :1]), starts_BL[:, 1:]), dim=1)
        return F.pad(starts_BL.flatten().nonzero().flatten(), (0, 1), value=starts_BL.numel()).int()


def starting_steps(like: Tensor, options: Options) -> Tensor:
    """Values whose softplus is log-uniform between the least and the largest step."""
    low, high = (torch.tensor(options[name]).log().item() for name in ("dt_min", "dt_max"))
    step = torch.empty_like(like).uniform_(low, high).exp()
    return step + torch.log(-torch.expm1(-step))


class HybridtronRMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(RMSNormInputs(x, self.weight, self.eps))


class GatedRMSNorm(nn.Module):
    """Mamba-2's: gate, then norm over the channels of each group."""

    def __init__(self, inner: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(inner))
        self.groups, self.eps = groups, eps

    def forward(self, y_BLHP: Tensor, z_BLHP: Tensor) -> Tensor:
        heads, size = y_BLHP.shape[2:]
        of_group = heads // self.groups
        squares_BLH = gated_squares(GatedSquaresInputs(y_BLHP, z_BLHP))
        sums_BLG = squares_BLH.unflatten(-1, (self.groups, of_group)).sum(-1)
        scale_BLH = torch.rsqrt(sums_BLG / (of_group * size) + self.eps).repeat_interleave(of_group, dim=-1)
        return gated_scale(GatedScaleInputs(y_BLHP, z_BLHP, scale_BLH, self.weight.unflatten(0, (heads, size))))


class ShortConv(nn.Conv1d):
    """The causal convolution of a few taps, with weights named and shaped as torch's."""

    def __init__(self, channels: int, width: int, bias: bool = True) -> None:
        super().__init__(channels, channels, width, groups=channels, bias=bias)

    def forward(
        self, x_BLC: Tensor, tail_BTC: Tensor | None, places: Places, activation: bool = True
    ) -> tuple[Tensor, Tensor]:
        weight_CW = self.weight.squeeze(1)
        return causal_conv(ConvInputs(x_BLC, weight_CW, self.bias, tail_BTC, places.documents_BL, activation))


class StepProjection(nn.Linear):
    """Mamba-1's projection to step sizes, whose bias (in fp32) is added by the scan."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Mixer(nn.Module):
    """Base of all mixers; `config` and `layer_idx` are for the attention functions of transformers."""

    def __init__(self, config: PreTrainedConfig, options: Options, layer_idx: int) -> None:
        super().__init__()
        self.config, self.options, self.layer_idx = config, options, layer_idx

    def forward(self, x_BLD: Tensor, state: State | None, places: Places) -> tuple[Tensor, State]:
        raise NotImplementedError


class Mamba(Mixer):
    """State: `ssm` (B, E, N) in fp32, and `conv` (B, W - 1, E)."""

    def __init__(self, config: PreTrainedConfig, options: Options, layer_idx: int) -> None:
        super().__init__(config, options, layer_idx)
        width, rank, states = config.hidden_size, options["dt_rank"], options["state"]
        inner = options["expand"] * width
        self.sections = (rank, states, states)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = ShortConv(inner, options["conv"])
        self.x_proj = nn.Linear(inner, sum(self.sections), bias=False)
        self.dt_proj = StepProjection(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLD: Tensor, state: State | None, places: Places) -> tuple[Tensor, State]:
        before = state or {}
        x_BLE, z_BLE = self.in_proj(x_BLD).chunk(2, dim=-1)
        x_BLE, tail = self.conv1d(x_BLE, before.get("conv"), places)
        dt_BLR, B_BLN, C_BLN = self.x_proj(x_BLE).split(self.sections, dim=-1)
        A_EN = -torch.exp(self.A_log)
        rest = self.D, self.dt_proj.bias, z_BLE, before.get("ssm"), places.documents_BL
        y_BLE, h_BEN = chunked_selective_scan(ScanInputs(x_BLE, self.dt_proj(dt_BLR), A_EN, B_BLN, C_BLN, *rest))
        return self.out_proj(y_BLE), {"ssm": h_BEN, "conv": tail}


class Mamba2(Mixer):
    """State: `ssm` (B, H, P, N) in fp32, and `conv` (B, W - 1, E + 2 G N)."""

    def __init__(self, config: PreTrainedConfig, options: Options, layer_idx: int) -> None:
        super().__init__(config, options, layer_idx)
        width, groups, states = config.hidden_size, options["groups"], options["state"]
        inner = options["expand"] * width
        self.heads = inner // options["head_dim"]
        self.sections = (inner, inner + 2 * groups * states, self.heads)
        self.in_proj = nn.Linear(width, sum(self.sections), bias=False)
        self.conv1d = ShortConv(self.sections[1], options["conv"])
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = GatedRMSNorm(inner, groups, options["norm_eps"])
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_BLD: Tensor, state: State | None, places: Places) -> tuple[Tensor, State]:
        before = state or {}
        z_BLE, xbc_BLC, dt_BLH = self.in_proj(x_BLD).split(self.sections, dim=-1)
        xbc_BLC, tail = self.conv1d(xbc_BLC, before.get("conv"), places)
        inner, groups, states = self.sections[0], self.options["groups"], self.options["state"]
        x_BLE, B_BLC, C_BLC = xbc_BLC.split((inner, groups * states, groups * states), dim=-1)
        x_BLHP, z_BLHP = (part.unflatten(-1, (self.heads, -1)) for part in (x_BLE, z_BLE))
        B_BLGN, C_BLGN = (part.unflatten(-1, (groups, states)) for part in (B_BLC, C_BLC))
        rest = self.D, self.dt_bias, before.get("ssm"), places.documents_BL
        y_BLHP, h_BHPN = chunked_ssd_scan(SSDInputs(x_BLHP, dt_BLH, -torch.exp(self.A_log), B_BLGN, C_BLGN, *rest))
        return self.out_proj(self.norm(y_BLHP, z_BLHP).flatten(2)), {"ssm": h_BHPN, "conv": tail}


class SwiGLU(Mixer):
    """Carries no state."""

    def __init__(self, config: PreTrainedConfig, options: Options, layer_idx: int) -> None:
        super().__init__(config, options, layer_idx)
        width, hidden = config.hidden_size, options["hidden"]
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BLD: Tensor, state: State | None, places: Places) -> tuple[Tensor, State]:
        return self.down_proj(swiglu(SwiGLUInputs(self.gate_proj(x_BLD), self.up_proj(x_BLD)))), {}
