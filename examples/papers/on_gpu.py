"""What shows a claim on one H100: commands, their hours by the planner's model, and the page's third column.

    python -m examples.papers samba --fill table3-order samba=runs/samba_421m mamba=runs/mamba_432m

reads held-out text with trained runs, at the lengths of the claim, and keeps what it finds beside the other results.
Nothing here has been measured on a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from examples.long_text import held_out_rows
from examples.papers.claim import Claim, OnGpu, Table
from examples.papers.samba_runs import losses_in_rows
from examples.results import ROOT, commit
from hybridtron.problems import Unusable
from hybridtron.train.records import read_lines, read_record, write_whole

TOKENS = 2**20  # of held-out text, that every length is read of


@cache
def hours(settings: tuple[str, ...]) -> float:
    """Of a run on one H100: by the planner's model of its fastest layout, or by the rehearsal's, which is of an H200.

    The longer one counts: the planner knows no launches, the rehearsal more memory traffic than an H100 has time for.
    """
    from hybridtron.config.load import load
    from hybridtron.config.resolve import resolve
    from hybridtron.planning.fit import fit
    from hybridtron.planning.rates import GPUS

    config = load(list(settings))
    steps = resolve(config)[-1].end_step
    tokens = steps * config.phases[0].global_batch * config.phases[0].seq_len
    layouts = fit(config, 1, GPUS["h100"].memory)
    if not layouts:
        raise Unusable(f"{' '.join(settings)} fits into no layout of one H100")
    return max(layouts[0].seconds * steps, tokens / rehearsed(settings[0].removeprefix("recipe="))) / 3600


def rehearsed(recipe: str) -> float:
    """Tokens a second of one of eight data-parallel GPUs; without end where it was not rehearsed so."""
    lines = read_lines(ROOT / "benchmarks/rehearse.jsonl")
    of_recipe = (line for line in lines if (line["recipe"], line["layout"]) == (recipe, "DP8"))
    return min((line["tokens_per_second"] for line in of_recipe if "tokens_per_second" in line), default=math.inf)


def commands(claim: Claim, on_gpu: OnGpu) -> list[str]:
    """What is typed, from training to the column."""
    given = f" run.weights={on_gpu.weights}" if on_gpu.weights else ""
    lines = [f"hybridtron train {' '.join(settings)}{given} data.path=TOKENS" for settings in on_gpu.runs]
    if on_gpu.lengths:
        lines.append(f"python -m examples.papers --fill {claim.name} NAME=RUN ...")
    return lines


def path_of(folder: Path, claim: Claim) -> Path:
    return folder / f"gpu-{claim.name}.json"


def column(folder: Path, claim: Claim) -> Table | None:
    """What was found at the paper's size, where that has been measured."""
    record = read_record(path_of(folder, claim))
    return Table(tuple(record["header"]), tuple(map(tuple, record["rows"]))) if record else None


def fill(claim: Claim, runs: Mapping[str, Path], folder: Path) -> Path:
    """Perplexity of these runs at the claim's lengths, as a file of results."""
    if claim.on_gpu is None or not claim.on_gpu.lengths:
        raise Unusable(f"{claim.name} is not read from perplexity by length: its page names the commands")
    lengths = claim.on_gpu.lengths
    rows = [(name, *(f"{value:.2f}" for value in perplexities(run, lengths))) for name, run in runs.items()]
    record = {
        "header": ("on a GPU", *map(str, lengths)),
        "rows": rows,
        "command": " ".join(["--fill", claim.name, *(f"{name}={run.name}" for name, run in runs.items())]),
        "commit": commit(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path_of(folder, claim), f"{json.dumps(record, indent=1)}\n")
    return path_of(folder, claim)


def perplexities(run: Path, lengths: Sequence[int]) -> list[float]:
    """Of the same held-out text, in rows of each length."""
    from hybridtron.cli.given import newest_checkpoint
    from hybridtron.evaluate.held_out import trained_model

    model, config, _ = trained_model(newest_checkpoint(run), None)
    spans_BT = held_out_rows(config.data, max(lengths) + 1, TOKENS // max(lengths))
    found = (losses_in_rows(model, spans_BT, length) for length in lengths)
    return [math.exp(sum(losses) / len(losses)) for losses in found]
