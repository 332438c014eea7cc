"""Token mixing: its forms against a loop over tokens, and their gradients against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.ops.dispatch import force
from hybridtron.ops.token_mix import TokenMixInputs, token_mix

FORMS = pytest.mark.parametrize("form", ["reference", "separate"])
DOCUMENTS = torch.tensor([[3, 3, 3, 4, 4], [7, 8, 8, 8, 9]], dtype=torch.int32)


def inputs(streams: int = 3, changes: bool = True, first: bool = True, documents: bool = True) -> TokenMixInputs:
    """Return 5 tokens in 2 rows, with 4 channels."""

    def wanted(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    return TokenMixInputs(
        wanted(5, 2, 4),
        wanted(streams, 4),
        wanted(streams, 5, 2, 4) if changes else None,
        wanted(2, 4) if first else None,
        DOCUMENTS if documents else None,
    )


def by_loop(fields: TokenMixInputs, stream: int, row: int, token: int) -> Tensor:
    """Return one stream's token."""
    x = fields.x_LBD[:, row]
    before = torch.zeros(4, dtype=torch.float64)
    if token == 0 and fields.first_BD is not None:
        before = fields.first_BD[row]
    if token > 0 and (
        fields.documents_BL is None or fields.documents_BL[row, token] == fields.documents_BL[row, token - 1]
    ):
        before = x[token - 1]
    weight = fields.mix_SD[stream]
    if fields.change_SLBD is not None:
        weight = weight + fields.change_SLBD[stream, token, row]
    return (1 - weight) * x[token] + weight * before


@FORMS
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_every_stream_interpolates_with_the_predecessor(form: str, changes: bool, first: bool, documents: bool) -> None:
    fields = inputs(3, changes, first, documents)
    with force(token_mix=form):
        streams = token_mix(fields)
    assert len(streams) == 3
    for stream, y_LBD in enumerate(streams):
        for row in range(2):
            for token in range(5):
                torch.testing.assert_close(y_LBD[token, row], by_loop(fields, stream, row, token))


@FORMS
def test_gradients_are_the_slopes(form: str) -> None:
    fields = inputs(streams=2)
    with force(token_mix=form):
        assert torch.autograd.gradcheck(lambda *x: token_mix(TokenMixInputs(*x, DOCUMENTS)), fields[:4])


@FORMS
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize(
    ("dtype", "mix_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_streams_have_the_dtype_of_x(form: str, changes: bool, dtype: torch.dtype, mix_dtype: torch.dtype) -> None:
    fields = inputs(changes=changes)
    dtypes = (dtype, mix_dtype, mix_dtype, dtype)
    floats = [None if x is None else x.detach().to(to) for x, to in zip(fields[:4], dtypes, strict=True)]
    mixed = TokenMixInputs(*floats, DOCUMENTS)
    exact = token_mix.reference.function(
        TokenMixInputs(*(None if x is None else x.double() for x in floats), DOCUMENTS)
    )
    with force(token_mix=form):
        streams = token_mix(mixed)
    for stream, expected in zip(streams, exact, strict=True):
        assert stream.dtype == dtype
        torch.testing.assert_close(stream, expected.to(dtype), rtol=2**-7, atol=2**-6)
