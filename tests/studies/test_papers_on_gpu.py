"""Claims on a GPU: runs fit, are long enough and last a day at most; scripts; and columns from real runs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.cli import main as cli
from hybridtron.cli.train import main as train
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.planning.memory import largest_phase, plan
from hybridtron.problems import Unusable
from hybridtron.sweep.grid import read
from studies.papers import __main__ as papers
from studies.papers import columns, speed, submission
from studies.papers.__main__ import PAPERS, main
from studies.papers.columns import by_position, in_rows, tasks
from studies.papers.material import MATERIAL, needed
from studies.papers.on_gpu import SWEEPS, chain_of, config_of, expected, fill, hours, rehearsed, runs_of, saved
from studies.papers.submission import by_sweep, script
from studies.results import ROOT
from tests.cluster.test_job import SHELLCHECK
from tests.docs.test_commands import Parsed, raising
from tests.train.conftest import counting_folder as counting_folder  # the fixture
from tests.train.conftest import small_run_arguments

CLAIMS = [claim for paper in PAPERS.values() for claim in paper.claims if claim.on_gpu is not None]
BY_NAME = {claim.name: claim for claim in CLAIMS}
TIMED = {claim.name: claim for paper in PAPERS.values() for claim in paper.claims if claim.timed}
ASSIGNED = ("CLUSTER=${CLUSTER:-h100_infiniband}", "ON_GPU=${ON_GPU:-srun")  # of the second the first word
DAY = 24
HELD = 80e9  # bytes of an H100
STEP = 2**19
LEAST = {  # tokens that the papers' claims need, by sweep and how the names of runs begin
    "samba/slimpajama": {"samba-keys": 500 * 2048 * 4096, "llama-swa-keys": 500 * 2048 * 4096, "": 2e9},
    "length/contexts": {"": 9e9},
    "length/warmup": {"": 9e9},
    "length/families": {"gla-passing": 100 * STEP, "hybrid-passing": 100 * STEP, "rwkv6-passing": 250e6, "": 9e9},
    "length/interventions": {"": 100 * STEP},
    "length/sigma": {"": 100 * STEP},
    "length/copying": {"": 1_000_000 * 2 * 75},  # a million strings of 50 to 100 letters, and their copies
    "length/answers": {
        "keys": 1000 * STEP,
        "passing-babi": 100 * 64 * 2048,
        "passing": 100 * STEP,
        "babi": 100 * 64 * 2048,
    },
    "hax/joint_recall": {"": 400_000 * 64 * 1059},
    "hax/chat": {"none-chat": 3000 * 64 * 3072, "HAX-chat": 3000 * 64 * 3072, "": 10_000 * 64 * 3072},
    **{f"span/{path.stem}": {"": 1000 * STEP} for path in (SWEEPS / "span").glob("*.yaml")},
}


@pytest.mark.slow
@pytest.mark.parametrize("sweep", by_sweep(CLAIMS))
def test_runs_fit_on_one_gpu_and_are_as_long_as_the_claim_needs(sweep: str) -> None:
    runs = {run.name: run for _, on_gpu in by_sweep(CLAIMS)[sweep] for run in runs_of(on_gpu)}
    for run in runs.values():
        config = config_of(chain_of(run, list(runs.values())))
        (phase,) = resolve(config)
        least = next(tokens for begin, tokens in LEAST[sweep].items() if run.name.startswith(begin))
        assert phase.end_step * phase.settings.tokens_per_step >= 0.999 * least, run.name
        assert all(0 < rank.memory.total < HELD for rank in plan(largest_phase(RunPlan.of(config)), 1).ranks), run.name


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_claim_takes_at_most_a_day_of_one_gpu(name: str) -> None:
    on_gpu = BY_NAME[name].on_gpu
    assert on_gpu is not None
    assert 0 < sum(hours(on_gpu).values()) <= DAY
    assert (on_gpu.column is None) == bool(on_gpu.reads)


def test_expected_hours_grow_with_the_tokens() -> None:
    (run,) = runs_of(BY_NAME["figure1-falls"].on_gpu)  # type: ignore[arg-type]
    longer = (*run.settings, "phases.0.tokens=4B")
    assert 2 < expected((run.settings,)) < 6
    assert expected((longer,)) == pytest.approx(2 * expected((run.settings,)), rel=0.01)


def test_indivisible_recipes_are_as_slow_as_their_stages() -> None:
    """Copying has the model of mamba2_45m but a fifteenth of its vocabulary, and no record of eight data ranks."""
    rate, launches = rehearsed("copying_45m")
    larger, fewer = rehearsed("mamba2_45m")
    assert larger / 4 < rate < 1.5 * larger
    assert fewer < launches < 10 * fewer
    (claim,) = [entry for entry in PAPERS["length"].claims if entry.name == "table1-copying"]
    assert claim.on_gpu is not None
    assert sum(hours(claim.on_gpu).values()) > 6 * 153e6 / (2 * larger) / 3600


def test_claims_of_a_sweep_train_with_equal_settings() -> None:
    """Otherwise a run that one claim has trained could not serve another."""
    for of in by_sweep(CLAIMS).values():
        assert len({on_gpu.smaller for _, on_gpu in of}) == 1


def test_material_of_every_sweep_can_be_made() -> None:
    """And nothing is made that no sweep reads."""
    runs = [run for paper in PAPERS for path in (SWEEPS / paper).glob("*.yaml") for run in read(path).runs]
    assert set(needed(runs)) <= set(MATERIAL)
    assert set(MATERIAL) - set(needed(runs)) == {"imported/mamba2-1.3b"}  # which wants several GPUs


def lines_of(text: str) -> Iterator[list[str]]:
    """The words of each command, without those of documents."""
    text = re.sub(r"(<<'END'\n).*?^END$", r"\1", text, flags=re.DOTALL | re.MULTILINE)
    text = (
        text.replace("\\\n", " ")
        .replace('"$CLUSTER"', "h100_infiniband")
        .replace("${ON:-} ", "")
        .replace("$ON_GPU ", "")
    )
    for line in text.replace('"${WORKERS:-8}"', "8").splitlines():
        if words := shlex.split(line, comments=True):
            yield words[words.index("||") + 1 :] if "||" in words else words


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the sweeps, and configurations in place of imported weights."""
    (tmp_path / "studies").symlink_to(ROOT / "studies")
    for name, material in MATERIAL.items():
        if material.like:
            saved(load([f"recipe={material.like}"]), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse words by the command's own parser, and stop before the command runs."""
    with monkeypatch.context() as patch:
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, raising(getattr(argparse.ArgumentParser, name)))
        with pytest.raises(Parsed):
            cli.main(words)


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["a day", "full"])
@pytest.mark.parametrize("paper", PAPERS)
def test_scripts_of_papers_are_parsed_by_bash_and_commands(
    paper: str, full: bool, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data commands are parsed, and array jobs are written, as with --slurm --plan, whose elements are counted."""
    monkeypatch.setattr(submission, "hours", lambda on_gpu: {"one": 1.0})  # that is slow, and another test's
    text = script(PAPERS[paper].claims, full, whole=True)
    for check in (["bash", "-n"], [str(SHELLCHECK), "-"]):
        assert subprocess.run(check, input=text, text=True, check=False).returncode == 0
    count = int(re.search(r"^# (\d+) runs of ", text, re.MULTILINE)[1])  # type: ignore[index]
    queued = 0
    for words in lines_of(text):
        if words[:2] == ["hybridtron", "sweep"]:
            assert cli.main([*words[1:], "--plan"]) == 0
            queued += sum(
                int(last) + 1 for last in re.findall(r"^#SBATCH --array=0-(\d+)$", capsys.readouterr().out, re.M)
            )
            then = words[words.index("--then") + 1] if "--then" in words else ""
            for command in lines_of(then.replace(" && ", "\n")):
                if command[0] == "python":
                    assert papers.parse(command[3:]).fill
                else:
                    assert command[1] == "evaluate"
        elif words[0] == "hybridtron":
            parsed(words[1:], monkeypatch)
        elif words[:3] == ["python", "-m", "studies.papers"]:
            assert papers.parse(words[3:]).fill[0] in TIMED
        else:
            assert words[0] in ("hf", "cp", "python", "if", "fi", "set", *ASSIGNED), words
    assert queued == count


@pytest.mark.parametrize("name", BY_NAME)
def test_every_claim_has_a_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "hours", lambda on_gpu: {"one": 1.0})
    text = script([BY_NAME[name]], full=False, whole=False)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert f"--fill {name}" in text or "hybridtron evaluate runs/gpu/" in text


@pytest.fixture(scope="module")
def run(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that was trained for 20 steps."""
    path = tmp_path_factory.mktemp("gpu") / "run"
    assert train(small_run_arguments(counting_folder, path)) == 0
    return path


@pytest.mark.slow
def test_a_trained_run_fills_a_column_that_the_page_shows(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a claim on Samba with shorter rows; the column has the perplexity of counting."""
    claim = BY_NAME["table3-order"]
    assert claim.on_gpu is not None
    shorter = replace(claim, on_gpu=replace(claim.on_gpu, column=in_rows(16, 32)))
    samba = replace(PAPERS["samba"], claims=(shorter,))
    monkeypatch.setitem(PAPERS, "samba", samba)
    monkeypatch.setattr(columns, "TOKENS", 2**10)
    where = ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "out")]
    named = [f"samba={run}", f"llama-swa={min((run / 'checkpoints').glob('step-*'))}"]  # the same, less trained
    assert main(["samba", "--fill", "table3-order", *named, *where]) == 0
    record = json.loads((tmp_path / "results/papers/gpu-table3-order.json").read_text())
    (samba_name, *trained), (other, *earlier) = record["rows"]
    assert (samba_name, other) == ("samba", "llama-swa")
    assert all(1 < float(late) < float(early) < 40 for late, early in zip(trained, earlier, strict=True))
    assert main(["samba", "--pages", *where]) == 0
    text = (tmp_path / "out/samba.md").read_text()
    assert "| on a GPU | perplexity in rows of 16 | perplexity in rows of 32 |" in text
    assert f"| samba | {' | '.join(trained)} |" in text


@pytest.mark.slow
def test_columns_of_positions_and_tasks_are_measured(run: Path, tmp_path: Path) -> None:
    """Check each cell's form, and its size where 20 steps of counting suffice."""
    column = by_position(1, 2)
    assert column.titles == ("least perplexity", "at 1x", "at 2x", "at 2x over the same tokens within a context")
    least, at_one, at_two, rise = map(float, column.cells(run))
    assert 1 < least <= min(at_one, at_two) < 40
    assert rise == pytest.approx(1, abs=0.2)
    copied = tasks("copying", "accuracy", (19, 23), samples=4)
    assert copied.titles == ("copying at 19", "copying at 23")
    cells = copied.cells(run)
    assert len(cells) == 2
    assert all(0 <= float(re.match(r"[\d.]+", cell)[0]) <= 1 for cell in cells)  # type: ignore[index]


def test_a_column_can_cover_every_checkpoint(run: Path, tmp_path: Path) -> None:
    claim = BY_NAME["figure3-training"]
    assert claim.on_gpu is not None
    (name,) = claim.on_gpu.only
    shorter = replace(claim, on_gpu=replace(claim.on_gpu, column=by_position(1, 2)))
    path = fill(shorter, [f"{name}={run}"], tmp_path, tmp_path)  # names and paths can have the sign between them
    rows = json.loads(path.read_text())["rows"]
    steps = [int(row[0].rpartition(" ")[2]) for row in rows]
    assert steps == sorted(steps)
    assert steps[-1] == 20
    assert float(rows[-1][1]) < float(rows[0][1])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["table3-ordr"], "table3-order?"),
        (["table3-order", "sambo=RUN"], "samba?"),
        (["table3-order", "samba="], "'samba='"),
        (["table3-order", "samba=/nowhere"], "/nowhere"),
        (["table3-order", "samba=FOLDER"], "checkpoint"),
        (["table3-order"], "runs/gpu/samba/slimpajama/samba"),
        (["figure5-entropy"], "hybridtron evaluate RUN --instruments entropy"),
        (["table1-benchmarks"], "table1-benchmarks"),
        (["table3-order", "samba=RUN"], "16385 tokens"),
    ],
)
def test_columns_that_cannot_be_filled_are_refused(
    arguments: list[str], named: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [text.replace("FOLDER", str(tmp_path)).replace("=RUN", f"={run}") for text in arguments]
    assert main(["samba", "--fill", *words, "--results", str(tmp_path / "results")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_claims_beyond_one_gpu_have_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samba", "--only", "table1-benchmarks", "--submit"]) == 2
    assert "table1-benchmarks" in capsys.readouterr().err
    with pytest.raises(Unusable):
        script([], full=False, whole=False)


@pytest.mark.parametrize("name", TIMED)
def test_claims_on_speed_have_a_separate_script(name: str) -> None:
    """It downloads and trains nothing."""
    text = script([TIMED[name]], full=False, whole=False)
    for check in (["bash", "-n"], [str(SHELLCHECK), "-"]):
        assert subprocess.run(check, input=text, text=True, check=False).returncode == 0
    assert f"$ON_GPU python -m studies.papers --fill {name}" in text.splitlines()
    assert not re.search("sweep|prepare", text)


def test_speed_of_named_models_fills_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pretend that there is a GPU; the models are small, and really timed."""
    prefill = replace(TIMED["figure3-prefill"], timed_models=("laptop", "mamba2_laptop"))
    monkeypatch.setitem(PAPERS, "samba", replace(PAPERS["samba"], claims=(prefill,)))
    where = ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "out")]
    assert main(["samba", "--fill", prefill.name, *where]) == 2
    assert "GPU" in capsys.readouterr().err
    assert main(["samba", "--fill", prefill.name, "samba=RUN", *where]) == 2
    assert "laptop, mamba2_laptop" in capsys.readouterr().err
    monkeypatch.setattr(speed, "measured_on_gpu", lambda claim: speed.measured("prefill", claim.timed_models, True))
    assert main(["samba", "--fill", prefill.name, *where]) == 0
    assert main(["samba", "--pages", *where]) == 0
    text = (tmp_path / "out/samba.md").read_text()
    assert re.search(r"^On a GPU:\n\n\| tokens of a row \|.* mamba2_laptop / laptop \|", text, re.MULTILINE)
    assert re.search(r"^\| 128 +\| [\d.]+x?", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_of_a_claim_fills_its_column(tmp_path: Path) -> None:
    """At the lengths of the paper: a tiny Samba whose held-out text is long enough, from its sweep's folder."""
    data = tmp_path / "tokens"
    run = tmp_path / "run"
    words = ["data", "prepare", "--input", "embedded", "--vocab-size", "512", "--output", str(data)]
    assert cli.main(words) == 0
    small = [
        "model.width=32",
        "model.vocab_size=512",
        "phases.0.tokens=32K",
        "run.eval_tokens=2K",
        "run.sample_tokens=0",
    ]
    assert train(["recipe=laptop", "data=folder", f"data.path={data}", *small, f"run.dir={run}"]) == 0
    where = ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "out")]
    assert main(["samba", "--fill", "figure1-falls", f"samba={run}", *where]) == 0
    assert main(["samba", "--pages", *where]) == 0
    text = (tmp_path / "out/samba.md").read_text()
    (row,) = re.findall(r"^\| samba \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert all(1 < float(cell) < 600 for cell in row)
