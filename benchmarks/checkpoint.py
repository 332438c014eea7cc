"""Checkpoints: writing against torch.save and against megatron-core's own, what asynchronous writing costs, loading.

Everything ends on disk: peers are flushed too. Times are the wall's, as disks are waited for.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.schema import CheckpointConfig, ParallelConfig
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.parallel import groups
from hybridtron.proving.measuring import (
    BenchReport,
    BenchSettings,
    BenchTable,
    Contender,
    Goal,
    interleaved,
    times,
)

AFTER = 5  # steps after the start of an asynchronous save whose time is looked at
Save = Callable[[], float]


def bench(settings: BenchSettings) -> BenchReport:
    width = 64 if settings.quick else 1024
    config = load(["recipe=laptop", f"model.width={width}", "checkpoint.keep=1"])
    with tempfile.TemporaryDirectory() as scratch, megatron_context():
        engine = Engine(config, groups.start(ParallelConfig(), launch=ProcessLaunch(0, 1)))
        train(engine)
        size = sum(b.data.numel() * b.data.element_size() for of_file in engine.blocks().values() for b in of_file)
        saving, goals = save_speed(engine, Path(scratch), settings)
        blocking, more = asynchronous(engine, Path(scratch), settings)
        loading, last = load_speed(engine, Path(scratch), settings)
        groups.stop()
    notes = ["the first asynchronous save makes the memory for its copies and is not counted"]
    notes += [f"{size / 2**20:,.0f} MiB: weights and two moments in fp32, one process; the wall's clock, local disk"]
    return BenchReport("Checkpoints", "cpu", [saving, blocking, loading], [*goals, *more, *last], notes)


def train(engine: Engine) -> float:
    """One small step, and the seconds that it took."""
    start = time.perf_counter()
    tokens_BT = torch.randint(0, engine.config.model.vocab_size, (1, 65))
    mask_BL = torch.ones(1, 64, dtype=torch.bool)
    engine.forward_backward([Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, SeqInfo.stream(1, 64))])
    engine.step(1e-4)
    return time.perf_counter() - start


def saver_of(engine: Engine, run_dir: Path, asynchronous: bool = False) -> Saver:
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "tokenizer.json").write_text("{}")
    engine.config = replace(engine.config, checkpoint=CheckpointConfig(asynchronous=asynchronous, keep=1))
    return Saver(engine.config, run_dir, engine.groups)


def save(engine: Engine, saver: Saver, step: int = 1) -> float:
    """Seconds until the call returns."""
    saver.settle()
    start = time.perf_counter()
    saver.save(engine, meta_of(engine, step, {}), saver.run_dir / "tokenizer.json")
    return time.perf_counter() - start


def save_speed(engine: Engine, scratch: Path, settings: BenchSettings) -> tuple[BenchTable, list[Goal]]:
    def ours() -> float:
        return save(engine, saver_of(engine, scratch / "ours"))

    def torch_save() -> float:
        tensors = {b.key: b.data for of_file in engine.blocks().values() for b in of_file}
        path = scratch / "torch.pt"
        path.unlink(missing_ok=True)
        start = time.perf_counter()
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start

    def megatron() -> float:
        folder = scratch / "megatron"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        state = {b.key: b for of_file in engine.blocks().values() for b in of_file}
        start = time.perf_counter()
        dist_checkpointing.save(state, str(folder))
        return time.perf_counter() - start

    forms = {"ours": ours, "torch.save, flushed": torch_save}
    if not settings.quick:  # it forks from a process that has threads, which can hang: not for a test
        forms["megatron-core's own, as it comes"] = megatron
    timing = interleaved({name: Contender(run, settings.repetitions) for name, run in forms.items()})
    fastest = timing["ours"].fastest
    cells = [(name, times(t.fastest / fastest), f"{t.spread:.0%}") for name, t in timing.items()]
    rows = BenchTable("writing, digested and flushed", ("form", "time over ours", "spread"), cells)
    limits = {"GiB/s over torch.save's with fsync": 0.9, "GiB/s over megatron-core's own": 2.0}
    ratios = [timing[name].fastest / fastest for name in list(forms)[1:]]
    return rows, [Goal.at_least(*limit, ratio) for limit, ratio in zip(limits.items(), ratios, strict=False)]


def asynchronous(engine: Engine, scratch: Path, settings: BenchSettings) -> tuple[BenchTable, list[Goal]]:
    """How long a save holds up its step, and how long the steps after it take."""
    slowed: list[float] = []
    saver = saver_of(engine, scratch / "later", asynchronous=True)
    steps = itertools.count(1)
    save(engine, saver, next(steps))  # the first one makes the memory for the copies

    def in_the_background() -> float:
        engine.config = replace(engine.config, checkpoint=CheckpointConfig(asynchronous=True, keep=1))
        blocked = save(engine, saver, next(steps))
        slowed.append(sum(train(engine) for _ in range(AFTER)))
        saver.settle()
        return blocked

    forms = {
        "synchronous": lambda: save(engine, saver_of(engine, scratch / "now")),
        "asynchronous": in_the_background,
        "steps alone": lambda: sum(train(engine) for _ in range(AFTER)),
    }
    timing = interleaved({name: Contender(run, settings.repetitions) for name, run in forms.items()})
    share = timing["asynchronous"].fastest / timing["synchronous"].fastest
    slower = min(slowed) / timing["steps alone"].fastest
    cells = [(f"{share:.1%}", times(slower))]
    title = f"asynchronous: the step is held up, and the {AFTER} steps after it"
    header = ("held up, over a synchronous save", f"the {AFTER} steps after, over {AFTER} steps alone")
    return BenchTable(title, header, cells), [Goal.at_most("a step held up, over a synchronous save", 0.1, share)]


def load_speed(engine: Engine, scratch: Path, settings: BenchSettings) -> tuple[BenchTable, list[Goal]]:
    """All bytes by one process: as they were written, and written by four tensor-parallel ranks' worth of pieces."""
    same, cut = scratch / "same", scratch / "cut"
    save(engine, saver_of(engine, same))
    saver = saver_of(engine, cut)
    whole = engine.blocks
    engine.blocks = lambda: {name: in_quarters(of_file) for name, of_file in whole().items()}  # type: ignore[method-assign]
    save(engine, saver)
    engine.blocks = whole  # type: ignore[method-assign]

    def read(run_dir: Path) -> float:
        start = time.perf_counter()
        checkpoint = Checkpoint.open(folder_of(run_dir, 1))
        for of_file in engine.blocks().values():
            checkpoint.fill(of_file)
        return time.perf_counter() - start

    forms = {"same layout": Contender(lambda: read(same), settings.repetitions)}
    forms["another layout"] = Contender(lambda: read(cut), settings.repetitions)
    timing = interleaved(forms)
    ratio = timing["another layout"].fastest / timing["same layout"].fastest
    cells = [(times(ratio), *(f"{timing[name].spread:.0%}" for name in forms))]
    rows = BenchTable(
        "loading what another layout wrote", ("over the same layout", "spread", "spread of the same"), cells
    )
    return rows, [Goal.at_most("loading with a change of layout, over without", 1.5, ratio)]


def in_quarters(blocks: list) -> list:
    """Each block cut in four along its last axis, where that is long enough."""
    cut = []
    for one in blocks:
        length = one.local_shape[-1] if one.local_shape else 0
        if length % 4:
            cut.append(one)
            continue
        for start in range(0, length, length // 4):
            data = one.data.narrow(-1, start, length // 4)
            offset = (*one.global_offset[:-1], one.global_offset[-1] + start)
            cut.append(replace(one, data=data, local_shape=tuple(data.shape), global_offset=offset))
    return cut
