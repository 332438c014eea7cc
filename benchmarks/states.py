"""What carried states cost: the time of a step in each mode over one from zero, and the memory of long TBTT steps.

Every mode takes the same steps of the whole engine over the same rows, which continue where the rows before them ended.
They are joined text in all modes, as that is what passed states and noise want; so the ratio is the cost of handing
out, taking over and checking states, of drawing noise, and of a scan that starts from a state.

Peak memory is that of a fresh process per form and length: the highest resident set during a step, less what was
resident before it, when weights, optimizer and tokens existed; on CUDA, what torch allocated. Such a process
runs `probe`. Forms: `detached` chunks, and `through` time with recompute.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from hybridtron.config.check import require
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import compute_device, megatron_context, peak_memory_gib
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups, start, stop
from hybridtron.proving.measuring import (
    BenchReport,
    BenchSettings,
    BenchTable,
    Contender,
    Goal,
    Timing,
    interleaved,
    times,
)

from .scan import in_fresh_process, resident

MIB = 2**20
CACHED_BELOW = 2**16  # bytes; larger blocks are returned to the system when they are freed
MODES = ("zero", "passing", "tbtt", "fitted", "random")
FROM_ZERO = ("zero", "passing", "tbtt", "fitted")  # in their first step
MODELS = {
    "Samba": ("model.pattern=(M-W-)*2",),
    "Mamba-2": (
        "model.pattern=S*4",
        "model.width=256",
        "model.layers.S={kind: mamba2, state: 128, head_dim: 64}",
    ),
}
TINY = ("model.width=64", "model.vocab_size=320", "model.layers.W.window=16")
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Sizes:
    """What is measured: rows of a step and their length; then the chunk and the lengths of a TBTT step."""

    seq_len: int
    rows: int
    micro_batch: int
    chunk: int
    lengths: tuple[int, ...]
    forms: tuple[str, ...]
    models: tuple[str, ...]
    overrides: tuple[str, ...] = ()


FULL = Sizes(1024, 2, 1, 1024, (4096, 8192, 16384, 32768), ("detached", "through"), tuple(MODELS))
QUICK = Sizes(32, 2, 1, 32, (64, 128), ("detached",), ("Mamba-2",), TINY)


def config_of(model: str, sizes: Sizes, *arguments: str) -> Config:
    """A laptop's model in rows of this length."""
    phase = (f"seq_len={sizes.seq_len}", f"global_batch={sizes.rows}", f"micro_batch={sizes.micro_batch}")
    settings = [*(f"phases.0.{setting}" for setting in phase), "run.eval_lengths=[1]", "run.eval_tokens=1M"]
    config = load(["recipe=laptop", *settings, *MODELS[model], *sizes.overrides, *arguments])
    require(config)
    return config


def rows_of(config: Config, rows: int, length: int) -> Batch:
    """Random text that continues from row to row."""
    tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    mask, continues = torch.ones(rows, length, dtype=torch.bool), torch.ones(rows, dtype=torch.bool)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, SeqInfo.stream(rows, length), continues)


class Steps:
    """Takes the steps of one phase, each over the same micro-batches."""

    def __init__(self, config: Config, groups: Groups, batches: list[Batch]) -> None:
        self.batches, self.engine, self.taken = batches, Engine(config, groups), 0
        self.engine.start_phase(0, range(resolve(config)[0].lanes))
        self.losses: list[float] = []

    def __call__(self) -> None:
        with megatron_context():
            self.losses.append(self.engine.forward_backward(self.batches, self.taken).mean.item())
            self.engine.step(LEARNING_RATE)
        self.taken += 1


