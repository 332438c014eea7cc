"""The compiled library on machines that are short of something: compiler, disk, rights, time; and after a fork."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybridtron import compiled
from hybridtron.ops.dispatch import force
from hybridtron.ops.native import library as owner
from hybridtron.ops.native.library import Build, NativeLibrary, library, quota
from hybridtron.ops.native.tensors import Tokens
from hybridtron.ops.scan import ScanInputs, selective_scan
from tests.damage import put, truncations, zeroed_pages

ROOT = Path(__file__).parents[3]
ANSWER = 'extern "C" int answer() { return 42; }\n'  # built in no time
NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide an empty cache and a library that builds quickly, and forget the library loaded in this process."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "answer.cpp").write_text(ANSWER)
    monkeypatch.setattr(owner, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache" / "hybridtron" / "native"
    library.cache_clear()


def in_children(count: int, task: Callable[[], bool], seconds: int = 60) -> list[int]:
    """Exit codes of forked processes that run a task at once: 0 where it is true. One that hangs ends by a signal."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)
            try:
                os._exit(int(not task()))
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(2)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_eight_processes_at_once_build_one_library(cache: Path) -> None:
    assert in_children(8, lambda: library().functions is not None) == [0] * 8
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".sha256", ".so"], "nothing else is left"
    assert stat_mode(cache) == 0o700


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_second_process_compiles_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library().functions is not None
    library.cache_clear()
    monkeypatch.setattr(Build, "compile", lambda *_: pytest.fail("compiled again"))
    assert library().functions is not None


def loads(path: Path) -> Path:
    """The one library of a cache."""
    return next(path.glob("*.so"))


