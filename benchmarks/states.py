"""The cost of carried states: the time of a step in each mode over one from zero, and the memory of long TBTT steps.

Every mode takes the same steps of the full engine over the same rows, each of which continues the row before it. They
are joined text in all modes, as passed states and noise require it. So the ratio is the cost of distributing, adopting
and checking states, of drawing noise, and of a scan that starts from a state.

Peak memory is that of a step in a fresh process, after weights, optimizer and tokens are allocated, by form and length.
Forms: `detached` chunks, and `through` time with recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import compute_device
from hybridtron.parallel.groups import Groups, start
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import Steps, load_checked, one_process

from .peak_memory import measure_memory

MODES = ("zero", "passing", "tbtt", "fitted", "random")
FROM_ZERO = ("zero", "passing", "tbtt", "fitted")  # modes whose first step starts from zero states
FORMS = ("detached", "through")
MODELS = {
    "Samba": ("model.pattern=(M-W-)*2",),
    "Mamba-2": (
        "model.pattern=S*4",
        "model.width=256",
        "model.layers.S={kind: mamba2, state: 128, head_dim: 64}",
    ),
}
TINY = ("model.width=64", "model.vocab_size=320", "model.layers.W.window=16")


@dataclass(frozen=True)
class Sizes:
    """Rows in a step, each with `length` tokens; then the lengths of a TBTT step, in chunks of `length`."""

    rows: int
    length: int
    lengths: tuple[int, ...]
    overrides: tuple[str, ...] = ()


FULL = Sizes(2, 1024, (4096, 8192, 16384, 32768))
QUICK = Sizes(2, 32, (64, 128), TINY)


def config_of(model: str, rows: int, sizes: Sizes, arguments: Sequence[str] = ()) -> Config:
    """Return a model's configuration, with one row in each micro-batch."""
    phase = (f"seq_len={sizes.length}", f"global_batch={rows}", "micro_batch=1")
    settings = [*(f"phases.0.{setting}" for setting in phase), "run.eval_lengths=[1]", "run.eval_tokens=1M"]
    return load_checked(["recipe=laptop", *settings, *MODELS[model], *sizes.overrides, *arguments])


def rows_of(config: Config, rows: int, length: int) -> Batch:
    """Return random text that continues from row to row."""
    tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(rows, length, dtype=torch.bool)
    continues = torch.ones(rows, dtype=torch.bool)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, SeqInfo.stream(rows, length), continues)


def states(report: BenchReport) -> None:
    """Measure the time of a step in each mode, and peak memory."""
    sizes = report.pick(full=FULL, quick=QUICK)
    report.device = compute_device().type
    with one_process(config_of("Samba", sizes.rows, sizes)) as groups:
        measured = report.sweep({model: modes(model, sizes, groups) for model in MODELS})
    report.ratios("time of a step", "model", measured, [(mode, "zero") for mode in MODES[1:]], {})
    for model, timings in measured.items():
        report.at_most(f"step with passed states / from zero, {model}", 1.05, timings.ratio("passing", "zero"))
    peaks = measure_memory(report, prepared, sizes.lengths, FORMS, sizes)
    first = sizes.lengths[0]
    last = sizes.lengths[-1]
    growth = peaks[last]["detached"] / peaks[first]["detached"]
    report.at_most(f"peak of detached chunks, {last} tokens / {first}", 1.10, growth)
    report.notes += [
        f"{sizes.rows} rows of {sizes.length} tokens in micro-batches of 1, fp32; {report.repetitions} rounds of "
        "every mode",
        f"memory: Mamba-2, one lane in chunks of {sizes.length} tokens; through time with parallel.recompute=layer",
    ]


def modes(model: str, sizes: Sizes, groups: Groups) -> dict[str, Callable[[], object]]:
    """Return a step of every mode, after two steps each, so that states and noise exist.

    Asserts that modes start from the same model and hand out different states.
    """
    configs = {mode: config_of(model, sizes.rows, sizes, [f"states.mode={mode}"]) for mode in MODES}
    batches = rows_of(configs["zero"], sizes.rows, sizes.length).split(1)
    steps = {mode: Steps(config, groups, batches) for mode, config in configs.items()}
    for step in steps.values():
        step()
        step()
    assert len({steps[mode].losses[0].item() for mode in FROM_ZERO}) == 1, "modes start from different models"
    assert len({step.losses[1].item() for step in steps.values()}) == len(MODES), "two modes hand out the same states"
    return dict(steps)


def prepared(form: str, length: int, sizes: Sizes) -> Callable[[], object]:
    """Return a TBTT step over one lane, after a first one on few tokens.

    Process groups stay open: the measuring process ends afterwards.
    """
    chunks = length // sizes.length
    settings = ["states.mode=tbtt", f"states.chunks={chunks}"]
    pieces = chunks
    if form == "through":
        settings += ["states.through_time=true", "parallel.recompute=layer"]
        pieces = 1
    config = config_of("Mamba-2", chunks, sizes, settings)
    few, many = (rows_of(config, 1, tokens).chunks(pieces) for tokens in (16 * chunks, length))
    steps = Steps(config, start(config.parallel, launch=ProcessLaunch(0, 1)), few)
    steps()
    steps.batches = many
    return steps
