"""The study of grown models at a size of a minute, stopped and resumed; its runs; its page of made-up numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridtron.config.load import load
from hybridtron.sweep.carry_out import Folder
from studies.grown.runs import QUICK, STUDY, TUNED, part_of
from studies.grown.study import main, page
from studies.study import with_starts
from tests.studies.quick import assert_nothing_is_left, written_quickly

VARIANTS = ["base", "mamba", "hax", "mamba-needles", "hax-needles"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_quick_study_is_written_and_resumes(tmp_path: Path) -> None:
    times = written_quickly(main, tmp_path)
    assert len(times) == len(VARIANTS)
    reported = (tmp_path / "out/grown.md").read_text().splitlines()
    assert_nothing_is_left(main, tmp_path, times)
    again = (tmp_path / "out/grown.md").read_text().splitlines()
    rows = [line for line in reported if line.startswith(("| Mamba,", "| +HAX,"))]
    assert len(rows) == len(VARIANTS)
    assert set(rows) <= set(again)


def test_both_models_are_continued_and_tuned_alike() -> None:
    """Their settings differ in the branch alone; each starts from the best checkpoint of the one before."""
    runs = {run.variant: run for run in part_of(STUDY, Path("runs"), Path("data")).sweep.runs}
    assert list(runs) == VARIANTS
    assert set(runs["mamba"].settings) ^ set(runs["hax"].settings) == {"model.layers.M.sparse=null"}
    assert runs["mamba-needles"].settings == runs["hax-needles"].settings
    starts = {name: run.start for name, run in runs.items()}
    assert starts == {
        "base": None, "mamba": "base-seed=1", "hax": "base-seed=1", "mamba-needles": "mamba-seed=1",
        "hax-needles": "hax-seed=1",
    }  # fmt: skip
    assert all(run.best for name, run in runs.items() if name != "base")
    quick = part_of(QUICK, Path("runs"), Path("data")).sweep.runs
    assert not any("model.width" in text for run in quick if run.variant.endswith(TUNED) for text in run.settings)


def test_the_grown_model_starts_with_a_rate_of_zero() -> None:
    config = load(["recipe=hax_mamba_laptop_continual"])
    assert config.optim.hold == "5%"
    assert config.model.layers["M"]["sparse"] == {"pattern": "hax", "keys": 16}
    lengths = [phase.seq_len for phase in load(["recipe=hax_mamba_laptop_needles"]).phases]
    assert lengths == list(STUDY.lengths)


def test_a_missing_start_is_trained_again(tmp_path: Path) -> None:
    """Train missing runs again from the newest finished run on, and nothing before that."""
    runs = part_of(STUDY, tmp_path, tmp_path).sweep.runs
    missing = [run for run in runs if run.variant == "hax-needles"]
    assert [run.variant for run in with_starts(missing, runs, Folder(tmp_path))] == ["base", "hax", "hax-needles"]
    (tmp_path / "hax-seed=1").mkdir()
    (tmp_path / "hax-seed=1/outcome.json").write_text('{"outcome": "finished"}')
    assert [run.variant for run in with_starts(missing, runs, Folder(tmp_path))] == ["hax", "hax-needles"]


def found(values: dict[int, list[float]]) -> dict[str, Any]:
    """Make up a result: by length, the shares of keys found with 3 and with 4 digits."""
    rows = [
        {"digits": digits, "length": length, "value": value, "standard_error": 0.01, "n": 220}
        for length, of in values.items()
        for digits, value in zip((3, 4), of, strict=True)
    ]
    return {"loss": 4.5, "needles": rows}


@pytest.mark.parametrize(("longer", "reached"), [(0.75, "yes"), (0.25, "**no**")])
def test_the_page_has_the_form_of_table_1(longer: float, reached: str) -> None:
    measured = {
        "hax-needles": found({256: [1.0, 0.75], 512: [longer, longer]}),
        "base": found({256: [0.0, 0.0], 512: [0.0, 0.0]}),
        "mamba-needles": found({256: [1.0, 0.5], 512: [0.5, 0.5]}),
    }
    rows = page(measured, 256, ["made up"]).splitlines()
    table = [row.partition(" | ")[0] for row in rows if row.startswith(("| Mamba,", "| +HAX,"))]
    assert table == ["| Mamba, the text alone", "| Mamba, continued, tuned", "| +HAX, continued, tuned"]
    assert any(row.startswith("| +HAX, continued, tuned | 1.000 ± 0.010 | 0.750 ± 0.010 | ") for row in rows)
    assert rows[-1].startswith("| what HAX adds after tuning, at 512 tokens")
    assert rows[-1].endswith(f"| {reached} |")
    assert rows[-2].endswith("| yes |")
