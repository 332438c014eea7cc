"""A folder's loss masks in every layout: the losses of one process, and the learned tokens counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import (
    Config,
    DataConfig,
    OptimConfig,
    Order,
    ParallelConfig,
    PhaseConfig,
    RunConfig,
    Source,
    StateMode,
    StatesConfig,
)
from hybridtron.data.loader import build_loader
from hybridtron.data.manifest import SPLITS
from hybridtron.data.prepare.writer import write_folder
from hybridtron.engine.engine import Engine
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.parallel.test_states import LAYERS, LAYOUTS, ROW_LAYOUTS

STEPS = 3
VOCABULARY = 512
EOS = 0
LR = 1e-2


def learned(tokens: np.ndarray) -> np.ndarray:
    """Long parts of each document are learned or not, so that some micro-batches of one row have nothing learned."""
    return tokens // 40 % 3 == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masked") / "data"
    documents = [np.arange(first, first + 25 + first % 97) for first in range(1, 400, 31)]
    splits = {split: {"text": documents} for split in SPLITS}
    masks = {split: {"text": [np.append(learned(document), 0) for document in documents]} for split in SPLITS}
    write_folder(path, splits, "{}", VOCABULARY, EOS, {}, masks=masks)
    return path


def config_of(folder: Path, parallel: ParallelConfig) -> Config:
    phase = PhaseConfig(tokens="1M", seq_len=16, global_batch=8, micro_batch=1, lr=LR)
    return Config(
        model=ModelConfig(width=32, vocab_size=VOCABULARY, pattern="M-SXWM", layers=LAYERS),
        data=DataConfig(Source.folder, str(folder), cache=str(folder.parent / "cache"), epochs=None, order=Order.lanes),
        optim=OptimConfig(eps=1e-3),  # a coarse one, as rounding may turn the sign of a tiny gradient
        parallel=parallel,
        states=StatesConfig(mode=StateMode.tbtt),
        run=RunConfig(name="test", dir="unused", eval_lengths=[1]),
        phases=[phase],
    )


def trained(seat: Seat, config: Config) -> list[tuple[float, int, int, int]]:
    """Return for each step its loss, the counted tokens, this rank's count by hand, and its batches without any."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        (phase,) = resolve(config)
        loader = build_loader(phase, groups.data.rank, groups.data.size, groups.shard_index)
        engine.start_phase(engine.phase, loader.lanes)
        step_results = []
        for step, batches in enumerate(loader.iterate(0, STEPS)):
            pairs = [(batch.tokens_BL.numpy(), batch.labels_BL.numpy()) for batch in batches]
            counts = [int((learned(labels) & (labels != EOS) & (tokens != EOS)).sum()) for tokens, labels in pairs]
            loss = engine.forward_backward(batches, step)
            engine.step(LR)
            step_results.append((loss.mean.item(), engine.learned, sum(counts), counts.count(0)))
        return step_results


@pytest.mark.slow
@pytest.mark.gloo
def test_every_layout_counts_the_learned_tokens(folder: Path) -> None:
    (expected,) = run_distributed(trained, 1, config_of(folder, ParallelConfig()))
    assert all(counted == by_hand for _, counted, by_hand, _ in expected)
    assert any(without for *_, without in expected)
    for layout in ("tp2-sp", "pp2-virtual2", "dp2", "cp2", "cp2-pp2"):
        parallel, processes = (LAYOUTS | ROW_LAYOUTS)[layout]
        ranks = run_distributed(trained, processes, config_of(folder, parallel))
        for of_rank in ranks:
            assert [loss for loss, *_ in of_rank] == pytest.approx([loss for loss, *_ in expected], rel=1e-5), layout
            assert [step[1] for step in of_rank] == [step[1] for step in expected], layout
        if layout in ("dp2", "cp2"):  # each has its own rows, or its own part of every row
            assert [sum(step[2] for step in steps) for steps in zip(*ranks, strict=True)] == [s[1] for s in expected]
