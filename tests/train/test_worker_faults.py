"""The worker process that one of two ranks reads with fails, dies, stops or hangs: the run ends, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.parallel.pool import WorkerError
from tests.train.conftest import small_run_arguments
from tests.train.faults import outcome_of, train_ranks, trained

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
TIMEOUT_S = 20  # of a fault that only the watchdog sees
PATIENT_S = 100  # of a run that reports by itself: starting two worker processes is part of the first step


def arguments_of(data: Path, run: Path) -> list[str]:
    return [*small_run_arguments(data, run), "run.max_steps=10"]


@pytest.fixture(scope="module")
def clean(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run without faults and without worker processes."""
    run = tmp_path_factory.mktemp("clean") / "run"
    assert train_ranks(arguments_of(counting_folder, run)) == [0, 0]
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "workers", "said"),
    [
        ("raise", 0, "RuntimeError: out of luck"),  # only the rank in trouble has one: to start it takes seconds
        ("raise", 1, "RuntimeError: out of luck"),
        ("kill", 1, "DataLoader worker (pid"),
        ("stop", 0, "is stopped (SIGSTOP)"),
        ("sleep", 0, "waiting for a worker process of the loader"),
    ],
)
def test_a_failing_worker_ends_the_run_and_a_restart_completes_it(
    fault: str, workers: int, said: str, counting_folder: Path, tmp_path: Path, clean: Path
) -> None:
    run = tmp_path / "run"
    arguments = arguments_of(counting_folder, run)
    timeout = PATIENT_S if workers else TIMEOUT_S
    with pytest.raises(WorkerError):
        train_ranks([*arguments, f"data.workers={workers}", f"run.timeout={timeout}"], fault, "worker")
    outcome = outcome_of(run)
    assert (outcome["outcome"], outcome["rank"]) == ("failed", 1)
    assert said in outcome["reason"]
    if fault == "raise":
        assert "in out_of_luck" in (run / "logs" / "error-1.txt").read_text()
    if fault == "sleep":
        assert "tests/train/faults.py" in (run / "logs" / "worker.txt").read_text()  # its own stack
    assert train_ranks(arguments) == [0, 0]
    assert trained(run) == trained(clean)
