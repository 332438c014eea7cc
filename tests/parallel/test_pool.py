"""The pool of processes: results by rank, tracebacks, deaths and time-outs."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridtron.config.schema import ParallelConfig
from hybridtron.parallel import pool as pool_module
from hybridtron.parallel.pool import Pool, Seat, WorkerError
from tests.distributed import pool, run_distributed

pytestmark = pytest.mark.gloo


def places(seat: Seat, parallel: ParallelConfig) -> tuple[int, int, int, float]:
    with seat.groups(parallel) as groups:
        ranks = torch.tensor(float(groups.rank))
        dist.all_reduce(ranks)
        return groups.tensor.rank, groups.pipeline.rank, groups.data.rank, float(ranks)


def fail_on_rank_1(seat: Seat) -> None:
    if seat.rank == 1:
        raise ValueError("no luck on this rank")


def die_on_rank_1(seat: Seat) -> None:
    if seat.rank == 1:
        os._exit(3)


def own_process(_: Seat) -> int:
    return os.getpid()


def the_worker_of_this(_: Seat) -> int:
    return os.getppid()


def sleep(_: Seat) -> None:
    time.sleep(60)


def test_pool_runs_layouts_of_several_sizes() -> None:
    assert run_distributed(places, 4, ParallelConfig(tensor=2, pipeline=2)) == [
        (0, 0, 0, 6.0),
        (1, 0, 0, 6.0),
        (0, 1, 0, 6.0),
        (1, 1, 0, 6.0),
    ]
    assert run_distributed(places, 2, ParallelConfig()) == [(0, 0, 0, 1.0), (0, 0, 1, 1.0)]
    assert run_distributed(places, 1, ParallelConfig()) == [(0, 0, 0, 0.0)]


def test_failed_job_raises_its_traceback_and_the_pool_continues() -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1.*Traceback.*fail_on_rank_1.*no luck"):
        run_distributed(fail_on_rank_1, 2)
    with pytest.raises(WorkerError, match=r"rank 1.*died"):
        run_distributed(die_on_rank_1, 2)
    with pytest.raises(WorkerError, match=r"\[0, 1\].*finish"):
        run_distributed(sleep, 2, timeout_s=0.2)
    assert len(run_distributed(places, 2, ParallelConfig(tensor=2))) == 2


def test_process_that_died_between_jobs_is_replaced() -> None:
    (process, *_) = run_distributed(the_worker_of_this, 2)
    os.kill(process, signal.SIGKILL)
    time.sleep(0.5)  # the fork server must reap it
    assert process not in run_distributed(the_worker_of_this, 2)


def test_every_job_has_new_processes_that_end_with_it() -> None:
    first = run_distributed(own_process, 2)
    second = run_distributed(own_process, 2)
    assert not set(first) & set(second)
    with pytest.raises(WorkerError, match="finish"):
        run_distributed(sleep, 2, timeout_s=0.2)
    time.sleep(0.2)
    assert not any(Path(f"/proc/{process}").exists() for process in (*first, *second))


def never_ready(_: Connection) -> None:
    time.sleep(120)


def test_workers_that_do_not_start_in_time_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill them by pid, as they have no process group yet, and keep none of them for the next job."""
    monkeypatch.setattr(pool_module, "_serve", never_ready)
    monkeypatch.setattr(pool_module, "START_S", 0.1)
    running = set(mp.active_children())
    fresh_pool = Pool()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="start"):
        fresh_pool.run(own_process, 2)
    assert fresh_pool._workers == []
    assert set(mp.active_children()) <= running
    assert time.monotonic() - begin < 60


def seen_gpus(_: Seat) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_every_process_sees_its_own_gpu_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_distributed(seen_gpus, 2) == ["", ""]
    monkeypatch.setattr(pool(), "gpus", ["6", "GPU-2"])
    assert run_distributed(seen_gpus, 2) == ["6", "GPU-2"]


def heard(seat: Seat) -> list[str]:
    """Warn as megatron-core, torch and another module do; return the warnings that reach a reader."""
    known = (
        (UserWarning, "megatron.core.optimizer"),
        (FutureWarning, "torch.distributed.c10d_logger"),
        (UserWarning, "torch.nn"),
    )
    with warnings.catch_warnings(record=True) as seen:
        for category, module in known:
            warnings.warn_explicit(f"of {module}", category, "file", 1, module)
    return [str(warning.message) for warning in seen]


def test_known_warnings_are_hidden_in_worker_processes() -> None:
    assert run_distributed(heard, 1) == [["of torch.nn"]]
