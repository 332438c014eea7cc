"""What a row leaves of the state before it. Every recurrence here is affine in that state:

    state after = total(state before) + state after zeros

So shares of a row can be read apart, each from zeros, and joined by what each of them leaves of what comes in:

    state after both = total_2(total_1(before) + after zeros_1) + after zeros_2
    total of both    = total_2 after total_1

A total is a function of the decays alone: no state and no output is in it, and its gradients reach what makes the
decays. Log decays are added up in float64, since a row may be long. Where a document begins inside of the row nothing
is left, also of a state that is not finite. Whether a row's first token begins one, a row does not know: then what is
before it is zeros.

The scan, SSD, its recurrence and gated linear attention leave a factor of every entry (`Factors`); RWKV-6's state is
gated linear attention's, and retention's is SSD's at angles that count from where positions do. Mamba-3 counts its
angles from the start of each row, and so turns what is left by the row's angles as well (`TurnedFactors`). The delta
rule leaves a matrix for each head (`Matrices`), the product of diag(exp(g_t)) and I - beta_t k_t k_t^T over its tokens:
the state after values of zeros from the identity, by whichever form of the op computes states.

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
    """`through_B`: the rows of one document; None: all are."""

    through_B: Tensor | None

    def of(self, state: Tensor) -> Tensor:
        """What is left of the state before the row (B, ...)."""
        left = self._left(state)
        if self.through_B is None:
            return left
        return left.masked_fill(~self.through_B.view(-1, *[1] * (left.dim() - 1)), 0)

    @abstractmethod
    def after(self, earlier: Self) -> Self:
        """Of two rows that follow each other, this one the later."""

    @abstractmethod
    def _left(self, state: Tensor) -> Tensor: ...

    def _through_both(self, earlier: Total) -> Tensor | None:
        if self.through_B is None or earlier.through_B is None:
            return earlier.through_B if self.through_B is None else self.through_B
        return self.through_B & earlier.through_B


@dataclass(frozen=True)
class Factors(Total):
    """A factor of every entry, of the state's shape, with sizes of 1 where entries share one."""

    factor: Tensor

    def after(self, earlier: Factors) -> Factors:
        return Factors(self._through_both(earlier), self.factor * earlier.factor)

    def _left(self, state: Tensor) -> Tensor:
        return self.factor * state


@dataclass(frozen=True)
class TurnedFactors(Total):
    """A factor of every head, and the angles by which the pairs of its channels turn."""

    factor_BH11: Tensor
    angles_BH1S: Tensor

    def after(self, earlier: TurnedFactors) -> TurnedFactors:
        factor_BH11, angles_BH1S = self.factor_BH11 * earlier.factor_BH11, self.angles_BH1S + earlier.angles_BH1S
        return TurnedFactors(self._through_both(earlier), factor_BH11, angles_BH1S)

    def _left(self, state_BHPN: Tensor) -> Tensor:
        return turned(self.factor_BH11 * state_BHPN, self.angles_BH1S)


@dataclass(frozen=True)
class Matrices(Total):
    """A matrix for every head, whose columns are what is left of the key channels."""

    matrix_BHNN: Tensor

    def after(self, earlier: Matrices) -> Matrices:
        return Matrices(self._through_both(earlier), self.matrix_BHNN @ earlier.matrix_BHNN)

    def _left(self, state_BHNP: Tensor) -> Tensor:
        return self.matrix_BHNN @ state_BHNP


def scan_total(inputs: ScanInputs) -> Factors:
    """Of the state (B, E, N)."""
    sum_BE1 = _summed_steps(inputs.dt_BLE, inputs.dt_bias_E).unsqueeze(2)
    factor_BEN = (sum_BE1 * inputs.A_EN).exp().to(wide_type(inputs.x_BLE))
    return Factors(_through(inputs.documents_BL), factor_BEN)


def ssd_total(inputs: SSDInputs) -> Factors:
    """Of the state (B, H, P, N)."""
    sum_BH = _summed_steps(inputs.dt_BLH, inputs.dt_bias_H)
    factor_BH = (sum_BH * inputs.A_H).exp().to(wide_type(inputs.x_BLHP))
    return Factors(_through(inputs.documents_BL), factor_BH[:, :, None, None])


def decay_total(inputs: DecayInputs) -> Factors:
    """Of the state (B, H, P, N)."""
    factor_BH = inputs.g_BLH.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return Factors(_through(inputs.documents_BL), factor_BH[:, :, None, None])


def turned_total(inputs: DecayInputs, angles_BLHS: Tensor) -> TurnedFactors:
    """Of the state (B, H, P, N) that is handed on at angle 0, as Mamba-3 does, after a row of these angles."""
    decay = decay_total(inputs)
    return TurnedFactors(decay.through_B, decay.factor, -angles_BLHS[:, -1].unsqueeze(2))


def gla_total(inputs: GLAInputs) -> Factors:
    """Of the state (B, H, N, P)."""
    factor_BHN = inputs.g_BLHN.sum(1, dtype=torch.float64).exp().to(wide_type(inputs.v_BLHP))
    return Factors(_through(inputs.documents_BL), factor_BHN.unsqueeze(3))


def delta_total(inputs: DeltaInputs) -> Matrices:
    """Of the state (B, H, N, P)."""
    size, wide = inputs.k_BLHN.shape[3], wide_type(inputs.v_BLHP)
    identity_NN = torch.eye(size, dtype=wide, device=inputs.k_BLHN.device)
    start_BHNN = identity_NN.expand(inputs.k_BLHN.shape[0], inputs.k_BLHN.shape[2], size, size)
    nothing_BLHN = torch.zeros_like(inputs.k_BLHN, dtype=inputs.v_BLHP.dtype)
    _, matrix_BHNN = delta_scan(inputs._replace(q_BLHN=nothing_BLHN, v_BLHP=nothing_BLHN, state_BHNP=start_BHNN))
    return Matrices(_through(inputs.documents_BL), matrix_BHNN)


def _summed_steps(dt: Tensor, dt_bias: Tensor) -> Tensor:
    """Over tokens. The steps are made again in the backward pass, and not kept for it.

    What they are made of are arguments: inside a sub-layer that is recomputed a closure would keep it all the same.
    """

    def summed(dt: Tensor, dt_bias: Tensor) -> Tensor:
        return step_sizes(dt, dt_bias).sum(1, dtype=torch.float64)

    if not torch.is_grad_enabled():
        return summed(dt, dt_bias)
    return checkpoint(summed, dt, dt_bias, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


def _through(documents_BL: Tensor | None) -> Tensor | None:
    starts_BL = document_starts(documents_BL)
    return None if starts_BL is None else ~starts_BL.any(1)
