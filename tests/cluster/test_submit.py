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
from hybridtron.cluster import scheduler
from hybridtron.cluster.problems import device_problems
from hybridtron.cluster.submit import job_of
from hybridtron.config.load import load, load_saved
from tests.cluster.conftest import ROOT
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


def refused(capsys: pytest.CaptureFixture[str], *asked: str) -> str:
    assert main(["submit", *asked]) == 2
    return capsys.readouterr().err


def test_a_run_s_folder_holds_code_configuration_script_and_the_job_s_number(
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


def test_a_chain_is_jobs_each_after_the_one_before(programs: Path, counting_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run, "--chain", "3")]) == 0
    script = f"{run}/slurm/job.sh"
    asked = (tmp_path / "asked").read_text().splitlines()[1:]
    assert asked == [
        f"--parsable {script}",
        f"--parsable --dependency=afterany:41 {script}",
        f"--parsable --dependency=afterany:42 {script}",
    ]


def test_everything_that_is_wrong_is_reported_at_once(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["nodes=5", "cluster.time=13:00:00", "cluster.stop_before=90000", "parallel.tensor=2", "--chain", "0"]
    reported = refused(capsys, *arguments(counting_folder, tmp_path / "run", *wrong, "optim.clip=-1"))
    assert reported.startswith("6 problems in the configuration")
    assert "nodes                is 5, but partition gpu has 4: use at most 4" in reported
    assert "use at most 0-12:00:00" in reported
    assert "cluster.stop_before  is 90000 s, but cluster.time=13:00:00 is 46800 s" in reported
    assert "parallel.tensor" in reported
    assert "--chain              is 0" in reported
    assert "optim.clip" in reported
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "asked").exists()  # sbatch is asked last


