"""Runs a step of every recipe that fits on this device: losses, speed and memory, for its verification card."""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybridtron.config.load import choices_of
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.device import compute_device, describe_device, forget_peak_memory, peak_memory_gib, warn_of_waits
from hybridtron.ops.kernel_launch import TRITON
from hybridtron.planning.memory import plan
from hybridtron.planning.rates import GB
from hybridtron.problems import ConfigError
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import Steps, checked, one_process, random_batches, speed
from hybridtron.requirements import installed
from hybridtron.shipped import pages

STEPS = 3  # the fastest counts
LINES_WRITTEN = ("command", "commit", "versions", "gpu", "losses", "peak_gb", "waits", "tokens_per_second", "mfu")
SYNCHRONIZES = "synchronizing CUDA operation"  # part of torch's warning
QUICK = ("laptop", "mamba2_laptop")
SHORT = ("phases.0.seq_len=128", "phases.0.global_batch=2", "phases.0.micro_batch=1")
BESIDE = ("mamba-ssm", "causal-conv1d", "flash-attn", "transformer-engine", "fla-core")
PACKAGES = ("torch", TRITON, "megatron-core", *BESIDE)


def every_recipe(report: BenchReport, names: Sequence[str] = ()) -> None:
    """Report a line for each of these recipes, or all, and write a file next to the cards; failures become notes."""
    cells = []
    checkout = pages()
    failed = list[str]()
    for name in names or (QUICK if report.quick else choices_of("recipe")):
        try:
            settings = fitting(name, report.quick)
            results = taken(settings)
        except (ConfigError, torch.OutOfMemoryError) as error:
            report.notes.append(f"{name} takes no step: {str(error).splitlines()[-1].strip()}")
            continue
        except Exception:  # a failed recipe must not stop the others
            traceback.print_exc()
            failed.append(name)
            continue
        cells.append((name, " ".join(settings[1:]), f"{results['tokens_per_second']:,.0f}", *losses_of(results)))
        if checkout is not None and not report.quick:
            write(checkout / "cards" / "measured" / f"{name.replace('/', '-')}.json", results)
    report.table("a step of every recipe", ("recipe", "settings", "tokens/s", "first loss", "last loss"), cells)
    report.notes += [f"{name} FAILED" for name in failed]
    report.at_most("recipes that fail", 0, len(failed))


def fitting(name: str, quick: bool) -> list[str]:
    """Return settings for one micro-batch with as many of the recipe's rows as fit into the device's memory."""
    settings = [f"recipe={name}", "precision=bf16", "cluster=h100"]
    if quick:
        return [*settings, *SHORT]
    rows = checked(settings).phases[0].micro_batch
    while True:
        chosen = [*settings, f"phases.0.micro_batch={rows}", f"phases.0.global_batch={rows}"]
        config = checked(chosen)
        limit = (config.cluster.memory_gb or 0) * GB
        if rows == 1 or plan(resolve(config)[0], 1).fullest.memory.total < 0.9 * limit:
            return chosen
        rows //= 2


def taken(settings: list[str]) -> dict[str, Any]:
    """Run the steps of one recipe, and return the results with the cards' keys."""
    recipe = settings[0].removeprefix("recipe=")
    options = settings[1:]
    config = checked(settings)
    forget_peak_memory()
    report = BenchReport("steps", repetitions=STEPS)
    with one_process(config) as groups:
        steps = Steps(config, groups, random_batches(config))
        seconds = report.timed({"step": steps}).popitem()[1].fastest
        with host_waits() as waits:
            steps()
    losses = {str(number + 1): loss.item() for number, loss in enumerate(steps.losses)}
    del steps
    gc.collect()
    memory = peak_memory_gib()
    results = {
        "command": f"hybridtron check gpu --only every_recipe --recipe {recipe}, with {' '.join(options)}",
        "commit": commit(),
        "versions": ", ".join([f"Python {platform.python_version()}", *package_versions()]),
        "gpu": describe_device(),
        "losses": losses,
        "peak_gb": None if memory is None else memory * 2**30 / GB,
        "waits": None if memory is None else len(waits),  # neither exists on a CPU
        **_speeds(config, seconds),
    }
    assert tuple(results) == LINES_WRITTEN
    return results


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Yield a list that gets torch's warnings of host synchronizations inside the block, once it has ended."""
    messages: list[str] = []
    on_cuda = compute_device().type == "cuda"
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        if on_cuda:
            warn_of_waits(True)
        try:
            yield messages
        finally:
            if on_cuda:
                warn_of_waits(False)
    messages += [str(warning.message) for warning in recorded if SYNCHRONIZES in str(warning.message)]


def _speeds(config: Config, seconds: float) -> dict[str, float | None]:
    tokens, tflops = speed(config, seconds)
    peak = config.cluster.peak_tflops
    return {"tokens_per_second": tokens, "mfu": None if peak is None else tflops / peak}


def package_versions() -> list[str]:
    """List the installed packages that matter here, with their versions."""
    return [f"{name} {version}" for name in PACKAGES if (version := installed(name))]


def losses_of(found: dict[str, Any]) -> tuple[str, str]:
    """Return the first and the last loss as text."""
    values = list(found["losses"].values())
    return f"{values[0]:.4f}", f"{values[-1]:.4f}"


def commit() -> str | None:
    """Return the checkout's commit, or None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return None
    return process.stdout.strip() or None


def write(path: Path, found: dict[str, Any]) -> None:
    """Update the file with new results; other keys keep their values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **found}, indent=1) + "\n")
