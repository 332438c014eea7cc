"""One run, one writer: a start waits for the folder's lock, and takes over a dead process's lock."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridtron.problems import ConfigError
from hybridtron.train import lock
from hybridtron.train.lock import RunLock
from tests.train.conftest import Train

HOLD = """
import sys, time
from pathlib import Path
from hybridtron.train.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.0)
    monkeypatch.setattr(lock, "SETTLE_S", 0.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)


def refused(run: Path) -> str:
    """Return the message of the problem with the folder, whose lock can't be taken."""
    with pytest.raises(ConfigError) as error, RunLock(run):
        pass
    (problem,) = error.value.problems
    assert problem.key == "run.dir"
    return problem.message


def test_a_lock_has_one_holder_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with RunLock(run) as held:
        assert held.own in refused(run)
        assert held.own.startswith(f"process {os.getpid()} on ")
    assert not run.exists()
    run.mkdir(parents=True)
    with RunLock(run):
        pass
    assert list(run.iterdir()) == []


def test_a_start_waits_until_the_lock_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 60.0)
    first = RunLock(tmp_path).__enter__()
    second = RunLock(tmp_path, given_up=lambda: bool(first.__exit__()))
    with second:
        assert lock._holder_at(tmp_path / lock.FILE) == second.own


def test_a_signal_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 3600.0)
    with RunLock(tmp_path), pytest.raises(ConfigError), RunLock(tmp_path, given_up=lambda: True):
        pass


def test_a_killed_process_releases_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert f"process {process.pid} " in refused(tmp_path)
        process.kill()
        process.wait()
    assert (tmp_path / lock.FILE).exists()
    with RunLock(tmp_path):
        pass


@pytest.mark.usefixtures("no_locks")
def test_a_heartbeat_replaces_missing_file_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with RunLock(tmp_path) as held:
        assert str(tmp_path / lock.FILE) in capsys.readouterr().err
        refused(tmp_path)
        before = held.path.stat().st_mtime_ns
        until = time.monotonic() + 30
        while held.path.stat().st_mtime_ns == before:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert not held.path.exists()


def left_behind(run: Path, host: str) -> None:
    """Leave a lock as a killed process would."""
    run.mkdir(exist_ok=True)
    here = RunLock(run)
    (run / lock.FILE).write_text(here.own.replace(here.here, f" on {host} since ").ljust(lock.SIZE))


@pytest.mark.parametrize("jump", [-(10**6), 10**6])
def test_a_remote_lock_without_heartbeat_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int
) -> None:
    """Whatever the clock of either machine says; the lock alone is not enough, as some systems keep it to a machine."""
    left_behind(tmp_path, "elsewhere")
    now = time.time() + jump
    os.utime(tmp_path / lock.FILE, (now, now))
    assert "elsewhere" in refused(tmp_path)
    monkeypatch.setattr(lock, "STALE_S", 0.3)
    monkeypatch.setattr(lock, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(lock, "PATIENCE_S", 60.0)
    with RunLock(tmp_path) as held:
        assert lock._holder_at(held.path) == held.own


def test_a_remote_lock_with_heartbeat_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(tmp_path, "elsewhere")
    looks: list[int] = []

    def beat() -> bool:
        looks.append(1)
        os.utime(tmp_path / lock.FILE, ns=(len(looks), len(looks)))
        return len(looks) > 20

    monkeypatch.setattr(lock, "STALE_S", 0.2)
    monkeypatch.setattr(lock, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(lock, "PATIENCE_S", 3600.0)
    with pytest.raises(ConfigError), RunLock(tmp_path, given_up=beat):
        pass
    assert len(looks) > 20


def test_a_process_ends_after_a_takeover_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with RunLock(tmp_path) as held:

        def end(code: int) -> None:
            ended.append(code)
            held._released.set()

        monkeypatch.setattr(lock.os, "_exit", end)
        left_behind(tmp_path, "elsewhere")
        assert held._released.wait(30)
    assert ended == [1]
    assert (tmp_path / lock.FILE).exists()


@pytest.mark.parametrize(
    "place", ["file", "file/below", "dangling", "dangling/below", "x" * 300, "/proc/x", "/dev/null", "a\0b"]
)
def test_unusable_folders_are_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    before = sorted(tmp_path.iterdir())
    refused(tmp_path / place)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("call", ["mkdir", "open", "pwrite"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_unwritable_folders_are_refused(call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    refused(tmp_path / "run")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_second_start_is_refused_and_writes_nothing(train_small: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunLock(run):
        assert train_small() == 2
        assert [path.name for path in run.iterdir()] == [lock.FILE]
    assert train_small("run.max_steps=1", "run.eval_lengths=[1]") == 0
    assert not (run / lock.FILE).exists()
