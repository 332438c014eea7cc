"""Submission, with stand-ins for SLURM's programs: refusals in advance, written files, and queued jobs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from hybridtron.cluster import scheduler, submit
from hybridtron.cluster.problems import device_problems
from hybridtron.cluster.submit import job_of
from hybridtron.config.load import load, load_saved
from hybridtron.config.resolve import RunPlan
from hybridtron.problems import Code, ConfigError
from tests.cluster.conftest import ROOT
from tests.refusals import problem_codes, refusal
from tests.train.conftest import small_run_arguments

PARTITIONS = "gpu*|up|12:00:00|4\nlong|up|7-00:00:00|2\nold|down|infinite|9\n"
SBATCH = """\
echo "$*" >>{folder}/asked
case $* in *--test-only*) {test_only} exit 0 ;; esac
number=$(grep -vc test-only {folder}/asked)
{submitting}
echo $((40 + number))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins, alone on the PATH with the system's own programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    stand_in(folder, "sbatch", SBATCH.format(folder=tmp_path, test_only="", submitting=""))
    stand_in(folder, "sinfo", f"printf '{PARTITIONS}'")
    stand_in(folder, "squeue", "true")
    return folder


def stand_in(folder: Path, name: str, does: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{does}\n")
    (folder / name).chmod(0o755)


def arguments(data: Path, run: Path, *more: str) -> list[str]:
    return [*small_run_arguments(data, run), "cluster=local", "cluster.time=90", "nodes=2", *more]


def test_submission_writes_code_configuration_script_and_job_number(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run)]) == 0
    assert "submitted as job 41; its log:" in capsys.readouterr().out
    assert load_saved(run / "config.yaml").phases[0].seq_len == 16
    attempt = Path("hybridtron/cluster/attempt.py")
    assert (run / "code" / attempt).read_text() == (ROOT / attempt).read_text()
    assert not list((run / "code").rglob("*.pyc"))
    alone = {**os.environ, "PYTHONPATH": str(run / "code"), "PYTHONDONTWRITEBYTECODE": "1"}
    plan = [sys.executable, "-P", "-m", "hybridtron", "train", "run.plan=true"]
    assert subprocess.run(plan, cwd=tmp_path, env=alone, check=False, capture_output=True).returncode == 0
    notes = json.loads((run / "slurm" / "submission.json").read_text())
    assert (notes["jobs"], notes["error"], notes["nodes"]) == (["41"], None, 2)
    written = (run / "slurm" / "job.sh").read_text()
    assert f"run.dir={run}" in written
    assert f"#SBATCH --chdir={Path.cwd()}" in written


def test_jobs_of_a_chain_depend_on_the_one_before(programs: Path, counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run, "--chain", "3")]) == 0
    script = f"{run}/slurm/job.sh"
    asked = (tmp_path / "asked").read_text().splitlines()[1:]
    assert asked == [
        f"--parsable {script}",
        f"--parsable --dependency=afterany:41 {script}",
        f"--parsable --dependency=afterany:42 {script}",
    ]


def test_all_problems_are_reported_at_once(programs: Path, counting_folder: Path, tmp_path: Path) -> None:
    wrong = ["nodes=5", "cluster.time=13:00:00", "cluster.stop_before=90000", "parallel.tensor=2", "--chain", "0"]
    settings = [*arguments(counting_folder, tmp_path / "run"), *wrong, "optim.clip=-1"]
    assert problem_codes(submit.main, settings) == {
        "nodes": "does-not-fit",
        "cluster.time": "out-of-range",
        "cluster.stop_before": "out-of-range",
        "parallel.tensor": "not-divisible",
        "--chain": "out-of-range",
        "optim.clip": "out-of-range",
    }
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "asked").exists()  # sbatch is asked last


