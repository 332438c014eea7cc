"""The suite: its cases, its records and missing ones, its page; and a slice of it, rehearsed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtron.cli import rehearse
from hybridtron.config.check import check
from hybridtron.config.load import choices_of
from hybridtron.planning.activations import MARGIN
from hybridtron.planning.memory import fullest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.problems import Unusable
from hybridtron.rehearse import suite
from hybridtron.rehearse.suite import EVERY_RANK, FAMILIES, LAYOUTS, RecipeCase, SuiteRecords
from hybridtron.rehearse.suite_page import page
from tests.rehearse.programs import PATIENT, printed_by

LAPTOP = 10**9  # bytes of a model that is so small that buffers of a fixed size show
SMALL = RecipeCase("mamba2_laptop", "PP2")


def record(case: RecipeCase, rank: int, pipeline_rank: int = 0, **changed: Any) -> dict[str, Any]:
    results = {
        "rank": rank, "pipeline_rank": pipeline_rank, "gpu": "h200", "code": "0a1b", "peak": 10**10, "planned": 9.9e9,
        "waits": 1.0, "launch_share": 0.05, "planned_sent": 5e9,
        "tokens_per_second": 1e5, "step_seconds": 2.0, "mfu": 0.4, "sent": 5e9,
        "forms": {"kernels": ["scan"], "attention": []},
    }  # fmt: skip
    return {**dataclasses.asdict(case), **results, **changed}


def test_suite_has_every_recipe_under_every_layout() -> None:
    cases = suite.all_cases()
    assert {case.recipe for case in cases} == set(choices_of("recipe"))
    assert len(cases) == (len(choices_of("recipe")) - len(FAMILIES)) * len(LAYOUTS) + len(FAMILIES)
    assert suite.all_cases(["laptop"]) == [RecipeCase("laptop", layout) for layout in LAYOUTS]


@pytest.mark.parametrize("recipe", FAMILIES)
def test_a_family_fits_on_its_gpus_and_leaves_a_tenth(recipe: str) -> None:
    (case,) = suite.all_cases([recipe])
    run_plan = case.plan()
    phase, layout_plan = fullest_phase(run_plan, case.world)
    assert layout_plan.fullest.memory.total < 0.9 * GPUS[suite.FAMILIES_GPU].memory
    assert case.layout.startswith(f"{case.world} x H100: ")
    assert "EP" in case.layout or phase.config.parallel.expert == 1


@pytest.mark.parametrize("recipe", [name for name in choices_of("recipe") if name.startswith("length/")])
def test_recipes_with_initial_weights_have_the_model_of_their_origin(recipe: str) -> None:
    case = RecipeCase(recipe, "PP2")
    plan = case.plan()
    assert check(plan, case.world) == []
    origin = suite.origin_of(recipe)
    assert origin is not None
    assert plan.config.model == RecipeCase(origin, "PP2").plan().config.model


def test_slices_partition_the_cases_and_differ_by_seed() -> None:
    cases = suite.all_cases()
    slices = [suite.slice_of(cases, index, 7, "a") for index in range(7)]
    assert sorted(str(case) for part in slices for case in part) == sorted(map(str, cases))
    assert slices[0] != suite.slice_of(cases, 0, 7, "b")


def test_digest_does_not_depend_on_text_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        suite.code_digest.cache_clear()
        return suite.code_digest()

    monkeypatch.setattr(suite, "PACKAGE", tmp_path)
    monkeypatch.setattr(suite, "CONFIGS", tmp_path / "configs")
    file = tmp_path / "device.py"
    recipe = tmp_path / "configs/recipe.yaml"
    recipe.parent.mkdir()
    try:
        file.write_text('"""Doc."""\nx = 1\n\n\ndef f():\n    """Return x."""\n    return x\n')
        recipe.write_text("width: 8\n")
        before = digest()
        file.write_text('"""Another\n\ndoc."""\nx = 1  # a comment\ndef f():\n    """Return the x."""\n    return x\n')
        recipe.write_text("# a comment\nwidth: 8\n")
        assert digest() == before
        file.write_text(file.read_text().replace("x = 1", "x = 2"))
        changed = digest()
        assert changed != before
        recipe.write_text("width: 9\n")
        assert digest() not in (before, changed)
    finally:
        suite.code_digest.cache_clear()


def left(cases: list[RecipeCase], records: SuiteRecords, keeps: bool = False) -> list[tuple[RecipeCase, int | None]]:
    return [(case, rank) for case, _, rank in suite.missing(cases, records, keeps)]


def test_recorded_cases_are_not_rehearsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = SuiteRecords(tmp_path / "records.jsonl")
    cases = [SMALL, RecipeCase("samba_3.8b", "TP2 + SP")]
    assert left(cases, records) == [(SMALL, 0), (SMALL, 1)]
    (refused,) = records.read().values()
    assert refused["recipe"] == "samba_3.8b"
    assert refused["refused"][0].startswith("parallel.tensor")
    records.write(SMALL, 0, {"peak": 1})
    assert left(cases, records) == [(SMALL, 1)]
    monkeypatch.setattr(suite, "code_digest", lambda: "another")
    assert left(cases, records, keeps=True) == [(SMALL, 1)]
    assert left(cases, records) == [(SMALL, 1), (SMALL, 0)]


def test_newest_record_of_a_case_counts(tmp_path: Path) -> None:
    """A case that was refused and works now, and the reverse, have only the newest kind of record."""
    records = SuiteRecords(tmp_path / "records.jsonl")
    for rank, peak in ((1, 1), (0, 2), (0, 3)):
        records.write(SMALL, rank, {"peak": peak})
    records.write(RecipeCase("no_such_recipe", "PP2"), 0, {"peak": 4})
    records.tidy()
    assert [(row["rank"], row["peak"]) for row in records.read().values()] == [(0, 3), (1, 1)]
    assert len(records.path.read_text().splitlines()) == 2
    records.write(SMALL, None, {"refused": ["no"]})
    assert [row["rank"] for row in records.read().values()] == [None]
    records.write(SMALL, 1, {"peak": 5})
    assert [row["rank"] for row in records.read().values()] == [1]


def test_suite_stops_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = SuiteRecords(tmp_path / "records.jsonl")
    said = []
    monkeypatch.setattr(suite, "rehearse_case", lambda *_: {"peak": 1})
    todo = suite.missing([SMALL], records)
    nobody: Any = SimpleNamespace()
    assert not suite.rehearse_all(nobody, todo, records, -1, said.append)
    assert said == ["stopped after 0 s: 2 of 2 ranks are not rehearsed yet"]
    assert suite.rehearse_all(nobody, todo, records, 60, said.append)
    assert [row["rank"] for row in records.read().values()] == [0, 1]
    assert said[1].startswith("1 of 2: mamba2_laptop, PP2, rank 0: 0 s, ")


def test_failed_case_is_recorded_and_the_others_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rehearse(process: Any, case: RecipeCase, config: Any, rank: int, compiles: bool) -> dict[str, Any]:
        if rank == 0:
            raise RuntimeError("no kernel for this\nand more")
        return record(case, rank, 1)

    monkeypatch.setattr(suite, "rehearse_case", rehearse)
    records = SuiteRecords(tmp_path / "records.jsonl")
    said = []
    nobody: Any = SimpleNamespace()
    assert suite.rehearse_all(nobody, suite.missing([SMALL], records), records, 60, said.append)
    rows = list(records.read().values())
    assert [row.get("failed") for row in rows] == ["RuntimeError: no kernel for this", None]
    assert "| `mamba2_laptop` | PP2 | failed: RuntimeError: no kernel for this |" in page(rows, "abc")


def test_all_ranks_of_one_case_are_rehearsed_and_one_a_stage_of_others() -> None:
    case = RecipeCase(*EVERY_RANK)
    assert list(suite.ranks_of(case, case.plan().config.parallel)) == list(range(8))
    other = RecipeCase("mamba2_130m", "TP2 x PP2 x DP2")
    assert list(suite.ranks_of(other, other.plan().config.parallel)) == [0, 4]
    shared = RecipeCase("mamba2_130m", "CP4")
    assert list(suite.ranks_of(shared, shared.plan().config.parallel)) == [3]


def test_page_lists_rehearsed_and_refused_cases() -> None:
    case = RecipeCase(*EVERY_RANK)
    ranks = [record(case, rank, rank // 4, peak=int(10e9) + rank // 4) for rank in range(8)]
    other = RecipeCase("mamba2_130m", "DP8")
    refused = {
        **dataclasses.asdict(RecipeCase("samba_3.8b", "TP2 + SP")),
        "refused": ["parallel.tensor  is 2, but ..."],
    }
    text = page([*ranks, record(other, 0, planned=8e9), refused], "abc")
    assert "`abc`" in text
    assert "0.800 to 0.990" in text
    assert f"1 of 9 ranks differ by more than {MARGIN:.0%}" in text
    assert "1.000 to 1.000" in text
    assert "0 of 9" in text
    equal = "are equal in memory (to a KiB), traffic and time"
    assert equal in text
    assert "| `mamba2_130m` | DP8 | 100,000 | 40.0% | 10.0 | 0.800 | 5.00 | 1.000 | 5% | 1 | `0a1b` |" in text
    assert "10.0, 10.0 | 0.990, 0.990 |" in text
    assert "| `samba_3.8b` | TP2 + SP | refused: `parallel.tensor`" in text
    assert "- `laptop`: TP2 + SP, PP2, PP2 x VPP2, DP8, CP4, TP2 x PP2 x DP2" in text
    assert equal not in page([{**row, "sent": row["rank"]} for row in ranks], "abc")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--only", "granite4_h_tiny"], "no-effect"),
        (["--families", "--only", "laptop"], "no-effect"),
        (["--families", "--gpu", "h200"], "conflict"),
    ],
)
def test_suites_without_cases_are_refused(arguments: list[str], code: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable) as refused:
        rehearse.main(["--suite", *arguments, "--output", str(tmp_path / "page.md")])
    assert refused.value.code == code


def test_page_has_families_in_a_table_of_their_own() -> None:
    (family,) = suite.all_cases(["granite4_h_tiny"])
    rows = [record(family, 0, gpu="h100"), record(RecipeCase("mamba2_130m", "DP8"), 0)]
    layouts, families = page(rows, "abc").split("## Families on H100s")
    assert "simulated on an H200" in layouts
    assert "| `granite4_h_tiny` | 8 x H100: EP8 | 100,000 |" in families
    assert "granite4_h_tiny" not in layouts


@pytest.mark.slow
@PATIENT
def test_slice_of_the_suite_is_within_the_margin_of_its_plans(tmp_path: Path) -> None:
    """Other cases with every change of the code."""
    pytest.importorskip("triton")
    results = printed_by("suite_slice", str(tmp_path / "records.jsonl"), "40", "420", processor_s=1200)
    assert not [row for row in results if "failed" in row]
    rehearsed = [row for row in results if "peak" in row]
    assert rehearsed
    for row in rehearsed:
        if row["peak"] > LAPTOP:
            assert row["planned"] == pytest.approx(row["peak"], rel=MARGIN), (row["recipe"], row["layout"])
        assert row["tokens_per_second"] > 0
