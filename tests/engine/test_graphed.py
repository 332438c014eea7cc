"""Passes that read a micro-batch from fixed memory give the bits of plain passes; the capture is replaced by a call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtron import device
from hybridtron.architecture.adapters import AdaptersConfig
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch, DeviceNumbers, SeqInfo
from hybridtron.device import GraphMemory
from hybridtron.engine import graphed
from hybridtron.engine.engine import Engine
from hybridtron.engine.graphed import WARM_UP, GraphedPasses
from hybridtron.ops.attention import flex
from hybridtron.ops.dispatch import force
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError
from hybridtron.rehearse.census import tensors_in
from tests.conftest import random_batch, seq_info, small_config, small_run

STEPS = WARM_UP + 1
PACKED = [[[10, 6, 8], [3, 13, 8]], [[24], [1, 23]], [[5] * 4 + [4], [12, 12]]]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """The calls that were captured; a replay calls them again."""
    calls: list[Callable[[], object]] = []

    def captured(call: Callable[[], object], memory: GraphMemory) -> Callable[[], object]:
        calls.append(call)
        return call

    monkeypatch.setattr(graphed, "captured", captured)
    return calls


def graphed_engine(config: Config, groups: Groups) -> Engine:
    engine = Engine(resolve(config)[0], groups)
    engine.graphed = GraphedPasses(engine.wrapped, engine.config.optim.z_loss, groups, engine.device)
    return engine


def micro_batches(isolated: bool) -> list[list[Batch]]:
    """Steps of two micro-batches each; with `isolated`, their documents differ in number and length."""
    steps = []
    for step in range(STEPS):
        torch.manual_seed(step)
        pair = []
        for turn in range(2):
            documents = PACKED[(step + turn) % len(PACKED)] if isolated else None
            pair.append(random_batch(documents=documents).with_boundaries())
        steps.append(pair)
    return steps


def trained(engine: Engine, steps: list[list[Batch]]) -> dict[str, Tensor]:
    """Return each step's loss, token count and gradients, and the weights after the last step."""
    values = {}
    for number, batches in enumerate(steps):
        loss = engine.forward_backward(batches, number)
        values |= {f"loss {number}": loss.total, f"tokens {number}": loss.tokens}
        values |= {f"{name} {number}": value.clone() for name, value in engine.optimizer.gradients()}
        engine.step(1e-3)
    return values | {name: weight.clone() for name, weight in engine.weights()}


@pytest.mark.parametrize("pattern", ["M-W-", "S-F-"])
@pytest.mark.parametrize("isolated", [False, True])
def test_graphed_steps_have_the_bits_of_plain_steps(
    pattern: str, isolated: bool, alone: Groups, captures: list[Callable[[], object]]
) -> None:
    config = small_run(small_config(pattern))
    config.optim.z_loss = 1e-3
    steps = micro_batches(isolated)
    plain = trained(Engine(resolve(config)[0], alone), steps)
    replayed = trained(graphed_engine(config, alone), steps)
    assert plain.keys() == replayed.keys()
    assert [name for name, value in plain.items() if not torch.equal(value, replayed[name])] == []
    assert len(captures) == 1


def test_each_replay_draws_its_own_dropout(alone: Groups, captures: list[Callable[[], object]]) -> None:
    model = dataclasses.replace(small_config("M-W-"), adapters=AdaptersConfig(rank=2, dropout=0.3))
    config = small_run(model)
    steps = micro_batches(True)
    plain = trained(Engine(resolve(config)[0], alone), steps)
    replayed = trained(graphed_engine(config, alone), steps)
    assert [name for name, value in plain.items() if not torch.equal(value, replayed[name])] == []
    assert len(captures) == 1


def test_numbers_on_the_device_are_those_of_the_key() -> None:
    numbers = DeviceNumbers()
    first = numbers.of("a")
    for key in (3, 2**64 - 1):
        numbers.refill(key)
        assert numbers.of("a") is first
        expected = dataclasses.replace(SeqInfo.stream(1, 2), key=key)
        assert [numbers.of(purpose).item() % 2**64 for purpose in "ab"] == [expected.number(p) for p in "ab"]


def test_sizes_beyond_the_padding_get_a_graph_of_their_own(
    alone: Groups, captures: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphed, "FEWEST_BOUNDARIES", 4)
    engine = graphed_engine(small_run(small_config("M-")), alone)
    few = random_batch(documents=[[24], [24]])
    many = random_batch(documents=[[12, 12], [6, 18]])
    for _ in range(WARM_UP + 1):
        engine.forward_backward([few, many])
    assert len(captures) == 2


