"""The Expansion Span paper's claims: cost, language, and recall.

Claims about recall, with their rules, come from the span study (studies/span_study/claims.py).
"""

from __future__ import annotations

import re
import statistics
from functools import partial

import studies.span_study.claims as study
from hybridtron.sweep.grid import SEED
from studies.judge import Verdict
from studies.papers.claim import EMPTY, Claim, Kept, OnGpu, Paper, Table, Written, nothing, unseen
from studies.papers.columns import in_rows, tasks
from studies.papers.speed import spans_cheaper, speed_rows
from studies.span_study.asked import readings_of
from studies.span_study.runs import ALONE, BASE

LENGTHS = (8192, 16384, 32768)
RULER = tasks("ruler_se", "string_match_all", LENGTHS, samples=20)
BOTH = tasks("ruler_se", "string_match_all", LENGTHS, samples=20, attentions=(study.FULL, study.TRAINED))
AT_SIZE = {
    "2(a)": ("attention", {name: f"{name}-data=language" for name in ("SE", "SW", "S2", "full")}),
    "2(b)": (
        "adapters",
        {"SE": "SE-preset=hylora", **{f"SE-{one}": f"SE-preset={one}" for one in ("lora", "lora_plus")}},
    ),
    "3(a)": ("retrieval", {"SE": "memory=span", "random": "memory=random", "NoMem": "memory=none"}),
    "3(b)": ("chunks", {"SE": "chunk=_2048,4096_", "chunk=128": "chunk=2048", "chunk=256": "chunk=4096"}),
    "3(c)": ("blocks", {"2x8": "8x32", "8x2": "64x4"}),
    "5": (
        "adapters",
        {
            "full": "full-preset=hylora",
            **{f"full-{one}": f"full-preset={one}" for one in ("lora", "lora_plus")},
        },
    ),
    "6": ("ranks", {"rank=4": "rank=8", "rank=16": "rank=16", "rank=64": "rank=64"}),
    "11(a)": ("attention", {"SW": "SW-data=language"}),
    "11(b)": ("attention", {"SE": "SE-data=language"}),
    "12": ("retrieval", {"SE": "memory=span", "LM": "memory=landmark"}),
    "13": ("shifted", {"S2": "lr=2e-5", "S2-lr=2e-4": "lr=2e-4"}),
}
"""For each figure, a sweep of the 2.7B model, and its runs that correspond to this study's models."""


def adapted(of: study.Claim) -> OnGpu:
    """Return the runs of two adapted 2.7B models, as the paper has them."""
    sweep, names = AT_SIZE[of.figure]
    only = tuple(dict.fromkeys((names[of.first], names[of.second])))
    column = RULER
    if of.reads != (study.FULL, study.FULL):
        column = BOTH
    return OnGpu(f"span/{sweep}", only, column=column)


RULES = {
    "above": "the first model's recall above the second's, seed by seed",
    "not_above": f"recall higher by less than {study.NOT_ABOVE:g} points, seed by seed",
    "level": f"recall within {study.LEVEL:g} points, seed by seed",
}
"""Rules for recall at the tuned length, twice and four times that; read with full attention unless a claim differs."""


def readings(kept: Kept) -> study.Found:
    """Return the readings of all measured models, by variant and seed."""
    by_variant: dict[str, dict[str, study.Readings]] = {}
    for run, result in kept.measured.get("span", ()):
        by_variant.setdefault(run.variant, {})[run.values[SEED]] = readings_of(result.measured)
    return by_variant


def recalls(of: study.Claim, kept: Kept) -> Table:
    """Return a table of recall in percent: the two compared models, and the base that both were tuned from."""
    by_variant = readings(kept)
    rows = []
    for name, how in ((of.first, of.reads[0]), (of.second, of.reads[1]), (BASE, study.FULL)):
        if scores := [100 * study.score(reading, how) for reading in by_variant.get(name, {}).values()]:
            rows.append((f"{name}, {how}", f"{len(scores)}", f"{statistics.mean(scores):.1f}"))
    return Table(("ours, recall in %", "seeds", "mean of rows of 512 to 2048"), tuple(rows))


