"""A mixer hands on the state that its recurrence's transition predicts."""

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
from hybridtron.ops.transition import StateTransition, delta_transition, gla_transition, scan_transition, ssd_transition
from hybridtron.parallel.linear import SINGLE_RANK

SIZES = ModelSizes(width=16, num_sublayers=4)
LENGTH = 21
KINDS: dict[str, tuple[dict[str, Any], Callable[[Any], StateTransition]]] = {
    "mamba": ({"state": 4}, scan_transition),
    "mamba2": ({"state": 6, "head_dim": 8}, ssd_transition),
    "gla": ({"heads": 2, "conv": 3}, gla_transition),
    "rwkv6": ({"head_dim": 8, "mix_rank": 3, "decay_rank": 5}, gla_transition),
    "gated_deltanet": ({"heads": 4, "key_heads": 2, "negative_eigenvalues": True}, delta_transition),
    "kda": ({"heads": 2, "expand_k": 0.5}, delta_transition),
}


@pytest.mark.parametrize("kind", KINDS)
def test_carried_state_enters_the_next_by_its_transition(kind: str) -> None:
    options, transition_of = KINDS[kind]
    spec = SPECS[kind](**options)
    mixer = build_mixer(spec, SIZES, SINGLE_RANK)
    for name, weight in mixer.named_parameters():
        start = starting_value(spec.parameters(SIZES)[name].init, tuple(weight.shape), 1, name)
        weight.data.copy_(start + 0.1 * torch.randn(start.shape))
    mixer = mixer.double()
    seq = SeqInfo.stream(2, LENGTH)
    with torch.no_grad():
        before = mixer(torch.randn(LENGTH, 2, 16, dtype=torch.float64), None, seq).state
        x = torch.randn(LENGTH, 2, 16, dtype=torch.float64)
        calls = []

        def watch(op: Op[Any, Any], inputs: Any) -> None:
            if any(field.startswith("state_") for field in inputs._fields):
                calls.append(inputs)

        with observed(watch):
            after = mixer(x, before, seq).state["ssm"]
        from_zero = mixer(x, {**before, "ssm": torch.zeros_like(before["ssm"])}, seq).state["ssm"]
        (inputs,) = calls
        assert_close(transition_of(inputs).apply(before["ssm"]) + from_zero, after, rtol=1e-11, atol=1e-12)
        assert not torch.allclose(from_zero, after)