WRONG: dict[str, dict[str, tuple[str, Code]]] = {
    "unreadable": {
        "cluster=h200": ("cluster", "unknown-name"),
        "nodes=two": ("nodes", "out-of-range"),
        "checkpoint.mirror=s3://me:secret@bucket/a": ("checkpoint.mirror", "secret"),
    },
    "unusable": {
        "cluster.partition=gpus": ("cluster.partition", "unknown-name"),
        "cluster.time=tomorrow": ("cluster.time", "malformed"),
        "cluster.account=my account": ("cluster.account", "malformed"),
        "cluster.container.mounts=[data]": ("cluster.container.mounts.0", "malformed"),
        "cluster.sbatch=[constraint]": ("cluster.sbatch.0", "malformed"),
        "cluster.gres=gpu:h100:8": ("cluster.gres", "malformed"),
        "cluster.cache=cache": ("cluster.cache", "malformed"),
        "cluster.environment.WANDB_API_KEY=abc": ("cluster.environment.WANDB_API_KEY", "secret"),
        "cluster.environment.A-B=c": ("cluster.environment", "malformed"),
        "cluster.cpus_per_process=0": ("cluster.cpus_per_process", "out-of-range"),
        "cluster.gpus_per_node=3": ("phases.0.global_batch", "not-divisible"),
        "phases.0.data.path=/nowhere": ("phases.0.data.path", "no-file"),
        "run.resume=never": ("run.resume", "unsupported"),
    },
    "down": {"cluster.partition=old": ("cluster.partition", "unavailable")},
    # sbatch is not asked about a script that can't be written
    "unwritable": {"cluster.account=my account": ("cluster.account", "malformed")},
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_settings_are_refused(kind: str, programs: Path, counting_folder: Path, tmp_path: Path) -> None:
    wrong = WRONG[kind]
    assert problem_codes(submit.main, arguments(counting_folder, tmp_path / "run", *wrong)) == dict(wrong.values())


def test_folder_of_a_killed_start_from_another_checkpoint_is_refused(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job would start from scratch: it resumes only from the folder, and its configuration names no checkpoint."""
    run = tmp_path / "run"
    elsewhere = tmp_path / "other" / "checkpoints" / "step-00000004"
    run.mkdir()
    (run / "config.yaml").write_text(f"run:\n  resume: {elsewhere}\n")
    before = (run / "config.yaml").read_bytes()
    for more in ([], ["--dry-run"]):
        assert main(["submit", *arguments(counting_folder, run), *more]) == 2
        said = capsys.readouterr().err
        assert "run.dir" in said
        assert f"copy {elsewhere} into {run / 'checkpoints'}" in said
    assert (run / "config.yaml").read_bytes() == before
    assert not (tmp_path / "asked").exists()
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)  # as the message says
    assert main(["submit", *arguments(counting_folder, run)]) == 0
    (run / "checkpoints" / "step-00000004").rmdir()
    assert main(["submit", *arguments(counting_folder, run)]) == 0  # the configuration has auto now


@pytest.mark.parametrize(
    "setting", ["cluster=h100", "cluster.peak_tflops=500", "precision=bf16", "phases.0.precision.name=bf16"]
)
def test_job_without_gpus_is_refused_if_its_settings_need_them(
    setting: str, programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*arguments(counting_folder, tmp_path / "run"), setting]
    for settings in (asked, [*asked, "--dry-run"]):
        assert problem_codes(submit.main, settings) == {"cluster.gpus_per_node": "missing"}
    assert not (tmp_path / "run").exists()
    assert main(["submit", *asked, "cluster.gpus_per_node=1", "--dry-run"]) == 0
    assert "#SBATCH --gpus-per-node=1\n" in capsys.readouterr().out


def test_default_cluster_of_a_recipe_is_refused_for_a_job(tmp_path: Path) -> None:
    """`h100`, which recipes for GPUs choose, has no `gpus_per_node`: a job names another cluster."""
    asked = ["recipe=samba_1.3b", f"run.dir={tmp_path}", "--dry-run", "nodes=2"]
    assert problem_codes(submit.main, asked) == {"cluster.gpus_per_node": "missing"}
    assert main(["submit", *asked, "cluster=h100_infiniband"]) == 0


def test_a_phase_in_bf16_and_emulated_fp8_may_run_on_cpus() -> None:
    assert list(device_problems(RunPlan.of(load(["recipe=laptop_phases"])))) == []
    emulated = ["precision.name=fp8_current", "precision.emulate=true"]
    assert list(device_problems(RunPlan.of(load(emulated)))) == []
    assert list(device_problems(RunPlan.of(load(emulated[:1]))))


def test_refusal_of_sbatch_is_reported_before_anything_is_written(
    programs: Path, counting_folder: Path, tmp_path: Path
) -> None:
    never = 'echo "allocation failure: Invalid feature" >&2; exit 1;'
    stand_in(programs, "sbatch", SBATCH.format(folder=tmp_path, test_only=never, submitting=""))
    error = refusal(submit.main, arguments(counting_folder, tmp_path / "run"))
    assert isinstance(error, ConfigError)
    (problem,) = error.problems
    assert (problem.key, problem.code) == ("cluster", "unavailable")
    assert "Invalid feature" in problem.message
    assert not (tmp_path / "run").exists()


def test_failure_of_sbatch_is_reported_and_recorded(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = '[ "$number" -lt 2 ] || { echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }'
    stand_in(programs, "sbatch", SBATCH.format(folder=tmp_path, test_only="", submitting=full))
    assert main(["submit", *arguments(counting_folder, tmp_path / "run", "--chain", "2")]) == 1
    reported = capsys.readouterr().err
    assert "QOSMaxSubmitJobPerUserLimit" in reported
    assert reported.endswith(": 41\n")
    notes = json.loads((tmp_path / "run" / "slurm" / "submission.json").read_text())
    assert notes["jobs"] == ["41"]
    assert "QOSMaxSubmitJobPerUserLimit" in notes["error"]


def test_queued_run_is_not_submitted_again(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run)]) == 0
    (run / "code" / "hybridtron" / "__init__.py").write_text("as it was")
    stand_in(programs, "squeue", "echo '41|PENDING|Resources||N/A'")
    assert main(["submit", *arguments(counting_folder, run)]) == 1
    assert "scancel 41\n" in capsys.readouterr().err
    assert (run / "code" / "hybridtron" / "__init__.py").read_text() == "as it was"


def test_unreadable_queue_leaves_the_folder_unchanged(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run)]) == 0
    before = (run / "slurm" / "submission.json").read_text()
    (run / "code" / "hybridtron" / "__init__.py").write_text("as it was")
    stand_in(programs, "squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    for _ in range(2):
        assert main(["submit", *arguments(counting_folder, run)]) == 1
        reported = capsys.readouterr().err
        assert "Unable to contact slurm controller" in reported
        assert str(run) in reported
    assert (run / "slurm" / "submission.json").read_text() == before
    assert (run / "code" / "hybridtron" / "__init__.py").read_text() == "as it was"
    assert "--parsable" not in "".join((tmp_path / "asked").read_text().splitlines(keepends=True)[2:])


def test_dry_run_needs_no_slurm(
    counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = arguments(counting_folder, tmp_path / "run")
    assert main(["submit", *asked, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=laptop\n#SBATCH --nodes=2\n")
    assert problem_codes(submit.main, asked) == {"cluster": "unavailable"}
    assert not (tmp_path / "run").exists()


def test_a_dry_run_warns_of_absent_data(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments(counting_folder, tmp_path / "run", "data.path=/nowhere")
    assert main(["submit", *asked, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash")
    assert "data.path" in printed.err
    assert problem_codes(submit.main, asked) == {"data.path": "no-file"}


def test_a_dry_run_prints_size_hours_jobs_and_absent_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = [
        "submit",
        "recipe=samba_1.3b",
        "cluster=h100_infiniband",
        "nodes=8",
        f"run.dir={tmp_path}/run",
        "--dry-run",
    ]
    assert main([*asked, "data.path=/nowhere", "cluster.time=3:00:00"]) == 0
    printed = capsys.readouterr().err
    assert "plan: the whole run: 47,684 steps, 100B tokens on 64 devices of 8 nodes" in printed
    # 8.37e20 FLOPs at 0.4 x 989e12 a second are 587.9 hours of one GPU; jobs of 170 minutes need four starts
    assert "plan: about 9.186 hours, 587.9 GPU-hours, at 40% of 989 TFLOP/s (a guess)" in printed
    assert "plan: a job of 3:00:00 that requeues itself 3 times" in printed
    assert "plan: not here: 52.2B tokens of RedPajamaCommonCrawl (phase pretrain), from /nowhere" in printed
    assert printed.count("not here") == 7
    assert main([*asked, "cluster.time=3:00:00", "cluster.requeue=false", "--chain", "2"]) == 0
    assert "plan: 4 jobs of 3:00:00, but 2 would be queued: use --chain 4" in capsys.readouterr().err
    # 100 steps of 512 rows of 4096 tokens
    assert main([*asked, "run.max_steps=100", "data.path=/nowhere"]) == 0
    printed = capsys.readouterr().err
    assert "plan: the whole run: 100 steps, 209.7M tokens on 64 devices of 8 nodes" in printed
    assert "1.233 GPU-hours" in printed
    assert "plan: not here: 109.5M tokens of RedPajamaCommonCrawl" in printed


def test_the_plan_of_a_submission_leaves_out_text_that_is_here(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *arguments(counting_folder, tmp_path / "run"), "--dry-run"]) == 0
    printed = capsys.readouterr().err
    assert "plan: hours are unknown: set cluster.peak_tflops" in printed
    assert "not here" not in printed


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o027, 0o750)])
def test_mode_of_the_script_follows_the_umask(
    umask: int, mode: int, programs: Path, counting_folder: Path, tmp_path: Path
) -> None:
    stand_in(programs, "sbatch", "echo 41")
    before = os.umask(umask)
    try:
        assert main(["submit", *arguments(counting_folder, tmp_path / "run")]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run/slurm/job.sh").stat().st_mode) == mode


def test_smaller_jobs_have_the_numbers_of_nodes_that_the_layout_fits(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*arguments(counting_folder, tmp_path / "run"), "nodes=4", "phases.0.micro_batch=1"]
    assert main(["submit", *asked, "cluster.on_lost_node=smaller", "--dry-run"]) == 0
    reported = capsys.readouterr().out
    assert "#SBATCH --nodes=1-4\n" in reported
    assert "fitting=1,2,4 " in reported  # three data-parallel ranks can't share four rows


def test_variables_of_the_cluster_override_those_of_the_layout() -> None:
    def exported(*settings: str) -> dict[str, str]:
        config = load(["recipe=samba_421m", *settings])
        return job_of(RunPlan.of(config), [], nodes=1).cluster.environment

    memory = "PYTORCH_CUDA_ALLOC_CONF"
    alone = exported("cluster=h100_infiniband")
    assert alone[memory] == "expandable_segments:True"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in alone
    assert alone["NCCL_IB_TIMEOUT"] == "22"
    assert exported("cluster=h100_infiniband", "parallel.tensor=2")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    overridden = exported("cluster=h100_infiniband", f"cluster.environment.{memory}=max_split_size_mb:512")
    assert overridden[memory] == "max_split_size_mb:512"
    assert exported("cluster=local") == {}


@pytest.mark.slow
def test_submission_imports_neither_torch_nor_megatron() -> None:
    imports = "import sys, hybridtron.cluster.submit, hybridtron.cluster.status, hybridtron.cluster.attempt"
    asked = f"{imports}; print([m for m in sys.modules if m in BAD])"
    code = f"BAD = ('torch', 'megatron', 'numpy'); {asked}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['numpy']")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("1:00:00", 3600), ("2-0", 172800), ("1-12:30", 131400),
        ("1-00:00:01", 86401), ("infinite", None), ("tomorrow", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_time_limits_of_slurm_are_parsed(text: str, seconds: int | None) -> None:
    assert scheduler.seconds(text) == seconds