@pytest.mark.parametrize("damaged", [truncations, zeroed_pages])
def test_damaged_library_is_compiled_again(
    damaged: Callable[[bytes, int, int], Iterator[bytes]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged file is compiled again before it is loaded: mapped, it would end the process or compute nonsense."""
    assert library().reason == "built for this CPU"
    whole = loads(cache).read_bytes()
    kept = shutil.copy(loads(cache), cache.parents[1] / "kept.so")
    monkeypatch.setattr(Build, "compile", lambda _, target: shutil.copy(kept, target))
    for bytes_there in damaged(whole, 20, time.time_ns()):
        put(loads(cache), bytes_there)
        library.cache_clear()
        loaded = library()
        assert loaded.reason.startswith(f"built for this CPU, again: {loads(cache)} had ")
        assert loaded.functions is not None
        assert loaded.functions.answer() == 42
        assert loads(cache).read_bytes() == whole


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute of compiling, and many on a busy machine
def test_truncated_library_is_compiled_again(tmp_path: Path) -> None:
    """Load a truncated library in another process, which would end by SIGBUS; it compiles all again, as users would."""
    assert owner.missing() is None
    intact = compiled.cache_folder("native")
    name = f"{Build.here().digest}.so"
    copies = tmp_path / "hybridtron" / "native"
    copies.mkdir(parents=True, mode=0o700)
    for ending in ("", ".sha256"):
        shutil.copy(intact / f"{name}{ending}", copies / f"{name}{ending}")
    os.truncate(copies / name, 100_000)
    program = "from hybridtron.ops.native.library import library; print(library().reason)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    size = (intact / name).stat().st_size
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"built for this CPU, again: {copies / name} had 100,000 bytes instead of {size:,}\n"


def test_library_of_another_build_is_compiled_again(cache: Path) -> None:
    assert library().functions is not None
    path = loads(cache)
    size = (cache / f"{path.name}.sha256").read_text().split()[0]
    other = Build(Build.here().compiler, ("-std=c++17", "-fPIC", "-g"), "another CPU")
    path.unlink()
    other.compile(path)
    library.cache_clear()
    loaded = library()
    assert loaded.functions is not None
    assert "again" in loaded.reason
    assert path.stat().st_size == int(size)


def test_two_kinds_of_node_share_a_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in ("flags : avx2", "flags : avx2 avx512f", "flags : avx2"):
        monkeypatch.setattr(owner, "cpu_features", lambda cpu=cpu: cpu)
        library.cache_clear()
        assert library().functions is not None
    assert len([*cache.glob("*.so")]) == 2


def test_digest_of_a_build_covers_compiler_flags_cpu_and_sources(cache: Path, tmp_path: Path) -> None:
    build = Build.here()
    compiler = script(tmp_path / "compiler", f'exec {build.compiler} "$@"')
    others = [Build(compiler, build.flags, build.cpu), Build(build.compiler, (*build.flags, "-g"), build.cpu)]
    others.append(Build(build.compiler, build.flags, build.cpu + " more"))
    digests = [build.digest, *(other.digest for other in others)]
    script(compiler, f'exec {build.compiler} "$@" # a new version')
    digests.append(Build(compiler, build.flags, build.cpu).digest)
    for name in ("answer.cpp", "more.h"):
        with (owner.SOURCES / name).open("a") as file:
            file.write("// changed\n")
        digests.append(Build(build.compiler, build.flags, build.cpu).digest)
    assert len({*digests}) == len(digests)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "CXX=no-such-compiler is not a program: set CXX to a C++ compiler"),
        ("false", "ended with exit code 1: no message"),
        ("true", "ended with exit code 0: no message"),
    ],
)
def test_absent_or_broken_compiler_is_a_reason_in_the_table(
    compiler: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    chosen, why = selective_scan.choice("cpu")
    assert chosen == "chunked"
    assert "native" in why
    assert reason in why
    assert {path.suffix for path in cache.glob("*")} <= {".lock"}


def test_empty_path_leaves_ops_to_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert library().reason == "not built: no C++ compiler (c++, g++, clang++) on the PATH: install one, or set CXX"
    y, _ = selective_scan(some_row(4))
    assert y.isfinite().all(), "the fallback runs"


def test_compiler_that_hangs_is_given_up(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "slow", "exec sleep 60")))
    monkeypatch.setattr(compiled, "BUILD_S", 0.2)
    assert "within" in library().reason


def test_messages_of_the_compiler_are_reported(cache: Path) -> None:
    (owner.SOURCES / "wrong.cpp").write_text("int wrong() { return nothing; }\n")
    assert "nothing" in library().reason
    assert "error" in library().reason


def test_cache_that_is_no_folder_is_a_reason(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "directory" in library().reason
    assert "XDG_CACHE_HOME" in library().reason


def test_cache_without_rights_to_write_is_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Build, "digest", "a name")  # another user can't read the sources of this test
    cache.mkdir(parents=True)
    cache.chmod(0o555)

    def refused() -> bool:
        if os.getuid() == 0:
            os.setuid(65534)
        loaded = library()
        return loaded.functions is None and "XDG_CACHE_HOME" in loaded.reason

    assert in_children(1, refused) == [0]


def test_cache_that_all_users_can_change_is_not_trusted(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert library().reason.startswith(
        f"not built: {cache} can be changed by every user: chmod go-w {cache} (XDG_CACHE"
    )


def test_full_disk_leaves_no_library(cache: Path) -> None:
    """No file may grow beyond a page, for this process and the compiler."""

    def refused() -> bool:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        loaded = library()
        return loaded.functions is None and {path.suffix for path in cache.iterdir()} == {".lock"}

    assert in_children(1, refused) == [0]
    assert library().functions is not None, "with room again, the next process builds"


def mounts_are_possible() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0


@pytest.mark.skipif(not mounts_are_possible(), reason="no mounts in a user namespace here")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("noexec", "failed to map segment"),
        pytest.param("size=8k", "No space left", marks=pytest.mark.slow),
        ("ro", "Read-only file system"),
    ],
)
def test_unusual_file_systems_are_a_reason(options: str, reason: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    sources = tmp_path / "sources"
    for folder in (home, sources):
        folder.mkdir()
    (sources / "answer.cpp").write_text(ANSWER)
    program = (
        "import pathlib; from hybridtron.ops.native import library as owner; "
        f"owner.SOURCES = pathlib.Path('{sources}'); print(owner.library().functions, owner.library().reason)"
    )
    command = f'mount -t tmpfs -o {options} none {home} && exec {sys.executable} -c "{program}"'
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*NAMESPACE, "sh", "-c", command], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("None not built: "), done.stderr
    assert reason in done.stdout


def some_row(length: int, rows: int = 1, channels: int = 160) -> ScanInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    x = normal(rows, length, channels)
    dt = normal(rows, length, channels)
    B = normal(rows, length, 16)
    C = normal(rows, length, 16)
    return ScanInputs(x, dt, -normal(channels, 16).exp(), B, C, normal(channels), normal(channels))


def test_library_runs_in_forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the parent first, and then in two children: a pool of threads would not survive the fork."""
    monkeypatch.setattr("hybridtron.ops.native.recurrence.threads", lambda worth: 2)
    row = some_row(300)

    def scanned() -> torch.Tensor:
        with force(selective_scan="native"):
            y, _ = selective_scan(row)
        return torch.autograd.grad(y, row.dt_BLE, torch.ones_like(y))[0]

    before = scanned()
    assert in_children(2, lambda: child_scans(row, before)) == [0, 0]


def child_scans(row: ScanInputs, expected: torch.Tensor) -> bool:
    torch.set_num_threads(1)  # torch's own pool did not survive
    with force(selective_scan="native"):
        y, _ = selective_scan(row)
    return torch.equal(torch.autograd.grad(y, row.dt_BLE, torch.ones_like(y))[0], expected)


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, sys.maxsize),
        ({"cpu.max": "max 100000\n"}, sys.maxsize),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, sys.maxsize),
    ],
    ids=str,
)
def test_quota_of_a_cgroup_limits_processors(files: dict[str, str], processors: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota(tmp_path) == processors


def test_cgroups_of_a_process_and_their_parents_are_listed() -> None:
    root = Path("/sys/fs/cgroup")
    assert owner.cgroups(root, "") == [root]
    assert {*owner.cgroups(root, "0::/\n")} == {root}
    system = [root, root / "user.slice/job/step", root / "user.slice/job", root / "user.slice"]
    assert owner.cgroups(root, "1:name=systemd:/a\n0::/user.slice/job/step\n") == system
    assert owner.cgroups(root, "0::/../elsewhere\n") == [root]


def test_affinity_and_quota_limit_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_allowed", lambda: sys.maxsize)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    expected = os.cpu_count()
    if sys.platform == "linux":
        expected = 3
    assert owner.processors() == expected
    monkeypatch.setattr(owner, "_allowed", lambda: 2)
    assert owner.processors() == 2


def test_threads_follow_the_work_torch_and_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "_allowed", lambda: sys.maxsize)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert [owner.threads(worth) for worth in (0.5, 1.5, 100)] == [1, 2, 3]
    monkeypatch.setattr(owner, "_allowed", lambda: 2)
    assert owner.threads(100) == 2


def test_failed_allocation_raises_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Functions:
        def short(self, task: object, threads: int) -> int:
            return 1

    monkeypatch.setattr(owner, "library", lambda: NativeLibrary(Functions(), ""))  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match="short"):
        owner.call("short", Tokens(), 1)
