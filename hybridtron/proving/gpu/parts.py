"""The parts of gpu_check.py: what each measures, and the table that all of them write."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hybridtron.ops.registry import choices
from hybridtron.proving.gpu.correct import correctness
from hybridtron.proving.gpu.speed import attention_over_length, recipes
from hybridtron.proving.measuring import BenchReport, BenchSettings, BenchTable, Goal, markdown, print_report

Part = Callable[[torch.device, bool], tuple[BenchTable, list[Goal], list[str]]]
"""From the device, and whether to be tiny: a table, what must hold, and remarks."""
STEPS = 8
LENGTHS = (4096, 8192, 16384, 32768, 65536)


def check_correctness(device: torch.device, tiny: bool) -> tuple[BenchTable, list[Goal], list[str]]:
    return *correctness(device, 64 if tiny else 256, 128 if tiny else 512), []


def check_recipes(_: torch.device, tiny: bool) -> tuple[BenchTable, list[Goal], list[str]]:
    rows, remarks = recipes([("samba_421m", 8), ("samba_1.3b", 4)], ["bf16"], 2 if tiny else STEPS, tiny)
    return rows, [], remarks


def check_attention(device: torch.device, tiny: bool) -> tuple[BenchTable, list[Goal], list[str]]:
    return attention_over_length(device, (128, 256) if tiny else LENGTHS, tiny), [], []


def check_fp8(_: torch.device, tiny: bool) -> tuple[BenchTable, list[Goal], list[str]]:
    precisions = ["bf16", "fp8_delayed", "fp8_current", "fp8_block"]
    rows, remarks = recipes([("samba_1.7b_padded", 2)], precisions, 2 if tiny else STEPS, tiny)
    return BenchTable(f"FP8: {rows.title}", rows.header, rows.cells), [], remarks


PARTS: dict[str, Part] = {
    "correctness": check_correctness,
    "recipes": check_recipes,
    "attention": check_attention,
    "fp8": check_fp8,
}


def run(names: Sequence[str], device: torch.device, rehearse: bool, output: Path | None) -> bool:
    """Run these parts, print and write their table; whether all went well."""
    tables, goals, notes, failed = [BenchTable("kernels", ("op", "runs", "why"), choices(device.type))], [], [], []
    for name in names:
        try:
            rows, of_part, remarks = PARTS[name](device, rehearse)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        tables.append(rows)
        goals += of_part
        notes += remarks
    notes += [f"{name} FAILED" for name in failed]
    report = BenchReport("GPU check", device.type, tables, goals, notes)
    print_report(report)
    if output is not None:
        settings = BenchSettings(rehearse, STEPS, torch.get_num_threads())
        output.write_text(markdown(report, settings, "hybridtron gpu-check"), encoding="utf-8")
        print(f"\nwritten to {output}")
    return not failed and all(goal.reached for goal in goals)
