"""A token that is not finite reaches no other row and, if a form promises it, no other document.

Forms by matrix products multiply unseen tokens with 0, which gives NaN if they are not finite. Attention, and the
chunked forms of states that are matrices, therefore keep rows apart, but not the documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.ops.attention import AttentionInputs, attention
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.dispatch import Implementation, Op
from hybridtron.ops.rotations import AngleInputs, angles
from tests.ops.recurrences import RECURRENCES

LENGTH = 11
WRONG = 5  # the token that is not finite
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 4 + [2] * 3, [0] * 9 + [1] * 2])
APART = torch.tensor([t < 4 or t >= 8 for t in range(LENGTH)])  # tokens of the first row's other documents
CASES: dict[str, tuple[Op[Any, Any], Callable[[], Any]]] = {
    "conv": (causal_conv, lambda: ConvInputs(torch.randn(2, LENGTH, 5), torch.randn(5, 4), None, None, DOCUMENTS)),
    "angles": (angles, lambda: AngleInputs(torch.rand(2, LENGTH, 3), torch.randn(2, LENGTH, 2), DOCUMENTS)),
    "attention": (
        attention,
        lambda: AttentionInputs(
            torch.randn(2, LENGTH, 4, 8), torch.randn(2, LENGTH, 2, 8), torch.randn(2, LENGTH, 2, 8), None, DOCUMENTS
        ),
    ),
}
CASES |= {case.name: (case.op, lambda make=case.make: make()._replace(documents_BL=DOCUMENTS)) for case in RECURRENCES}
FORMS = [
    (name, form)
    for name, (op, _) in CASES.items()
    for form in (op.reference, *op.implementations)
    if form.device != "cuda"
]


def keeps_documents_apart(name: str, form: Implementation[Any, Any]) -> bool:
    if name == "attention":
        return False
    return name in ("conv", "scan") or form.name in ("reference", "native")


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{name}-{form.name}" for name, form in FORMS])
def test_token_that_is_not_finite_stays_in_its_row_and_document(
    name: str, form: Implementation[Any, Any], wrong: float
) -> None:
    inputs = CASES[name][1]()
    if (reason := form.missing() or form.unsupported_reason(inputs)) is not None:
        pytest.skip(reason)
    expected = output(form, inputs)
    tokens = [
        field
        for field, x in inputs._asdict().items()
        if "_BL" in field and isinstance(x, Tensor) and x.is_floating_point()
    ]
    assert tokens
    for field in tokens:
        broken = getattr(inputs, field).detach().clone()
        broken[0, WRONG] = wrong
        actual = output(form, inputs._replace(**{field: broken}))
        assert torch.equal(actual[1], expected[1]), field
        if keeps_documents_apart(name, form):
            assert torch.equal(actual[0, APART], expected[0, APART]), field


@torch.no_grad()
def output(form: Implementation[Any, Any], inputs: Any) -> Tensor:
    outputs = form.function(inputs)
    return outputs if isinstance(outputs, Tensor) else outputs[0]
