"""Recurrences at equal size on a laptop: loss, longer texts than trained on, recall, and speed.

    python -m examples.mixers.study           hours on two cores; a study that was stopped continues
    python -m examples.mixers.study --quick   tiny sizes, a minute: does it run, not what does it show

The sweep text.yaml trains each mixer on text from three seeds and reads held-out text of up to 16 times the training
length; recall.yaml trains multi-query associative recall (MQAR). Runs stand in runs/mixers, rows of MQAR in
data/mixers; the page and the picture go to benchmarks/, whatever they say.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from examples.long_text import Curve, draw_seeds, spread
from examples.mixers.runs import (
    PAIRS,
    QUICK,
    SEQ_LEN,
    STUDY,
    VOCABULARY,
    Sizes,
    of_recall,
    of_text,
    sweep_of,
    write_rows,
)
from examples.study import ROOT, Plan, conduct, measured, parse
from hybridtron.cli.given import progress_bar
from hybridtron.evaluate.pictures import picture
from hybridtron.proving.measuring import BenchReport, markdown
from hybridtron.sweep.grid import SEED

YARDSTICK = "mamba"
WORST_LOSS = 1.2  # times the yardstick's, that a mixer may have
LEAST_RECALL = 0.05  # far above chance, which is 1 of 256 values


@dataclass
class Found:
    """Of a mixer, by seed: losses by position and tokens per second; and by tokens of a row: recall."""

    parameters: int
    losses: dict[int, Sequence[float]] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    recall: dict[int, float] = field(default_factory=dict)

    def trained(self, context: int) -> list[float]:
        """Mean loss of the positions that are trained, by seed."""
        return [statistics.mean(losses[:context]) for losses in self.losses.values()]


def main(arguments: list[str]) -> int:
    """Train what is missing, measure, and write. Returns the exit code."""
    chosen = parse("Recurrences at equal size on a laptop.", "mixers", arguments)
    sizes = QUICK if chosen.quick else STUDY
    data = chosen.runs / "data" if chosen.quick else ROOT / "data/mixers"
    if not chosen.measure:
        write_rows(sizes, data)
    planned = {part: partial(sweep_of, part, sizes, chosen.runs, data) for part in ("text", "recall")}
    return conduct(chosen, lambda: {part: made() for part, made in planned.items()}, partial(write, sizes))


def write(sizes: Sizes, plan: Plan, more: list[str], output: Path) -> None:
    """Measure what has not been, and write page and picture."""
    (text, text_folder), (recall, recall_folder) = plan["text"], plan["recall"]
    found: dict[str, Found] = {}
    whole, done = len(text.runs) + len(recall.runs), 0
    with progress_bar("measured") as moved:
        for run in text.runs:
            of_run = measured(text_folder, run, partial(of_text, sizes=sizes))
            one = found.setdefault(run.variant, Found(parameters_of(text_folder.of(run.name))))
            one.losses[int(run.values[SEED])] = of_run["losses"]
            one.rates.append(of_run["rate"])
            moved(done := done + 1, whole)
        for run in recall.runs:
            accuracy = measured(recall_folder, run, partial(of_recall, sizes=sizes))
            if run.variant in found:
                found[run.variant].recall[int(run.values[SEQ_LEN]) - 1] = accuracy
            moved(done := done + 1, whole)
    context, notes = described(text_folder.of(text.runs[0].name), recall_folder.of(recall.runs[0].name), sizes)
    draw(found, context, output / "mixers.png")
    (output / "mixers.md").write_text(page(found, context, [*notes, *more]), encoding="utf-8")


def parameters_of(run: Path) -> int:
    from hybridtron.config.load import load_saved
    from hybridtron.planning.count import count

    config = load_saved(run / "config.yaml")
    return count(config.model, config.phases[0].seq_len).parameters


def described(text: Path, recall: Path, sizes: Sizes) -> tuple[int, list[str]]:
    """The training length, and what was done in words."""
    from hybridtron.config.load import load_saved

    config, asked = load_saved(text / "config.yaml"), load_saved(recall / "config.yaml")
    phase, of_recall = config.phases[0], asked.phases[0]
    return phase.seq_len, [
        f"text: {config.model.pattern}, width {config.model.width}, {phase.tokens} tokens of {config.data.source} text "
        f"in rows of {phase.seq_len}, lr {phase.lr:g} (examples/mixers/text.yaml)",
        f"read: {sizes.rows} rows of held-out text, packed end to end and cut anywhere, each from zero states",
        f"MQAR: {asked.model.pattern}, width {asked.model.width}, {sizes.training} rows of each length, "
        f"{VOCABULARY // 2} keys and as many values, lr {of_recall.lr:g}, one seed (examples/mixers/recall.yaml); "
        f"chance is {2 / VOCABULARY:.3f}",
        "± is the standard deviation over seeds; tokens per second are those of the median step, one thread a run, two "
        "runs side by side",
    ]


def page(found: Mapping[str, Found], context: int, notes: Sequence[str]) -> str:
    """The whole page in Markdown."""
    report = BenchReport("Recurrences at equal size on a laptop", notes=list(notes))
    names = {name: [Curve.of(losses, context) for losses in one.losses.values()] for name, one in found.items()}
    last = max(end for curves in names.values() for end in curves[0].ends)
    multiples = [2**power for power in range(10) if context * 2**power <= last]
    header = ("mixer", "parameters", "loss", *(f"perplexity at {multiple}x" for multiple in multiples))
    cells = [
        (
            name,
            f"{found[name].parameters:,}",
            spread(found[name].trained(context)),
            *(spread([curve.at(context * multiple) for curve in curves]) for multiple in multiples),
        )
        for name, curves in names.items()
    ]
    report.table("Text", header, cells, "mixers.png")
    recall_rows(report, found)
    speed_rows(report, found)
    least = statistics.mean(found[YARDSTICK].trained(context))
    for name, one in found.items():
        ratio = statistics.mean(one.trained(context)) / least
        report.at_most(f"loss of {name} / that of {YARDSTICK}", WORST_LOSS, ratio)
        for tokens, accuracy in one.recall.items():
            report.at_least(f"recall of {name} at {tokens} tokens", LEAST_RECALL, accuracy)
    return markdown(report, "make mixers")


def recall_rows(report: BenchReport, found: Mapping[str, Found]) -> None:
    """Accuracy by length of the row."""
    header = ("mixer", *(f"{tokens} tokens, {pairs} pairs" for tokens, pairs in PAIRS.items()))
    cells = [
        (name, *(f"{one.recall[tokens]:.3f}" if tokens in one.recall else "" for tokens in PAIRS))
        for name, one in found.items()
    ]
    report.table("Values that were recalled (MQAR)", header, cells)


def speed_rows(report: BenchReport, found: Mapping[str, Found]) -> None:
    """Tokens per second, also over the yardstick's."""
    rates = {name: statistics.median(one.rates) for name, one in found.items()}
    cells = [(name, f"{rate:,.0f}", f"{rate / rates[YARDSTICK]:.2f}x") for name, rate in rates.items()]
    report.table("Speed of training on text", ("mixer", "tokens/s", f"of {YARDSTICK}'s"), cells)


def draw(found: Mapping[str, Found], context: int, path: Path) -> None:
    """Perplexity by position."""
    with picture(path) as axes:
        for number, (name, one) in enumerate(found.items()):
            curves = [Curve.of(losses, context) for losses in one.losses.values()]
            draw_seeds(axes, curves[0].ends, [curve.perplexities for curve in curves], f"C{number}", name, "-")
        axes.axvline(context, color="black", linestyle=":", linewidth=0.8, label=f"trained on {context}")
        axes.set(xscale="log", yscale="log", xlabel="position (tokens before)", ylabel="perplexity")
        axes.set(xlim=(context // 8, None))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
