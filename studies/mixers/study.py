"""Recurrences at equal size on a laptop: loss, longer texts than trained on, recall, and speed.

    python -m studies.mixers.study           hours on two cores; a stopped study continues
    python -m studies.mixers.study --quick   tiny sizes, a minute: checks that the study runs, not its result

The sweep text.yaml trains each mixer on text from three seeds and reads held-out text of up to 16 times the training
length; recall.yaml trains multi-query associative recall (MQAR). Runs are stored in runs/mixers, MQAR rows in
data/mixers; the page and the picture go to this folder, whatever their result. Speed is measured when the page is
written, with the mixers in turns, so that other work beside the training does not distort it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hybridtron.evaluate.pictures import picture
from hybridtron.problems import Unusable
from hybridtron.proving.measuring import BenchReport, Timing, markdown, time_in_turns
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches
from hybridtron.sweep.grid import SEED, SweepRun
from studies.long_text import Curve, draw_seeds, spread
from studies.mixers.runs import PAIRS, VOCABULARY, Sizes, part_of, sizes_of, write_rows
from studies.results import Result, Trained
from studies.study import Measured, conduct, parse

YARDSTICK = "mamba"
WORST_LOSS = 1.2  # largest allowed ratio of a mixer's loss to the yardstick's
LEAST_RECALL = 0.05  # far above chance, which is 1 of 256 values
ROUNDS = 5  # timed steps of each mixer


@dataclass
class Found:
    """A mixer's results: losses and curves by seed, recall by row length, and the time of a step."""

    parameters: int
    losses: dict[int, float] = field(default_factory=dict)
    curves: dict[int, Curve] = field(default_factory=dict)
    recall: dict[int, float] = field(default_factory=dict)
    step: Timing | None = None


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("Recurrences at equal size on a laptop.", "mixers", arguments)
    sizes = sizes_of(chosen.quick)
    if not chosen.measure:
        write_rows(sizes, chosen.data)
    planned = {part: partial(part_of, part, sizes, chosen.runs, chosen.data) for part in ("text", "recall")}
    return conduct(chosen, lambda: {part: make_part() for part, make_part in planned.items()}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page and the picture of the measured runs.

    Times the steps too. Raises Unusable if the yardstick has no finished run on text.
    """
    if not any(run.variant == YARDSTICK for run, _ in measured["text"]):
        raise Unusable(f"no run of {YARDSTICK} on text has finished, with which the page compares", code="no-file")
    by_mixer = gathered(measured["text"], measured["recall"])
    for name, timing in step_times([run for run, _ in measured["text"]]).items():
        by_mixer[name].step = timing
    of_text, of_recall = (next((result.trained for _, result in measured[part]), None) for part in ("text", "recall"))
    assert of_text is not None
    context = of_text.phases[0].seq_len
    draw(by_mixer, context, output / "mixers.png")
    notes = [*described(of_text, of_recall, sizes), *more]
    (output / "mixers.md").write_text(page(by_mixer, context, notes), encoding="utf-8")


def gathered(text: Sequence[tuple[SweepRun, Result]], recall: Sequence[tuple[SweepRun, Result]]) -> dict[str, Found]:
    """Group the results of both parts by mixer, in the sweep's order."""
    by_mixer: dict[str, Found] = {}
    for run, result in text:
        mixer = by_mixer.setdefault(run.variant, Found(result.trained.parameters))
        mixer.losses[int(run.values[SEED])] = result.measured["loss"]
        mixer.curves[int(run.values[SEED])] = Curve(**result.measured["curve"])
    for run, result in recall:
        if run.variant in by_mixer:
            by_mixer[run.variant].recall[result.trained.phases[0].seq_len - 1] = result.measured
    return by_mixer


def step_times(runs: Sequence[SweepRun]) -> dict[str, Timing]:
    """Time training steps of each mixer's first run in turns, by processor time."""
    configs = {run.variant: load_checked(run.settings) for run in reversed(runs)}
    with one_process(next(iter(configs.values()))) as groups:
        forms = {name: Steps(config, groups, random_batches(config)) for name, config in configs.items()}
        return time_in_turns(forms, ROUNDS)


def described(text: Trained, recall: Trained | None, sizes: Sizes) -> list[str]:
    """Return notes that describe training and evaluation."""
    phase = text.phases[0]
    notes = [
        f"text: {text.pattern}, width {text.width}, {phase.tokens} tokens of {text.source} text "
        f"in rows of {phase.seq_len}, lr {phase.lr:g} (studies/mixers/text.yaml)",
        f"read: {sizes.rows} rows of held-out text, packed end to end and cut anywhere, each from zero states",
        "± is the standard deviation over seeds; the time of a step is processor time of one thread, by the fastest of "
        f"{ROUNDS} rounds in which all mixers take turns",
    ]
    if recall is not None:
        notes.append(
            f"MQAR: {recall.pattern}, width {recall.width}, {sizes.training} rows of each length in "
            f"batches of {recall.phases[0].global_batch}, "
            f"{VOCABULARY // 2} keys and as many values, lr {recall.phases[0].lr:g}, one seed "
            f"(studies/mixers/recall.yaml); chance is {2 / VOCABULARY:.3f}"
        )
    return notes


def page(found: Mapping[str, Found], context: int, notes: Sequence[str]) -> str:
    """Return the full page in Markdown."""
    report = BenchReport("Recurrences at equal size on a laptop", notes=list(notes))
    last = max(curve.ends[-1] for mixer in found.values() for curve in mixer.curves.values())
    multiples = [2**power for power in range(10) if context * 2**power <= last]
    header = ("mixer", "parameters", "loss", *(f"perplexity at {multiple}x" for multiple in multiples))
    cells = [
        (
            name,
            f"{mixer.parameters:,}",
            spread(list(mixer.losses.values())),
            *(spread([curve.at(context * multiple) for curve in mixer.curves.values()]) for multiple in multiples),
        )
        for name, mixer in found.items()
    ]
    report.table("Text", header, cells, "mixers.png")
    recall_rows(report, found)
    speed_rows(report, found)
    least = statistics.mean(found[YARDSTICK].losses.values())
    for name, mixer in found.items():
        ratio = statistics.mean(mixer.losses.values()) / least
        report.at_most(f"loss of {name} / that of {YARDSTICK}", WORST_LOSS, ratio)
        for tokens, accuracy in mixer.recall.items():
            report.at_least(f"recall of {name} at {tokens} tokens", LEAST_RECALL, accuracy)
    return markdown(report, "make mixers")


def recall_rows(report: BenchReport, found: Mapping[str, Found]) -> None:
    """Add the table of recall by row length."""
    header = ("mixer", *(f"{tokens} tokens, {pairs} pairs" for tokens, pairs in PAIRS.items()))
    cells = [
        (name, *(f"{mixer.recall[tokens]:.3f}" if tokens in mixer.recall else "" for tokens in PAIRS))
        for name, mixer in found.items()
    ]
    report.table("Values that were recalled (MQAR)", header, cells)


def speed_rows(report: BenchReport, found: Mapping[str, Found]) -> None:
    """Add the table of step times, as multiples of the yardstick's."""
    steps = {name: mixer.step for name, mixer in found.items() if mixer.step is not None}
    cells = [
        (name, f"{step.fastest / steps[YARDSTICK].fastest:.2f}x", f"+{step.spread:.0%}") for name, step in steps.items()
    ]
    header = ("mixer", f"time over {YARDSTICK}'s", "median over fastest")
    report.table("Time of a training step on text", header, cells)


def draw(found: Mapping[str, Found], context: int, path: Path) -> None:
    """Draw perplexity by position for every mixer."""
    with picture(path) as axes:
        for number, (name, mixer) in enumerate(found.items()):
            curves = list(mixer.curves.values())
            draw_seeds(
                axes,
                curves[0].ends,
                [curve.perplexities for curve in curves],
                color=f"C{number}",
                label=name,
                style="-",
            )
        axes.axvline(context, color="black", linestyle=":", linewidth=0.8, label=f"trained on {context}")
        axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")
        axes.set(xlim=(context // 8, None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
