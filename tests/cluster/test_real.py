"""Runs on a real SLURM: over two nodes, preempted in each way that there is, on lost and bad nodes, and failing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.train.supervisor import faults
from tests.cluster.conftest import ROOT, Cluster, attempts, logs_of

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = "laptop_phases"
PHASES = ("pretrain", "passing", "long", "last")
CLUSTER = (
    "cluster=local", f"cluster.python={sys.executable}", "cluster.time=20", "cluster.stop_before=60",
    "cluster.environment.GLOO_SOCKET_IFNAME=lo", "cluster.checks.all_reduce=false", "nodes=2",
)  # fmt: skip
STEPS = 16  # of each phase
ROWS = (8, 8, 2, 8)
LENGTHS = (16, 16, 64, 16)


def arguments(data: Path, run: Path) -> list[str]:
    """The recipe on two processes, with a model and phases of which each takes some seconds."""
    sizes = [
        setting
        for index, (rows, length) in enumerate(zip(ROWS, LENGTHS, strict=True))
        for setting in (f"phases.{index}.seq_len={length}", f"phases.{index}.tokens={STEPS * rows * length}")
    ]
    return [
        f"recipe={RECIPE}", "data=folder", f"data.path={data}", f"run.dir={run}", "run.name=two nodes",
        "model.width=32", "model.vocab_size=32", "model.layers.M.state=4", "model.layers.-.hidden=64", *sizes,
        "model.layers.W.window=8",
        "phases.2.layers.W.chunk=[16,32]", "phases.3.layers.W.chunk=[16,32]", "phases.3.export=null",
        "phases.0.micro_batch=2", "phases.0.ramp.tokens=256", "checkpoint.every=10",
        "run.eval_every=1000", "run.eval_tokens=256", "run.eval_lengths=[1]", "run.sample_tokens=0", *CLUSTER,
    ]  # fmt: skip


def phase_of(run: Path) -> str:
    """The phase of the last step."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return ""
    lines = path.read_text().split("\n")[:-1]
    if not lines:
        return ""
    return json.loads(lines[-1])["phase"]


def last_step(run: Path) -> int:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(run / "checkpoints" / f"step-{step:08}")
    return {name: checkpoint.whole(name) for name in checkpoint.shapes}


def ranks_of(run: Path) -> dict[int, int]:
    """The processes that train a run, each with its supervisor."""
    wanted = f"run.dir={run}".encode()
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if wanted in words and b"hybridtron" in words and b"python" in words[0]:
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    return {process: parent for process, parent in parents.items() if parent in parents}


def node_of(process: int) -> str:
    variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next(v for v in variables if v.startswith(b"SLURMD_NODENAME=")).partition(b"=")[2].decode()


@contextmanager
def held(run: Path) -> Iterator[list[int]]:
    """The processes that train a run stand still inside the block; their ids."""
    process_ids = list(ranks_of(run))
    for process in process_ids:
        os.kill(process, signal.SIGSTOP)
    try:
        assert len(process_ids) == 2
        yield process_ids
    finally:
        for process in process_ids:
            os.kill(process, signal.SIGCONT)


