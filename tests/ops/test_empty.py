"""Rows of no tokens, and no rows at all, in every form for a CPU: nothing is computed, and gradients are zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.ops.attention import AttentionInputs, attention
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.delta import DeltaGateInputs, delta_gates
from hybridtron.ops.dispatch import Op
from hybridtron.ops.gated_norm import (
    GatedNormInputs,
    GatedScaleInputs,
    GatedSquaresInputs,
    NormBeforeGateInputs,
    gated_norm,
    gated_scale,
    gated_squares,
    norm_before_gate,
)
from hybridtron.ops.gla import GLAGateInputs, gla_gates
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm
from hybridtron.ops.rope import RopeInputs, apply_rope
from hybridtron.ops.rotations import AngleInputs, TurnInputs, angles, turn_pairs
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from tests.ops.recurrences import RECURRENCES

EMPTY = [(0, 4), (2, 0), (0, 0)]


def wanted(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


CASES: dict[str, tuple[Op[Any, Any], Callable[[int, int], Any]]] = {
    "conv": (
        causal_conv,
        lambda B, L: ConvInputs(wanted(B, L, 5), wanted(5, 4), wanted(5), wanted(B, 3, 5), None, True),
    ),
    "angles": (angles, lambda B, L: AngleInputs(wanted(B, L, 3), wanted(B, L, 2), None)),
    "turns": (
        turn_pairs,
        lambda B, L: TurnInputs(wanted(B, L, 1, 4), wanted(B, L, 1, 4), wanted(3, 4), wanted(3, 4), wanted(B, L, 3, 2)),
    ),
    "norm": (rms_norm, lambda B, L: RMSNormInputs(wanted(B, L, 5), wanted(5), 1e-5)),
    "norm of a sum": (add_rms_norm, lambda B, L: AddRMSNormInputs(wanted(B, L, 5), wanted(B, L, 5), wanted(5), 1e-5)),
    "gated norm": (gated_norm, lambda B, L: GatedNormInputs(wanted(B, L, 8), wanted(B, L, 8), wanted(8), 2, 1e-5)),
    "norm before gate": (
        norm_before_gate,
        lambda B, L: NormBeforeGateInputs(wanted(B, L, 2, 4), wanted(B, L, 2, 4), wanted(4), 1e-5),
    ),
    "delta gates": (
        delta_gates,
        lambda B, L: DeltaGateInputs(wanted(B, L, 6), wanted(B, L, 2), wanted(6), wanted(2)),
    ),
    "gla gates": (gla_gates, lambda B, L: GLAGateInputs(wanted(B, L, 6), wanted(6), 16.0)),
    "squares": (gated_squares, lambda B, L: GatedSquaresInputs(wanted(B, L, 2, 4), wanted(B, L, 2, 4))),
    "scale": (
        gated_scale,
        lambda B, L: GatedScaleInputs(wanted(B, L, 2, 4), wanted(B, L, 2, 4), wanted(B, L, 2), wanted(2, 4)),
    ),
    "attention": (
        attention,
        lambda B, L: AttentionInputs(wanted(B, L, 4, 8), wanted(B, L, 2, 8), wanted(B, L, 2, 8), 3),
    ),
    "swiglu": (swiglu, lambda B, L: SwiGLUInputs(wanted(B, L, 8))),
    "rope": (apply_rope, lambda B, L: RopeInputs(wanted(B, L, 2, 4), torch.ones(B, L, 2), torch.ones(B, L, 2))),
}
CASES |= {case.name: (case.op, case.make) for case in RECURRENCES}
FORMS = [
    (name, form)
    for name, (op, _) in CASES.items()
    for form in (op.reference, *op.implementations)
    if form.device != "cuda"
]


@pytest.mark.parametrize(("rows", "length"), EMPTY)
@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{name}-{form.name}" for name, form in FORMS])
def test_empty_rows_have_empty_outputs_and_zero_gradients(name: str, form: Any, rows: int, length: int) -> None:
    inputs = CASES[name][1](rows, length)
    if (reason := form.missing() or form.unsupported_reason(inputs)) is not None:
        pytest.skip(reason)
    outputs = form.function(inputs)
    if isinstance(outputs, Tensor):
        outputs = (outputs,)
    assert outputs[0].numel() == 0
    assert outputs[0].shape[:2] == (rows, length)
    fields = {field: x for field, x in inputs._asdict().items() if isinstance(x, Tensor) and x.requires_grad}
    learning = [x.sum() for x in outputs if x.requires_grad]
    gradients = torch.autograd.grad(learning, [*fields.values()], allow_unused=True, materialize_grads=True)
    for field, gradient in zip(fields, gradients, strict=True):
        assert gradient.shape == fields[field].shape
        passes = field.startswith("state_") and length == 0  # to the state after the row, which it is
        assert (gradient == (1 if passes else 0)).all(), field
