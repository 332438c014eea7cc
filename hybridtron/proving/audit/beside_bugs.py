"""Planted bugs of parallel branches and multipliers, for testing the audit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from hybridtron.mixers.mamba2 import Mamba2
from hybridtron.model.stack import ParallelBranch, Residual, ResidualOut, Stack, StackOut, SubLayerInputs
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.parallel.linear import TensorGroup
from hybridtron.proving.audit.bug import Bug, Replaced

_residual = Residual.forward
_beside = ParallelBranch.forward
_stack = Stack.forward
_multiplied = Mamba2._multiplied


def _showing(shown: Callable[[ResidualOut], Tensor]) -> Replaced:
    """Replace the normed input that a sub-layer passes to its parallel branches."""

    def forward(self: Residual, inputs: SubLayerInputs) -> ResidualOut:
        out = _residual(self, inputs)
        if out.normed_LBD is None:
            return out
        return out._replace(normed_LBD=shown(out))

    return {"hybridtron.model.stack.Residual.forward": forward}


def _normed(out: ResidualOut) -> Tensor:
    assert out.normed_LBD is not None
    return out.normed_LBD


def _twice_under_sequence_parallelism(self: ParallelBranch, inputs: SubLayerInputs) -> ResidualOut:
    out = _beside(self, inputs)
    tensor = cast(TensorGroup, self.mixer.tensor)
    times = 2 if tensor.sequence else 1
    return out._replace(stream=out.stream._replace(pending_LBD=times * out.stream.latest_LBD))


def _settled_before_the_last(self: Stack, *given: Any) -> StackOut:
    """Send the stream to the next stage without the last sub-layer's output, if that is a parallel branch."""
    out = _stack(self, *given)
    last = list(self.values())[-1]
    if isinstance(last, ParallelBranch):
        return out._replace(x_LBD=out.x_LBD - cast(Tensor, last.added_LBD))
    return out


def _noting(self: ParallelBranch, inputs: SubLayerInputs) -> ResidualOut:
    out = _beside(self, inputs)
    self.added_LBD = out.stream.latest_LBD
    return out


def _without_one_part(self: Mamba2, *parts: Tensor) -> tuple[Tensor, ...]:
    return (*_multiplied(self, *parts)[:2], *parts[2:3], *_multiplied(self, *parts)[3:])


UN_NORMED = _showing(lambda out: out.stream.x_LBD)
NORM_GRADIENT_OF_FIRST = _showing(lambda out: _normed(out).detach())
TWICE: Replaced = {"hybridtron.model.stack.ParallelBranch.forward": _twice_under_sequence_parallelism}
LOST_AT_BORDER: Replaced = {
    "hybridtron.model.stack.ParallelBranch.forward": _noting,
    "hybridtron.model.stack.Stack.forward": _settled_before_the_last,
}
MULTIPLIER_OF_ONE_PART: Replaced = {"hybridtron.mixers.mamba2.Mamba2._multiplied": _without_one_part}
GATE_MULTIPLIER: Replaced = {
    "hybridtron.mixers.swiglu.swiglu": lambda inputs: swiglu(SwiGLUInputs(inputs.gate_up)),
}
BESIDE_BUGS = {
    "beside_un_normed": Bug("a second mixer reads the stream and not its norm", UN_NORMED, "falcon-h1", "tp2"),
    "beside_norm_gradient": Bug(
        "a norm learns from the first mixer alone", NORM_GRADIENT_OF_FIRST, "falcon-h1", "tp2-sp"
    ),
    "beside_twice": Bug("tokens' shares get a second mixer's output twice", TWICE, "falcon-h1", "tp2-sp"),
    "beside_lost_at_border": Bug(
        "what a stage's last sub-layer adds beside another is lost", LOST_AT_BORDER, "falcon-h1", "pp4"
    ),
    "multiplier_of_one_part": Bug("the step size is not multiplied", MULTIPLIER_OF_ONE_PART, "falcon-h1", "tp2"),
    "gate_multiplier": Bug("the gate of an MLP is not multiplied", GATE_MULTIPLIER, "falcon-h1", "cp2"),
}