def compared(of: study.Claim, kept: Kept) -> Verdict:
    verdict = study.verdict(readings(kept), of)
    assert verdict is not None, "the claim waits while one of its models has no result"
    return verdict


FURTHER = ("SE-16x4", "SE-long", "full-long")


def why_not_level(kept: Kept) -> str:
    """Explain a distance from full attention by two experiments of one seed.

    SE with four times as many blocks, and both models after three times as many steps.
    """
    by_variant = readings(kept)
    seed = ALONE
    recall = {name: f"{100 * study.score(by_variant[name][seed]):.1f}%" for name in ("full", "SE", *FURTHER)}
    return (
        f"from seed {seed}, full attention recalls {recall['full']} and SE {recall['SE']}; with 16 blocks in place of "
        f"4 SE recalls {recall['SE-16x4']}; after three times as many steps full attention {recall['full-long']}, SE "
        f"{recall['SE-long']}"
    )


def of_recall(of: study.Claim) -> Claim:
    """Return the claim for a comparison of the study."""
    pair = re.sub(r"[^a-z0-9]+", "-", f"{of.first} {of.second}".lower())
    reason = None
    further = {}
    if of.kind == "level":
        reason = why_not_level
        further = {"span": FURTHER}
    return Claim(
        f"figure{re.sub(r'[^a-z0-9]', '', of.figure)}-{pair}",
        f"Figure {of.figure}",
        f"{of.says[0].upper()}{of.says[1:]}.",
        EMPTY,
        RULES[of.kind],
        {"span": tuple(dict.fromkeys((of.first, of.second)))},
        partial(recalls, of),
        partial(compared, of),
        reason=reason,
        further=further,
        on_gpu=adapted(of),
    )


CLAIMS = (
    *(of_recall(one) for one in study.CLAIMS),
    Claim(
        "figure4-cost",
        "Figure 4",
        "A span's time grows linearly, and full attention takes many times as long.",
        Table(("2.7B, a training step at long rows", "over SE-Attn"), (("full attention", "4x to 5x"),)),
        "forward and backward of one layer: full attention at least 2 times a span at the longest row, and a span's "
        "time "
        "per token at most 1.2 times that of the shortest",
        {},
        speed_rows("span"),
        spans_cheaper,
        timed="span",
        written=Written.TIMED,
    ),
    Claim(
        "tables1-2-language",
        "Tables 1, 2 and 7",
        "Adapted with spans, the 2.7B hybrid reads PG-19 nearly as well as with full attention, and better than with "
        "windows or shifted groups.",
        Table(
            ("tuned on PG-19 (Table 7), its perplexity at", "8192", "16384", "32768"),
            (
                ("full", "10.04", "10.14", "10.91"),
                ("SW", "10.59", "11.64", "13.25"),
                ("S2", "12.74", "14.42", "16.11"),
                ("SE", "10.22", "10.84", "12.28"),
            ),
        ),
        "perplexity at 2 and 4 times the tuned length: SE below SW and S2",
        {},
        nothing,
        unseen("a laptop's text has no books, and its models use little of what is far"),
        seen_at="from models on that read books: the 2.7B, 1000 steps of 0.5M tokens for each kind of attention. The "
        "numbers are Table 7's, whose models are tuned on PG-19 as these runs are; Table 1 has models tuned on other "
        "text. The paper reads PG-19's validation, these runs read books that are held out of its training books",
        on_gpu=OnGpu(
            "span/attention", tuple(f"{kind}-data=pg19" for kind in ("SE", "SW", "S2")), column=in_rows(*LENGTHS)
        ),
    ),
    Claim(
        "tables8-9-tasks",
        "Tables 8 and 9",
        "On LongBench and real recall tasks spans are level with full attention.",
        EMPTY,
        "the averages within a point of full attention's",
        {},
        nothing,
        unseen("models of a laptop's size answer at chance"),
        seen_at="the 2.7B, adapted",
        on_gpu=OnGpu(
            "span/attention", ("SE-data=language", "full-data=language"), reads="--harness longbench recall span_long"
        ),
    ),
)
PAPER = Paper("span", "Expansion Span: Combining Fading Memory and Retrieval in Hybrid State Space Models", CLAIMS)
