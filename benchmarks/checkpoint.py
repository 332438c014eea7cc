"""Checkpoints: writing against torch.save and megatron-core's own format, the cost of asynchronous writing, and
loading.

All forms end on disk: peers are flushed too. Times are wall-clock, as a save waits for the disk.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import CheckpointConfig
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.problems import Unusable
from hybridtron.proving.measuring import MIB, BenchReport, Seconds, times
from hybridtron.proving.steps import Steps, load_checked, one_process

AFTER = 5  # timed steps after the start of an asynchronous save


def checkpoint(report: BenchReport) -> None:
    if importlib.util.find_spec("psutil") is None:
        raise Unusable(
            "megatron-core's own checkpoint never returns without psutil: pip install psutil", code="not-installed"
        )
    width = report.pick(full=1024, quick=64)
    config = load_checked(["recipe=laptop", f"model.width={width}", "checkpoint.keep=1"])
    tokens_BT = torch.randint(config.model.vocab_size, (1, 65))
    mask_BL = torch.ones(1, 64, dtype=torch.bool)
    batch = Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, SeqInfo.stream(1, 64))
    with tempfile.TemporaryDirectory() as scratch, one_process(config) as groups:
        step = Steps(config, groups, [batch])
        step()
        size = sum(block.data.nbytes for block in blocks_of(step.engine).values())
        save_speed(step.engine, Path(scratch), report)
        asynchronous(step, Path(scratch), report)
        load_speed(step.engine, Path(scratch), report)
    report.notes += [
        "the first asynchronous save makes the memory for its copies and is not counted",
        f"{size / MIB:,.0f} MiB: weights and two moments in fp32, one process; the wall's clock, local disk",
    ]


def blocks_of(engine: Engine) -> dict[str, Any]:
    return {block.key: block for of_file in engine.blocks().values() for block in of_file}


def wall_seconds(run: Callable[[], object]) -> Seconds:
    start = time.perf_counter()
    run()
    return Seconds(time.perf_counter() - start)


def new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def saver_of(engine: Engine, run_dir: Path, asynchronous: bool = False) -> Saver:
    (new(run_dir) / "tokenizer.json").write_text("{}")
    engine.config = replace(engine.config, checkpoint=CheckpointConfig(asynchronous=asynchronous, keep=1))
    return Saver(RunPlan.of(engine.config), run_dir, engine.groups)


def save(engine: Engine, saver: Saver, step: int = 1) -> Seconds:
    """Save a checkpoint and return the seconds until the call returns.

    It first waits for an earlier save to finish.
    """
    saver.settle()
    return wall_seconds(lambda: saver.save(engine, meta_of(engine, step, {}), saver.run_dir / "tokenizer.json"))


def save_speed(engine: Engine, scratch: Path, report: BenchReport) -> None:
    def torch_save() -> Seconds:
        tensors = {key: block.data for key, block in blocks_of(engine).items()}
        with (new(scratch / "torch") / "tensors.pt").open("wb") as file:
            return wall_seconds(lambda: (torch.save(tensors, file), file.flush(), os.fsync(file.fileno())))

    def megatron() -> Seconds:
        folder = str(new(scratch / "megatron"))
        state = blocks_of(engine)
        return wall_seconds(lambda: dist_checkpointing.save(state, folder))

    forms = {"ours": lambda: save(engine, saver_of(engine, scratch / "ours")), "torch.save with fsync": torch_save}
    if not report.quick:  # it forks a process with threads, which can hang: not for a test
        forms["megatron-core's own"] = megatron
    timings = report.timed(forms)
    cells = [(name, times(timings.ratio(name, "ours")), f"{timing.spread:.0%}") for name, timing in timings.items()]
    report.table("writing, digested and flushed", ("form", "time over ours", "spread"), cells)
    for name, limit in zip(list(forms)[1:], (1.5, 4.0), strict=False):
        report.at_least(f"GiB/s over {name}", limit, timings.ratio(name, "ours"))


def asynchronous(step: Steps, scratch: Path, report: BenchReport) -> None:
    """Measure the time that an asynchronous save adds to its own step, and to the steps after it."""
    engine = step.engine
    slowed = list[float]()
    both = list[float]()
    saver = saver_of(engine, scratch / "later", asynchronous=True)
    numbers = itertools.count(1)
    save(engine, saver, next(numbers))  # the first save allocates the memory for the copies

    def some_steps() -> Seconds:
        return wall_seconds(lambda: [step() for _ in range(AFTER)])

    def in_the_background() -> Seconds:
        engine.config = saver.config
        blocked = save(engine, saver, next(numbers))
        slowed.append(some_steps())
        both.append(blocked + slowed[-1])
        saver.settle()
        return blocked

    forms = {
        "synchronous": lambda: save(engine, saver_of(engine, scratch / "now")),
        "asynchronous": in_the_background,
        "steps alone": some_steps,
    }
    timings = report.timed(forms)
    share = timings.ratio("asynchronous", "synchronous")
    title = f"asynchronous: the step is held up, and the {AFTER} steps after it"
    header = ("held up, over a synchronous save", f"the {AFTER} steps after, over {AFTER} steps alone", "both together")
    alone = timings["steps alone"].fastest
    together = (min(both) - alone) / timings["synchronous"].fastest
    report.table(title, header, [(f"{share:.1%}", times(min(slowed) / alone), f"{together:.1%} of a synchronous save")])
    report.notes.append("the first of the steps after waits until weights and moments are copied and seen to be finite")
    report.at_most("a step held up, over a synchronous save", 0.1, share)


def load_speed(engine: Engine, scratch: Path, report: BenchReport) -> None:
    """Measure loading by one process: in the layout of the save, and from blocks cut as four tensor-parallel ranks
    write them.
    """
    uncut = engine.blocks
    save(engine, saver_of(engine, scratch / "same"))
    engine.blocks = lambda: {name: in_quarters(of_file) for name, of_file in uncut().items()}  # type: ignore[method-assign]
    save(engine, saver_of(engine, scratch / "cut"))
    engine.blocks = uncut  # type: ignore[method-assign]

    def read(run_dir: Path) -> None:
        checkpoint = Checkpoint.open(folder_of(run_dir, 1))
        for of_file in engine.blocks().values():
            checkpoint.fill(of_file)

    forms = {
        "same layout": lambda: wall_seconds(lambda: read(scratch / "same")),
        "another layout": lambda: wall_seconds(lambda: read(scratch / "cut")),
    }
    timings = report.timed(forms)
    pairs = [("another layout", "same layout")]
    report.ratios("loading what another layout wrote", "of", {"weights and moments": timings}, pairs, {})
    report.at_most("loading with a change of layout, over without", 1.5, timings.ratio(*pairs[0]))


def in_quarters(blocks: list) -> list:
    """Cut each block in four along its last axis; blocks with another length stay as they are."""
    cut = []
    for block in blocks:
        length = block.local_shape[-1] if block.local_shape else 0
        if length % 4:
            cut.append(block)
            continue
        for start in range(0, length, length // 4):
            data = block.data.narrow(-1, start, length // 4)
            offset = (*block.global_offset[:-1], block.global_offset[-1] + start)
            cut.append(replace(block, data=data, local_shape=tuple(data.shape), global_offset=offset))
    return cut
