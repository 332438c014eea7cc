"""The job's script: a golden file, quoting, checks by bash and shellcheck, and forwarded signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.cluster.job import SlurmJob, directives, script, steps, unusable
from hybridtron.config.cluster import ChecksConfig, ClusterConfig, ContainerConfig, Runtime
from hybridtron.config.load import load

GOLDEN = Path(__file__).with_name("job.golden.sh")
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
NASTY = "a b\"c'd$(touch nasty)`touch nasty`\n;touch nasty"
STAND_IN = """\
[ "$1 $2" = "-P -m" ] || exit 1
shift 2
case $1 in
  hybridtron.cluster.attempt) case $2 in begin) echo go - - ;; check) echo go n1 - ;; end) echo done - - ;; esac ;;
  *) printf '%s\\0' "$@" "$NASTY" >>words ;;
esac
"""
STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": '[ "$2" = hostnames ] && echo n1 || echo "NodeName=n1 NodeAddr=10.0.0.1 "',
    "squeue": "echo RUNNING",
}


def job(cluster: ClusterConfig, *arguments: str, fitting: tuple[int, ...] = (4,)) -> SlurmJob:
    return SlurmJob(
        run_dir=Path("/shared/runs/samba_421m"),
        working_dir=Path("/home/someone/hybridtron"),
        name="samba_421m",
        arguments=(*arguments, "run.dir=/shared/runs/samba_421m"),
        fitting=fitting,
        patience=1860,
        cluster=cluster,
    )


JOBS = {
    "h100_infiniband": job(
        load(["cluster=h100_infiniband"]).cluster, "recipe=samba_421m", "cluster=h100_infiniband",
        "data.path=/data/slimpajama", "phases.0.micro_batch=4",
    ),
    "h100_roce": job(
        load(["cluster=h100_roce"]).cluster, "recipe=samba_421m", "cluster=h100_roce", "data.path=/data/slimpajama",
        fitting=(1, 2, 4),
    ),
    "apptainer_draining_without_requeue": job(
        ClusterConfig(
            container=ContainerConfig("/shared/hybridtron.sif", Runtime.apptainer, ["/data:/data:ro"]),
            gpus_per_node=4, requeue=False, checks=ChecksConfig(drain=True, all_reduce=False),
        ),
        "model.pattern=(M-W-)*3",
    ),
}  # fmt: skip


def test_script_equals_the_golden_file(tmp_path: Path) -> None:
    written = tmp_path / "job.sh"
    written.write_text(script(JOBS["h100_infiniband"]))
    assert written.read_text() == GOLDEN.read_text(), f"if that is wanted: cp {written} {GOLDEN}"


def test_elastic_job_takes_exclusive_nodes() -> None:
    """Given a number of tasks, SLURM would allocate the smallest number of nodes."""
    elastic, fixed = (set(directives(JOBS[name]).values()) for name in ("h100_roce", "h100_infiniband"))
    assert {"--nodes=1-4", "--exclusive"} <= elastic
    assert {"--nodes=4", "--ntasks-per-node=8"} <= fixed
    assert not any(line.startswith(("--ntasks-per-node", "--cpus-per-task")) for line in elastic)
    assert "fitting=1,2,4 " in script(JOBS["h100_roce"])


def test_a_cluster_that_must_not_requeue_drains_bad_nodes_inside_a_container() -> None:
    draining = JOBS["apptainer_draining_without_requeue"]
    written = script(draining)
    assert {"--no-requeue", "--gpus-per-node=4", "--ntasks-per-node=4"} <= set(directives(draining).values())
    assert "\nrequeue=false\ndrain=true\n" in written
    assert "\nrequeue=true\ndrain=false\n" in script(JOBS["h100_infiniband"])
    inside = (
        "apptainer exec --nv --bind /shared/runs/samba_421m:/shared/runs/samba_421m,"
        "/home/someone/hybridtron:/home/someone/hybridtron,/data:/data:ro "
        "--pwd /home/someone/hybridtron /shared/hybridtron.sif python -P -m"
    )
    assert f"\nalone=({inside})\ntask=({inside})\n" in written


@pytest.mark.parametrize("name", JOBS)
def test_scripts_pass_bash_and_shellcheck(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(script(JOBS[name]))
    subprocess.run(["bash", "-n", path], check=True)
    checked = subprocess.run([SHELLCHECK, path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_every_attempt_draws_a_port_below_the_ephemeral_ones() -> None:
    (line,) = [text for text in steps("job.sh").splitlines() if text.startswith("MASTER_PORT=")]
    command = ["bash", "-c", f"{line}\necho $MASTER_PORT"]
    ports = [int(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(20)]
    assert len({*ports}) > 1
    assert all(20000 <= port < 32768 for port in ports)


def test_values_reach_the_program_unchanged(tmp_path: Path) -> None:
    """Run the full script with stand-ins for SLURM's programs, and quoted for python that records its arguments."""
    python = tmp_path / "my 'python'"
    python.write_text(f"#!/bin/bash\n{STAND_IN}")
    python.chmod(0o755)
    for name in ("srun", "scontrol", "squeue"):
        (tmp_path / name).write_text(f"#!/bin/bash\n{STAND_INS[name]}")
        (tmp_path / name).chmod(0o755)
    bare = ClusterConfig(python=str(python), environment={"NASTY": NASTY})
    quoted = replace(
        job(bare, f"run.sample_prompt={NASTY}", fitting=(1,)), run_dir=tmp_path / "run", working_dir=tmp_path
    )
    slurm = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash", "-c", script(quoted)], cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    reported = (tmp_path / "words").read_text().split("\0")
    assert reported.count(NASTY) == 2  # the variable, in the check and in the run
    assert reported.count(f"run.sample_prompt={NASTY}") == 2
    assert not (tmp_path / "nasty").exists()


@pytest.mark.parametrize("value", ["two words", "$(touch nasty)", "a\n#SBATCH --uid=0", "a'b", 'a"b', "50%j"])
@pytest.mark.parametrize("key", ["partition", "account", "qos", "memory", "time"])
def test_values_that_no_sbatch_line_can_hold_are_reported(key: str, value: str) -> None:
    assert list(unusable(job(ClusterConfig(**{key: value})))) == [f"cluster.{key}"]


def test_folders_that_no_sbatch_line_can_name_are_reported() -> None:
    spaced = replace(job(ClusterConfig()), run_dir=Path("/shared/my runs/a"), working_dir=Path("/home/a b"))
    assert list(unusable(spaced)) == ["run.dir", "the working folder"]


def test_environment_is_not_written_into_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0123456789secret")
    assert "0123456789secret" not in script(JOBS["h100_roce"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_every_signal_is_forwarded_as_sigusr1(number: signal.Signals, tmp_path: Path) -> None:
    script_path = tmp_path / "batch.sh"
    ready = tmp_path / "ready"
    command = f"""trap 'sleep 0.3; exit 75' USR1; trap 'exit 1' TERM INT; touch {ready}; while :; do sleep 0.05; done"""
    text = steps("job.sh")
    forwarding = text[text.index("stopped=''") : text.index("use_nodes()")]
    script_path.write_text(f"set -u\n{forwarding}\nforwarding bash -c {shlex.quote(command)}\nexit $?\n")
    batch = subprocess.Popen(["bash", script_path], start_new_session=True)
    until = time.monotonic() + 120
    while not ready.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(batch.pid, number)
    time.sleep(0.1)
    os.kill(batch.pid, number)
    assert batch.wait(120) == 75
