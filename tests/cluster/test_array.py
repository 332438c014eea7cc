"""A sweep as array jobs: the runs of each element, the dependencies, and a complete sweep on a real SLURM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.cli import sweep as command
from hybridtron.cli.main import main
from hybridtron.problems import Unusable
from hybridtron.sweep.grid import narrow, read
from tests.cluster.conftest import Cluster
from tests.cluster.test_job import SHELLCHECK
from tests.cluster.test_submit import programs as programs  # the fixture
from tests.cluster.test_submit import stand_in
from tests.refusals import problem_codes, refusal
from tests.train.conftest import small_run_arguments

GRID = {"run.seed": [0, 1]}


@pytest.fixture
def sweep(counting_folder: Path, tmp_path: Path) -> Path:
    """Write a sweep: two seeds of a tiny run, and of a run that starts from its weights."""
    small = [text for text in small_run_arguments(counting_folder, tmp_path) if not text.startswith("run.dir=")]
    variants = {"base": [], "longer": {"from": "base", "settings": ["optim.clip=2.0"]}, "other": []}
    path = tmp_path / "pair.yaml"
    path.write_text(json.dumps({"settings": small, "variants": variants, "grid": GRID}))
    return path


def words_of(sweep: Path, *more: str) -> list[str]:
    words = ["--only", "longer", "--slurm", "--output", str(sweep.parent / "pair")]
    return [str(sweep), *words, "cluster=local", "cluster.time=90", *more]


def queue(sweep: Path, *more: str) -> int:
    return main(["sweep", *words_of(sweep, *more)])


def test_runs_that_start_from_others_are_a_second_array(
    programs: Path, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert queue(sweep) == 0
    assert "submitted as job 41, 42" in capsys.readouterr().out
    scripts = [sweep.parent / f"pair/slurm/pair-{number}.sh" for number in (1, 2)]
    asked = (sweep.parent / "asked").read_text().splitlines()
    assert asked == [f"--parsable {scripts[0]}", f"--parsable --dependency=afterany:41 {scripts[1]}"]
    first, second = (path.read_text() for path in scripts)
    for text in (first, second):
        assert "#SBATCH --array=0-1\n" in text
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        assert subprocess.run([SHELLCHECK, "-"], input=text, text=True, check=False).returncode == 0
    assert "other" not in first + second
    assert "run.weights" not in first
    assert f"run.weights={sweep.parent}/pair/base-seed=1" in second
    assert (sweep.parent / "pair/code/hybridtron/cli/train.py").is_file()


def test_queued_runs_are_refused_and_finished_runs_left_out(programs: Path, sweep: Path) -> None:
    assert queue(sweep) == 0
    stand_in(programs, "squeue", "echo '41_[0-1]|PENDING|Priority||'")
    error = refusal(command.main, words_of(sweep))
    assert error.code == "in-use"
    assert "41_[0-1]" in str(error)
    stand_in(programs, "squeue", "true")
    done = sweep.parent / "pair/longer-seed=1"
    done.mkdir()
    (done / "outcome.json").write_text('{"outcome": "finished"}')
    assert queue(sweep) == 0
    assert "#SBATCH --array=0-0\n" in (sweep.parent / "pair/slurm/pair-2.sh").read_text()
    error = refusal(command.main, words_of(sweep, "optim.clip=3"))
    assert error.code == "changed"
    assert "optim.clip=3" in str(error)


def test_all_problems_are_reported_before_anything_is_queued(programs: Path, sweep: Path) -> None:
    wrong = ("cluster.partition=gpus", "cluster.stop_before=90000", "data.path=/nowhere")
    assert problem_codes(command.main, words_of(sweep, *wrong)) == {
        "cluster.partition": "unknown-name",
        "cluster.stop_before": "out-of-range",
        "data.path": "no-file",
    }
    assert not (sweep.parent / "asked").exists()
    assert refusal(command.main, [sweep, "--slurm", "--only", "longest"]).code == "unknown-name"


def test_run_takes_one_gpu_of_a_shared_node(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(sweep.parent / "pair")
    assert main(["sweep", str(sweep), "--slurm", "--plan", "--output", out, "cluster=h100_infiniband"]) == 0
    text = capsys.readouterr().out
    head = {line for line in text.splitlines() if line.startswith("#SBATCH")}
    assert {"#SBATCH --gpus-per-node=1", "#SBATCH --ntasks-per-node=1", "#SBATCH --array=0-3"} <= head
    assert not any("exclusive" in line or "--mem" in line for line in head)
    assert "export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'" in text
    assert not (sweep.parent / "pair").exists()


@pytest.mark.parametrize(("code", "requeued"), [(0, ""), (75, "requeue 41_1\n"), (1, "")])
def test_array_element_trains_its_run_and_is_requeued_after_a_checkpoint(
    code: int, requeued: str, programs: Path, sweep: Path
) -> None:
    """The script itself runs, with a stand-in for python."""
    stand_in(programs, "python", f'printf "%s\\n" "$@" >{sweep.parent}/words; exit {code}')
    (sweep.parent / "requeued").touch()
    stand_in(programs, "scontrol", f'echo "$@" >>{sweep.parent}/requeued')
    assert queue(sweep, f"cluster.python={programs}/python") == 0
    slurm = {"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "1", "PATH": f"{programs}:/usr/bin:/bin"}
    script = sweep.parent / "pair/slurm/pair-2.sh"
    assert subprocess.run(["bash", str(script)], env=slurm, timeout=60, check=False).returncode == code
    words = (sweep.parent / "words").read_text().splitlines()
    assert words[:4] == ["-P", "-m", "hybridtron", "train"]
    assert {"optim.clip=2.0", "run.seed=1", f"run.weights={sweep.parent}/pair/base-seed=1"} <= set(words)
    assert (sweep.parent / "requeued").read_text() == requeued


def test_a_command_is_queued_behind_the_runs(programs: Path, sweep: Path) -> None:
    """The command runs in the folder where it was requested, with the package as it was then."""
    command = f"echo \"$PYTHONPATH\" 'a b' >{sweep.parent}/said"
    assert queue(sweep, "--then", command) == 0
    script = sweep.parent / "pair/slurm/pair-then.sh"
    assert (sweep.parent / "asked").read_text().splitlines()[-1] == f"--parsable --dependency=afterany:42 {script}"
    text = script.read_text()
    assert "--array" not in text
    assert "/logs/slurm-%j.txt" in text
    assert subprocess.run([SHELLCHECK, str(script)], check=False).returncode == 0
    subprocess.run(["bash", str(script)], env={"PATH": "/usr/bin:/bin"}, timeout=60, check=True)
    assert (sweep.parent / "said").read_text() == f"{sweep.parent}/pair/code a b\n"


def test_option_only_keeps_the_variants_that_others_start_from(sweep: Path) -> None:
    chosen = narrow(read(sweep, ["optim.clip=3"]), ["longer"])
    assert [run.name for run in chosen.runs] == ["base-seed=0", "base-seed=1", "longer-seed=0", "longer-seed=1"]
    clips = [[text for text in run.settings if text.startswith("optim.clip")] for run in chosen.runs]
    assert clips == [["optim.clip=3"]] * 2 + [["optim.clip=3", "optim.clip=2.0"]] * 2  # a variant's own counts
    assert [run.name for run in narrow(read(sweep), ["longer-seed=1"]).runs] == ["base-seed=1", "longer-seed=1"]
    with pytest.raises(Unusable) as refused:
        read(sweep, ["run.dir=a"])
    assert refused.value.code == "misplaced"


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sweep_finishes_on_a_real_slurm(cluster: Cluster, sweep: Path) -> None:
    """Run two arrays, where the second waits for the first; afterwards nothing is left to queue."""
    out = sweep.parent / "pair"
    words = [sys.executable, "-m", "hybridtron", "sweep", str(sweep), "--only", "longer", "--slurm"]
    words += [
        "--output",
        str(out),
        "cluster=local",
        f"cluster.python={sys.executable}",
        "cluster.time=20",
        "cluster.stop_before=60",
    ]
    jobs = re.findall(r"submitted as job (\d+), (\d+)", cluster.printed(words))[0]
    runs = [out / f"{variant}-seed={seed}" for variant in ("base", "longer") for seed in (0, 1)]
    cluster.wait_until(lambda: not cluster.reported("squeue", "-h", "-j", ",".join(jobs)).strip(), out)
    assert all('"finished"' in (run / "outcome.json").read_text() for run in runs)
    assert "all runs have finished" in cluster.printed(words)