def handles_signal(process: int, number: signal.Signals) -> bool:
    """Return True if a signal is pending for a stopped process."""
    status = Path(f"/proc/{process}/status").read_text()
    pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
    return bool(pending >> (number - 1) & 1)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, as a chain of two jobs, with the whole check."""
    run = tmp_path_factory.mktemp("peace") / "run"
    whole = [*arguments(counting_folder, run), "cluster.checks.all_reduce=true"]
    first, second = cluster.submit([*whole, "--chain", "2"])
    assert cluster.job(second)["Dependency"].startswith(f"afterany:{first}")
    assert cluster.ended(first, run) == "COMPLETED", logs_of(run)
    assert cluster.ended(second, run) == "COMPLETED", logs_of(run)
    return run


def same_end(run: Path, other: Path) -> bool:
    """Return True if two runs end with the same bits in every tensor of model and optimizer; their last steps must
    match.
    """
    assert last_step(run) == last_step(other)
    ours = weights(run, last_step(run))
    theirs = weights(other, last_step(other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_chain_runs_on_both_nodes_and_ends_with_the_run(undisturbed: Path) -> None:
    (only,) = attempts(undisturbed)
    assert only["nodes"] == ["n1", "n2"]
    assert only["decision"] == "done"
    assert only["step"] == last_step(undisturbed)
    assert "the run has finished" in logs_of(undisturbed)
    checks = [(undisturbed / "logs" / f"slurm-{only['job']}-0" / f"check-{rank}.txt").read_text() for rank in (0, 1)]
    assert [text.split(":")[0] for text in checks] == ["n1", "n2"]
    assert all("ok (" in text and "GB/s over 2 nodes" in text for text in checks)
    assert (undisturbed / "code/hybridtron/cli/train.py").read_text() == (ROOT / "hybridtron/cli/train.py").read_text()


def test_run_preempted_in_every_phase_ends_with_the_same_bits(
    cluster: Cluster, undisturbed: Path, counting_folder: Path, run_dir: Path
) -> None:
    run = run_dir / "run"
    (job,) = cluster.submit(arguments(counting_folder, run))
    cluster.wait_until(lambda: phase_of(run) == PHASES[0], run)
    cluster.reported("scancel", "--batch", "--signal=USR1", job)
    cluster.requeued(job, run, restarts=1)
    cluster.wait_until(lambda: phase_of(run) == PHASES[1], run)
    cluster.reported("scontrol", "requeue", job)
    cluster.requeued(job, run, restarts=2)
    cluster.wait_until(lambda: phase_of(run) == PHASES[2], run)
    with held(run) as ranks:  # SLURM looks at time limits twice a minute
        cluster.reported("scontrol", "update", f"JobId={job}", f"TimeLimit={cluster.minutes(job) + 2}")
        cluster.wait_until(lambda: all(handles_signal(rank, signal.SIGUSR1) for rank in ranks), run)
    cluster.requeued(job, run, restarts=3)
    cluster.wait_until(lambda: phase_of(run) == PHASES[3], run)
    cluster.reported("scancel", "--signal=TERM", job)
    cluster.requeued(job, run, restarts=4)
    assert cluster.ended(job, run) == "COMPLETED", logs_of(run)
    starts = attempts(run)
    assert [start["outcome"] for start in starts] == [*["preempted"] * 4, "finished"]
    assert [start["decision"] for start in starts] == [*["again"] * 4, "done"]
    assert (starts[0]["reason"], starts[2]["reason"]) == ("SIGUSR1", "SIGUSR1")
    assert same_end(run, undisturbed)


def test_job_waits_for_a_node_that_is_down(
    cluster: Cluster, undisturbed: Path, counting_folder: Path, run_dir: Path
) -> None:
    run = run_dir / "run"
    (job,) = cluster.submit(arguments(counting_folder, run))
    cluster.wait_until(lambda: phase_of(run) == PHASES[1], run)
    cluster.reported("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        cluster.requeued(job, run, restarts=1)
        cluster.wait_until(lambda: cluster.job(job)["Reason"] not in ("BeginTime", "None"), run)
        assert cluster.job(job)["JobState"] == "PENDING"
    finally:
        cluster.reported("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert cluster.ended(job, run) == "COMPLETED", logs_of(run)
    first, second = attempts(run)
    assert first["decision"] == "again"
    assert second["step_before"] >= 10
    assert same_end(run, undisturbed)


def test_smaller_job_continues_without_a_node_that_is_down(
    cluster: Cluster, undisturbed: Path, counting_folder: Path, run_dir: Path
) -> None:
    run = run_dir / "run"
    (job,) = cluster.submit([*arguments(counting_folder, run), "cluster.on_lost_node=smaller"])
    cluster.wait_until(lambda: phase_of(run) == PHASES[1], run)
    cluster.reported("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        cluster.requeued(job, run, restarts=1)
        assert cluster.ended(job, run) == "COMPLETED", logs_of(run)
    finally:
        cluster.reported("scontrol", "update", "NodeName=n2", "State=RESUME")
    first, second = attempts(run)
    assert (first["nodes"], second["nodes"]) == (["n1", "n2"], ["n1"])
    assert second["step_before"] >= 10
    ours = weights(run, last_step(run))
    theirs = weights(undisturbed, last_step(undisturbed))
    names = [name for name in ours if name.startswith("layers.")]  # sums in another order, else the same
    assert all(torch.allclose(ours[name].float(), theirs[name].float(), rtol=0.02, atol=2e-3) for name in names)


def test_killed_and_suspended_ranks_start_again_inside_the_job(
    cluster: Cluster, undisturbed: Path, counting_folder: Path, run_dir: Path
) -> None:
    run = run_dir / "run"
    (job,) = cluster.submit([*arguments(counting_folder, run), "run.timeout=60"])
    for phase, number in ((PHASES[1], signal.SIGKILL), (PHASES[2], signal.SIGSTOP)):
        cluster.wait_until(lambda phase=phase: phase_of(run) == phase, run)
        (rank,) = [rank for rank in ranks_of(run) if node_of(rank) == "n2"]
        os.kill(rank, number)
    assert cluster.ended(job, run) == "COMPLETED", logs_of(run)
    (only,) = attempts(run)
    assert only["outcome"] == "finished"
    killed, hung = faults.read(run)
    assert (killed.cause, killed.rank, killed.host) == ("killed", 1, "n2")
    assert hung.cause.startswith("hung in ")
    assert (hung.rank, hung.detail) == (1, "is stopped (SIGSTOP)")
    assert hung.found_s < hung.limit_s + 5
    assert same_end(run, undisturbed)


def test_spare_node_takes_the_place_of_a_node_that_is_down(
    cluster: Cluster, undisturbed: Path, counting_folder: Path, run_dir: Path
) -> None:
    run = run_dir / "run"
    (job,) = cluster.submit([*arguments(counting_folder, run), "cluster.partition=three", "cluster.spares=1"])
    cluster.wait_until(lambda: phase_of(run) == PHASES[1], run)
    assert sorted(map(node_of, ranks_of(run))) == ["n1", "n2"]
    cluster.reported("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        assert cluster.ended(job, run) == "COMPLETED", logs_of(run)
    finally:
        cluster.reported("scontrol", "update", "NodeName=n2", "State=RESUME")
    (only,) = attempts(run)
    assert (only["outcome"], only["nodes"]) == ("finished", ["n1", "n2", "n3"])
    (lost,) = faults.read(run)
    assert (lost.cause, lost.host, lost.spare) == ("lost node", "n2", "n3")
    assert same_end(run, undisturbed)


def test_bad_node_is_excluded_and_the_run_continues(cluster: Cluster, counting_folder: Path, run_dir: Path) -> None:
    run = run_dir / "run"
    python = run_dir / "python"
    spoilt = '*cluster.preflight*) [ "$SLURMD_NODENAME" = n1 ] || set -- "$@" cluster.checks.disk_gb=1e9'
    python.write_text(f'#!/bin/bash\ncase "$*" in {spoilt} ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    bad = [*arguments(counting_folder, run), f"cluster.python={python}"]
    (job,) = cluster.submit([*bad, "cluster.on_lost_node=smaller"])
    assert cluster.ended(job, run) == "COMPLETED", logs_of(run)
    assert attempts(run)[0]["nodes"] == ["n1", "n2"]
    assert attempts(run)[0]["outcome"] == "finished"
    assert "BAD NODE n2: has " in logs_of(run)
    shutil.rmtree(run)
    (job,) = cluster.submit([*bad, "cluster.on_lost_node=wait"])
    cluster.requeued(job, run, restarts=1)
    assert cluster.job(job)["ExcNodeList"] == "n2"
    cluster.reported("scancel", job)
    (first,) = attempts(run)
    assert (first["outcome"], first["excluded"]) == ("bad nodes", ["n2"])


def test_run_without_progress_stops_after_two_attempts(cluster: Cluster, counting_folder: Path, run_dir: Path) -> None:
    run = run_dir / "run"
    data = run_dir / "data"
    shutil.copytree(counting_folder, data)
    for shard in data.rglob("*.mds"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (job,) = cluster.submit([*arguments(data, run), "run.restarts=0", "--then", "evaluate", "--then", "export"])
    later = json.loads((run / "slurm" / "submission.json").read_text())["then"]
    cluster.requeued(job, run, restarts=1)
    assert [cluster.job(follow_up)["JobState"] for follow_up in later] == ["PENDING", "PENDING"]
    assert cluster.ended(job, run) == "FAILED"
    assert [cluster.ended(follow_up, run) for follow_up in later] == ["CANCELLED", "CANCELLED"]
    first, second = attempts(run)
    assert (first["outcome"], first["decision"]) == ("failed", "again")
    assert (second["outcome"], second["decision"]) == ("failed", "stop")
    assert "step 0" in second["why"]
    assert "digest" in second["why"]


def test_follow_ups_wait_for_the_last_attempt_of_a_run_that_reads_copies(
    cluster: Cluster, undisturbed: Path, counting_folder: Path, run_dir: Path
) -> None:
    run = run_dir / "run"
    disk = run_dir / "disk"
    whole = [*arguments(counting_folder, run), f"cluster.stage={disk}", "cluster.checks.disk_gb=0"]
    (job,) = cluster.submit([*whole, "--then", "evaluate --instruments states --rows 1 --length 1x",
                             "--then", "export --verify none"])  # fmt: skip
    evaluate, export = json.loads((run / "slurm" / "submission.json").read_text())["then"]
    cluster.wait_until(lambda: phase_of(run) == PHASES[1], run)
    cluster.reported("scancel", "--batch", "--signal=USR1", job)
    cluster.requeued(job, run, restarts=1)
    assert [cluster.job(later)["JobState"] for later in (evaluate, export)] == ["PENDING", "PENDING"]
    for each in (job, evaluate, export):
        assert cluster.ended(each, run) == "COMPLETED", logs_of(run)
    assert (run / "evaluation").is_dir()
    assert (run_dir / "run-hf" / "config.json").is_file()
    reports = [
        [(run / "logs" / f"slurm-{job}-{start}" / "stage" / f"{node}.json").read_text() for node in ("n1", "n2")]
        for start in (0, 1)
    ]
    complete = [["0 GB in 0 shards were missing" in text for text in of_nodes] for of_nodes in reports]
    assert not all(complete[0])  # the nodes share a disk here, so that the slower one may find a complete copy
    assert all(complete[1])
    assert list(disk.glob("*/train/**/*.mds"))
    assert same_end(run, undisturbed)


def test_jobs_that_would_never_start_are_refused(cluster: Cluster, counting_folder: Path, run_dir: Path) -> None:
    run = run_dir / "run"
    wrong = ["nodes=3", "cluster.time=1-00:00:00"]
    done = cluster.run([sys.executable, "slurm/submit.py", *arguments(counting_folder, run), *wrong])
    assert done.returncode == 2
    assert "8 problems in the configuration" in done.stderr  # 3 nodes share out no phase's batch evenly either
    assert "nodes " in done.stderr
    assert "cluster.time " in done.stderr
    gres = ['cluster.sbatch=["--gres=gpu:7"]']
    done = cluster.run([sys.executable, "slurm/submit.py", *arguments(counting_folder, run), *gres])
    assert done.returncode == 2
    assert "sbatch: error: Invalid generic resource" in done.stderr
    assert not run.exists()