@pytest.mark.parametrize(
    "wrong",
    [
        {
            "cluster=h200": "has no 'h200' (did you mean h100?); have: h100, h100_infiniband, h100_roce, local",
            "nodes=two": "is 'two', must be a number of nodes of at least 1",
            "checkpoint.mirror=s3://me:secret@bucket/a": "holds a password",
        },
        {
            "cluster.partition=gpus": "is 'gpus', which is not here (did you mean gpu?); here are: gpu, long, old",
            "cluster.time=tomorrow": "is 'tomorrow', must be a limit such as 90 (minutes), 12:00:00 or 2-00:00:00",
            "cluster.account=my account": "can only hold",
            "cluster.container.mounts=[data]": "is 'data', must be /OUTSIDE:/INSIDE",
            "cluster.sbatch=[constraint]": "must be an option such as --constraint=h100",
            "cluster.environment.WANDB_API_KEY=abc": "looks like a secret",
            "cluster.environment.A-B=c": "can't be the name of a variable",
            "cluster.cpus_per_process=0": "is 0, must be at least 1",
            "cluster.gpus_per_node=3": "must share out to 6 data-parallel ranks",
            "phases.0.data.path=/nowhere": "/nowhere",
            "run.resume=never": "each start of the job would begin from scratch",
        },
        {"cluster.partition=old": "old is not up"},
        {"cluster.account=my account": "can only hold"},  # sbatch is not asked about a script that can't be written
    ],
    ids=["unreadable", "unusable", "down", "unwritable"],
)
def test_what_is_refused(
    wrong: dict[str, str], programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reported = refused(capsys, *arguments(counting_folder, tmp_path / "run", *wrong))
    for setting, message in wrong.items():
        assert message in reported, setting
    assert f"{len(wrong)} problem" in reported


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["cluster=h100"],
            "cluster=h100 says what a GPU does (peak_tflops=989), not how many there are: write cluster.gp",
        ),
        (["cluster.peak_tflops=500"], "(peak_tflops=500), not how many there are: write cluster.gpus_per_node=8"),
        (["precision=bf16"], "which precision=bf16 is for: write cluster.gpus_per_node=8, or as many"),
        (["phases.0.precision.name=bf16"], "to train on CPUs write precision=fp32"),
    ],
)
def test_a_job_for_gpus_asks_for_some(
    settings: list[str],
    said: str,
    programs: Path,
    counting_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [*arguments(counting_folder, tmp_path / "run"), *settings]
    for more in ([], ["--dry-run"]):
        reported = refused(capsys, *asked, *more)
        assert "1 problem in the configuration\n  cluster.gpus_per_node  is 0, so that the job would" in reported
        assert said in reported
    assert not (tmp_path / "run").exists()
    assert main(["submit", *asked, "cluster.gpus_per_node=1", "--dry-run"]) == 0
    assert "#SBATCH --gpus-per-node=1\n" in capsys.readouterr().out


def test_the_recipes_own_cluster_is_no_job_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`h100`, which recipes for GPUs choose, has no `gpus_per_node`: a job names another cluster."""
    asked = ["recipe=samba_1.3b", f"run.dir={tmp_path}", "--dry-run", "nodes=2"]
    assert "cluster.gpus_per_node" in refused(capsys, *asked)
    assert main(["submit", *asked, "cluster=h100_infiniband"]) == 0


def test_a_phase_in_bf16_and_emulated_fp8_may_run_on_cpus() -> None:
    assert list(device_problems(load(["recipe=laptop_phases"]))) == []
    emulated = ["precision.name=fp8_current", "precision.emulate=true"]
    assert list(device_problems(load(emulated))) == []
    assert list(device_problems(load(emulated[:1])))


def test_what_sbatch_itself_refuses_is_reported_before_anything_is_written(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never = 'echo "allocation failure: Invalid feature" >&2; exit 1;'
    stand_in(programs, "sbatch", SBATCH.format(folder=tmp_path, test_only=never, submitting=""))
    reported = refused(capsys, *arguments(counting_folder, tmp_path / "run"))
    assert "allocation failure: Invalid feature" in reported
    assert not (tmp_path / "run").exists()


def test_an_sbatch_that_fails_is_reported_and_the_run_s_folder_says_so(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = '[ "$number" -lt 2 ] || { echo "QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }'
    stand_in(programs, "sbatch", SBATCH.format(folder=tmp_path, test_only="", submitting=full))
    assert main(["submit", *arguments(counting_folder, tmp_path / "run", "--chain", "2")]) == 1
    reported = capsys.readouterr().err
    assert "sbatch failed: QOSMaxSubmitJobPerUserLimit" in reported
    assert "submitted before that, and still queued: 41" in reported
    notes = json.loads((tmp_path / "run" / "slurm" / "submission.json").read_text())
    assert (notes["jobs"], notes["error"]) == (["41"], "sbatch failed: QOSMaxSubmitJobPerUserLimit")


def test_a_run_that_is_queued_is_not_submitted_again(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["submit", *arguments(counting_folder, run)]) == 0
    (run / "code" / "hybridtron" / "__init__.py").write_text("as it was")
    stand_in(programs, "squeue", "echo '41|PENDING|Resources||N/A'")
    assert main(["submit", *arguments(counting_folder, run)]) == 1
    assert f"{run} is the run of job 41, which has not ended: wait, or scancel 41" in capsys.readouterr().err
    assert (run / "code" / "hybridtron" / "__init__.py").read_text() == "as it was"


def test_a_queue_that_can_t_be_read_leaves_the_earlier_job_s_folder_as_it_is(
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
        assert "squeue failed: Unable to contact slurm controller" in reported
        assert f"earlier jobs of {run} may still run" in reported
    assert (run / "slurm" / "submission.json").read_text() == before
    assert (run / "code" / "hybridtron" / "__init__.py").read_text() == "as it was"
    assert "--parsable" not in "".join((tmp_path / "asked").read_text().splitlines(keepends=True)[2:])


def test_without_slurm_there_is_a_dry_run_and_nothing_else(
    counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = arguments(counting_folder, tmp_path / "run")
    assert main(["submit", *asked, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=laptop\n#SBATCH --nodes=2\n")
    assert "sbatch is not on the PATH here" in refused(capsys, *asked)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_warns_of_absent_data(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments(counting_folder, tmp_path / "run", "data.path=/nowhere")
    assert main(["submit", *asked, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash")
    assert "data.path" in printed.err
    assert "data.path" in refused(capsys, *asked)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o027, 0o750)])
def test_the_script_follows_the_umask(
    umask: int, mode: int, programs: Path, counting_folder: Path, tmp_path: Path
) -> None:
    stand_in(programs, "sbatch", "echo 41")
    before = os.umask(umask)
    try:
        assert main(["submit", *arguments(counting_folder, tmp_path / "run")]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run/slurm/job.sh").stat().st_mode) == mode


def test_fewer_nodes_do_where_the_layout_can_be_shared_out(
    programs: Path, counting_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*arguments(counting_folder, tmp_path / "run"), "nodes=4", "phases.0.micro_batch=1"]
    assert main(["submit", *asked, "cluster.on_lost_node=smaller", "--dry-run"]) == 0
    reported = capsys.readouterr().out
    assert "#SBATCH --nodes=1-4\n" in reported
    assert "fitting=1,2,4 " in reported  # three data-parallel ranks can't share four rows


def test_variables_of_the_layout_are_exported_unless_the_cluster_says_otherwise() -> None:
    def exported(*settings: str) -> dict[str, str]:
        config = load(["recipe=samba_421m", *settings])
        return job_of(config, [], nodes=1).cluster.environment

    memory = "PYTORCH_CUDA_ALLOC_CONF"
    alone = exported("cluster=h100_infiniband")
    assert alone[memory] == "expandable_segments:True"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in alone
    assert alone["NCCL_IB_TIMEOUT"] == "22"
    assert exported("cluster=h100_infiniband", "parallel.tensor=2")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    given = exported("cluster=h100_infiniband", f"cluster.environment.{memory}=max_split_size_mb:512")
    assert given[memory] == "max_split_size_mb:512"
    assert exported("cluster=local") == {}


def test_neither_torch_nor_megatron_is_imported() -> None:
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
def test_slurm_s_times(text: str, seconds: int | None) -> None:
    assert scheduler.seconds(text) == seconds
