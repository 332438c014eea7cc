"""Verification cards: a page per recipe with its measurements on a GPU and its rehearsal's results.

    hybridtron check cards
    hybridtron check cards --records FILE --output FOLDER

A card is a Markdown file. A row without a measurement shows "not measured". Measurements are read from the files that
`hybridtron check gpu` writes, one per recipe. A rehearsal is a training step that is simulated without a GPU. The
results are read from the records that `hybridtron rehearse --suite` writes (`suite.py`).

MFU is the model's FLOPs per second, divided by the GPU's peak. A card has two MFU values, because there are two ways to
count FLOPs:

- the true count (`planning/count`) includes only attention pairs (query, key) in which the query sees the key
- Megatron's formula (arXiv:2104.04473, equation 3) includes all pairs (query, key) in a sequence, and no FLOPs for
  scans

In both counts, the backward pass has twice the forward pass's FLOPs.

Exit codes: 0 cards are written, 2 wrong arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridtron.architecture.attention import HeadsSpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.load import choices_of
from hybridtron.limits import path_of
from hybridtron.planning.count import count
from hybridtron.planning.memory import largest_phase
from hybridtron.problems import CommandParser, Unusable
from hybridtron.rehearse.suite import RecipeCase, SuiteRecords, layouts_of
from hybridtron.resources import pages

NOT_MEASURED = "not measured"
REHEARSED = "## Rehearsed: a model, no GPU took part"
LINES = {
    "command": "command",
    "commit": "commit",
    "versions": "versions",
    "gpu": "GPU",
    "losses": "losses at steps",
    "tokens_per_second": "tokens/s a GPU",
    "mfu": "MFU by the true count",
    "megatron_mfu": "MFU by Megatron's formula",
    "peak_gb": "GB of tensors at the most",
    "waits": "host waits a step",
    "resume_difference": "largest difference of a resumed run's weights",
}
"""Key in a measurement file -> label of the card's row."""
HEADER = (
    "layout", "tokens/s a GPU", "MFU by the true count", "MFU by Megatron's formula", "GB of tensors",
    "host waits a step", "code",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write a card for every recipe. Return the exit code."""
    parser = CommandParser(prog="hybridtron check cards", description="Write verification cards.")
    parser.add_argument(
        "--records", type=path_of, metavar="FILE", help="records of rehearsals (default: benchmarks/rehearse.jsonl)"
    )
    parser.add_argument("--output", type=path_of, metavar="FOLDER", help="default: benchmarks/cards")
    chosen = parser.parse_args(arguments)
    checkout = pages()
    output = chosen.output or (checkout and checkout / "cards")
    if output is None:
        raise Unusable(
            "--output is not given, and without a checkout there is no benchmarks/cards to write to: "
            "set --output FOLDER, or run the command in a checkout",
            code="missing",
        )
    path = chosen.records or (checkout and checkout / "rehearse.jsonl")
    if path is None or not path.is_file():
        raise Unusable(
            f"--records {path}: no such file; give a file that `hybridtron rehearse --suite` has written",
            code="no-file",
        )
    records = SuiteRecords(path).read().values()
    for recipe in choices_of("recipe"):
        recipe_records = [record for record in records if record["recipe"] == recipe]
        page = output / f"{recipe}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(card(recipe, measured_of(recipe, output), recipe_records))
    print(f"{len(choices_of('recipe'))} cards in {output}")
    return 0


def measured_path(recipe: str, folder: Path) -> Path:
    """Return the path of a recipe's measurement file. `folder` is the cards' folder."""
    return folder / "measured" / f"{recipe.replace('/', '-')}.json"


def measured_of(recipe: str, folder: Path) -> dict[str, Any]:
    """Return a recipe's measurements, or {} if it has no measurement file. Raises Unusable for unknown keys."""
    path = measured_path(recipe, folder)
    measurements = json.loads(path.read_text()) if path.exists() else {}
    if unknown := sorted(measurements.keys() - LINES.keys()):
        raise Unusable(
            f"{path} has unknown keys: {', '.join(unknown)}; remove them, or measure again by `hybridtron check gpu`",
            code="unknown-name",
        )
    return measurements


def card(recipe: str, measured: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a recipe's card as Markdown."""
    lines = [f"# Verification card of `{recipe}`", "", "## Measured, on one GPU", "", "| | |", "|---|---|"]
    if measured.get("mfu") is not None:
        measured = {**measured, "megatron_mfu": measured["mfu"] * megatron_share(recipe, "TP2 + SP")}
    lines += [f"| {line} | {_text(measured.get(key))} |" for key, line in LINES.items()]
    lines += ["", REHEARSED, ""]
    shown = list(_rehearsed(recipe, records))
    if shown:
        lines += [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}", *shown]
        lines += [
            "",
            "By `hybridtron rehearse --suite`, of the slowest rank: [the method](../../docs/rehearse.md).",
        ]
    else:
        lines.append("not rehearsed")
    text = "\n".join(lines) + "\n"
    if "/" in recipe:
        return text.replace("(../../docs/", "(../../../docs/")
    return text


def _rehearsed(recipe: str, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table row for each layout that has records.

    The row has the slowest rank's speed, and the largest memory and wait count over all ranks. If the recipe can't be
    trained in the layout, the row names the configuration key that is refused.
    """
    for layout in layouts_of(recipe):
        lines = [line for line in records if line["layout"] == layout]
        if lines and "refused" in lines[0]:
            yield f"| {layout} | refused: `{lines[0]['refused'][0].partition('  ')[0]}` |{' |' * (len(HEADER) - 2)}"
        elif ranks := [line for line in lines if "peak" in line]:
            slowest = max(ranks, key=lambda line: line["step_seconds"])
            by_megatron = slowest["mfu"] * megatron_share(recipe, layout)
            cells = (
                layout, f"{slowest['tokens_per_second']:,.0f}", f"{slowest['mfu']:.1%}", f"{by_megatron:.1%}",
                f"{max(line['peak'] for line in ranks) / 1e9:.1f}", f"{max(line['waits'] for line in ranks):.0f}",
                f"`{slowest['code']}`",
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def megatron_share(recipe: str, layout: str) -> float:
    """Return the FLOPs per token by Megatron's formula, divided by the true count, in the rehearsed phase."""
    phase = largest_phase(RecipeCase(recipe, layout).plan())
    length = phase.settings.seq_len
    return megatron_flops(phase.arch, length) / count(phase.arch, length).flops_per_token


def megatron_flops(arch: Architecture, length: int) -> float:
    """Return the FLOPs per token for forward and backward pass by Megatron's formula, for sequences of `length` tokens.

    The formula counts matrix products with weights, and attention from every query to every key in the sequence.
    """
    parts = count(arch, length).flops_by_part
    queries = sum(spec.channels(arch.sizes)[0] for spec in arch.specs if isinstance(spec, HeadsSpec))
    return 3 * (parts["projections"] + parts["head"] + 2 * 2 * length * queries)


def _text(value: Any) -> str:
    """Return a value as text for the card. None gives "not measured"."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, dict):  # losses by step
        return ", ".join(f"{step}: {loss:.4f}" for step, loss in value.items())
    if isinstance(value, float):
        if value < 1e4:
            return f"{value:,.4g}"
        return f"{value:,.0f}"
    if isinstance(value, str):
        return f"`{value}`"
    return str(value)
