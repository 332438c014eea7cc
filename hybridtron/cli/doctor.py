"""Report on one screen if this machine can train: packages, device, kernels, memory and disks.

    hybridtron doctor

It needs only Python. Every package is imported in a process of its own, so that a package that is missing, raises,
crashes the interpreter or hangs becomes a line of the report. Versions are compared with those tried in pyproject.toml.
Exit codes: 0 training can run, 1 something required is missing (the last lines name the packages to install).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hybridtron.cli.machine import Line, machine_section
from hybridtron.cluster.variables import ALLOCATOR, ONE_QUEUE
from hybridtron.compiled import BUILD_S
from hybridtron.rehearse import guard
from hybridtron.requirements import MODULES, install_command, installed, is_there, missing, requirements

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # time limit of an import in seconds; the first one on a network file system is slow
OPTIONAL = {
    "triton": "compiled kernels on CUDA (torch.compile needs it too); hybridtron rehearse, on any machine",
    "mamba_ssm": "scans of Mamba-1 and Mamba-2 on CUDA",
    "causal_conv1d": "short convolution on CUDA",
    "flash_attn": "attention on CUDA",
    "transformer_engine": "FP8",
    "nvidia.dali": "data.feed=dali",
    "wandb": "metrics to wandb (run.wandb=PROJECT)",
    "tensorboard": "metrics to TensorBoard, in the run's logs/",
}
IMPORTED = {"flash_attn": "flash_attn.flash_attn_interface"}  # other packages have a `flash_attn` without its functions

TORCH_ALONE = "ops run in torch alone, several times slower on a CPU"

IMPORT = """
import importlib, importlib.util, json, sys
name = sys.argv[1]
first = importlib.util.find_spec(name.partition(".")[0])
# a folder that several packages share, as `nvidia` is, says nothing of this one
found = first is not None and (first.origin is not None or importlib.util.find_spec(name) is not None)
try:
    module = importlib.import_module(name) if found else None
    seen = {"found": found, "version": str(getattr(module, "__version__", "")), "fault": None}
except BaseException as error:
    seen = {"found": True, "version": "", "fault": (type(error).__name__ + ": " + str(error)).splitlines()[0]}
print("\\n" + json.dumps(seen))
"""
KERNELS = """
import json
import torch
from hybridtron.device import compute_device, cuda_report, describe_device
from hybridtron.config.choices import Precision
from hybridtron.ops.native.library import library
from hybridtron.ops.registry import choices
from hybridtron.parallel.transformer_engine import fp8_fault
about = {"device": describe_device(), "cuda": cuda_report(), "threads": torch.get_num_threads()}
about["fp8"] = fp8_fault(Precision.fp8_delayed)
about["native"] = library().reason, library().functions is not None
print("\\n" + json.dumps({**about, "choices": choices(compute_device().type)}))
"""


@dataclass(frozen=True)
class Probe:
    """Result of importing a package in a separate process: its version, or the fault if the import failed."""

    found: bool
    version: str = ""
    fault: str | None = None


def run_python(code: str, *arguments: str, patience: float | None = None) -> tuple[dict, str | None]:
    """Run Python code in a new process; return the JSON on its last line of output, and a fault if there is none."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    patience = patience or PATIENCE
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=patience, env=environment
        )
    except subprocess.TimeoutExpired:
        return {}, f"does not answer within {patience:.0f} s"
    try:
        return json.loads(process.stdout.splitlines()[-1]), None
    except (IndexError, json.JSONDecodeError):
        last = process.stderr.strip().splitlines()[-1:] or ["no message"]
        if process.returncode < 0:
            ended = f"signal {-process.returncode}"
        else:
            ended = f"exit code {process.returncode}"
        return {}, f"ends the interpreter: {ended}, {last[0]}"


def probe(module: str) -> Probe:
    """Import a module in a separate process and return the result."""
    report, fault = run_python(IMPORT, module)
    if fault:
        return Probe(True, "", fault)
    return Probe(**report)


