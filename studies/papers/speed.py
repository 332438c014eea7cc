"""Speed by length: reading and generating (Samba's Figures 1 and 3), and spans (Expansion Span's Figure 4).

The benchmarks of `hybridtron bench` measure it with all forms in turns; their tables are kept as files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hybridtron.problems import Unusable
from hybridtron.train.jsonl import read_record, write_whole
from studies.judge import Verdict, timed
from studies.papers.claim import Claim, Kept, Table
from studies.results import commit

NAMES = ("prefill", "decode", "span")
ROUNDS = 3
FASTER = 2.0  # smallest speed-up over full attention at the longest text
# largest time per token at the longest text, as a multiple of the shortest text's
LINEAR = 1.2
FLAT = 1.15


def kept_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the stored measurements of a folder, by name."""
    return {name: record for name in NAMES if (record := read_record(folder / f"speed-{name}.json"))}


def measure_missing(folder: Path, quick: bool) -> None:
    """Measure the speeds that have no file yet, and write them."""
    import torch

    torch.set_num_threads(1)
    for name in NAMES:
        if name not in kept_in(folder):
            write(measured(name, quick=quick), folder / f"speed-{name}.json")


def measured(name: str, models: Sequence[str] = (), quick: bool = False) -> dict[str, Any]:
    """Run a benchmark and return its first table as a record.

    `models` are recipes; without any the benchmark takes its own models.
    """
    from hybridtron.cli.bench import WHAT
    from hybridtron.proving.measuring import BenchReport, machine, versions

    report = BenchReport(name, quick, 1 if quick else ROUNDS, tuple(models))
    began = time.monotonic()
    getattr(import_module(f"benchmarks.{WHAT[name][0]}"), name)(report)
    table = report.tables[0]
    return {
        "header": table.header,
        "rows": table.cells,
        "command": " ".join(["hybridtron bench", name, *models, f"--repetitions {ROUNDS}"]),
        "minutes": round((time.monotonic() - began) / 60, 2),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(report),
    }


def measured_on_gpu(claim: Claim) -> dict[str, Any]:
    """Time models of the paper's size for the third column.

    Their weights are untrained, which costs the same time. Raises Unusable without a GPU.
    """
    from hybridtron.device import compute_device

    if compute_device().type != "cuda":
        raise Unusable(f"{claim.name} is timed on a GPU, and there is none here", code="unavailable")
    return measured(claim.timed, claim.timed_models)


def write(record: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    write_whole(path, f"{{\n{lines}\n}}\n")


def speed_rows(name: str) -> Callable[[Kept], Table]:
    def table(kept: Kept) -> Table:
        if name not in kept.timed:
            return Table((), ())
        record = kept.timed[name]
        return Table(tuple(record["header"]), tuple(map(tuple, record["rows"])))

    return table


def column(kept: Kept, name: str, title: str) -> list[float]:
    """Return a column of ratios, by length."""
    record = kept.timed[name]
    place = record["header"].index(title)
    return [float(row[place].replace(",", "").removesuffix("x")) for row in record["rows"] if row[place]]


def prefill_faster(kept: Kept) -> Verdict:
    ratio = column(kept, "prefill", "Llama / Samba")[-1]
    grown = column(kept, "prefill", "Samba by length")[-1]
    return timed([
        (f"Llama takes {ratio:.2f} times Samba's time at the longest rows", ratio >= FASTER),
        (f"Samba's time per token there is {grown:.2f} times that of the shortest", grown <= LINEAR),
    ])  # fmt: skip


def decoding_flat(kept: Kept) -> Verdict:
    ratio = column(kept, "decode", "Llama / Samba")[-1]
    grown = column(kept, "decode", "Samba per token")[-1]
    return timed([
        (f"Samba's time per token after the longest text is {grown:.2f} times that after the shortest", grown <= FLAT),
        (f"Llama takes {ratio:.1f} times Samba's there", ratio >= FASTER),
    ])  # fmt: skip


def spans_cheaper(kept: Kept) -> Verdict:
    full = column(kept, "span", "full / span")
    grown = column(kept, "span", "span per token")
    return timed([
        (f"full attention takes {full[-1]:.1f} times a span's time at its longest row", full[-1] >= FASTER),
        (
            f"a span's time per token at the longest row is {grown[-1]:.2f} times that of the shortest",
            grown[-1] <= LINEAR,
        ),
    ])  # fmt: skip
