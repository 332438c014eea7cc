"""Report on one screen whether this machine can train: packages, device, kernels, memory and disks.

    hybridtron doctor

The command itself needs only Python. It imports every package in a separate process, so that the report is complete
even if a package is missing, raises an error, crashes the interpreter or hangs. Versions are compared with the tested
ranges in pyproject.toml.

Exit codes: 0 training can run, 1 a required package is missing or broken. The last lines name the package.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hybridtron.cluster.gpu_env import ALLOCATOR, ONE_QUEUE
from hybridtron.compiled import BUILD_S
from hybridtron.problems import CommandParser, first_line
from hybridtron.rehearse import fake_cuda_shim
from hybridtron.requirements import MODULES, install_command, installed, is_there, missing, requirements

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # time limit of an import in seconds; a package's first import from a network file system is slow
OPTIONAL = {
    "triton": "compiled kernels on CUDA, torch.compile, and hybridtron rehearse on any machine",
    "mamba_ssm": "scans of Mamba-1 and Mamba-2 on CUDA",
    "causal_conv1d": "short convolution on CUDA",
    "flash_attn": "attention on CUDA",
    "transformer_engine": "FP8",
    "nvidia.dali": "data.feed=dali",
    "wandb": "metrics to wandb (run.wandb=PROJECT)",
    "tensorboard": "metrics to TensorBoard, in the run's logs/",
    "mlflow": "metrics to MLflow (run.mlflow=EXPERIMENT)",
}
# other packages also install a module `flash_attn`, but not this submodule
IMPORTED = {"flash_attn": "flash_attn.flash_attn_interface"}

GIB = 2**30
MIN_DISK = 10 * GIB
MIN_SHARED = GIB
MIN_MEMORY = 4 * GIB
MIN_OPEN_FILES = 4096

HOPPER_TRITON = "3.7.1"  # the first version with the fix of flash-linear-attention's issue 640
TORCH_ALONE = "ops use torch implementations, several times slower on a CPU"

IMPORT = """
import importlib, importlib.util, json, sys
name = sys.argv[1]
first = importlib.util.find_spec(name.partition(".")[0])
# several packages share a namespace folder such as nvidia/, which exists even if this package does not
installed = first is not None and (first.origin is not None or importlib.util.find_spec(name) is not None)
try:
    module = importlib.import_module(name) if installed else None
    seen = {"installed": installed, "version": str(getattr(module, "__version__", "")), "fault": None}
except BaseException as error:
    seen = {"installed": True, "version": "", "fault": (type(error).__name__ + ": " + str(error)).splitlines()[0]}
