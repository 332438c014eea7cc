"""Fixtures and helpers that many tests share: small models in float64 or fp32, and random batches for them."""

from __future__ import annotations

import gc
import signal
import zlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.choices import FP8_MULTIPLES, Precision
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.schema import (
    Config,
    DataConfig,
    OptimConfig,
    ParallelConfig,
    PhaseConfig,
    PrecisionConfig,
    RunConfig,
)
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel import groups as process_groups
from hybridtron.parallel.groups import Groups
from hybridtron.train import preempt

SMALL_LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 8, "groups": 2},
    "W": {"kind": "attention", "heads": 4, "kv_heads": 2, "window": 8},
    "F": {"kind": "attention", "heads": 2},
    "-": {"kind": "swiglu", "hidden": 48},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="I/N", help="every N-th test by a digest of its name: slice I of N")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a pytest under which xdist runs every test for itself, on twice as many processes as there are cores.

    The garbage collector rests until the tests are collected: imports and tests make little garbage and many objects,
    through which it would look again and again (a quarter of the time).
    """
    gc.disable()
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError("pytest-xdist does not group tests under this pytest: install a version below 9.2")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one slice of the tests; each test is in one slice, regardless of the other tests.

    With two workers, one runs the tests that start processes, first because they take longest, while the other runs the
    rest. The tests in a file share their fixtures, so one worker runs them.
    """
    items.sort(key=lambda item: item.get_closest_marker("gloo") is None)
    for item in items:
        group = item.nodeid.partition("::")[0]
        if item.get_closest_marker("gloo"):
            group = "gloo"
        item.add_marker(pytest.mark.xdist_group(group))
    if chosen := config.getoption("--slice"):
        index, count = map(int, chosen.split("/"))
        items[:] = [item for item in items if zlib.crc32(_sliced_by(item).encode()) % count == index - 1]


def _sliced_by(item: pytest.Item) -> str:
    """Return the text whose digest decides the test's slice: its file's if the file's tests share a long fixture."""
    if item.get_closest_marker("one_slice"):
        return item.nodeid.partition("::")[0]
    return item.nodeid


def pytest_collection_finish() -> None:
    """A run collects garbage between its phases: half a second, where it looks through all that is imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _signals_as_they_come() -> None:
    """Reset signal handlers for child processes, in case the parent ignores some signals, as in `nohup make test &`."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, preempt.SIGNALS)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def small_config(pattern: str = "M-W-F", tie_embeddings: bool = True) -> ModelConfig:
    return ModelConfig(width=32, vocab_size=61, pattern=pattern, layers=SMALL_LAYERS, tie_embeddings=tie_embeddings)


def small_model(
    pattern: str = "M-W-F", dtype: torch.dtype = torch.float32, tie_embeddings: bool = True
) -> LanguageModel:
    model = LanguageModel(architecture(small_config(pattern, tie_embeddings)))
    initialise(model, seed=1)
    return model.to(dtype)


def random_batch(rows: int = 2, length: int = 24, vocab: int = 61, documents: list[list[int]] | None = None) -> Batch:
    """Random tokens; `documents` gives the lengths of each row's documents."""
    tokens = torch.randint(vocab, (rows, length + 1))
    mask = torch.rand(rows, length) < 0.9
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, seq_info(rows, length, documents))


def seq_info(rows: int, length: int, documents: list[list[int]] | None = None) -> SeqInfo:
    if documents is None:
        return SeqInfo.stream(rows, length)
    index = [[i for i, size in enumerate(row) for _ in range(size)] for row in documents]
    positions = [[p for size in row for p in range(size)] for row in documents]
    return SeqInfo(torch.tensor(positions), torch.tensor(index, dtype=torch.int32))


def part_of(seq: SeqInfo, first: int, last: int) -> SeqInfo:
    positions_BL = seq.positions_BL[:, first:last]
    if seq.documents_BL is None:
        return SeqInfo(positions_BL, None, seq.key)
    return SeqInfo(positions_BL, seq.documents_BL[:, first:last], seq.key)


def stored_weights(model: LanguageModel) -> dict[str, Tensor]:
    """A model's weights as a checkpoint stores them, fused ones by their parts."""
    weights = {}
    for name, weight in model.named_parameters():
        keys = model.table[name].stored(name)
        axis = model.table[name].parts_axis
        sizes = [shape[axis] for shape in keys.values()]
        weights |= dict(zip(keys, weight.detach().split(sizes, axis), strict=True))
    return weights


def small_run(model: ModelConfig | None = None, optim: OptimConfig | None = None, precision: str = "fp32") -> Config:
    """A configuration around a small model, for an engine that is fed by hand."""
    return Config(
        model=model or small_config(),
        data=DataConfig(path="unused"),
        optim=optim or OptimConfig(),
        precision=PrecisionConfig(Precision(precision), emulate=precision in FP8_MULTIPLES, history=4),
        run=RunConfig(name="test", dir="unused"),
        phases=[PhaseConfig(tokens="1M", seq_len=24, global_batch=4, lr=1e-3)],
    )


def serving(engine: Engine) -> Callable[[Checkpoint], tuple[Engine, None]]:
    """Return the function that `restore_newest` takes: it uses one engine for every checkpoint."""
    return lambda _: (engine, None)


@pytest.fixture
def alone() -> Iterator[Groups]:
    """The groups of a single process, in the context that megatron-core needs off CUDA."""
    with megatron_context():
        yield process_groups.start(ParallelConfig(), launch=ProcessLaunch(0, 1))
        process_groups.stop()
