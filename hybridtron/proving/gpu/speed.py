"""Measures speed and memory on the device: recipes for a few steps, and FP8 compared with bf16."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from hybridtron.device import forget_peak_memory, peak_memory_gib
from hybridtron.planning.memory import plan
from hybridtron.problems import ConfigError
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches, speed

# settings for tiny models
TINY = ("model.width=128", "model.vocab_size=384", "model.layers.-.hidden=128", "model.layers.W.window=64")
TINY += ("model.layers.W.heads=2", "model.layers.W.kv_heads=2", "phases.0.seq_len=128", "phases.0.global_batch=2")
TINY += ("phases.0.micro_batch=1",)
# headers of the table's columns
SPEED = ("recipe", "precision", "rows x tokens", "tokens/s", "TFLOP/s", "MFU", "peak memory", "estimate", "loss")


def recipes(report: BenchReport) -> None:
    """Measure two recipes in bf16."""
    measure(report, "steps", [("samba_421m", 8), ("samba_1.3b", 4)], ["bf16"])


def fp8(report: BenchReport) -> None:
    """Measure one recipe in bf16 and with every FP8 scaling."""
    precisions = ["bf16", "fp8_delayed", "fp8_current", "fp8_block"]
    measure(report, "FP8: steps", [("samba_1.7b_padded", 2)], precisions)


def measure(report: BenchReport, title: str, wanted: Sequence[tuple[str, int]], precisions: Sequence[str]) -> None:
    """Add a table with a row for each recipe in each precision.

    `wanted` has pairs: a recipe, and the number of sequences in a micro-batch. If a recipe can't run in a precision on
    this device, the table lacks this row, and a note in the report gives the reason.
    """
    cells = []
    for name, rows in wanted:
        for precision in precisions:
            try:
                cells.append(train_rows(report, name, rows, precision))
            except (ConfigError, torch.OutOfMemoryError) as error:
                reason = str(error).splitlines()[-1].strip()
                report.notes.append(f"{name} in {precision} is not measured: {reason}")
    report.table(f"{title} on random tokens, forward, backward and AdamW", SPEED, cells)


def train_rows(report: BenchReport, name: str, rows: int, precision: str) -> tuple[str, ...]:
    """Run steps with two micro-batches of `rows` sequences each.

    Return the table cells for the columns SPEED: the speed of the fastest step, memory, and the last step's loss.
    """
    settings = [f"recipe={name}", f"precision={precision}", f"phases.0.micro_batch={rows}", "cluster=h100"]
    settings.append(f"phases.0.global_batch={2 * rows}")
    if report.quick:
        settings += [*TINY, f"precision.emulate={str(precision.startswith('fp8')).lower()}"]
    config = load_checked(settings)
    forget_peak_memory()
    with one_process(config) as groups:
        steps = Steps(config, groups, random_batches(config))
        seconds = report.timed({f"{name} in {precision}": steps}).popitem()[1].fastest
    loss = steps.losses[-1].item()
    planned = plan(steps.phase, 1).fullest.memory.total
    del steps
    gc.collect()
    phase = config.phases[0]
    peak = config.cluster.peak_tflops
    memory = peak_memory_gib()
    tokens, tflops = speed(config, seconds)
    return (
        name,
        precision,
        f"{phase.micro_batch} x {phase.seq_len}",
        f"{tokens:,.0f}",
        f"{tflops:.4g}",
        "-" if peak is None else f"{tflops / peak:.1%}",
        in_gib(memory),
        in_gib(planned / 2**30),
        f"{loss:.3f}",
    )


def in_gib(memory: float | None) -> str:
    if memory is None:
        return "-"
    return f"{memory:.2f} GiB"
