"""The passkey study at a size of a minute, stopped and resumed; and its page for numbers made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from studies.passkey.samples import QUICK, STUDY, Found, means, part_of
from studies.passkey.study import draw, main, page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    arguments = ["--quick", "--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"passkey.md", "passkey_samba.png", "passkey_training.png", "passkey_mamba2.png"}
    reported = (tmp_path / "out/passkey.md").read_text()
    assert "| zero-shot |" in reported
    measured = sorted((tmp_path / "runs").rglob("measured.json"))
    times = [path.stat().st_mtime_ns for path in measured]
    assert len(times) == 2
    assert main(arguments) == 0  # has nothing left to train or to ask
    assert [path.stat().st_mtime_ns for path in measured] == times


def test_mamba2_variants_differ_only_in_states() -> None:
    part = part_of(STUDY, Path("runs"), Path("data"))
    sweep = part.sweep
    folder = part.folder
    zero, fitted = (set(run.settings) for run in sweep.runs if run.variant.startswith("mamba2"))
    assert {text.partition("=")[0] for text in zero ^ fitted} == {f"phases.{n}.states.mode" for n in (1, 2, 3, 4)}
    assert len(sweep.runs) == 5
    assert [run.variant for run in part_of(QUICK, Path("runs"), Path("data")).sweep.runs] == ["samba", "mamba2_fitted"]
    assert folder.path == Path("runs")


def test_plotted_losses_are_means_of_ten_steps() -> None:
    assert means([{"step": step, "loss": float(step)} for step in range(1, 13)]) == [(10, 5.5), (12, 11.5)]


def rows(values: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Return rows of results by length, each with values by depth."""
    return [
        {
            "task": "passkey", "length": length, "metric": "exact", "value": sum(of) / len(of), "standard_error": 0.1,
            "n": 20 * len(of), "by_depth": [[place / (len(of) - 1), value, 20] for place, value in enumerate(of)],
        }
        for length, of in values.items()
    ]  # fmt: skip


@pytest.mark.parametrize(("worst", "reached"), [(0.9, "yes"), (0.85, "**no**")])
def test_the_page_judges_the_worst_depth(worst: float, reached: str, tmp_path: Path) -> None:
    samba = Found(rows({512: [1.0, worst, 1.0], 1024: [0.0, 0.0, 0.6]}), [], [(1, 0.0), (2, 1.0)], [(1, 2.0), (2, 0.1)])
    mamba2 = Found(rows({512: [0.5, 0.5], 1024: [0.25, 0.25]}), rows({512: [0.0, 0.0], 1024: [0.0, 0.0]}), [(1, 0.5)])
    results = {"samba": samba, "mamba2_fitted": Found(**{**vars(mamba2), "losses": [(1, 1.0)]})}
    reported = page(results, ["made up"], 512)
    assert f"| >= 0.9 | {worst} | {reached} |" in reported.splitlines()[-1]
    assert "| 50% | " + f"{worst:.2f} | 0.00 |" in reported
    assert "| zero-shot | 0.000 ± 0.100 | 0.000 ± 0.100 |" in reported
    assert "| from fitted noise | 0.500 ± 0.100 | 0.250 ± 0.100 |" in reported
    draw(results, 512, tmp_path)
    assert len(list(tmp_path.glob("passkey_*.png"))) == 3