print("\\n" + json.dumps(seen))
"""
KERNELS = """
import json
import torch
from hybridtron.device import compute_device, cuda_report, describe_device
from hybridtron.config.choices import Precision
from hybridtron.ops.native.library import library
from hybridtron.ops.registry import EXAMPLES, choices_by_case
from hybridtron.parallel.transformer_engine import fp8_fault
about = {"device": describe_device(), "cuda": cuda_report(), "threads": torch.get_num_threads()}
about["fp8"] = fp8_fault(Precision.fp8_delayed)
about["native"] = library().reason, library().functions is not None
print("\\n" + json.dumps({**about, "choices": choices_by_case(compute_device().type, EXAMPLES)}))
"""


@dataclass(frozen=True)
class Line:
    """One line of the report.

    `mark` is ok, warn (training runs, but the line needs attention), fail (training can't run) or none (neutral).
    """

    mark: str
    name: str
    result: str
    note: str = ""


@dataclass(frozen=True)
class Probe:
    """Result of importing a package in a separate process: its version, or the fault if the import failed."""

    installed: bool
    version: str = ""
    fault: str | None = None


def run_python(code: str, *arguments: str, patience: float | None = None) -> tuple[dict, str | None]:
    """Run Python code in a new process; the code must print JSON as its last line.

    Returns (the parsed JSON, None), or (an empty dictionary, a fault) if the process prints no such line in time.
    """
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
        return {}, f"crashes the interpreter: {ended}, {last[0]}"


def probe(module: str) -> Probe:
    """Import a module in a separate process and return the result."""
    report, fault = run_python(IMPORT, module)
    if fault:
        return Probe(True, "", fault)
    return Probe(**report)


def inside(version: str, version_range: str) -> bool:
    """Return True if a version such as `2.13.0+cpu` lies in a range such as `>=2.11,<2.14`.

    Only the release numbers count, without suffixes such as `+cpu`. A version that can't be parsed counts as inside.
    """
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return Version(Version(version).base_version) in SpecifierSet(version_range)
    except (ModuleNotFoundError, ValueError):  # a missing `packaging` has its own line in the report
        return True


def package_line(distribution: str, version_range: str, probed: Probe) -> Line:
    """Build the report line of a required package."""
    version = installed(distribution) or probed.version
    if not probed.installed:
        return Line("fail", distribution, "not installed", f'pip install "{distribution}{version_range}"')
    if probed.fault:
        return Line("fail", distribution, version, f"can't be imported: {probed.fault}")
    if not inside(version, version_range):
        return Line("warn", distribution, version, f"outside the tested range: {version_range}")
    return Line("ok", distribution, version, f"tested range: {version_range}")


def optional_line(module: str, purpose: str, probed: Probe) -> Line:
    """Build the report line of an optional package."""
    if not probed.installed:
        return Line("none", module, "not installed", purpose)
    version = probed.version or installed(module.replace(".", "-").replace("_", "-")) or "installed"
    if probed.fault:
        return Line("warn", module, "broken", f"can't be imported: {probed.fault}")
    return Line("ok", module, version, purpose)


def package_sections() -> list[tuple[str, list[Line]]]:
    """Build three sections: required packages, optional packages, and extras (named groups of optional packages).

    The required and optional packages are imported, four at a time. For extras only versions are read.
    """
    needs = requirements()
    modules = {name: MODULES.get(name, name.replace("-", "_")) for name in needs.required}
    with ThreadPoolExecutor(4) as pool:
        names = [*modules.values(), *OPTIONAL]
        probes = dict(zip(names, pool.map(probe, [IMPORTED.get(name, name) for name in names]), strict=True))
    version = platform.python_version()
    first = Line("ok" if inside(version, needs.python) else "fail", "Python", version, f"tested range: {needs.python}")
    required_probes = {name: probes[module] if is_there(name) else Probe(False) for name, module in modules.items()}
    needed = [package_line(name, versions, required_probes[name]) for name, versions in needs.required.items()]
    return [
        ("required", [first, *needed]),
        ("optional", [optional_line(name, purpose, probes[name]) for name, purpose in OPTIONAL.items()]),
        ("extras", [extra_line(name, versions) for name, versions in needs.extras.items()]),
    ]


def extra_line(extra: str, version_ranges: dict[str, str]) -> Line:
    """Build the report line of an extra, a named group of optional packages."""
    versions = {name: installed(name) for name in version_ranges}
    missing = [name for name, version in versions.items() if version is None]
    outside = [
        f"{name} {version}"
        for name, version in versions.items()
        if version and not inside(version, version_ranges[name])
    ]
    if missing:
        notes = [f"{install_command(missing, [extra])} adds {', '.join(missing)}"]
    else:
        notes = []
    notes += [f"outside the tested range: {', '.join(outside)}"] if outside else []
    if outside:
        mark = "warn"
    elif missing:
        mark = "none"
    else:
        mark = "ok"
    return Line(mark, extra, f"{len(version_ranges) - len(missing)} of {len(version_ranges)}", "; ".join(notes))


def kernel_section() -> tuple[str, list[Line]]:
    """Build the section on the device, with a line for the implementation that will run for each op."""
    about, fault = run_python(KERNELS, patience=PATIENCE + BUILD_S)  # the process may first compile the C++ ops
    if fault:
        return "device", [Line("fail", "hybridtron", "does not start", fault)]
    lines = [Line("ok", "device", about["device"])]
    lines += [Line("none", name, value) for name, value in about["cuda"].items()]
    if any(name.startswith("cuda:") for name in about["cuda"]):
        lines += gpu_lines(os.environ, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
    lines += hopper_lines(about["cuda"].values(), installed("triton"))
    if driver := _driver():
        lines.append(Line("none", "driver", driver))
    lines.append(Line("none", "threads", f"{about['threads']} (set OMP_NUM_THREADS to change)"))
    reason, built = about["native"]
    lines.append(Line("ok" if built else "none", "compiled CPU ops", reason, "" if built else TORCH_ALONE))
    good, reason = fake_cuda_shim.describe()
    lines.append(Line("ok" if good else "warn", "simulated GPU", reason, "library for hybridtron rehearse"))
    lines += [Line("ok", op, form, why) for op, form, why in about["choices"]]
    return "device and kernels", [*lines, fp8_line(about["fp8"])]


def gpu_lines(environment: Mapping[str, str], numa_nodes: int) -> list[Line]:
    """Build lines on environment variables and NUMA binding for processes with a GPU.

    `hybridtron submit` sets the variables in its jobs if the parallel layout needs them.
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


def hopper_lines(devices: Iterable[str], triton: str | None) -> list[Line]:
    """Build a warning if a GPU is a Hopper GPU and the installed version of Triton is older than HOPPER_TRITON."""
    if triton is None or inside(triton, f">={HOPPER_TRITON}"):
        return []
    if not any("compute capability 9." in device for device in devices):
        return []
    note = (
        f"before {HOPPER_TRITON}, Triton computes some products of transposed products wrongly on Hopper GPUs "
        "(github.com/fla-org/flash-linear-attention/issues/640): install a later one, or compare Gated DeltaNet and "
        "KDA with their references by `hybridtron check gpu`"
    )
    return [Line("warn", "triton on Hopper", triton, note)]


def fp8_line(fault: str | None) -> Line:
    """Build the line on FP8; `fault` is the reason why FP8 can't run on this device, or None."""
    if fault is None:
        return Line("ok", "FP8", "transformer_engine", "precision=fp8_delayed, fp8_current, fp8_block")
    return Line("none", "FP8", "emulated only", f"{fault}; precision.emulate=true emulates FP8 rounding")


def _driver() -> str:
    """Return the version of NVIDIA's driver as nvidia-smi reports it, or an empty string without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        about = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi fails or does not answer"
    if about:
        return about[0]
    return "nvidia-smi finds no device"


def machine_section() -> tuple[str, list[Line]]:
    """Build the section on cores, memory, disks and limits."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    lines = [Line("ok", "cores", f"{usable} of {os.cpu_count()}"), _memory_line()]
    lines.append(_disk_line(Path.cwd(), MIN_DISK, "for runs and checkpoints in the current folder"))
    if Path("/dev/shm").exists():
        lines.append(_disk_line(Path("/dev/shm"), MIN_SHARED, "shared memory for processes and NCCL"))
    return "machine", [*lines, _temp_line(), _files_line()]


def _memory_line() -> Line:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        total = min(total, int(text))
    return _minimum_line(total, MIN_MEMORY, "memory", f"{total / GIB:.1f} GiB", "memory that this process may use")


def _disk_line(path: Path, least: int, purpose: str) -> Line:
    free = shutil.disk_usage(path).free
    name = "disk" if path == Path.cwd() else str(path)
    if not os.access(path, os.W_OK):
        return Line("warn", name, "not writable", purpose)
    return _minimum_line(free, least, name, f"{free / GIB:.1f} GiB free", purpose)


def _temp_line() -> Line:
    try:
        with tempfile.TemporaryFile():
            return Line("ok", "temporary files", tempfile.gettempdir())
    except OSError as error:
        return Line("warn", "temporary files", "not writable", f"set TMPDIR to a writable folder: {error}")


def _files_line() -> Line:
    import resource

    files, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return Line("ok", "open files", "unlimited")
    return _minimum_line(
        files, MIN_OPEN_FILES, "open files", str(files), f"`ulimit -n {min(hard_limit, 65536)}` raises the limit"
    )


def _minimum_line(value: int, least: int, name: str, text: str, note: str) -> Line:
    if value >= least:
        return Line("ok", name, text, "" if name == "open files" else note)
    minimum = least if least < GIB else f"{least / GIB:.0f} GiB"
    return Line("warn", name, text, f"less than {minimum}; {note}")


def attempt(section: Callable[[], tuple[str, list[Line]]]) -> tuple[str, list[Line]]:
    """Build a section. If `section` raises an error, return a section with one line that names the error."""
    try:
        return section()
    except Exception as error:
        name = section.__name__.removesuffix("_section")
        return name, [Line("warn", name, "unknown", first_line(error))]


def show(sections: list[tuple[str, list[Line]]]) -> None:
    """Print the sections in aligned columns. On a terminal, lines are coloured and truncated to its width."""
    terminal = sys.stdout.isatty()
    colours = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m", "none": ""}
    if terminal:
        width = shutil.get_terminal_size((160, 24)).columns
    else:
        width = 0
    for title, lines in sections:
        print(f"\n{title}")
        name_width = max(len(line.name) for line in lines)
        result_width = min(max(len(line.result) for line in lines), 24)
        for line in lines:
            mark = "-" if line.mark == "none" else line.mark
            text = f"  {mark:<4}  {line.name:<{name_width}}  {line.result:<{result_width}}  {line.note}".rstrip()
            text = text[:width] if width else text
            print(f"{colours[line.mark]}{text}\x1b[0m" if terminal else text)


def main(arguments: list[str]) -> int:
    """Print the report. Returns the exit code."""
    CommandParser(
        prog="hybridtron doctor",
        description="Report if this machine can train: packages, device, kernels, memory and disks.",
    ).parse_args(arguments)
    try:
        sections = package_sections()
    except Exception as error:
        sections = [("packages", [Line("fail", "pyproject.toml", "unreadable", f"{type(error).__name__}: {error}")])]
    failed = [line for _, lines in sections for line in lines if line.mark == "fail"]
    if not failed:  # without a required package, the kernel section would only repeat the failure
        sections.append(attempt(kernel_section))
    sections.append(attempt(machine_section))
    show(sections)
    failed = [line for _, lines in sections for line in lines if line.mark == "fail"]
    warned = [line.name for _, lines in sections for line in lines if line.mark == "warn"]
    print(f"\ncheck the lines marked warn: {', '.join(warned)}" if warned else "")
    for line in failed:
        print(f"failed: {line.name} {line.result}. {line.note}")
    if not failed and (fault := missing("rehearse")):
        print(f"hybridtron rehearse can't run: {fault}")
    print("training can't run: install the required packages with `make setup`" if failed else "training can run")
    return 1 if failed else 0
