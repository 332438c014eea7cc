"""The delta rule against numbers worked out by hand and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import force

FORMS = ["reference"]


@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_replaced_by_hand(form: str) -> None:
    """Three tokens of one key: 8 is written, decays to 4 and moves half-way to 2, then is replaced by 5."""
    key = torch.tensor([0.6, 0.8]).expand(1, 3, 1, 2)
    v = torch.tensor([8.0, 2.0, 5.0]).view(1, 3, 1, 1)
    beta, g = torch.tensor([1.0, 0.5, 1.0]).view(1, 3, 1), torch.tensor([0.0, math.log(0.5), 0.0]).view(1, 3, 1, 1)
    with force(delta_scan=form):
        y, state = delta_scan(DeltaInputs(key, key, v, beta, g))
    assert_close(y.flatten(), torch.tensor([8.0, 3.0, 5.0]))
    assert_close(state.flatten(), torch.tensor([3.0, 4.0]))
