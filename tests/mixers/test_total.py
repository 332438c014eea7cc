"""What a mixer's row leaves of the state before it is what its recurrence says: it hands that on as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.table import SPECS
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import build_mixer
from hybridtron.model.init import starting_value
from hybridtron.ops.dispatch import Op, observed
from hybridtron.ops.total import Total, delta_total, gla_total, scan_total, ssd_total
from hybridtron.parallel.linear import SINGLE_RANK

SIZES, LENGTH = ModelSizes(width=16, num_sublayers=4), 21
KINDS: dict[str, tuple[dict[str, Any], Callable[[Any], Total]]] = {
    "mamba": ({"state": 4}, scan_total),
    "mamba2": ({"state": 6, "head_dim": 8}, ssd_total),
    "gla": ({"heads": 2, "conv": 3}, gla_total),
    "rwkv6": ({"head_dim": 8, "mix_rank": 3, "decay_rank": 5}, gla_total),
    "gated_deltanet": ({"heads": 4, "key_heads": 2, "negative_eigenvalues": True}, delta_total),
    "kda": ({"heads": 2, "expand_k": 0.5}, delta_total),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_carried_state_enters_the_next_by_its_total(kind: str) -> None:
    options, total_of = KINDS[kind]
    spec = SPECS[kind](**options)
    mixer = build_mixer(spec, SIZES, SINGLE_RANK)
    for name, weight in mixer.named_parameters():
        start = starting_value(spec.parameters(SIZES)[name].init, tuple(weight.shape), 1, name)
        weight.data.copy_(start + 0.1 * torch.randn(start.shape))
    mixer, seq = mixer.double(), SeqInfo.stream(2, LENGTH)
    with torch.no_grad():
        before = mixer(torch.randn(LENGTH, 2, 16, dtype=torch.float64), None, seq).state
        x, totals = torch.randn(LENGTH, 2, 16, dtype=torch.float64), []

        def watch(op: Op[Any, Any], inputs: Any) -> None:
            if any(field.startswith("state_") for field in inputs._fields):
                totals.append(inputs)

        with observed(watch):
            after = mixer(x, before, seq).state["ssm"]
        own = mixer(x, {**before, "ssm": torch.zeros_like(before["ssm"])}, seq).state["ssm"]
        (inputs,) = totals
        assert_close(total_of(inputs).of(before["ssm"]) + own, after, rtol=1e-11, atol=1e-12)
        assert not torch.allclose(own, after)
