"""Experiments on copying, spans, grown models, keys and joint recall: sweeps of studies with other sizes and seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import studies.grown.runs as grown
import studies.joint_recall.runs as recall
import studies.length_story.runs as story
import studies.passkey.samples as passkey
import studies.span_study.runs as span
from hybridtron.sweep.grid import SweepRun
from studies.long_text import Beyond, held_out_rows
from studies.results import Part, Results, results_of
from studies.study import Measured, Plan, found_in

HERE = Path(__file__).parent
RECALL = "more"  # the part of joint recall
FIVE = ("1", "2", "3", "4", "5")
OF_SPANS = ("4", "5", "6", "7", "8", "9", "10")  # without those of the earlier study, as in the next line
OF_GROWN = ("2", "3", "4", "5", "6")
AT = 64  # contexts into the text where the rise of a model for keys is read
RISE_ROWS = 8  # rows in which it is read
COPY_ROW = 44  # tokens of a row: at most 20 letters, their copy, three signs, and the row's end
COPYING = (f"phases.0.seq_len={COPY_ROW}", "phases.0.global_batch=96", "phases.0.micro_batch=96", "phases.0.lr=1e-3")


def copying_sizes(quick: bool) -> story.Sizes:
    """Return the sizes of copying in rows of one string, which end with its copy."""
    if quick:
        return replace(story.QUICK, copy_padded=True)
    variants = {"copying/zero": COPYING, "copying/passing": COPYING}
    rows = replace(story.STORY, copy_tokens=COPY_ROW - 1, copy_rows=205_000, copy_padded=True)
    return replace(rows, seeds=FIVE, variants=variants)


def span_sizes(quick: bool) -> span.Sizes:
    """Return the sizes of the span study with seven new seeds of every variant, and adapters of low rank."""
    if quick:
        return replace(span.QUICK, every=True, variants=(span.BASE, "SE", "rank=2", "lora-rank=2"))
    return replace(span.STUDY, seeds=OF_SPANS, every=True)


def grown_sizes(quick: bool) -> grown.Sizes:
    if quick:
        return grown.QUICK
    return replace(grown.STUDY, seeds=OF_GROWN)


def passkey_sizes(quick: bool) -> passkey.Sizes:
    if quick:
        return replace(passkey.QUICK, variants=None)
    return passkey.STUDY


def recall_sizes(quick: bool) -> recall.Sizes:
    if quick:
        return replace(recall.QUICK, variants=("mamba+D",), rates=None)
    return recall.STUDY


def keys_part(quick: bool, runs: Path, data: Path) -> Part:
    """Return the runs on keys; each also has the rise of perplexity that its model had before keys."""
    part = passkey.part_of(passkey_sizes(quick), runs, data, HERE / "passkey.yaml")
    at = AT
    if quick:
        at = 4

    def measure(run: SweepRun, path: Path) -> dict[str, Any]:
        return {**part.measure(run, path), "rise": text_rise(path, at)}

    return replace(part, measure=measure, asked={**part.asked, "rise_at": at, "rise_rows": RISE_ROWS})


def text_rise(run: Path, at: int) -> float:
    """Return how perplexity rises after the text phase: at some contexts, over that of the same tokens within one."""
    from hybridtron.checkpoint.folder import all_of, step_of
    from hybridtron.evaluate.held_out import trained_model
    from hybridtron.inference.reader import reader
    from hybridtron.train.jsonl import read_lines

    ended = max(line["step"] for line in read_lines(run / "metrics.jsonl") if line["phase"] == passkey.TEXT)
    checkpoint = next(folder for folder in all_of(run) if step_of(folder) == ended)
    model, config, _ = trained_model(checkpoint, None)
    context = config.phases[0].seq_len
    tokens_BT = held_out_rows(config.data, context * at + 1, RISE_ROWS)
    return math.exp(Beyond.of(reader(model), tokens_BT, context).risen(context * at))


def recall_plan(quick: bool, runs: Path, data: Path) -> Plan:
    """Return further seeds of joint recall, at the rates that its study has found."""
    best = recall.best_rates(recall.rates_part(recall.STUDY, runs, data), Results(results_of("joint_recall")))
    return {RECALL: recall.more_part(recall_sizes(quick), runs, data, best)}


def recall_before(runs: Path, data: Path) -> Measured:
    """Return the results that the study of joint recall has committed, each at the best rate of its variant."""
    kept = Results(results_of("joint_recall"))
    rates = recall.rates_part(recall.STUDY, runs, data)
    best = recall.best_rates(rates, kept)
    seeds = recall.seeds_part(recall.STUDY, runs, data, best)
    measured = found_in({"rates": rates, "seeds": seeds}, kept)
    at_best = [pair for pair in measured["rates"] if pair[0].values[recall.RATE] == best.get(pair[0].variant)]
    return {RECALL: [*at_best, *measured["seeds"]]}


def spans_before(runs: Path, data: Path) -> Measured:
    """Return the results that the span study has committed."""
    return found_in({"span": span.part_of(span.STUDY, runs, data)}, Results(results_of("span_study")))


def grown_before(runs: Path, data: Path) -> Measured:
    """Return the results that the study of grown models has committed."""
    return found_in({"grown": grown.part_of(grown.STUDY, runs, data)}, Results(results_of("grown")))
