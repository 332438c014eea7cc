"""Follow-up jobs: their scripts, their dependencies, and refusals before anything is queued."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from hybridtron.cluster import submit, then
from hybridtron.config.cluster import ClusterConfig, ContainerConfig
from tests.cluster.test_job import JOBS, SHELLCHECK, job
from tests.cluster.test_submit import SBATCH, arguments, stand_in
from tests.cluster.test_submit import programs as programs  # the fixture
from tests.refusals import problem_codes

THEN = ("--then", "evaluate", "--then", "export")


def test_each_job_starts_if_the_one_before_has_succeeded(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run, *THEN, "--chain", "2")]) == 0
    scripts = [run / "slurm" / name for name in ("job.sh", "then-1-evaluate.sh", "then-2-export.sh")]
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if "--test-only" not in line]
    assert asked == [
        f"--parsable {scripts[0]}",
        f"--parsable --dependency=afterany:41 {scripts[0]}",
        f"--parsable --dependency=afterok:42 --kill-on-invalid-dep=yes {scripts[1]}",
        f"--parsable --dependency=afterok:43 --kill-on-invalid-dep=yes {scripts[2]}",
    ]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"job 43, if job 42 succeeds: hybridtron evaluate {run}",
        f"job 44, if job 43 succeeds: hybridtron export {run} --output {run}-hf",
    ]
    notes = json.loads((run / "slurm" / "submission.json").read_text())
    assert (notes["jobs"], notes["then"]) == (["41", "42"], ["43", "44"])


def test_run_with_a_queued_follow_up_is_not_submitted_again(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments(counting_folder, tmp_path / "run", *THEN)
    assert main(["submit", *asked]) == 0
    stand_in(programs, "squeue", "echo '43|PENDING|Dependency||N/A'")
    assert main(["submit", *asked]) == 1
    assert "scancel 43\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", JOBS)
def test_follow_up_takes_one_process_of_one_node(name: str, tmp_path: Path) -> None:
    for follow_up in then.follow_ups(["evaluate --suite samba", "export --output 'a b'"], JOBS[name]):
        path = tmp_path / follow_up.script_path.name
        path.write_text(then.script(follow_up))
        head = [line.removeprefix("#SBATCH ") for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
        assert {"--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"} <= set(head)
        assert not any(line.startswith(("--exclusive", "--signal", "--no-kill")) for line in head)
        subprocess.run(["bash", "-n", path], check=True)
        checked = subprocess.run([SHELLCHECK, path], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


def test_follow_up_runs_the_command_in_the_container(tmp_path: Path) -> None:
    image = ContainerConfig("/shared/hybridtron.sqsh", mounts=["/data:/data"])
    evaluate, export = then.follow_ups(["evaluate --suite samba", "export"], job(ClusterConfig(container=image)))
    assert then.script(evaluate).splitlines()[-1] == (
        'exec srun --overlap --nodes=1 --ntasks=1 "${container[@]}" python -P -m hybridtron evaluate '
        "/shared/runs/samba_421m --suite samba"
    )
    (container,) = [line for line in then.script(export).splitlines() if line.startswith("container=")]
    assert container == (
        "container=(--container-image=/shared/hybridtron.sqsh "
        "--container-mounts=/shared/runs/samba_421m:/shared/runs/samba_421m,"
        "/home/someone/hybridtron:/home/someone/hybridtron,/home/someone/.cache:/home/someone/.cache,"
        "/shared/runs:/shared/runs,/data:/data --container-workdir=/home/someone/hybridtron "
        "--container-env=PYTHONPATH,XDG_CACHE_HOME,TRITON_CACHE_DIR,TORCHINDUCTOR_CACHE_DIR)"
    )
    (elsewhere,) = then.follow_ups(["export --output /models/samba"], job(ClusterConfig(container=image)))
    assert ",/models:/models," in then.script(elsewhere)
    assert "--container-name" not in then.script(export)  # pyxis removes it after the only step


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("evalute", "unknown-name"), ("", "unknown-name"), ("train", "unknown-name"), ("export 'a", "malformed"),
        ("export --output other", "duplicate"),
        ("evaluate --data s3://me:secret@bucket/a", "secret"), ("export", "exists"),
    ],
)  # fmt: skip
def test_wrong_follow_ups_are_refused_before_anything_is_queued(
    text: str, code: str, programs: Path, counting_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "run-hf").mkdir()
    asked = arguments(counting_folder, tmp_path / "run", "--then", text, "--then", "export --output other")
    assert problem_codes(submit.main, asked) == {"--then": code}
    assert not (tmp_path / "asked").exists()
    assert not (tmp_path / "run").exists()


def test_refusal_of_a_follow_up_is_found_before_the_run_is_queued(
    programs: Path, counting_folder: Path, tmp_path: Path
) -> None:
    refusing = 'grep -q Follow-up "${@: -1}" && { echo "QOSMinGRES" >&2; exit 1; };'
    stand_in(programs, "sbatch", SBATCH.format(folder=tmp_path, test_only=refusing, submitting=""))
    asked = arguments(counting_folder, tmp_path / "run", *THEN)
    assert problem_codes(submit.main, asked) == {"cluster": "unavailable"}
    assert "--parsable" not in (tmp_path / "asked").read_text()


def test_a_dry_run_prints_every_script(
    counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run, *THEN), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("#!/bin/bash\n") == 3
    assert f"# Follow-up 1: hybridtron evaluate {run}\n" in printed
    assert f"# Follow-up 2: hybridtron export {run} --output {run}-hf\n" in printed
    assert not run.exists()
