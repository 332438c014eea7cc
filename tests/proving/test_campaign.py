"""A campaign of ordeals passes each fault once, continues after an interruption, and its page comes from the record."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from hybridtron import resources
from hybridtron.problems import UsageError
from hybridtron.proving.chaos import campaign
from hybridtron.proving.chaos.campaign import (
    Campaign,
    CampaignFailed,
    CampaignResult,
    PassedOrdeal,
    append,
    commit,
    plan,
    read,
    verdict,
    write_page,
)
from hybridtron.proving.chaos.main import parse
from hybridtron.proving.chaos.ordeal_hook import KINDS
from hybridtron.proving.chaos.ordeals import LOSES_NODE, NEEDS_MOUNTS, RANKS, SLOW_STEPS, STEPS, Ordeal
from hybridtron.proving.chaos.training_run import LAYOUTS

NOTICED = PassedOrdeal(
    "abc",
    version("torch"),
    1.0,
    "dp2",
    "killed",
    1,
    11,
    "rank 1: killed",
    after=0.5,
    limit=5.0,
    unit="s",
    equal=True,
    lost={"restarted": 2},
)


@pytest.fixture(autouse=True)
def clean_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_commit(monkeypatch, NOTICED.commit)


def set_commit(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let `commit` return these names in turn, and then the last one."""
    left = list(names)
    monkeypatch.setattr(campaign, "commit", lambda: left.pop(0) if len(left) > 1 else left[0])


def carry_on(folder: Path, count: int) -> CampaignResult:
    return Campaign(folder, folder / "record.jsonl", lambda clean, run: []).carry_on(count, print)


def passed_of(ordeal: Ordeal) -> PassedOrdeal:
    fault = ordeal.fault
    return replace(NOTICED, layout=ordeal.layout, ordeal=fault.kind, rank=fault.rank, step=fault.step)


def test_plan_has_all_kinds_on_all_layouts() -> None:
    planned = plan(campaign.MOST_FAULTS)
    assert len(set(planned)) == len(planned) == 64
    assert [ordeal.kind for ordeal in planned[: len(KINDS)]] == list(KINDS)
    counted = Counter((ordeal.kind, ordeal.layout) for ordeal in planned)
    assert counted.pop(("slow rank", "dp4")) == 8
    assert counted == dict.fromkeys([(kind, layout) for kind in KINDS if kind != "slow rank" for layout in LAYOUTS], 2)
    assert all(ordeal.fault.rank < RANKS[ordeal.layout] for ordeal in planned)
    assert {ordeal.fault.rank for ordeal in planned if ordeal.kind in LOSES_NODE} == {1}
    assert {ordeal.fault.rank for ordeal in planned if ordeal.kind == "killed"} == {0, 1}
    slow = max(ordeal.fault.step for ordeal in planned if ordeal.kind == "slow rank")
    assert slow + SLOW_STEPS < STEPS["dp4"]


def test_interrupted_campaign_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Ordeal] = []

    def interrupted(self: Campaign, ordeal: Ordeal) -> PassedOrdeal:
        begun.append(ordeal)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return passed_of(ordeal)

    monkeypatch.setattr(Campaign, "passed", interrupted)
    monkeypatch.setattr(campaign, "unshare_mounts", lambda: ["unshare"])
    record = tmp_path / "records" / "record.jsonl"
    with pytest.raises(KeyboardInterrupt):
        Campaign(tmp_path, record, lambda clean, run: []).carry_on(5, print)
    with record.open("a") as file:
        file.write('{"commit": "cut')
    said: list[str] = []
    Campaign(tmp_path, record, lambda clean, run: []).carry_on(5, said.append)
    planned = plan(5)
    assert begun == [*planned[:3], *planned[2:]]
    assert [passed.fault for passed in read(record)] == planned
    assert said[0].startswith("2 of 5")
    assert said[-1].startswith("5 of 5")
    Campaign(tmp_path, record, lambda clean, run: []).carry_on(5, said.append)
    assert len(begun) == 6


def test_faults_that_need_mounts_are_skipped_without_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Campaign, "passed", lambda self, ordeal: passed_of(ordeal))
    monkeypatch.setattr(campaign, "unshare_mounts", list)
    result = carry_on(tmp_path, len(KINDS))
    assert [passed.ordeal for passed in result.passed] == [kind for kind in KINDS if kind not in NEEDS_MOUNTS]
    write_page(result, len(KINDS), tmp_path / "page.md")
    assert f"allows no mounts: {', '.join(NEEDS_MOUNTS)}" in (tmp_path / "page.md").read_text()


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Ordeal]:
    """Faults that campaigns begin, each of which passes at once."""
    ordeals: list[Ordeal] = []

    def passed(self: Campaign, ordeal: Ordeal) -> PassedOrdeal:
        ordeals.append(ordeal)
        return replace(passed_of(ordeal), commit=self.commit)

    monkeypatch.setattr(Campaign, "passed", passed)
    monkeypatch.setattr(campaign, "unshare_mounts", lambda: ["unshare"])
    return ordeals


