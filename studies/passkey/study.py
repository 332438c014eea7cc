"""Passkey retrieval on a laptop: a Samba and its sibling without Mamba, and the effect of fitted noise on a Mamba-2.

    python -m studies.passkey.study           an hour on two cores; a stopped study continues
    python -m studies.passkey.study --quick   tiny sizes, a minute: checks that the study runs, not its result

The sweep passkey.yaml trains recipe=passkey_laptop: text, then samples of 128, 256 and 512 tokens, whose answers alone
are learned. Each earlier checkpoint is evaluated at 512 tokens, the last one at up to 16 times that (Figures 4, 6 and 7
of the Samba paper; Figure 7 of the length-generalization paper). Runs are stored in runs/passkey, samples in
data/passkey; pictures and tables go to this folder, whatever their result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron.config.units import readable
from hybridtron.evaluate.pictures import by_length, heat_map
from hybridtron.evaluate.results import shown
from hybridtron.proving.measuring import BenchReport, markdown
from hybridtron.sweep.grid import SweepRun
from studies.passkey.samples import LONGER, Found, Sizes, part_of, sizes_of, write_samples
from studies.results import Result
from studies.study import Measured, conduct, parse

NAMES = {
    "samba": "Samba",
    LONGER: "Samba, three times the last phase",
    "swa": "windows alone",
    "mamba2": "Mamba-2",
    "mamba2_fitted": "Mamba-2, fitted noise",
}
WANTED = 0.9  # share of keys that Samba must find at the training length, at every depth
Rows = list[dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("Passkey retrieval on a laptop.", "passkey", arguments)
    sizes = sizes_of(chosen.quick)
    write_samples(sizes, chosen.data)
    return conduct(chosen, lambda: {"passkey": part_of(sizes, chosen.runs, chosen.data)}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page and the pictures of the measured runs."""
    runs = measured["passkey"]
    results = {run.variant: Found(**result.measured) for run, result in runs}
    draw(results, sizes.lengths[-1], output)
    notes = [*described(runs, sizes), *more]
    (output / "passkey.md").write_text(page(results, notes, sizes.lengths[-1]), encoding="utf-8")


def described(runs: Sequence[tuple[SweepRun, Result]], sizes: Sizes) -> list[str]:
    """Return notes that describe models, training and evaluation."""
    notes = []
    for run, result in runs:
        trained = result.trained
        size = f"{readable(trained.parameters)} parameters, {trained.pattern}, width {trained.width}"
        took = f"{result.minutes:.0f} minutes of steps on one thread beside other work"
        tokens = " + ".join(phase.tokens for phase in trained.phases)
        notes.append(f"{NAMES[run.variant]}: {size}; {tokens} tokens; seed {trained.seed}; {took}")
    first = runs[0][1].trained  # every run trains in the same phases
    phases = ", ".join(f"{phase.name} in {phase.global_batch} rows of {phase.seq_len}" for phase in first.phases)
    return [
        *notes,
        f"phases, by steps: {phases} (configs/recipe/passkey_laptop.yaml)",
        f"keys of {sizes.digits} digits, at drawn depths; the answer alone is learned; {sizes.training} samples each "
        f"of {', '.join(map(str, sizes.lengths))} tokens, the last phase mixes them",
        f"asked: {sizes.trained} keys at {sizes.lengths[-1]} tokens, {sizes.longer} at each other length, and of each "
        f"checkpoint on the way {sizes.steps}, over 11 depths, with seeds not trained on; ± is the standard error",
    ]


def page(found: Mapping[str, Found], notes: list[str], seq_len: int) -> str:
    """Return the full page in Markdown."""
    report = BenchReport("Passkey retrieval on a laptop", notes=notes)
    named = {NAMES[variant]: results.last for variant, results in found.items()}
    hybrid = {NAMES[name]: found[name].last for name in ("samba", LONGER, "swa") if name in found}
    table(report, "Keys that were found, by length", hybrid, "passkey_training.png")
    for variant in ("samba", "swa"):
        if variant in found:
            depths(report, NAMES[variant], found[variant].last, f"passkey_{variant}.png")
    mamba2 = of_mamba2(found)
    if mamba2:
        table(report, "Mamba-2 by its states in training", mamba2, "passkey_mamba2.png")
    for name, rows in named.items():
        worst = min(value for row in rows if row["length"] == seq_len for _, value, _ in row["by_depth"])
        if name == NAMES["samba"]:
            report.at_least(f"{name} at {seq_len} tokens, at its worst depth", WANTED, worst)
    return markdown(report, "make passkey")


def of_mamba2(found: Mapping[str, Found]) -> dict[str, Rows]:
    """Return the Mamba-2 rows: zero-shot (after the text phase), and after both ways of training.

    Variants without a result are left out.
    """
    runs = {"from zero states": "mamba2", "from fitted noise": "mamba2_fitted"}
    tuned = {name: found[run].last for name, run in runs.items() if run in found}
    zero_shot = next((found[run].text for run in runs.values() if run in found), None)
    if not zero_shot:
        return tuned
    return {"zero-shot": zero_shot, **tuned}


def table(report: BenchReport, title: str, runs: Mapping[str, Rows], picture: str) -> None:
    """Add a table with a row for each run and a column for each length."""
    lengths = [row["length"] for row in next(iter(runs.values()))]
    header = ("run", *(f"{length} tokens" for length in lengths))
    report.table(title, header, [(name, *map(shown, rows)) for name, rows in runs.items()], picture)


def depths(report: BenchReport, name: str, rows: Rows, picture: str) -> None:
    """Add a table with a row for each depth and a column for each length."""
    header = ("depth", *(f"{row['length']} tokens" for row in rows))
    by_depth = [{place: value for place, value, _ in row["by_depth"]} for row in rows]
    cells = [
        (f"{depth:.0%}", *(f"{row[depth]:.2f}" if depth in row else "" for row in by_depth)) for depth in by_depth[0]
    ]
    report.table(f"{name}, by depth and length", header, cells, picture)


def draw(found: Mapping[str, Found], seq_len: int, output: Path) -> None:
    """Draw all pictures into a folder."""
    for variant in ("samba", "swa"):
        if variant in found:
            heat_map(NAMES[variant], found[variant].last, seq_len, output / f"passkey_{variant}.png")
    draw_training({NAMES[variant]: run for variant, run in found.items()}, seq_len, output / "passkey_training.png")
    if mamba2 := of_mamba2(found):
        by_length({name: {"passkey": rows} for name, rows in mamba2.items()}, [seq_len], output / "passkey_mamba2.png")


def draw_training(found: Mapping[str, Found], seq_len: int, output: Path) -> None:
    """Draw the answers' loss, and the share of keys found at the training length, over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), dpi=120, layout="constrained")
    losses, accuracies = figure.subplots(2, 1, sharex=True)
    for name, results in found.items():
        losses.plot(*zip(*results.losses, strict=True), linewidth=0.9, label=name)
        accuracies.plot(*zip(*results.accuracy, strict=True), "o-", markersize=3, linewidth=1, label=name)
    losses.set(yscale="log", ylabel="loss of the answer")
    accuracies.set(xlabel="step", ylabel=f"keys found at {seq_len} tokens", ylim=(-0.03, 1.03))
    for axes in (losses, accuracies):
        axes.grid(alpha=0.3)
    losses.legend(frameon=False, fontsize="small")
    figure.savefig(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
