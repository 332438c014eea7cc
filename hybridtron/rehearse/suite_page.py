"""Page of a suite: each recipe's modelled step under each layout, compared with its plan.

A suite is a set of rehearsals: training steps that are simulated without a GPU. A record has one rank's results for a
recipe in a layout, or the reason why there are no results (`suite.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridtron.planning.activations import MARGIN
from hybridtron.rehearse.suite import EVERY_RANK, FAMILIES, LAYOUTS, ORIGIN, ORIGINS, RecipeCase, all_cases

Record = dict[str, Any]
SCALARS = 10**5  # maximum bytes of norms and losses that a rank sends in a step; plans do not count them
INTRODUCTION = """# Rehearsed steps

One training step of every recipe under six layouts, simulated on {gpu} by `make rehearse`. [Recipes of published
families](#families-on-h100s) have one layout each, and are simulated on H100s. The last column has the
digest of the simulated code; the digest of the code that wrote this page is `{digest}`. **No time here was measured**:
tokens/s and MFU are those of the slowest rank, by the model in [docs/rehearse.md](../docs/rehearse.md).

Memory (GB of tensors) is the peak memory of tensors, and traffic (GB sent) the bytes that a rank sends in a step. Both
are compared with the plan of `hybridtron inspect`. Each cell has a value for every pipeline rank. Launches are the
host's launch time in a micro-batch, divided by the device time. Above 100%, launches limit the speed. Results with
the digest of older code may be by an older model of the time, with fewer microseconds a launch and without latencies.
All results are in [rehearse.jsonl](rehearse.jsonl).
"""
ABOUT_FAMILIES = """## Families on H100s

Published models with experts, their dense relatives, and a Samba with experts, each on the smallest of 8, 16, 32 and 64
H100s that hold it by the plan with a tenth of their memory left over. Loads of experts are taken as even. The settings
are in `FAMILIES` of [suite.py](../hybridtron/rehearse/suite.py).

By this model `nemotron_3_nano_30b` trains with 12.2k tokens/s a GPU in bf16, and under PP2 x VPP4 x CP4 x EP4 without
recomputation with 9.9k. Megatron Bridge publishes 14.3k to 14.9k (performance-summary-archive.md of its docs), measured
on as many H100s with rows of as many tokens, but in FP8, which experts do not have here. A modelled time and a measured
one do not compare frameworks.
"""
HEADERS = (
    "recipe", "layout", "tokens/s a GPU (model)", "MFU (model)", "GB of tensors", "planned / rehearsed", "GB sent",
    "planned / rehearsed", "launches", "host waits a step", "code",
)  # fmt: skip


def page(records: Sequence[Record], digest: str) -> str:
    """Return the page as Markdown. `digest` identifies the code that writes the page."""
    shown = [record for record in records if "peak" in record]
    in_layouts = [record for record in shown if record["recipe"] not in FAMILIES]
    gpu = in_layouts[0]["gpu"].upper() if in_layouts else "a GPU"
    families = [case for case in all_cases() if case.recipe in FAMILIES]
    others = [case for case in all_cases() if case.recipe not in FAMILIES]
    gpus = f"an {gpu}" if gpu.startswith("H") else gpu
    parts = [INTRODUCTION.format(gpu=gpus, digest=digest), "\n".join(_summary(records))]
    parts += ["\n".join(_table(records, others)), ABOUT_FAMILIES, "\n".join(_table(records, families))]
    parts += ["## What computed the ops", "\n".join(_forms(shown))]
    if missing := _missing(records):
        parts += ["## Not rehearsed", "\n".join(missing)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _summary(records: Sequence[Record]) -> Iterator[str]:
    shown = [record for record in records if "peak" in record]
    if shown:
        yield f"- {len(shown)} ranks of {len({record['recipe'] for record in shown})} recipes."
        yield f"- {_nearness('peak', [record['planned'] / record['peak'] for record in shown])}"
        yield f"- {_nearness('traffic', [ratio for ratio in map(_sent_ratio, shown) if ratio is not None])}"
    yield f"- {_equal_ranks(shown)}"
    yield (
        f"- Recipes of `length/` start from the weights of another run. The recipes `length/official_*` are rehearsed "
        f"with the models of {', '.join(f'`{name}`' for name in sorted(set(ORIGINS.values())))}, all others with the "
        f"model of `{ORIGIN}`."
    )


def _nearness(what: str, ratios: Sequence[float]) -> str:
    far = sum(abs(ratio - 1) > MARGIN for ratio in ratios)
    if ratios:
        span = f"{min(ratios):.3f} to {max(ratios):.3f}"
    else:
        span = "none"
    return (
        f"The planned {what} divided by the rehearsed {what} is {span}; {far} of {len(ratios)} ranks differ by more "
        f"than {MARGIN:.0%}."
    )


def _sent_ratio(record: Record) -> float | None:
    """Return planned traffic divided by rehearsed traffic, or None if the rank sends only norms and losses."""
    if record["sent"] > SCALARS:
        return record["planned_sent"] / record["sent"]
    return None


def _equal_ranks(shown: Sequence[Record]) -> str:
    """Return a sentence on the case EVERY_RANK: do ranks with the same pipeline rank have equal costs?"""
    case = f"`{EVERY_RANK[0]}` under {EVERY_RANK[1]}"
    ranks = [record for record in shown if (record["recipe"], record["layout"]) == EVERY_RANK]
    world = LAYOUTS[EVERY_RANK[1]][0]
    if len(ranks) < world:
        return f"Only {len(ranks)} of the {world} ranks of {case} were rehearsed."
    amounts = {
        (
            record["pipeline_rank"],
            record["peak"] >> 10,
            record["sent"],
            round(record["step_seconds"], 6),
            record["waits"],
        )
        for record in ranks
    }
    stages = {record["pipeline_rank"] for record in ranks}
    if len(amounts) == len(stages):
        comparison = "are equal"
    else:
        comparison = "differ"
    return (
        f"All {world} ranks of {case} were rehearsed. The ranks of a pipeline rank {comparison} in memory (to a KiB), "
        f"traffic and time (to a microsecond)."
    )


def _table(records: Sequence[Record], cases: Sequence[RecipeCase]) -> Iterator[str]:
    yield f"| {' | '.join(HEADERS)} |"
    yield f"|---|---|{'---|' * (len(HEADERS) - 2)}"
    rest = " |" * (len(HEADERS) - 3)
    for case in cases:
        case_records = [
            record for record in records if (record["recipe"], record["layout"]) == (case.recipe, case.layout)
        ]
        if not case_records:
            continue
        cells = [f"`{case.recipe}`", case.layout]
        if failed := [entry["failed"] for entry in case_records if "failed" in entry]:
            yield f"| {' | '.join(cells)} | failed: {failed[0]} |{rest}"
        elif "refused" in case_records[0]:
            refused = case_records[0]["refused"][0].partition("  ")
            yield f"| {' | '.join(cells)} | refused: `{refused[0]}` {refused[2].partition(': ')[0]} |{rest}"
        else:
            yield f"| {' | '.join([*cells, *_numbers(_different(case_records))])} |"


def _different(records: Sequence[Record]) -> list[Record]:
    """Return one record for each pipeline rank, from its lowest global rank. The records are sorted by rank."""
    ordered = sorted(records, key=lambda record: record["rank"])
    return list({record["pipeline_rank"]: record for record in reversed(ordered)}.values())[::-1]


def _numbers(ranks: Sequence[Record]) -> list[str]:
    slowest = max(ranks, key=lambda record: record["step_seconds"])
    return [
        f"{slowest['tokens_per_second']:,.0f}",
        f"{slowest['mfu']:.1%}",
        ", ".join(f"{record['peak'] / 1e9:.1f}" for record in ranks),
        ", ".join(f"{record['planned'] / record['peak']:.3f}" for record in ranks),
        ", ".join(f"{record['sent'] / 1e9:.2f}" for record in ranks),
        ", ".join("" if ratio is None else f"{ratio:.3f}" for ratio in map(_sent_ratio, ranks)),
        ", ".join(f"{record['launch_share']:.0%}" for record in ranks),
        ", ".join(f"{record['waits']:.0f}" for record in ranks),
        ", ".join(dict.fromkeys(f"`{record['code']}`" for record in ranks)),
    ]


def _forms(shown: Sequence[Record]) -> Iterator[str]:
    """Yield a table's lines: a row for each combination of kernels, with the recipes that use it in any layout."""
    recipes: dict[tuple[str, str], dict[str, None]] = {}
    for record in shown:
        forms = tuple(", ".join(record["forms"][key]) for key in ("kernels", "attention"))
        recipes.setdefault((forms[0], forms[1]), {})[record["recipe"]] = None
    yield "| Triton kernels of our own, by op | attention | recipes |"
    yield "|---|---|---|"
    for (kernels, attention), names in sorted(recipes.items()):
        yield f"| {kernels} | {attention} | {', '.join(f'`{name}`' for name in sorted(names))} |"


def _missing(records: Sequence[Record]) -> list[str]:
    """Return a line for each recipe without records for some layouts, with these layouts' names."""
    recorded = {(record["recipe"], record["layout"]) for record in records}
    lacking: dict[str, list[str]] = {}
    for case in all_cases():
        if (case.recipe, case.layout) not in recorded:
            lacking.setdefault(case.recipe, []).append(case.layout)
    return [f"- `{recipe}`: {', '.join(layouts)}" for recipe, layouts in lacking.items()]
