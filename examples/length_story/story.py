"""Length generalization on a laptop, from a base that fails beyond its context to what repairs it.

    python -m examples.length_story.story            tens of minutes on two cores; a story that was stopped continues
    python -m examples.length_story.story --quick    tiny sizes, seconds: does it run, not what does it show

Trains recipe=mamba2_laptop from three seeds, post-trains each by every recipe of configs/recipe/length, and reads
held-out text at many times the context (Figure 5 of the length-generalization paper); trains copying with and without
passed states (its Table 1). Runs stand in runs/length_story; pictures and a table go to benchmarks/, whatever they say.

Exit codes: 0 written, 1 a run failed, 2 a wrong argument, or runs of other settings stand in the folder.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from examples.length_story.runs import (
    LETTERS,
    QUICK,
    STORY,
    Sizes,
    Task,
    carry_out,
    chains,
    measured,
    share_done,
    write_copying_data,
)
from hybridtron.requirements import demand

ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(description="Length generalization on a laptop: pretrain, post-train, measure.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes only where --output says")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where the runs stand (default: runs/length_story)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="of page and pictures (default: benchmarks)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    if chosen.jobs < 1:
        parser.error(f"--jobs is {chosen.jobs}, must be at least 1")
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
    plan = chains(sizes, runs)
    try:
        train_all(plan, sizes, chosen.jobs)
        write(plan, sizes, output)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"written to {output}")
    return 0


def train_all(plan: list[list[Task]], sizes: Sizes, jobs: int) -> None:
    """Carry out the chains that are not done, this number at a time, one thread each."""
    left = [chain for chain in plan if any(measured(task) is None for task in chain)]
    if jobs == 1 or not left:
        for chain in left:
            carry_out(chain, sizes)
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # which the processes inherit
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        watch([pool.submit(carry_out, chain, sizes) for chain in left], [task for chain in left for task in chain])


def watch(futures: list[Future[None]], tasks: list[Task]) -> None:
    """Show how far the runs are until all chains have ended; the first that fails ends the story."""
    columns, console = (*Progress.get_default_columns(), TimeElapsedColumn()), Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar, waiting = progress.add_task(f"{len(tasks)} runs", total=len(tasks)), set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=1, return_when=FIRST_EXCEPTION)
            progress.update(bar, completed=sum(map(share_done, tasks)))
            if failed := next((one for one in ended if one.exception()), None):
                for future in waiting:
                    future.cancel()
                failed.result()


def write(plan: list[list[Task]], sizes: Sizes, output: Path) -> None:
    """Page and pictures of all that was measured."""
    from examples.length_story.pages import Findings, draw, page

    language: dict[str, dict] = {}
    copying: dict[str, dict] = {}
    for task in (task for chain in plan for task in chain):
        part = language if task.part == "language" else copying
        part.setdefault(task.name, {})[task.seed] = measured(task)
    base = plan[0][0]
    context, notes = described(base, sizes)
    findings = Findings(context, language, copying, sizes.copy_lengths, notes)
    output.mkdir(parents=True, exist_ok=True)
    draw(findings, output)
    (output / "length_story.md").write_text(page(findings, "make length-story"), encoding="utf-8")


def described(base: Task, sizes: Sizes) -> tuple[int, list[str]]:
    """The base's context, and what was done in words."""
    from hybridtron.config.load import load_saved
    from hybridtron.config.resolve import last_step
    from hybridtron.config.units import readable
    from hybridtron.planning.count import count

    config, posted = (load_saved(base.folder.parent / name / "config.yaml") for name in ("base", "passing"))
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
