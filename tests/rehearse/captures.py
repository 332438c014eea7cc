"""Rehearses the passes of two micro-batches with faults planted that prevent a CUDA graph: JSON of lines by fault.

`python -m tests.rehearse.captures`; the first entries have none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

process = RehearsalProcess(GPUS["h100"])

import torch  # noqa: E402

from hybridtron.engine import graphed  # noqa: E402
from hybridtron.engine.graphed import StaticPasses  # noqa: E402
from hybridtron.mixers.swiglu import SwiGLU  # noqa: E402
from hybridtron.ops.dispatch import force_on_all_threads  # noqa: E402
from hybridtron.rehearse import capture  # noqa: E402
from hybridtron.rehearse.capture import CaptureProof, prove_capture  # noqa: E402

TINY = ("precision=bf16", "phases.0.micro_batch=2", "data.documents=isolate")
SAMBA = ["recipe=laptop", *TINY]
MAMBA2 = ["recipe=mamba2_laptop", *TINY]
ADAPTED = [*SAMBA, "model.adapters={rank: 4, dropout: 0.1}", "model.pattern=M-W-"]
forward: Callable[..., Any] = SwiGLU.forward


@contextmanager
def before_each_mlp(plant: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Pass each MLP's input and its batch's `SeqInfo` through the plant, inside the context."""

    def planted(self: Any, x_LBD: Any, state: Any, seq: Any) -> Any:
        return forward(self, plant(x_LBD, seq), state, seq)

    with patch.object(SwiGLU, "forward", planted):
        yield


def waited(x: Any, seq: Any) -> Any:
    x.sum().item()
    return x


def multiplied_by_the_key(x: Any, seq: Any) -> Any:
    return x * float(seq.key)


def copied_from_the_host(x: Any, seq: Any) -> Any:
    return x + torch.zeros(x.shape[-1]).to(x.device, non_blocking=True)


def launched_for_one_key(x: Any, seq: Any) -> Any:
    return x.clone() if seq.key == capture.DOCUMENTS[0] else x


@contextmanager
def without_fixed_memory() -> Iterator[None]:
    """Let the passes read each micro-batch where it is."""

    def fill(self: StaticPasses, batch: Any) -> None:
        self.batch = batch

    with patch.object(StaticPasses, "fill", fill):
        yield


@contextmanager
def without_padding() -> Iterator[None]:
    """Let the passes read each micro-batch where it is, with as many boundaries as its documents have."""

    def unpadded(batch: Any) -> Any:
        return dataclasses.replace(batch, seq=dataclasses.replace(batch.seq, _spans=[]))

    with (
        without_fixed_memory(),
        patch.object(graphed, "with_padded_boundaries", unpadded),
        patch.object(capture, "with_padded_boundaries", unpadded),
    ):
        yield


@contextmanager
def with_numbers_of_the_host() -> Iterator[None]:
    """Let dropout's numbers be scalars, as in passes outside of a graph."""
    from hybridtron.data.batch import SeqInfo

    with patch.object(SeqInfo, "number_for_device", SeqInfo.number):
        yield


PLANTS: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "samba": (SAMBA, lambda: before_each_mlp(lambda x, _: x)),
    "mamba2": (MAMBA2, lambda: before_each_mlp(lambda x, _: x)),
    "flex": (SAMBA, lambda: force_on_all_threads({"attention": "flex"})),
    "dropout": (ADAPTED, lambda: before_each_mlp(lambda x, _: x)),
    "a host wait": (SAMBA, lambda: before_each_mlp(waited)),
    "a baked scalar": (SAMBA, lambda: before_each_mlp(multiplied_by_the_key)),
    "a copy from the host": (SAMBA, lambda: before_each_mlp(copied_from_the_host)),
    "another kernel": (SAMBA, lambda: before_each_mlp(launched_for_one_key)),
    "other memory": (SAMBA, without_fixed_memory),
    "other boundaries": (SAMBA, without_padding),
    "numbers of the host": (ADAPTED, with_numbers_of_the_host),
}


def proof(settings: list[str]) -> CaptureProof:
    return prove_capture(largest_phase(RunPlan.of(load(settings))), process.collectives)


def shown(proven: CaptureProof) -> dict[str, Any]:
    return {
        "launches": proven.launches,
        "waits": [f"{wait.place.partition(':')[0]} {wait.kind}" for wait in proven.waits],
        "copies": [f"{launch.place.partition(':')[0]} {launch.name}" for launch in proven.copies],
        "differences": [f"{difference}"[:2000] for difference in proven.differences],
    }


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for name, (settings, plant) in PLANTS.items():
        with plant():
            results[name] = shown(proof(settings))
    print(json.dumps(results))
