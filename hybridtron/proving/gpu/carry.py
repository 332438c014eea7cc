"""Make a folder of packages and compiled kernels for `make gpu-measure` on a GPU machine without a network.

    python -m hybridtron.proving.gpu.carry .carry --python .venv312/bin/python
    python -m hybridtron.proving.gpu.carry .carry --python .venv312/bin/python --extra wheels/of/mamba-ssm

`make gpu-measure` runs parts. A part is a group of measurements, such as those of one recipe's training step.

Copy this checkout, with the folder in it, to the GPU machine. There, run in the copy:
`bash .carry/measure.sh RESULTS --minutes 4.5`. The folder has:

    wheels/         packages that the GPU machine lacks: pure Python, prebuilt for its Python, or from --extra
    triton/         Triton's cache with the kernels that the parts launch, compiled for Hopper GPUs (sm_90)
    modelled.json   times from a rehearsal (steps simulated without a GPU), shown next to the measured times
    measure.sh      script that installs the wheels into a temporary folder and runs the parts
    carried.json    versions of Python and packages with which the kernels were compiled

--python names the interpreter that compiles the kernels. This interpreter needs:

- the GPU machine's Python version (--python-version)
- the GPU machine's Triton version (--triton)
- torch in any version, and the packages that training needs

Triton finds a compiled kernel by a hash over Triton's files and the assembler ptxas. With another Triton version, the
GPU machine would compile all kernels again. Two commands make an interpreter with the right versions:
`make setup PYTHON=python3.12 VENV=.venv312` and `pip install triton==3.6.0`. On the GPU machine, the part `machine`
reports whether the versions match.

--extra is for wheels with compiled code, such as mamba-ssm or causal-conv1d.

Exit codes: 0 the folder is complete, 1 it is larger than --limit-mib or a command failed, 2 wrong arguments.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
DISTRIBUTIONS = (
    "hydra-core",
    "omegaconf",
    "brotli",
    "cramjam",
    "zstd",
    "xxhash",
    "catalogue",
    "rich",
    "psutil",
    "einops",
)
SOURCE_ALONE = ("antlr4-python3-runtime==4.9.3",)  # required by omegaconf; it has no wheel on the package index
MODULES = ("megatron.core", "hydra", "omegaconf", "xxhash", "einops", "rich", "fla")
MIB = 2**20
SCRIPT = """#!/bin/bash
# Made by hybridtron/proving/gpu/carry.py: bash {folder}/measure.sh RESULTS [options of hybridtron.proving.gpu.measure]
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" {folder}/wheels/*.whl
export PYTHONPATH=$site:$PWD TRITON_CACHE_DIR=$PWD/{folder}/triton PYTHONUNBUFFERED=1
results=$1
shift
exec python3 -m hybridtron.proving.gpu.measure --output "$results" --modelled {folder}/modelled.json "$@"
"""


@dataclass(frozen=True)
class Carried:
    """Options from the command line: the folder to make, and the versions on the GPU machine."""

    folder: Path
    python: Path
    python_version: str
    triton: str
    megatron: str
    fla: str
    gpu: str
    extra: Path | None
    limit_mib: float


def parse(arguments: list[str] | None = None) -> Carried:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that compiles the kernels")
    parser.add_argument("--python-version", default="3.12", help="on the GPU machine (default: %(default)s)")
    parser.add_argument("--triton", default="3.6.0", help="on the GPU machine (default: %(default)s)")
    parser.add_argument("--megatron", default="0.16.1", help="megatron-core to carry (default: %(default)s)")
    parser.add_argument("--fla", default="0.6.0", help="fla-core to carry (default: %(default)s)")
    parser.add_argument("--gpu", default="h100", help="kind of GPU for modelled times (default: %(default)s)")
    parser.add_argument("--extra", type=Path, metavar="FOLDER", help="wheels with compiled code, to copy")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="for the folder's size (default: %(default)s)")
    return Carried(**vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> int:
    """Make the folder. Return the exit code."""
    chosen = parse(arguments)
    versions = interpreter(chosen.python)
    wrong = [
        f"{name} {versions[name]}, not {version}"
        for name, version in wanted_of(chosen).items()
        if versions[name] != version
    ]
    if wrong:
        print(
            f"{chosen.python} has {' and '.join(wrong)}: give an interpreter with the GPU machine's versions as "
            f"--python, or set --python-version and --triton to the GPU machine's versions"
        )
        return 2
    chosen.folder.mkdir(parents=True, exist_ok=True)
    wheels(chosen)
    kernels(chosen)
    (chosen.folder / "measure.sh").write_text(SCRIPT.format(folder=chosen.folder.name))
    (chosen.folder / "carried.json").write_text(json.dumps(versions, indent=1) + "\n")
    check_wheels(chosen)
    return print_sizes(chosen)


def wanted_of(asked: Carried) -> dict[str, str]:
    """Return the versions that the compiling interpreter and the GPU machine must share."""
    return {"python": asked.python_version, "triton": asked.triton}


def interpreter(python: Path) -> dict[str, str]:
    """Return the versions of Python, torch, Triton and megatron-core in the interpreter that compiles."""
    program = (
        "import json, sys; from importlib.metadata import version\n"
        "versions = {name: version(name) for name in ('torch', 'triton', 'megatron-core')}\n"
        "print(json.dumps({'python': '.'.join(map(str, sys.version_info[:2])), **versions}))"
    )
    return json.loads(run([str(python), "-c", program]))


def wheels(asked: Carried) -> None:
    """Download wheels for the GPU machine's Python, build wheels of SOURCE_ALONE, and copy the wheels of --extra."""
    folder = asked.folder / "wheels"
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(asked.python), "-m", "pip"]
    machine = ["--only-binary=:all:", "--python-version", asked.python_version, "--implementation", "cp"]
    for platform in PLATFORMS:
        machine += ["--platform", platform]
    names = (f"megatron-core=={asked.megatron}", f"fla-core=={asked.fla}", *DISTRIBUTIONS)
    run([*pip, "download", "--quiet", "--no-deps", "-d", str(folder), *machine, *names])
    run([*pip, "wheel", "--quiet", "--no-deps", "-w", str(folder), *SOURCE_ALONE])
    for wheel in sorted(asked.extra.glob("*.whl")) if asked.extra else ():
        shutil.copy(wheel, folder)


