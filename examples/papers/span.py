"""The claims of the Expansion Span paper about cost and language; those about recall have a study of their own."""

from __future__ import annotations

from examples.papers.claim import EMPTY, Claim, OnGpu, Paper, Table, nothing, unseen
from examples.papers.speed import spans_cheaper, speed_rows

ADAPTED = OnGpu(
    (("recipe=mamba2_hybrid_2.7b_span", "phases.0.tokens=${steps:1000}"),),
    also="it starts from mamba2attn-2.7b, imported: run.weights=imported",
)
CLAIMS = (
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
    ),
    Claim(
        "tables1-2-language",
        "Tables 1 and 2",
        "Adapted with spans, the 2.7B hybrid reads PG-19 nearly as well as with full attention, and better than with "
        "windows or shifted groups.",
        Table(
            ("PG-19 perplexity at", "8192", "16384", "32768"),
            (
                ("full", "10.28", "10.39", "11.14"),
                ("SW", "10.80", "11.82", "13.45"),
                ("S2", "12.89", "14.67", "16.37"),
                ("SE", "10.45", "11.14", "12.64"),
            ),
        ),
        "perplexity at 2 and 4 times the tuned length: SE below SW and S2 by two standard errors",
        {},
        nothing,
        unseen("a laptop's text has no books, and its models use little of what is far"),
        seen_at="from models on that read books: the 2.7B, 1000 steps of 0.5M tokens for each kind of attention",
        on_gpu=ADAPTED,
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
        seen_at="the 2.7B, adapted: `hybridtron evaluate RUN --harness longbench,recall`",
        on_gpu=ADAPTED,
    ),
)
PAPER = Paper("span", "Expansion Span: Combining Fading Memory and Retrieval in Hybrid State Space Models", CLAIMS)
