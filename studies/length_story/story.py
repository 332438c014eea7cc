"""Length generalization on a laptop: a base model that fails beyond its context, and the training that repairs it.

    python -m studies.length_story.story            tens of minutes on two cores; a stopped story continues
    python -m studies.length_story.story --quick    tiny sizes, seconds: checks that it runs, not its result

The sweep language.yaml trains recipe=mamba2_laptop from three seeds and post-trains each model by every recipe of
configs/recipe/length. Held-out text is then read at many times the context (Figure 5 of the length-generalization
paper). The sweep copying.yaml trains copying with and without passed states (its Table 1). Runs are stored in
runs/length_story; pictures and a table go to this folder, whatever their result.

Exit codes: 0 written; 1 a run failed; 2 a wrong argument, or the folder holds runs with other settings; 75 stopped.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron.config.units import readable
from hybridtron.problems import Unusable
from hybridtron.sweep.grid import SEED
from studies.length_story.runs import Sizes, part_of, sizes_of, write_copying_data
from studies.long_text import Curve
from studies.results import Trained
from studies.study import Measured, conduct, parse

PARTS = ("language", "copying")


def main(arguments: list[str]) -> int:
    """Train the missing runs, measure them, and write the page. Returns the exit code."""
    chosen = parse("Length generalization on a laptop: pretrain, post-train, measure.", "length_story", arguments)
    sizes = sizes_of(chosen.quick)
    write_copying_data(sizes, chosen.runs)
    return conduct(chosen, lambda: {part: part_of(part, sizes, chosen.runs) for part in PARTS}, partial(write, sizes))


def write(sizes: Sizes, measured: Measured, more: list[str], output: Path) -> None:
    """Write the page and the pictures of the measured runs.

    Raises Unusable if a part has no finished run.
    """
    from studies.length_story.pages import Findings, draw, page

    if missing := [part for part in PARTS if not measured[part]]:
        raise Unusable(f"no run of {' and '.join(missing)} has finished", code="no-file")
    language = by_variant(measured, "language")
    copying = by_variant(measured, "copying")
    curves = {name: {seed: Curve(**curve) for seed, curve in seeds.items()} for name, seeds in language.items()}
    base = measured["language"][0][1].trained
    post_trained = measured["language"][-1][1].trained
    notes = [
        *described(base, post_trained),
        f"read: {sizes.rows} rows of held-out text, packed end to end and cut anywhere, each from zero states; "
        "a perplexity is that of half a doubling of positions, up to the one named",
        copying_described(measured["copying"][0][1].trained, sizes),
        "± is the standard deviation over seeds; bands in the pictures go from the lowest seed to the highest",
        *more,
    ]
    findings = Findings(base.phases[0].seq_len, curves, copying, sizes.copy_lengths, notes)
    draw(findings, output)
    (output / "length_story.md").write_text(page(findings, "make length-story"), encoding="utf-8")


def by_variant(measured: Measured, part: str) -> dict[str, dict[int, Any]]:
    """Group the results of a part by variant and seed."""
    results: dict[str, dict[int, Any]] = {}
    for run, result in measured[part]:
        results.setdefault(run.variant, {})[int(run.values[SEED])] = result.measured
    return results


def described(base: Trained, post: Trained) -> list[str]:
    """Return notes that describe the base model and the post-training."""
    phase = base.phases[0]
    letter = next(iter(base.layers.values()))
    model = f"{readable(base.parameters)} parameters, {base.pattern}, width {base.width}, state {letter['state']}"
    return [
        f"base: Mamba-2, {model}; {phase.tokens} tokens of {base.source} text in rows of {phase.seq_len}, "
        f"lr {phase.lr:g} (configs/recipe/mamba2_laptop.yaml)",
        f"post-training: {base.steps} steps of the base, then {post.steps} steps at lr {post.phases[0].lr:g} "
        "(configs/recipe/length)",
    ]


def copying_described(copied: Trained, sizes: Sizes) -> str:
    """Return the note that describes the copying task and its training."""
    phase = copied.phases[0]
    (shortest, longest) = sizes.copy_lengths
    return (
        f"copying: Mamba-2, {readable(copied.parameters)} parameters, {copied.pattern}, width {copied.width}; "
        f"strings of {shortest} to {longest} of 26 letters, packed back to back into {sizes.copy_rows} rows of "
        f"{phase.seq_len} tokens, {phase.tokens} tokens, lr {phase.lr:g}, from scratch; the copy alone is learned; "
        f"counted are the letters of {sizes.copy_samples} copies a length that the model finds likeliest, given the "
        "right ones before"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