@pytest.mark.parametrize("commit", ["def", "abc-dirty", "unknown"])
def test_lines_of_other_or_unknown_code_do_not_count(
    commit: str, begun: list[Ordeal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(passed_of(plan(1)[0]), commit=commit, wrong=["not noticed"])
    append(tmp_path / "record.jsonl", wrong)
    if commit != "def":
        set_commit(monkeypatch, commit)
    result = carry_on(tmp_path, 2)
    assert begun == plan(2)
    assert [passed.wrong for passed in result.passed] == [(), ()]


def test_lines_of_another_torch_do_not_count(begun: list[Ordeal], tmp_path: Path) -> None:
    append(tmp_path / "record.jsonl", replace(passed_of(plan(1)[0]), torch="1.0"))
    carry_on(tmp_path, 2)
    assert begun == plan(2)


def test_lines_of_faults_that_are_not_asked_for_are_not_judged(begun: list[Ordeal], tmp_path: Path) -> None:
    append(tmp_path / "record.jsonl", replace(passed_of(plan(3)[2]), wrong=["not noticed"]))
    assert [passed.fault for passed in carry_on(tmp_path, 2).passed] == plan(2)
    assert carry_on(tmp_path, 3).passed[2].wrong == ["not noticed"]


def test_code_that_changes_ends_the_campaign_without_a_line(
    begun: list[Ordeal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_commit(monkeypatch, "abc", "abc", "def")
    with pytest.raises(CampaignFailed, match="abc"):
        carry_on(tmp_path, 3)
    assert len(begun) == 2
    assert [passed.fault for passed in read(tmp_path / "record.jsonl")] == plan(1)


def test_two_campaigns_do_not_share_a_folder(
    begun: list[Ordeal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(self: Campaign, ordeal: Ordeal) -> PassedOrdeal:
        carry_on(tmp_path, 1)
        raise AssertionError("the second campaign was not refused")

    monkeypatch.setattr(Campaign, "passed", second)
    with pytest.raises(CampaignFailed, match="another program"):
        carry_on(tmp_path, 1)


def test_folder_of_a_wrong_run_stays(begun: list[Ordeal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Campaign, ordeal: Ordeal) -> PassedOrdeal:
        (tmp_path / "disturbed").mkdir()
        return replace(passed_of(ordeal), wrong=["not noticed"])

    monkeypatch.setattr(Campaign, "passed", wrong)
    carry_on(tmp_path, 2)
    assert sorted(path.name.split("-", 3)[3] for path in tmp_path.glob("wrong-*")) == ["dp2-killed", "tp2-hung-in-step"]


def test_commit_is_known_only_in_the_repository_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "hybridtron"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(campaign, "PACKAGE", package)
    monkeypatch.setattr(resources, "PACKAGE", package)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert commit() == "unknown"
    subprocess.run([*git, "add", "hybridtron"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    clean = commit()
    assert len(clean) == 12
    (package / "new.py").touch()
    assert commit() == f"{clean}-dirty"


def test_page_is_made_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    ordeals = plan(3)
    append(record, passed_of(ordeals[0]))
    append(record, replace(passed_of(ordeals[1]), equal=False, wrong=["step 3: other loss"]))
    append(record, replace(passed_of(ordeals[2]), after=7.0))
    page = tmp_path / "page.md"
    write_page(CampaignResult(read(record)), 64, page)
    text = page.read_text()
    assert "3 of 64 faults: 0 not noticed, 1 noticed too early or late, 1 with an end other than" in text
    assert "no mounts" not in text
    assert "**step 3: other loss**" in text
    assert "| killed | 1 | dp2 | 10% | 2.0 s |" in text
    assert "| slow rank | 0 |" in text


def test_notice_before_the_fault_is_counted() -> None:
    assert "0 not noticed, 1 noticed too early or late" in verdict([replace(NOTICED, after=-1.0)], 64)


def test_fault_without_notice_is_counted() -> None:
    silent = replace(NOTICED, noticed="", wrong=["the fault was not noticed"])
    said = verdict([NOTICED, NOTICED, silent], 64)
    assert "3 of 64 faults: 1 not noticed, 0 noticed too" in said
    assert said.endswith("1 with anything wrong")


@pytest.mark.parametrize(
    "options",
    [["--faults", "8"], ["--record", "r.jsonl"], ["--ordeals", "--faults", "0"], ["--ordeals", "--faults", "65"]],
)
def test_wrong_options_are_refused(options: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(options)
