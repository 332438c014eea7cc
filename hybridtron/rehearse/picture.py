"""Picture of a rehearsed step: memory over modelled device time, and bars that divide the time by kind of work.

Memory is shown for the passes and the update in the larger rehearsed step. Its colours are allocation sites: the
largest ones at the peak have their own, all others share one.
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

HOLDERS = 7  # allocation sites with a colour of their own
LINE = "{1} ({0})"
BESIDE: Any = {"frameon": False, "fontsize": "x-small", "loc": "center left", "bbox_to_anchor": (1, 0.5)}
SMALL = 0.02  # share of a step: kinds of work that take less are drawn as one


def draw(found: Sequence[Rehearsed], output: Path) -> None:
    """Draw a column for each rank, memory above and time below, and save the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 * len(found), 7), dpi=120, layout="constrained")
    rows = figure.subplots(2, len(found), squeeze=False, gridspec_kw={"height_ratios": [3, 2]})
    for rehearsed, memory, time in zip(found, *rows, strict=True):
        draw_memory(memory, rehearsed)
        draw_time(time, rehearsed)
    figure.suptitle("A model of a step that no GPU has taken", fontsize="small")
    figure.savefig(output)


def draw_memory(axes: Axes, rehearsed: Rehearsed) -> None:
    """Plot tensor bytes over the step by allocation site, with the planned peak."""
    step = rehearsed.step
    course = rehearsed.step.course
    until = [0.0, *accumulate(seconds_of(rehearsed))]
    moments = [min(max(change.moment - step.passes_of_many.first, 0), len(until) - 1) for change in course.changes]
    milliseconds = [1e3 * until[moment] for moment in moments]
    most = [holder for holder, _ in course.at_peak.most_common(HOLDERS)]
    holders = sorted(most, key=lambda holder: holder[0] != "build")  # permanent tensors at the bottom
    bottom = [0.0] * len(milliseconds)
    for number, (holder, held) in enumerate(zip(holders, course.of(holders), strict=True)):
        top = [low + size / 1e9 for low, size in zip(bottom, held, strict=True)]
        axes.fill_between(
            milliseconds, bottom, top, step="post", color=f"C{number}", linewidth=0, label=LINE.format(*holder)
        )
        bottom = top
    total = [size / 1e9 for size in course.total]
    axes.fill_between(milliseconds, bottom, total, step="post", color="lightgrey", linewidth=0, label="all others")
    axes.axhline(rehearsed.planned / 1e9, color="black", linestyle="--", linewidth=0.8, label="planned peak")
    title = f"{rehearsed.phase.config.run.name}, rank {step.rank} of {rehearsed.world}, {rehearsed.gpu.name}"
    label = f"ms of {step.many} micro-batches and the update"
    axes.set(title=title, xlabel=label, ylabel="GB of tensors", ylim=(0, None))
    axes.legend(**BESIDE)


def seconds_of(rehearsed: Rehearsed) -> list[float]:
    """Return each operation's seconds in the larger step and its update."""
    times = {number: kernel.time for number, kernel in enumerate(rehearsed.kernels)}
    operations = (*rehearsed.step.passes_of_many.operations, *rehearsed.step.update.operations)
    return [operation_seconds(operation, times, rehearsed.gpu) for operation in operations]


def draw_time(axes: Axes, rehearsed: Rehearsed) -> None:
    """Plot a step's milliseconds: a bar for each part by kind of work, and a bar for the device's idle time."""
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
    """Return a step's seconds by part and kind of work, and its idle time by reason."""
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
    stands = {
        "collectives that nothing hides": whole.exposed,
        "host waits": WAIT_S * whole.waits,
        "the pipeline's bubble": time.waiting * time.micro_batch.seconds,
    }
    stands["launches that take longer"] = max(0.0, time.seconds - device - sum(stands.values()))
    return {**bars, "standing still": {kind: seconds for kind, seconds in stands.items() if seconds > 0}}
