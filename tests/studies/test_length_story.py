"""The length story at a size of seconds, stopped and resumed; and its page for numbers made up here."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hybridtron.data.folder import TokenFolder
from studies.length_story.pages import Findings, draw, page
from studies.length_story.runs import QUICK, STORY, part_of, write_copying_data
from studies.length_story.story import main
from studies.long_text import Curve
from studies.results import Results
from studies.study import found_in, state
from tests.data.test_folder import documents_by_streaming
from tests.studies.test_results import SHAPE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_story_is_written_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    reported = (tmp_path / "out/length_story.md").read_text()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "length_story.md",
        "length_story.png",
        "length_story_copying.png",
    }
    assert "| passing |" in reported
    measured = sorted((tmp_path / "runs").rglob("measured.json"))
    assert len(measured) == 2 + 2  # base and an intervention; copying with and without passed states
    written = [path.stat().st_mtime_ns for path in measured]
    assert main(arguments) == 0  # has nothing left to train
    assert [path.stat().st_mtime_ns for path in measured] == written
    started = tmp_path / "runs/language/sweep.json"
    for file in (started, *started.parent.rglob("measured.json")):
        file.write_text(file.read_text().replace("model.width=32", "model.width=33"))
    assert main(arguments) == 2
    assert "model.width=33" in capsys.readouterr().err


def test_a_quick_story_needs_separate_folders(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--quick"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "--runs" in message
    assert "--output" in message


def test_interventions_start_from_the_base_of_their_seed() -> None:
    for sizes, runs in ((STORY, (18, 8)), (QUICK, (2, 2))):
        sweeps = [part_of(part, sizes, Path("runs")).sweep for part in ("language", "copying")]
        assert tuple(len(sweep.runs) for sweep in sweeps) == runs
        for run in sweeps[0].runs:
            assert run.start == (None if run.variant == "base" else f"base-seed={run.values['run.seed']}")
        assert all("data.path=runs/strings" in run.settings for run in sweeps[1].runs)


def test_unfinished_runs_are_named_and_left_out(tmp_path: Path) -> None:
    plan = {"copying": part_of("copying", STORY, tmp_path)}
    (run,) = (run for run in plan["copying"].sweep.runs if run.name == "passing-seed=2")
    about = {"trained": {**SHAPE, "phases": []}, "found": 1, "minutes": 2, "commit": "c"}
    result = {**plan["copying"].identity(run), **about}
    (tmp_path / "copying/passing-seed=2").mkdir(parents=True)
    (tmp_path / "copying/passing-seed=2/measured.json").write_text(json.dumps(result))
    stored = found_in(plan, Results(None))
    assert [run.name for run, _ in stored["copying"]] == ["passing-seed=2"]
    written, note = state(plan, stored)
    assert written.startswith("written at commit ")
    assert "zero-seed=2" in note
    assert "passing-seed=3" in note
    assert "passing-seed=2" not in note


def test_rows_of_strings_learn_complete_copies(tmp_path: Path) -> None:
    write_copying_data(QUICK, tmp_path)
    folder = TokenFolder.open(tmp_path / "strings")
    rows, masks = (documents_by_streaming(folder, "train", "copying", one) for one in ("tokens", "mask"))
    assert len(rows) == QUICK.copy_rows
    assert {len(row) for row in rows} == {24}  # phases.0.seq_len
    for row, mask in zip(rows, masks, strict=True):
        # $ a b | a b . $ c d ...
        middle = row.index(27)
        end = row.index(28)
        assert row[1:middle] == row[middle + 1 : end]
        assert mask[: end + 1] == [0] * (middle + 1) + [1] * (end - middle)
        assert mask[-1] == 0  # the end of the row


def curve(context: int, growth: float) -> Curve:
    """With a perplexity of 10 up to the context, and from there one that grows with the position."""
    losses = [math.log(10 * max(1.0, position / context) ** growth) for position in range(1, 16 * context + 1)]
    return Curve.of(losses, context)


@pytest.mark.parametrize(("growth", "reached"), [(0.5, "yes"), (0.05, "**no**")])
def test_the_page_says_whether_the_base_fails(growth: float, reached: str, tmp_path: Path) -> None:
    language = {"base": {1: curve(24, growth), 2: curve(24, growth)}, "passing": {1: curve(24, 0), 2: curve(24, 0)}}
    copying = {"zero": {1: {"9": 0.25, "10": 1.0}, 2: {"9": 0.75, "10": 0.9}}}
    findings = Findings(24, language, copying, (5, 10), ["made up"])
    reported = page(findings, "make length-story")
    assert reported.splitlines()[-2].endswith(f"| {reached} |")
    assert (
        reported.splitlines()[-1] == "| letters copied rightly at 10 letters, from zero states | >= 0.9 | 0.95 | yes |"
    )
    assert (
        "| passing | 10.00 ± 0.00 | 10.00 ± 0.00 | 10.00 ± 0.00 | 10.00 ± 0.00 | 1.00 ± 0.00 | 1.00 ± 0.00 |"
        in reported
    )
    assert "| zero | 0.50 ± 0.35 |" in reported
    draw(findings, tmp_path)
    assert (tmp_path / "length_story.png").stat().st_size > 1000


def test_curves_have_a_bin_that_ends_at_the_context() -> None:
    for context in (24, 32, 33):
        read = curve(context, 0.5)
        assert read.at(context) == pytest.approx(10)
        assert read.at(4 * context) == pytest.approx(10 * 4**0.5, rel=0.1)