def kernels(asked: Carried) -> None:
    """Rehearse the parts. The rehearsal compiles kernels into the folder `triton`, and writes modelled.json.

    TRITON_STORE_BINARY_ONLY keeps only the machine code in the cache.
    """
    cache = asked.folder / "triton"
    shutil.rmtree(cache, ignore_errors=True)
    folders = {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache.resolve()), "TRITON_STORE_BINARY_ONLY": "1"}
    command = [str(asked.python), "-m", "hybridtron.rehearse.queue_model", str(asked.folder / "modelled.json")]
    run([*command, "--gpu", asked.gpu], {**os.environ, **folders})
    model = json.loads((asked.folder / "modelled.json").read_text())
    print(
        f"compiled the kernels of {len(model['steps'])} recipes and {len(model['calls'])} op calls, "
        f"with the compiler {model['compiler']}"
    )


def check_wheels(asked: Carried) -> None:
    """Install the wheels as measure.sh does, and import their modules. If a command fails, exit with code 1."""
    site = asked.folder / "tried"
    shutil.rmtree(site, ignore_errors=True)
    target = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
    files = [str(wheel) for wheel in sorted((asked.folder / "wheels").glob("*.whl"))]
    run([str(asked.python), "-m", "pip", "install", "--quiet", *target, *files])
    program = "\n".join(f"import {name}" for name in MODULES)
    run([str(asked.python), "-W", "ignore", "-c", program], {**os.environ, "PYTHONPATH": str(site)})
    shutil.rmtree(site)


def print_sizes(asked: Carried) -> int:
    """Print the sizes of files and folders. Return the exit code: 1 if the total exceeds the limit, else 0."""
    sizes = {path.name: size_of(path) / MIB for path in sorted(asked.folder.iterdir())}
    for name, size in sizes.items():
        print(f"{size:8.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total:8.2f} MiB  of {asked.limit_mib:.0f}")
    if total > asked.limit_mib:
        print(f"{asked.folder} exceeds --limit-mib: remove wheels from the folder of --extra, or raise --limit-mib")
        return 1
    return 0


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a program and return its output. If the program fails, print its error output and exit with code 1."""
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ended.returncode:
        print(
            f"`{' '.join(command[:4])} ...` failed with exit code {ended.returncode}:\n{ended.stderr.strip()[-2000:]}",
            file=sys.stderr,
        )
        raise SystemExit(1)
    return ended.stdout


if __name__ == "__main__":
    raise SystemExit(main())
