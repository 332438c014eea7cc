"""The compiled library on other kinds of machine: its flags, results on older CPUs, and the number of threads."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.rounding import backward
from hybridtron.ops.dispatch import force
from hybridtron.ops.native import library as owner
from hybridtron.ops.native.library import Build, NativeLibrary, library
from hybridtron.ops.registry import OPS, torch_alone
from tests.conftest import random_batch, small_model
from tests.ops.native.test_forms import FORMS, computed, errors, typed

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("system", "machine", "native", "linked"),
    [
        ("linux", "x86_64", "-march=native", True),
        ("linux", "aarch64", "-mcpu=native", True),
        ("darwin", "arm64", "-mcpu=native", False),
        ("darwin", "x86_64", "-march=native", False),
    ],
)
def test_every_kind_of_machine_has_its_compiler_flags(
    system: str, machine: str, native: str, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    flags = Build.here().flags
    assert [flag for flag in flags if flag.endswith("=native")] == [native]
    assert ("-Wl,--as-needed" in flags) is linked, "macOS's linker knows no such option"
    assert not [flag for flag in flags if "openmp" in flag], "its threads do not outlive a fork"
    assert "-ffast-math" not in flags


def test_compiler_that_does_not_know_the_cpu_leaves_ops_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an older clang on a newer Mac all ops run in torch alone, and the table gives the reason."""
    compiler = tmp_path / "old-clang"
    compiler.write_text("#!/bin/sh\necho \"error: unsupported argument 'native' to option '-mcpu='\" >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    library.cache_clear()
    try:
        reason = library().reason
        chosen = {name: op.choice("cpu") for name, op in OPS.items()}
    finally:
        library.cache_clear()
    assert (
        reason
        == "not built: " + f"{compiler} ended with exit code 1: error: unsupported argument 'native' to option '-mcpu='"
    )
    assert not [name for name, (form, _) in chosen.items() if form == "native"]
    assert "'native'" in chosen["selective_scan"][1]


def test_cpu_is_named_by_the_platform_where_proc_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no /proc."""

    def absent(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "open", absent)
    assert owner.cpu_features() == f"{platform.processor()} {platform.release()}"


@pytest.fixture(scope="module", params=["x86-64", "x86-64-v3"])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The whole library for older CPUs: without AVX, and with AVX2 but without AVX-512."""
    if platform.machine() != "x86_64" or (owner.missing() is not None):
        pytest.skip("for x86 with a compiler")
    if request.param == "x86-64-v3" and " avx2 " not in owner.cpu_features():
        pytest.skip("this CPU has no AVX2")
    here = Build.here()
    flags = tuple(f"-march={request.param}" if flag == "-march=native" else flag for flag in here.flags)
    build = Build(here.compiler, flags, here.cpu)
    path = tmp_path_factory.mktemp(request.param) / "older.so"
    build.compile(path)
    return NativeLibrary(ctypes.CDLL(str(path)), request.param)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the whole library is compiled
def test_libraries_for_older_cpus_equal_the_references(older: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "library", lambda: older)
    owner.constant.cache_clear()
    try:
        for case in FORMS:
            for dtype, close in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
                op, inputs = case(2, 70, 33)
                inputs = typed(inputs, dtype)
                exact = computed(op, "reference", typed(inputs, torch.float64))
                apart = errors(computed(op, "native", inputs), exact)
                assert {name: value for name, value in apart.items() if value > close} == {}, case.__name__
    finally:
        owner.constant.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_omp_num_threads_sets_the_number_of_threads(threads: int) -> None:
    """Run in a process of its own, whose environment torch reads (at most the cores), as if no cgroup had a limit."""
    program = "from hybridtron.ops.native import library as o; o._allowed = lambda: 64; print(o.threads(worth=100))"
    environment = {**os.environ, "OMP_NUM_THREADS": f"{threads}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == f"{threads}", done.stderr


@pytest.mark.slow
def test_training_in_float64_equals_training_by_torch_alone() -> None:
    """Compiled forms differ only by rounding: where that is small, so is the difference after many steps."""
    by_torch = losses(torch_alone())
    compiled = losses({})
    apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(compiled, by_torch, strict=True))
    assert apart < 1e-11
    assert by_torch[-1] < 0.8 * by_torch[0], "it learns"


def losses(forms: dict[str, str]) -> list[float]:
    """Return the losses of 40 steps over two batches, with documents."""
    torch.manual_seed(0)
    batches = [random_batch(3, 70, documents=[[70], [20, 50], [1, 68, 1]]) for _ in range(2)]
    model = small_model("M-W-S-F-", torch.float64)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_of_step = []
    for step in range(40):
        with force(**forms):
            loss_of_step.append(backward(model, batches[step % 2], 1))
        adam.step()
        adam.zero_grad()
    return loss_of_step