def test_padding_adds_no_document() -> None:
    seq = seq_info(2, 24, PACKED[0]).with_boundaries()
    padded = seq.padded(64)
    assert padded.boundaries_E is not None
    assert len(padded.boundaries_E) == 64
    assert padded._spans == []
    assert padded.spans() == seq.spans()


def test_failed_capture_names_the_key(alone: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(call: Callable[[], object], memory: GraphMemory) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed, "captured", captured)
    engine = graphed_engine(small_run(small_config("M-")), alone)
    with pytest.raises(ConfigError) as refused:
        engine.forward_backward([random_batch()] * (WARM_UP + 1))
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [("run.cuda_graph", "unavailable")]


def test_graphs_are_refused_on_a_cpu(alone: Groups) -> None:
    engine = Engine(resolve(small_run(small_config("M-")))[0], alone)
    with pytest.raises(ConfigError) as refused:
        engine.use_graphs()
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [("run.cuda_graph", "unavailable")]


def test_graphs_share_the_memory_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture with stand-ins for functions that torch lacks in a build without CUDA."""
    seen: list[tuple[str, object]] = []

    @contextlib.contextmanager
    def graph(graph: object, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        seen.append((f"pool on {stream}", pool))
        yield

    new_graph = SimpleNamespace(replay=lambda: seen.append(("replay", None)), pool=lambda: 7)
    cuda = SimpleNamespace(CUDAGraph=lambda: new_graph, graph=graph)
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "_graph_stream", lambda: "the stream")
    memory = GraphMemory()
    for _ in range(2):
        device.captured(lambda: seen.append(("call", None)), memory)
    device.captured(lambda: None, memory)()
    pool = "pool on the stream"
    assert seen == [(pool, None), ("call", None), (pool, 7), ("call", None), (pool, 7), ("replay", None)]


class Tape(TorchDispatchMode):
    """Records torch's operations on a CPU, and repeats them with the same scalars and memory, as a graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.append((func, args, kwargs or {}, outputs))
        return outputs

    @torch.no_grad()
    def repeat(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            repeated = func(*args, **kwargs)
            for old, new in zip(tensors_in((outputs,)), tensors_in((repeated,)), strict=True):
                if old is not new:
                    old.copy_(new)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tapes that take the place of graphs."""
    made: list[Tape] = []

    def captured(call: Callable[[], object], memory: GraphMemory) -> Callable[[], None]:
        tape = Tape()
        made.append(tape)
        repeats = 0

        def replay() -> None:
            nonlocal repeats
            repeats += 1
            if repeats > 1:
                tape.repeat()
                return
            with tape:  # unlike a graph, a tape computes while it records
                call()

        return replay

    monkeypatch.setattr(graphed, "captured", captured)
    return made


def tape_faults(config: Config, groups: Groups) -> list[str]:
    """Return the names of values that differ between plain steps and steps from a tape, by torch's operations alone."""
    steps = micro_batches(True)
    with force("reference"):
        plain = trained(Engine(resolve(config)[0], groups), steps)
        replayed = trained(graphed_engine(config, groups), steps)
    return [name for name, value in plain.items() if not torch.equal(value, replayed[name])]


def adapted() -> Config:
    return small_run(dataclasses.replace(small_config("M-W-"), adapters=AdaptersConfig(rank=2, dropout=0.3)))


def test_repeated_operations_give_the_bits_of_plain_steps(alone: Groups, tapes: list[Tape]) -> None:
    assert tape_faults(small_run(small_config("M-S-W-F-")), alone) == []
    assert len(tapes) == 1


def test_repeated_operations_draw_dropout_from_the_device(
    alone: Groups, tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tape_faults(adapted(), alone) == []
    monkeypatch.setattr(SeqInfo, "number_for_device", SeqInfo.number)  # a baked scalar
    assert tape_faults(adapted(), alone) != []


def test_a_graph_builds_its_masks_and_shares_none(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(flex, "block_mask", lambda seen, total: built.append(total))

    def read_masks() -> None:
        for _ in range(2):
            flex._mask_of_sizes(2, 8, None, torch.device("cpu"))

    def captured(call: Callable[[], object], memory: GraphMemory) -> Callable[[], None]:
        call()
        return lambda: None

    monkeypatch.setattr(graphed, "captured", captured)
    passes: Any = read_masks
    flex.forget_masks()
    for count in (2, 4):  # each of the other calls and each capture builds its own mask
        read_masks()
        graphed._captured(passes, GraphMemory())
        assert len(built) == count
    flex.forget_masks()
