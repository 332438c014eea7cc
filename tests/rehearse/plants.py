"""Rehearses a small recipe with faults planted into the code that trains, in one process: JSON of budgets by fault.

`python -m tests.rehearse.plants`; the first entry has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.memory import largest_phase, plan
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

process = RehearsalProcess(GPUS["h100"])

from hybridtron.mixers.swiglu import SwiGLU  # noqa: E402
from hybridtron.ops.swiglu import swiglu  # noqa: E402
from hybridtron.ops.swiglu.recomputed import RECOMPUTED  # noqa: E402
from hybridtron.rehearse.budget import budget_of  # noqa: E402
from hybridtron.rehearse.report import as_json  # noqa: E402

ALONE = ["recipe=laptop", "precision=bf16", "phases.0.micro_batch=2"]
TWO = [*ALONE, "parallel=data"]
WIDE = [*ALONE, "phases.0.micro_batch=8"]  # most of its memory is activations
forward: Callable[..., Any] = SwiGLU.forward
held: list[Any] = []


@contextmanager
def before_each_mlp(plant: Callable[[Any], Any]) -> Iterator[None]:
    """Pass each MLP's input through the plant, inside the context."""
    SwiGLU.forward = lambda self, x_LBD, state, seq: forward(self, plant(x_LBD), state, seq)  # type: ignore[method-assign]
    try:
        yield
    finally:
        SwiGLU.forward = forward  # type: ignore[method-assign]
        held.clear()


@contextmanager
def without_the_kernel() -> Iterator[None]:
    known = swiglu.implementations
    swiglu.implementations = (RECOMPUTED,)
    try:
        yield
    finally:
        swiglu.implementations = known


def waited(x: Any) -> Any:
    x.sum().item()
    return x


def kept(x: Any) -> Any:
    held.append(x.clone())
    return x


PLANTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: before_each_mlp(lambda x: x),
    "a host wait": lambda: before_each_mlp(waited),
    "a copy": lambda: before_each_mlp(lambda x: x.clone()),
    "a larger activation": lambda: before_each_mlp(kept),
    "an upcast": lambda: before_each_mlp(lambda x: x.float().to(x.dtype)),
    "a lost kernel": without_the_kernel,
}


def rehearsed(settings: list[str], gpus: int) -> dict[str, Any]:
    return as_json(process.rehearse(largest_phase(RunPlan.of(load(settings))), gpus, 0, compiles=False))


def planned_without(forgotten: type[MixerSpec] | None) -> int:
    """Return planned bytes without one kind of sub-layer's activations."""
    with ExitStack() as stack:
        if forgotten is not None:
            stack.enter_context(patch.object(forgotten, "activation_values", lambda self, sizes: 0))
        return plan(largest_phase(RunPlan.of(load(WIDE))), 1).ranks[0].memory.total


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for name, plant in PLANTS.items():
        with plant():
            results[name] = budget_of(rehearsed(ALONE, 1))
    not_overlapped = [*TWO, "parallel.overlap_grad_reduce=false", "parallel.overlap_param_gather=false"]
    results["hidden"] = budget_of(rehearsed(TWO, 2))
    results["not hidden"] = budget_of(rehearsed(not_overlapped, 2))
    results["wide"] = budget_of(rehearsed(WIDE, 1))
    results["planned"] = [planned_without(forgotten) for forgotten in (None, MambaSpec, SwiGLUSpec)]
    print(json.dumps(results))