def inside(version: str, wanted: str) -> bool:
    """Return True if a version such as `2.13.0+cpu` lies in a range such as `>=2.11,<2.14`.

    Only the release numbers count. It is also True if the version can't be parsed.
    """
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return Version(Version(version).base_version) in SpecifierSet(wanted)
    except (ModuleNotFoundError, ValueError):  # a missing `packaging` is reported itself, as a requirement
        return True


def package_line(distribution: str, wanted: str, found: Probe) -> Line:
    """Build the report line of a required package."""
    version = installed(distribution) or found.version
    if not found.found:
        return Line("fail", distribution, "not installed", f'pip install "{distribution}{wanted}"')
    if found.fault:
        return Line("fail", distribution, version, f"does not import: {found.fault}")
    if not inside(version, wanted):
        return Line("warn", distribution, version, f"outside of what was tried: {wanted}")
    return Line("ok", distribution, version, f"tried: {wanted}")


def optional_line(module: str, purpose: str, found: Probe) -> Line:
    """Build the report line of an optional package."""
    if not found.found:
        return Line("none", module, "not installed", purpose)
    version = found.version or installed(module.replace(".", "-").replace("_", "-")) or "installed"
    if found.fault:
        return Line("warn", module, "broken", f"does not import: {found.fault}")
    return Line("ok", module, version, purpose)


def package_sections() -> list[tuple[str, list[Line]]]:
    """Build the sections on required packages, optional packages and extras; packages are imported in parallel."""
    wanted = requirements()
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in wanted.required}
    with ThreadPoolExecutor(4) as pool:
        names = [*modules.values(), *OPTIONAL]
        probes = dict(zip(names, pool.map(probe, [IMPORTED.get(name, name) for name in names]), strict=True))
    version = platform.python_version()
    first = Line("ok" if inside(version, wanted.python) else "fail", "Python", version, f"tried: {wanted.python}")
    required_probes = {name: probes[module] if is_there(name) else Probe(False) for name, module in modules.items()}
    needed = [package_line(name, versions, required_probes[name]) for name, versions in wanted.required.items()]
    return [
        ("required", [first, *needed]),
        ("optional", [optional_line(name, purpose, probes[name]) for name, purpose in OPTIONAL.items()]),
        ("extras", [extra_line(name, versions) for name, versions in wanted.extras.items()]),
    ]


def extra_line(extra: str, wanted: dict[str, str]) -> Line:
    """Build the report line of an extra, whose packages training does not need."""
    versions = {name: installed(name) for name in wanted}
    missing = [name for name, version in versions.items() if version is None]
    outside = [
        f"{name} {version}" for name, version in versions.items() if version and not inside(version, wanted[name])
    ]
    if missing:
        notes = [f"{install_command(missing, [extra])} adds {', '.join(missing)}"]
    else:
        notes = []
    notes += [f"outside of what was tried: {', '.join(outside)}"] if outside else []
    if outside:
        mark = "warn"
    elif missing:
        mark = "none"
    else:
        mark = "ok"
    return Line(mark, extra, f"{len(wanted) - len(missing)} of {len(wanted)}", "; ".join(notes))


