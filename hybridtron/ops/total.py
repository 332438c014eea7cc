"""State transitions ("totals"): the linear maps by which rows act on the state before them.

Every recurrence here is affine in that state:

    state after = total(state before) + state after zeros

So sequence shards of a row can be scanned apart, each from zeros, and then be joined through their transitions:

    state after both = total_2(total_1(before) + after zeros_1) + after zeros_2
    total of both    = total_2 after total_1

A transition depends on the decays alone, and for the delta rule on its keys and betas, but on no state and no output.
Gradients flow through it to the tensors that make the decays. Log decays are summed in float64, since a row may be
long. If a document begins inside the row, nothing of the state before it passes, even if that state is not finite. A
row cannot know whether its first token begins a document; its caller passes zeros as the state before it then.

The scan, SSD, its recurrence and gated linear attention multiply every entry of the state by a factor (`Factors`).
RWKV-6's state is gated linear attention's. Retention's is SSD's, at angles that count along with positions. Mamba-3
counts its angles from the start of each row, and so its transition also rotates the state by the row's angles
(`TurnedFactors`). The delta rule multiplies by a matrix for each head (`Matrices`), the product of diag(exp(g_t)) and
I - beta_t k_t k_t^T over its tokens. This is the final state of the op itself, run from the identity with zeros as
values, by whichever implementation computes states.

Legend: as in the ops; S angles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.documents import document_starts
from hybridtron.ops.gla import GLAInputs
from hybridtron.ops.precision import wide_type
from hybridtron.ops.scan import ScanInputs
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.ssd import DecayInputs, SSDInputs
from hybridtron.ops.turns import turned


@dataclass(frozen=True)
class Total(ABC):
    """The state transition of a row, zero if a document begins inside the row.

    `through_B` marks the rows in which none begins; None: all of them.
    """

    through_B: Tensor | None

    def of(self, state: Tensor) -> Tensor:
        """Apply the transition to the state before the row (B, ...)."""
        left = self._left(state)
        if self.through_B is None:
            return left
        return left.masked_fill(~self.through_B.view(-1, *[1] * (left.dim() - 1)), 0)

    @abstractmethod
    def after(self, earlier: Self) -> Self:
        """Compose the transitions of two rows; `earlier` is that of the row before this one."""

    @abstractmethod
    def _left(self, state: Tensor) -> Tensor: ...

    def _through_both(self, earlier: Total) -> Tensor | None:
        if self.through_B is None or earlier.through_B is None:
            return earlier.through_B if self.through_B is None else self.through_B
        return self.through_B & earlier.through_B


@dataclass(frozen=True)
class Factors(Total):
    """Transition by a factor for every entry; `factor` has the state's shape, with size 1 where entries share it."""

    factor: Tensor

    def after(self, earlier: Factors) -> Factors:
        return Factors(self._through_both(earlier), self.factor * earlier.factor)

    def _left(self, state: Tensor) -> Tensor:
        return self.factor * state


@dataclass(frozen=True)
class TurnedFactors(Total):
    """Transition by a factor for every head, and a rotation of its channel pairs by angles."""

    factor_BH11: Tensor
    angles_BH1S: Tensor

    def after(self, earlier: TurnedFactors) -> TurnedFactors:
        factor_BH11, angles_BH1S = self.factor_BH11 * earlier.factor_BH11, self.angles_BH1S + earlier.angles_BH1S
        return TurnedFactors(self._through_both(earlier), factor_BH11, angles_BH1S)

    def _left(self, state_BHPN: Tensor) -> Tensor:
        return turned(self.factor_BH11 * state_BHPN, self.angles_BH1S)


@dataclass(frozen=True)
class Matrices(Total):
    """Transition by a matrix for every head; column n is the image of key channel n."""

    matrix_BHNN: Tensor

    def after(self, earlier: Matrices) -> Matrices:
        return Matrices(self._through_both(earlier), self.matrix_BHNN @ earlier.matrix_BHNN)

    def _left(self, state_BHNP: Tensor) -> Tensor:
        return self.matrix_BHNN @ state_BHNP


def scan_total(inputs: ScanInputs) -> Factors:
    """Return the selective scan's transition, for states (B, E, N)."""
    sum_BE1 = _summed_steps(inputs.dt_BLE, inputs.dt_bias_E).unsqueeze(2)
    factor_BEN = (sum_BE1 * inputs.A_EN).exp().to(wide_type(inputs.x_BLE))
    return Factors(_through(inputs.documents_BL), factor_BEN)


def ssd_total(inputs: SSDInputs) -> Factors:
    """Return SSD's transition, for states (B, H, P, N)."""
    sum_BH = _summed_steps(inputs.dt_BLH, inputs.dt_bias_H)
    factor_BH = (sum_BH * inputs.A_H).exp().to(wide_type(inputs.x_BLHP))
    return Factors(_through(inputs.documents_BL), factor_BH[:, :, None, None])


def decay_total(inputs: DecayInputs) -> Factors:
    """Return the transition of SSD's recurrence, for states (B, H, P, N)."""
    factor_BH = inputs.g_BLH.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return Factors(_through(inputs.documents_BL), factor_BH[:, :, None, None])


def turned_total(inputs: DecayInputs, angles_BLHS: Tensor) -> TurnedFactors:
    """Return Mamba-3's transition, for states (B, H, P, N) that pass from row to row at angle 0.

    `angles_BLHS` are the row's angles; the transition rotates by minus the last of them.
    """
    decay = decay_total(inputs)
    return TurnedFactors(decay.through_B, decay.factor, -angles_BLHS[:, -1].unsqueeze(2))


def gla_total(inputs: GLAInputs) -> Factors:
    """Return gated linear attention's transition, for states (B, H, N, P)."""
    factor_BHN = inputs.g_BLHN.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return Factors(_through(inputs.documents_BL), factor_BHN.unsqueeze(3))


def delta_total(inputs: DeltaInputs) -> Matrices:
    """Return the delta rule's transition, for states (B, H, N, P), by a run of the op from the identity."""
    size, wide = inputs.k_BLHN.shape[3], wide_type(inputs.v_BLHP)
    identity_NN = torch.eye(size, dtype=wide, device=inputs.k_BLHN.device)
    start_BHNN = identity_NN.expand(inputs.k_BLHN.shape[0], inputs.k_BLHN.shape[2], size, size)
    nothing_BLHN = torch.zeros_like(inputs.k_BLHN, dtype=inputs.v_BLHP.dtype)
    _, matrix_BHNN = delta_scan(inputs._replace(q_BLHN=nothing_BLHN, v_BLHP=nothing_BLHN, state_BHNP=start_BHNN))
    return Matrices(_through(inputs.documents_BL), matrix_BHNN)


def _summed_steps(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """Sum the step sizes over tokens, in float64; backward computes them again instead of saving them.

    `summed` takes its tensors as arguments: inside a recomputed sub-layer, a closure would keep them alive.
    """

    def summed(dt: Tensor, dt_bias: Tensor) -> Tensor:
        return step_sizes(dt, dt_bias).sum(1, dtype=torch.float64)

    if not torch.is_grad_enabled():
        return summed(dt, dt_bias)
    return checkpoint(summed, dt, dt_bias, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


def _through(documents_BL: Tensor | None) -> Tensor | None:
    starts_BL = document_starts(documents_BL)
    return None if starts_BL is None else ~starts_BL.any(1)
