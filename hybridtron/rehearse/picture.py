"""Picture of a rehearsed step: memory over modelled device time, and bars for the time of each kind of work.

A rehearsal simulates two steps without a GPU, with different micro-batch counts. The memory plot shows the step with
more micro-batches. Its colours stand for allocation sites: source lines that allocate tensors. The sites with the most
bytes at the peak have their own colours, and all other sites share one colour.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.planning.rates import WAIT_S
from hybridtron.rehearse.rehearsal import Rehearsed
from hybridtron.rehearse.step_time import operation_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SITES = 7  # number of allocation sites with a colour of their own
LINE = "{1} ({0})"
BESIDE: Any = {"frameon": False, "fontsize": "x-small", "loc": "center left", "bbox_to_anchor": (1, 0.5)}
SMALL = 0.02  # fraction of the step's time; kinds of work that take less are drawn together, as "all others"


def draw(rehearsals: Sequence[Rehearsed], output: Path) -> None:
    """Draw a column for each rank, with the memory plot above the time bars, and save the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 * len(rehearsals), 7), dpi=120, layout="constrained")
    rows = figure.subplots(2, len(rehearsals), squeeze=False, gridspec_kw={"height_ratios": [3, 2]})
    for rehearsed, memory, time in zip(rehearsals, *rows, strict=True):
        draw_memory(memory, rehearsed)
        draw_time(time, rehearsed)
    figure.suptitle("A model of a step that no GPU has taken", fontsize="small")
    figure.savefig(output)


def draw_memory(axes: Axes, rehearsed: Rehearsed) -> None:
    """Plot the tensors' memory over the step's time, by allocation site, with a line for the planned peak."""
    step = rehearsed.step
    timeline = rehearsed.step.timeline
    until = [0.0, *accumulate(seconds_of(rehearsed))]
    moments = [min(max(change.moment - step.passes_of_many.first, 0), len(until) - 1) for change in timeline.changes]
    milliseconds = [1e3 * until[moment] for moment in moments]
    most = [site for site, _ in timeline.at_peak.most_common(MAX_SITES)]
    sites = sorted(most, key=lambda site: site[0] != "build")  # permanent tensors are drawn at the bottom
    bottom = [0.0] * len(milliseconds)
    for number, (site, amounts) in enumerate(zip(sites, timeline.of(sites), strict=True)):
        top = [low + size / 1e9 for low, size in zip(bottom, amounts, strict=True)]
        axes.fill_between(
            milliseconds, bottom, top, step="post", color=f"C{number}", linewidth=0, label=LINE.format(*site)
        )
        bottom = top
    total = [size / 1e9 for size in timeline.total]
    axes.fill_between(milliseconds, bottom, total, step="post", color="lightgrey", linewidth=0, label="all others")
    axes.axhline(rehearsed.planned / 1e9, color="black", linestyle="--", linewidth=0.8, label="planned peak")
    title = f"{rehearsed.phase.config.run.name}, rank {step.rank} of {rehearsed.world}, {rehearsed.gpu.name}"
    label = f"ms of {step.many} micro-batches and the update"
    axes.set(title=title, xlabel=label, ylabel="GB of tensors", ylim=(0, None))
    axes.legend(**BESIDE)


def seconds_of(rehearsed: Rehearsed) -> list[float]:
    """Return the modelled seconds for each operation in the step with more micro-batches, the update included."""
    times = {number: kernel.time for number, kernel in enumerate(rehearsed.kernels)}
    operations = (*rehearsed.step.passes_of_many.operations, *rehearsed.step.update.operations)
    return [operation_seconds(operation, times, rehearsed.gpu) for operation in operations]


def draw_time(axes: Axes, rehearsed: Rehearsed) -> None:
    """Plot a step's milliseconds: a bar for each part, divided by kind of work, and a bar for idle time."""
    bars = {name: dict(kinds) for name, kinds in bars_of(rehearsed).items()}
    kinds = list(dict.fromkeys(kind for kinds in bars.values() for kind in kinds))
    names = list(bars)[::-1]
    left = [0.0] * len(names)
    for number, kind in enumerate(kinds):
        widths = [1e3 * bars[name].get(kind, 0.0) for name in names]
        axes.barh(names, widths, left=left, color=f"C{number % 10}", hatch="//" * (number // 10), label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(
        xlabel=f"ms of a step of {rehearsed.time.micro_batches} micro-batches: {1e3 * rehearsed.time.seconds:,.0f}"
    )
    axes.legend(**BESIDE)


def bars_of(rehearsed: Rehearsed) -> Mapping[str, Mapping[str, float]]:
    """Return bar -> label -> seconds of the step.

    There is a bar for each part of the step, with kinds of work as labels, and a bar for idle time, with reasons as
    labels.
    """
    time = rehearsed.time
    whole = time.whole
    limit = SMALL * time.seconds
    bars: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in ("forward", "backward", "update")}
    of_kind: defaultdict[str, float] = defaultdict(float)
    for (_, kind), cost in whole.costs.items():
        of_kind[kind] += cost.seconds
    for (part, kind), cost in sorted(whole.costs.items(), key=lambda item: -item[1].seconds):
        bars[part][kind if of_kind[kind] > limit else "all others"] += cost.seconds
    device = sum(cost.seconds for cost in whole.costs.values())
    idle = {
        "collectives that nothing hides": whole.exposed,
        "host waits": WAIT_S * whole.waits,
        "the pipeline's bubble": time.waiting * time.micro_batch.seconds,
    }
    idle["launches that take longer"] = max(0.0, time.seconds - device - sum(idle.values()))
    return {**bars, "standing still": {kind: seconds for kind, seconds in idle.items() if seconds > 0}}
