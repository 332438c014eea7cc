"""Speed by length: of reading and generating (Samba's Figures 1 and 3) and of spans (Expansion Span's Figure 4).

Measured in turns by `hybridtron bench`, and kept as files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from examples.papers.claim import Claim, Kept, Table, Verdict, holds
from examples.results import commit
from hybridtron.problems import Unusable
from hybridtron.train.records import read_record, write_whole

NAMES = ("prefill", "decode", "span")
ROUNDS = 3
FASTER = 2.0  # times as fast as full attention at the longest text
# times the time per token of the shortest text
LINEAR = 1.2
FLAT = 1.15


def kept_in(folder: Path) -> dict[str, dict[str, Any]]:
    """What has been measured."""
    return {name: record for name in NAMES if (record := read_record(folder / f"speed-{name}.json"))}


def measure_missing(folder: Path, quick: bool) -> None:
    """The table of each benchmark, with what it takes to measure it again."""
    import torch

    torch.set_num_threads(1)
    for name in NAMES:
        if name not in kept_in(folder):
            write(measured(name, quick=quick), folder / f"speed-{name}.json")


def measured(name: str, models: Sequence[str] = (), quick: bool = False) -> dict[str, Any]:
    """The benchmark's first table, of these recipes or of the benchmark's own models."""
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
    """For the third column: models of the paper's size, whose weights are as they start, which cost what others do."""
    from hybridtron.device import compute_device

    if compute_device().type != "cuda":
        raise Unusable(f"{claim.name} is timed on a GPU, and there is none here")
    return measured(claim.timed, claim.timed_models)


def write(record: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
    write_whole(path, f"{{\n{lines}\n}}\n")


def speed_rows(name: str) -> Callable[[Kept], Table]:
    def table(kept: Kept) -> Table:
        record = kept.timed.get(name)
        return Table((), ()) if record is None else Table(tuple(record["header"]), tuple(map(tuple, record["rows"])))

    return table


def column(kept: Kept, name: str, title: str) -> list[float]:
    """A column of ratios, by length."""
    record = kept.timed[name]
    place = record["header"].index(title)
    return [float(row[place].replace(",", "").removesuffix("x")) for row in record["rows"] if row[place]]


def prefill_faster(kept: Kept) -> Verdict:
    ratio = column(kept, "prefill", "Llama / Samba")[-1]
    grown = column(kept, "prefill", "Samba by length")[-1]
    return holds([
        (f"Llama takes {ratio:.2f} times Samba's time at the longest rows", ratio >= FASTER),
        (f"Samba's time per token there is {grown:.2f} times that of the shortest", grown <= LINEAR),
    ])  # fmt: skip


def decoding_flat(kept: Kept) -> Verdict:
    ratio = column(kept, "decode", "Llama / Samba")[-1]
    grown = column(kept, "decode", "Samba per token")[-1]
    return holds([
        (f"Samba's time per token after the longest text is {grown:.2f} times that after the shortest", grown <= FLAT),
        (f"Llama takes {ratio:.1f} times Samba's there", ratio >= FASTER),
    ])  # fmt: skip


def spans_cheaper(kept: Kept) -> Verdict:
    full = column(kept, "span", "full / span")
    own = column(kept, "span", "span per token")
    return holds([
        (f"full attention takes {full[-1]:.1f} times a span's time at its longest row", full[-1] >= FASTER),
        (f"a span's time per token at the longest row is {own[-1]:.2f} times that of the shortest", own[-1] <= LINEAR),
    ])  # fmt: skip
