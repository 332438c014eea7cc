"""One of two ranks fails, dies, stops or hangs: the run ends, says why, and resumes at the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.parallel.pool import WorkerError
from hybridtron.train.collectives import first_divergence, read_calls
from tests.train.conftest import small_run_arguments
from tests.train.faults import ending_of, outcome_of, train_ranks, trained

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
TIMEOUT_S = 20  # of a fault that only the watchdog sees
PATIENT_S = 100  # of a run that reports by itself


def arguments_of(data: Path, run: Path) -> list[str]:
    return [*small_run_arguments(data, run), "run.max_steps=10"]


@pytest.fixture(scope="module")
def clean(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to which nothing happens."""
    run = tmp_path_factory.mktemp("clean") / "run"
    assert train_ranks(arguments_of(counting_folder, run)) == [0, 0]
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "at", "rank", "said"),
    [
        ("raise", "step", 1, "RuntimeError: out of luck"),
        ("kill", "step", 1, "rank 1 is gone"),
        ("raise", "loader", 1, "RuntimeError: out of luck"),
        ("stop", "step", 1, "rank 1 is stopped"),
        ("sleep", "step", 1, "step 8 did not end within 20 s"),
        ("sleep", "loader", 1, "did not end within 20 s"),
        ("lock", "step", 0, "waiting for other ranks"),
    ],
)
def test_a_failing_rank_ends_the_run_and_a_restart_completes_it(
    fault: str, at: str, rank: int, said: str, counting_folder: Path, tmp_path: Path, clean: Path
) -> None:
    run = tmp_path / "run"
    arguments = arguments_of(counting_folder, run)
    timeout = PATIENT_S if fault in ("raise", "kill") else TIMEOUT_S
    with pytest.raises(WorkerError):
        train_ranks([*arguments, f"run.timeout={timeout}"], fault, at)
    outcome = outcome_of(run)
    assert outcome["outcome"] == "failed"
    assert outcome["rank"] == rank
    assert said in outcome["reason"]
    logs = {path.name: path.read_text() for path in (run / "logs").glob("*.txt")}
    if fault == "raise":
        assert "in out_of_luck" in logs["error-1.txt"]
    if fault == "sleep":
        assert "tests/train/faults.py" in logs["stacks-1.txt"]
        divergence = first_divergence(read_calls(run / "logs", since=0.0))
        assert divergence is not None
        assert divergence.rank == 1
        assert "rank 1 waits for nobody and lacks gloo:" in divergence.what
    if fault == "lock":
        assert "keep_the_interpreter" in logs["stacks-1.txt"]
    assert train_ranks(arguments) == [0, 0]
    assert ending_of(run) == {"outcome": "finished", "step": 10}
    assert trained(run) == trained(clean)


def test_a_signal_on_one_rank_stops_all_after_the_same_step(counting_folder: Path, tmp_path: Path, clean: Path) -> None:
    run = tmp_path / "run"
    arguments = arguments_of(counting_folder, run)
    assert train_ranks(arguments, "SIGUSR1") == [75, 75]
    assert ending_of(run) == {"outcome": "preempted", "step": 8, "reason": "SIGUSR1"}
    assert train_ranks(arguments) == [0, 0]
    assert trained(run) == trained(clean)