def bench(settings: BenchSettings) -> BenchReport:
    """Both tables, and the goals of the two."""
    sizes, on_cpu = QUICK if settings.quick else FULL, compute_device().type == "cpu"
    time_cells, time_goals, console = [], [], []
    for model in sizes.models:
        measured = modes(model, sizes, settings)
        zero = measured["zero"].fastest
        ratios = {mode: timing.fastest / zero for mode, timing in measured.items() if mode != "zero"}
        spreads = " / ".join(f"+{timing.spread:.0%}" for timing in measured.values())
        time_cells.append((model, *map(times, ratios.values()), spreads))
        time_goals.append(Goal.at_most(f"step with passed states / from zero, {model}", 1.05, ratios["passing"]))
        console += [f"{model}, {mode}: {timing}" for mode, timing in measured.items()]
    peaks = {length: {form: peak_memory(form, length, sizes) for form in sizes.forms} for length in sizes.lengths}
    first, last = sizes.lengths[0], sizes.lengths[-1]
    memory_cells = [
        (f"{length}", *(f"{peak / MIB:.1f}" for peak in of_forms.values()), *shares(of_forms, peaks[first]))
        for length, of_forms in peaks.items()
    ]
    growth = peaks[last]["detached"] / peaks[first]["detached"]
    memory_goals = [Goal.at_most(f"peak of detached chunks, {last} tokens / {first}", 1.10, growth)]
    header = ("model", *(f"{mode} / zero" for mode in MODES[1:]), f"median over fastest, {' / '.join(MODES)}")
    memory_header = ("tokens", *(f"{form}, MiB" for form in sizes.forms), *(f"{form}, growth" for form in sizes.forms))
    notes = [
        f"{sizes.rows} rows of {sizes.seq_len} tokens in micro-batches of {sizes.micro_batch}, fp32; "
        f"{settings.repetitions} rounds of every mode",
        f"memory: Mamba-2, one lane in chunks of {sizes.chunk} tokens; through time with parallel.recompute=layer",
    ]
    tables = [
        BenchTable("time of a step", header, time_cells),
        BenchTable("peak memory of a step", memory_header, memory_cells),
    ]
    device = "cpu" if on_cpu else compute_device().type
    return BenchReport(
        "Carried states", device, tables, [] if settings.quick else time_goals + memory_goals, notes, console
    )


def modes(model: str, sizes: Sizes, settings: BenchSettings) -> dict[str, Timing]:
    """The rounds of every mode, after two steps each, so that there are states and noise to hand out."""
    configs = {mode: config_of(model, sizes, f"states.mode={mode}") for mode in MODES}
    batches = rows_of(configs["zero"], sizes.rows, sizes.seq_len).split(sizes.micro_batch)
    with megatron_context():
        groups = start(configs["zero"].parallel, launch=ProcessLaunch(0, 1))
        steps = {mode: Steps(config, groups, batches) for mode, config in configs.items()}
    for step in steps.values():
        step()
        step()
    assert len({steps[mode].losses[0] for mode in FROM_ZERO}) == 1, "the modes start from different models"
    assert len({step.losses[1] for step in steps.values()}) == len(MODES), "two modes hand out the same states"
    measured = interleaved({mode: Contender(step, settings.repetitions) for mode, step in steps.items()})
    stop()
    return measured


def shares(of_forms: dict[str, int], at_first: dict[str, int]) -> list[str]:
    return [times(peak / at_first[form]) for form, peak in of_forms.items()]


def peak_memory(form: str, length: int, sizes: Sizes) -> int:
    """Bytes that one step adds to a fresh process."""
    call = f"probe({form!r}, {length}, {'QUICK' if sizes is QUICK else 'FULL'})"
    # Else the C library keeps freed blocks between those in use, and these would count.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(CACHED_BELOW)}
    return in_fresh_process(f"from {__name__} import FULL, QUICK, probe; {call}", environment)


def probe(form: str, length: int, sizes: Sizes) -> None:
    """The body of that process: first a step of few tokens, which loads what every first step loads."""
    torch.set_num_threads(1)
    chunks = length // sizes.chunk
    lane = Sizes(sizes.chunk, chunks, 1, sizes.chunk, (), (), (), sizes.overrides)
    tbtt = ["states.mode=tbtt", f"states.chunks={chunks}"] if chunks > 1 else []
    through = ["states.through_time=true", "parallel.recompute=layer"] if form == "through" else []
    config = config_of("Mamba-2", lane, *tbtt, *through)
    batch = rows_of(config, 1, length)
    with megatron_context():
        steps = Steps(config, start(config.parallel, launch=ProcessLaunch(0, 1)), [])
    pieces = 1 if form == "through" else chunks
    before = 0
    for steps.batches in (rows_of(config, 1, 16 * chunks).chunks(pieces), batch.chunks(pieces)):
        before = resident(reset=True)
        steps()
    stop()
    on_device = peak_memory_gib()
    print(max(1, resident(reset=False) - before) if on_device is None else round(on_device * 2**30))
