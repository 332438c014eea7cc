"""Runs a few steps with every recipe on this device, for the verification cards: losses, speed and memory.

A verification card is a file in benchmarks/cards with a recipe's measured results, and with the results of a rehearsal
(a training step that is simulated without a GPU).
"""

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
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config
from hybridtron.device import compute_device, describe_device, forget_peak_memory, peak_memory_gib, warn_of_waits
from hybridtron.ops.kernel_launch import TRITON
from hybridtron.planning.memory import plan
from hybridtron.planning.rates import GB
from hybridtron.problems import ConfigError
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches, speed
from hybridtron.requirements import installed
from hybridtron.resources import pages

STEPS = 3  # number of timed steps; the fastest step determines the speed
LINES_WRITTEN = ("command", "commit", "versions", "gpu", "losses", "peak_gb", "waits", "tokens_per_second", "mfu")
SYNCHRONIZES = "synchronizing CUDA operation"  # part of torch's warning about a synchronization
QUICK = ("laptop", "mamba2_laptop")
SHORT = ("phases.0.seq_len=128", "phases.0.global_batch=2", "phases.0.micro_batch=1")
BESIDE = ("mamba-ssm", "causal-conv1d", "flash-attn", "transformer-engine", "fla-core")
PACKAGES = ("torch", TRITON, "megatron-core", *BESIDE)


def every_recipe(report: BenchReport, names: Sequence[str] = ()) -> None:
    """Run steps with the named recipes, or with all recipes if `names` is empty.

    Each recipe gets a row in the report's table, and a file with its measurements in cards/measured. If a recipe can't
    run on this device, or if its step fails, a note in the report says so.
    """
    cells = []
    checkout = pages()
    failed = list[str]()
    for name in names or (QUICK if report.quick else choices_of("recipe")):
        try:
            settings = fitting(name, report.quick)
            results = take_steps(settings)
        except (ConfigError, torch.OutOfMemoryError) as error:
            report.notes.append(f"{name} can't run on this device: {str(error).splitlines()[-1].strip()}")
            continue
        except Exception:  # after a failure, the remaining recipes still run
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
    """Return key=value settings for a step with a single micro-batch that fits into an H100's memory.

    The number of sequences in the recipe's micro-batch is halved until the planned memory is below 90% of the GPU's
    memory, or until one sequence is left. With `quick`, the settings give short sequences, and memory is not planned.
    """
    settings = [f"recipe={name}", "precision=bf16", "cluster=h100"]
    if quick:
        return [*settings, *SHORT]
    rows = load_checked(settings).phases[0].micro_batch
    while True:
        chosen = [*settings, f"phases.0.micro_batch={rows}", f"phases.0.global_batch={rows}"]
        config = load_checked(chosen)
        limit = (config.cluster.memory_gb or 0) * GB
        if rows == 1 or plan(RunPlan.of(config).phases[0], 1).fullest.memory.total < 0.9 * limit:
            return chosen
        rows //= 2


def take_steps(settings: list[str]) -> dict[str, Any]:
    """Run one recipe's steps, and return the measurements for its verification card, with the keys LINES_WRITTEN."""
    recipe = settings[0].removeprefix("recipe=")
    options = settings[1:]
    config = load_checked(settings)
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
        "waits": None if memory is None else len(waits),  # a CPU has no device memory and no synchronizations
        **_speeds(config, seconds),
    }
    assert tuple(results) == LINES_WRITTEN
    return results


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Record the warnings that torch gives in the block when the host waits for the device (synchronizes).

    Yield a list. It is empty while the block runs, and gets the warnings' texts when the block ends.
    """
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
    """Return name and version of each installed package in PACKAGES, as text."""
    return [f"{name} {version}" for name in PACKAGES if (version := installed(name))]


def losses_of(results: dict[str, Any]) -> tuple[str, str]:
    """Return the first and the last loss as text."""
    values = list(results["losses"].values())
    return f"{values[0]:.4f}", f"{values[-1]:.4f}"


def commit() -> str | None:
    """Return the checkout's commit hash, or None outside a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return None
    return process.stdout.strip() or None


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results into a JSON file. Keys of the file that are not in `results` keep their values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **results}, indent=1) + "\n")
