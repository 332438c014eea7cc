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

import sys
from functools import partial
from pathlib import Path
from typing import Any

from examples.length_story.runs import (
    QUICK,
    STORY,
    Sizes,
    copy_accuracy,
    sweep_of,
    write_copying_data,
)
from examples.long_text import long_text_losses
from examples.study import Plan, conduct, measured, parse
from hybridtron.cli.given import progress_bar
from hybridtron.sweep.grid import SEED

PARTS = {
    "language": lambda run, sizes: long_text_losses(run, sizes.multiples, sizes.rows),
    "copying": copy_accuracy,
}
"""By the name of the sweep: what is measured on each of its runs."""


def main(arguments: list[str]) -> int:
    """Train what is missing, measure, and write. Returns the exit code."""
    chosen = parse("Length generalization on a laptop: pretrain, post-train, measure.", "length_story", arguments)
    sizes = QUICK if chosen.quick else STORY
    write_copying_data(sizes, chosen.runs)
    return conduct(chosen, lambda: {part: sweep_of(part, sizes, chosen.runs) for part in PARTS}, partial(write, sizes))


def write(sizes: Sizes, plan: Plan, more: list[str], output: Path) -> None:
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
    context, notes = described(folder.of(language.runs[0].name), folder.of(language.runs[-1].name))
    copying, folder = plan["copying"]
    notes += [
        f"read: {sizes.rows} rows of held-out text, packed end to end and cut anywhere, each from zero states; "
        "a perplexity is that of half a doubling of positions, up to the one named",
        copying_described(folder.of(copying.runs[0].name), sizes),
        "± is the standard deviation over seeds; bands in the pictures go from the lowest seed to the highest",
        *more,
    ]
    findings = Findings(context, found["language"], found["copying"], sizes.copy_lengths, notes)
    draw(findings, output)
    (output / "length_story.md").write_text(page(findings, "make length-story"), encoding="utf-8")


def described(base: Path, post_trained: Path) -> tuple[int, list[str]]:
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
    ]


def copying_described(run: Path, sizes: Sizes) -> str:
    """What was copied, and how that was learned."""
    from hybridtron.config.load import load_saved
    from hybridtron.config.units import readable
    from hybridtron.planning.count import count

    config = load_saved(run / "config.yaml")
    phase = config.phases[0]
    parameters = readable(count(config.model, phase.seq_len).parameters)
    shortest, longest = sizes.copy_lengths
    return (
        f"copying: Mamba-2, {parameters} parameters, {config.model.pattern}, width {config.model.width}; "
        f"strings of {shortest} to {longest} of 26 letters, packed back to back into {sizes.copy_rows} rows of "
        f"{phase.seq_len} tokens, {phase.tokens} tokens, lr {phase.lr:g}, from scratch; the copy alone is learned; "
        f"counted are the letters of {sizes.copy_samples} copies a length that the model finds likeliest, given the "
        "right ones before"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
