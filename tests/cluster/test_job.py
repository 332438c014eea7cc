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

from hybridtron.cluster.job import SlurmJob, cache_of, directives, script, steps, unusable
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
    "srun": 'echo "$@" >>sruns; while [[ $1 == --* ]]; do shift; done; exec "$@"',
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
        cache=Path("/home/someone/.cache"),
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
    options = (
        "--nv --bind /shared/runs/samba_421m:/shared/runs/samba_421m,/home/someone/hybridtron:/home/someone/hybridtron,"
        "/home/someone/.cache:/home/someone/.cache,/data:/data:ro --pwd /home/someone/hybridtron /shared/hybridtron.sif"
    )
    inside = 'apptainer exec "${container[@]}" python -P -m'
    assert f"\nmkdir -p /home/someone/.cache  # the container mounts this folder\ncontainer=({options})\n" in written
    assert f"\nalone=({inside})\ntask=({inside})\n" in written
    assert "--container" not in written.partition("settings=(")[0]


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


def carried_out(cluster: ClusterConfig, folder: Path, *arguments: str, restart: int = 0) -> list[str]:
    """Run the full script with stand-ins for SLURM's programs, and for python that records its arguments.

    Returns the arguments of each srun. `cluster.python` is replaced.
    """
    python = folder / "my 'python'"
    python.write_text(f"#!/bin/bash\n{STAND_IN}")
    python.chmod(0o755)
    for name, does in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / name).chmod(0o755)
    asked = replace(
        job(replace(cluster, python=str(python)), *arguments, fitting=(1,)),
        run_dir=folder / "run", working_dir=folder, cache=folder / "cache",
    )  # fmt: skip
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "HOME": str(folder)}
    slurm |= {"SLURM_RESTART_COUNT": str(restart), "PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script(asked)], cwd=folder, env=slurm, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [line.replace(f" {python} ", " python ") for line in (folder / "sruns").read_text().splitlines()]


def test_values_reach_the_program_unchanged(tmp_path: Path) -> None:
    carried_out(ClusterConfig(environment={"NASTY": NASTY}), tmp_path, f"run.sample_prompt={NASTY}")
    reported = (tmp_path / "words").read_text().split("\0")
    assert reported.count(NASTY) == 2  # the variable, in the check and in the run
    assert reported.count(f"run.sample_prompt={NASTY}") == 2
    assert not (tmp_path / "nasty").exists()


@pytest.mark.parametrize("restart", [0, 3])
def test_every_step_and_attempt_of_a_job_uses_one_unpacked_container(restart: int, tmp_path: Path) -> None:
    image = ContainerConfig("/shared/hybridtron.sqsh", Runtime.pyxis, ["/data:/data:ro"])
    cluster = ClusterConfig(container=image, environment={"NCCL_DEBUG": "WARN"}, gpus_per_node=2, cpus_per_process=3)
    sruns = carried_out(cluster, tmp_path, restart=restart)
    own = (f"{folder}:{folder}" for folder in (tmp_path / "run", tmp_path, tmp_path / "cache"))
    container = (
        f"--container-image=/shared/hybridtron.sqsh --container-mounts={','.join(own)},/data:/data:ro "
        f"--container-workdir={tmp_path} "
        "--container-env=PYTHONPATH,XDG_CACHE_HOME,TRITON_CACHE_DIR,TORCHINDUCTOR_CACHE_DIR,NCCL_DEBUG "
        "--container-name=hybridtron-7"
    )
    logs = tmp_path / f"run/logs/slurm-7-{restart}"
    settings = "run.dir=/shared/runs/samba_421m"
    history = f"--run {tmp_path}/run --job 7 --restart {restart}"
    alone = f"--overlap --nodes=1 --ntasks=1 {container} python -P -m hybridtron.cluster.attempt"
    on_nodes = (
        "--nodelist=n1 --nodes=1 --ntasks=2 --ntasks-per-node=2 --distribution=block --kill-on-bad-exit=0 "
        f"--output={logs}/{{}}-%t.txt --wait=1860 --cpus-per-task=3 {container} python -P -m"
    )
    assert sruns == [
        f"{alone} begin --nodes n1 {history}",
        f"{on_nodes.format('check')} hybridtron.cluster.preflight --reports {logs} {settings}",
        f"{alone} check --nodes n1 --reports {logs} --code 0 --fitting 1 --spares 0 {history}",
        f"{on_nodes.format('rank')} hybridtron train {settings}",
        f"{alone} end --code 0 {history}",
        "--overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=0 timeout 60 enroot remove "
        "--force pyxis_hybridtron-7",
    ]
    assert (tmp_path / "cache").is_dir()


def test_data_are_copied_by_one_process_on_each_node_before_ranks_start(tmp_path: Path) -> None:
    cluster = ClusterConfig(processes_per_node=4, stage=str(tmp_path / "disk"))
    creating, preflight, copying, training = carried_out(cluster, tmp_path)
    assert creating == (
        f"--overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=0 mkdir -p {tmp_path}/disk"
    )
    assert (tmp_path / "disk").is_dir()
    assert "hybridtron.cluster.preflight" in preflight
    assert "hybridtron train" in training
    logs = tmp_path / "run/logs/slurm-7-0/stage"
    assert copying == (
        "--nodelist=n1 --nodes=1 --ntasks=1 --ntasks-per-node=1 --distribution=block --kill-on-bad-exit=0 "
        f"--output={logs}/check-%t.txt --wait=0 python -P -m hybridtron.cluster.stage "
        f"--reports {logs} run.dir=/shared/runs/samba_421m"
    )
    assert logs.is_dir()


def test_container_mounts_the_folder_for_copies() -> None:
    image = ContainerConfig("/shared/hybridtron.sqsh")
    assert ",/local/disk:/local/disk" in script(job(ClusterConfig(container=image, stage="/local/disk")))


@pytest.mark.parametrize("name", [None, "gpu", "gpu:h100"])
def test_gpus_are_requested_by_the_option_that_the_cluster_needs(name: str | None) -> None:
    options = directives(job(ClusterConfig(gpus_per_node=8, gres=name))).values()
    if name is not None:
        assert load([f"cluster.gres={name}"]).cluster.gres == name
    wanted = "--gpus-per-node=8" if name is None else f"--gres={name}:8"
    assert [option for option in options if "gpu" in option] == [wanted]
    assert not any("gres" in option for option in directives(job(ClusterConfig(gres=name))).values())


def test_compiled_kernels_are_kept_in_a_folder_that_attempts_share() -> None:
    written = script(job(ClusterConfig(environment={"TRITON_CACHE_DIR": "/local/triton"})))
    exported = [line for line in written.splitlines() if line.startswith("export") and "CACHE" in line]
    assert exported == ["export TRITON_CACHE_DIR='/local/triton'"]
    assert (
        """[ -n "${TORCHINDUCTOR_CACHE_DIR:-}" ] || """
        "export TORCHINDUCTOR_CACHE_DIR='/home/someone/.cache/torchinductor'\n"
    ) in written
    chosen = script(job(ClusterConfig(cache="/home/someone/.cache")))
    assert "\nexport TRITON_CACHE_DIR='/home/someone/.cache/triton'\n" in chosen
    assert cache_of(ClusterConfig(cache="/shared/cache")) == Path("/shared/cache")


def test_cache_of_the_user_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_of(ClusterConfig()) == Path("/scratch/cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_of(ClusterConfig()) == Path("/home/somebody/.cache")


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