def kernel_section() -> tuple[str, list[Line]]:
    """Build the section on the device, and on the implementation of every op that runs there."""
    about, fault = run_python(KERNELS, patience=PATIENCE + BUILD_S)  # it may compile the native library first
    if fault:
        return "device", [Line("fail", "hybridtron", "does not start", fault)]
    lines = [Line("ok", "device", about["device"])]
    lines += [Line("none", name, value) for name, value in about["cuda"].items()]
    if any(name.startswith("cuda:") for name in about["cuda"]):
        lines += gpu_lines(os.environ, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    if driver := _driver():
        lines.append(Line("none", "driver", driver))
    lines.append(Line("none", "threads", f"{about['threads']} (OMP_NUM_THREADS changes it)"))
    reason, built = about["native"]
    lines.append(Line("ok" if built else "none", "compiled CPU forms", reason, "" if built else TORCH_ALONE))
    good, reason = guard.described()
    lines.append(Line("ok" if good else "warn", "guard", reason, "a library that rehearsals load"))
    lines += [Line("ok", op, form, why) for op, form, why in about["choices"]]
    return "device and kernels", [*lines, fp8_line(about["fp8"])]


def gpu_lines(environment: Mapping[str, str], numa_nodes: int) -> list[Line]:
    """Build lines on environment variables and NUMA binding that processes with a GPU should have.

    `hybridtron submit` sets the variables that a layout needs.
    """
    lines = []
    for variable in (ALLOCATOR, ONE_QUEUE):
        value = environment.get(variable.name)
        note = f"{variable.name}={variable.value}, {variable.purpose}"
        lines.append(Line("ok" if value == variable.value else "none", variable.name, value or "not set", note))
    if numa_nodes > 1:
        note = "torchrun --numa-binding=node keeps every process on the cores next to its GPU"
        lines.append(Line("none", "NUMA", f"{numa_nodes} nodes", note))
    return lines


def fp8_line(fault: str | None) -> Line:
    """Build the line on FP8; `fault` says why it can't run on this device."""
    if fault is None:
        return Line("ok", "FP8", "transformer_engine", "precision=fp8_delayed, fp8_current, fp8_block")
    return Line("none", "FP8", "emulated only", f"{fault}; precision.emulate=true tries its numerics")


def _driver() -> str:
    """Return the version of NVIDIA's driver as nvidia-smi reports it, or an empty string without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        about = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi does not answer"
    if about:
        return about[0]
    return "nvidia-smi finds no device"


def attempt(section: Callable[[], tuple[str, list[Line]]]) -> tuple[str, list[Line]]:
    """Build a section. If that raises, return a section with one line that names the error."""
    try:
        return section()
    except Exception as error:
        name = section.__name__.removesuffix("_section")
        return name, [Line("warn", name, "unknown", f"{type(error).__name__}: {error}".splitlines()[0])]


def show(sections: list[tuple[str, list[Line]]]) -> None:
    """Print the sections in aligned columns. On a terminal lines are coloured and cut to its width."""
    terminal = sys.stdout.isatty()
    colours = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m", "none": ""}
    if terminal:
        width = shutil.get_terminal_size((160, 24)).columns
    else:
        width = 0
    for title, lines in sections:
        print(f"\n{title}")
        names, values = (max(len(getattr(line, field)) for line in lines) for field in ("name", "found"))
        for line in lines:
            mark = "-" if line.mark == "none" else line.mark
            text = f"  {mark:<4}  {line.name:<{names}}  {line.found:<{min(values, 24)}}  {line.note}".rstrip()
            text = text[:width] if width else text
            print(f"{colours[line.mark]}{text}\x1b[0m" if terminal else text)


def main(arguments: list[str]) -> int:
    """Print the report. Returns the exit code."""
    argparse.ArgumentParser(
        prog="hybridtron doctor", description="Can this machine train, with what, and how fast will it be?"
    ).parse_args(arguments)
    try:
        sections = package_sections()
    except Exception as error:
        sections = [("packages", [Line("fail", "pyproject.toml", "unreadable", f"{type(error).__name__}: {error}")])]
    failed = [line for _, lines in sections for line in lines if line.mark == "fail"]
    if not failed:  # else this section would fail for the same reason
        sections.append(attempt(kernel_section))
    sections.append(attempt(machine_section))
    show(sections)
    failed = [line for _, lines in sections for line in lines if line.mark == "fail"]
    warned = [line.name for _, lines in sections for line in lines if line.mark == "warn"]
    print(f"\nlook at: {', '.join(warned)}" if warned else "")
    for line in failed:
        print(f"missing: {line.name} {line.found}. {line.note}")
    if not failed and (fault := missing("rehearse")):
        print(f"hybridtron rehearse can't run: {fault}")
    print("training can't run; `make setup` installs what it needs" if failed else "training can run")
    return 1 if failed else 0
