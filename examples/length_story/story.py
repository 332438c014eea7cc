"""Length generalization on a laptop, from a base that fails beyond its context to what repairs it.

    python -m examples.length_story.story            tens of minutes on two cores; a story that was stopped continues
    python -m examples.length_story.story --quick    tiny sizes, seconds: does it run, not what does it show

The sweep language.yaml trains recipe=mamba2_laptop from three seeds and post-trains each by every recipe of
configs/recipe/length; held-out text is read at many times the context (Figure 5 of the length-generalization paper).
The sweep copying.yaml trains copying with and without passed states (its Table 1). Runs stand in runs/length_story;
pictures and a table go to benchmarks/, whatever they say.

Exit codes: 0 written, 1 a run failed, 2 a wrong argument, or runs of other settings stand in the folder, 75 stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.length_story.runs import (
    LETTERS,
    QUICK,
    STORY,
    Sizes,
    copy_accuracy,
    long_text_losses,
    measured,
    sweep_of,
    write_copying_data,
)
from hybridtron.cli.given import positive, progress_bar
from hybridtron.cli.sweep import INTERRUPTED, carried, steps_of
from hybridtron.problems import Unusable
from hybridtron.requirements import demand
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import SEED, Sweep

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"language": long_text_losses, "copying": copy_accuracy}
"""By the name of the sweep: what is measured on each of its runs."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(description="Length generalization on a laptop: pretrain, post-train, measure.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes only where --output says")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where the runs stand (default: runs/length_story)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of page and pictures (default: benchmarks)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.quick and (chosen.runs is None or chosen.output is None):
        parser.error("--quick needs --runs and --output, so that it leaves the real story's alone")
    return chosen


def main(arguments: list[str]) -> int:
    """Train what is missing, measure, and write. Returns the exit code."""
    chosen = parse(arguments)
    demand("plot")
    sizes = QUICK if chosen.quick else STORY
    runs: Path = chosen.runs or ROOT / "runs/length_story"
    output: Path = chosen.output or ROOT / "benchmarks"
    runs.mkdir(parents=True, exist_ok=True)
    write_copying_data(sizes, runs)
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        plan = {part: sweep_of(part, sizes, runs) for part in PARTS}
        for sweep, folder in plan.values():
            if not carried(sweep, folder, chosen.jobs, steps_of(sweep, folder), console):
                return 1
        write(plan, sizes, output)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"written to {output}")
    return 0


def write(plan: Mapping[str, tuple[Sweep, Folder]], sizes: Sizes, output: Path) -> None:
    """Measure what has not been, and write page and pictures."""
    from examples.length_story.pages import Findings, draw, page

    found: dict[str, dict[str, dict[int, Any]]] = {part: {} for part in PARTS}
    whole = sum(len(sweep.runs) for sweep, _ in plan.values())
    with progress_bar("measured") as moved:
        for part, (sweep, folder) in plan.items():
            for run in sweep.runs:
                of_run = measured(folder, run, partial(PARTS[part], sizes=sizes))
                found[part].setdefault(run.variant, {})[int(run.values[SEED])] = of_run
                moved(sum(len(of) for one in found.values() for of in one.values()), whole)
    language, folder = plan["language"]
    context, notes = described(folder.of(language.runs[0].name), folder.of(language.runs[-1].name), sizes)
    findings = Findings(context, found["language"], found["copying"], sizes.copy_lengths, notes)
    output.mkdir(parents=True, exist_ok=True)
    draw(findings, output)
    (output / "length_story.md").write_text(page(findings, "make length-story"), encoding="utf-8")


def described(base: Path, post_trained: Path, sizes: Sizes) -> tuple[int, list[str]]:
    """The base's context, and what was done in words."""
    from hybridtron.config.load import load_saved
    from hybridtron.config.resolve import last_step
    from hybridtron.config.units import readable
    from hybridtron.planning.count import count

    config, posted = (load_saved(run / "config.yaml") for run in (base, post_trained))
    phase, post = config.phases[0], posted.phases[0]
    parameters = readable(count(config.model, phase.seq_len).parameters)
    letter = next(iter(config.model.layers.values()))
    model = f"{parameters} parameters, {config.model.pattern}, width {config.model.width}, state {letter['state']}"
    return phase.seq_len, [
        f"base: Mamba-2, {model}; {phase.tokens} tokens of {config.data.source} text in rows of {phase.seq_len}, "
        f"lr {phase.lr:g} (configs/recipe/mamba2_laptop.yaml)",
        f"post-training: {last_step(config)} steps of the base, then "
        f"{int(post.tokens) // post.tokens_per_step} steps at lr {post.lr:g} (configs/recipe/length)",
        f"read: {sizes.rows} rows of held-out text, packed end to end and cut anywhere, each from zero states; "
        "a perplexity is that of half a doubling of positions, up to the one named",
        f"copying: {sizes.copy_examples} strings over {LETTERS} letters, one a row, trained on all their tokens from "
        "scratch; counted are the letters of the copy that the model finds likeliest, given the right ones before",
        "± is the standard deviation over seeds; bands in the pictures go from the lowest seed to the highest",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
