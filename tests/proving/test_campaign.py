"""A campaign of ordeals passes each fault once, continues after an interruption, and its page comes from the record."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.problems import UsageError
from hybridtron.proving.chaos import campaign
from hybridtron.proving.chaos.campaign import Campaign, PassedOrdeal, append, plan, read, verdict, write_page
from hybridtron.proving.chaos.main import parse
from hybridtron.proving.chaos.ordeal_hook import KINDS
from hybridtron.proving.chaos.ordeals import LOSES_NODE, RANKS, Ordeal
from hybridtron.proving.chaos.training_run import LAYOUTS

NOTICED = PassedOrdeal(
    "abc", 1.0, "dp2", "killed", 1, 11, "rank 1: killed", after=0.5, limit=5.0, unit="s", equal=True, lost={"found": 2}
)


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


def test_full_disk_is_skipped_without_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Campaign, "passed", lambda self, ordeal: passed_of(ordeal))
    monkeypatch.setattr(campaign, "unshare_mounts", list)
    record = tmp_path / "record.jsonl"
    said: list[str] = []
    Campaign(tmp_path, record, lambda clean, run: []).carry_on(len(KINDS), said.append)
    assert [passed.ordeal for passed in read(record)] == [kind for kind in KINDS if kind != "full local disk"]
    assert "the full local disk is skipped" in said[0]


def test_page_is_made_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    ordeals = plan(3)
    append(record, passed_of(ordeals[0]))
    append(record, replace(passed_of(ordeals[1]), equal=False, wrong=["step 3: other loss"]))
    append(record, replace(passed_of(ordeals[2]), after=7.0))
    page = tmp_path / "page.md"
    write_page(read(record), 64, page)
    text = page.read_text()
    assert "3 of 64 faults: 0 not noticed, 1 noticed after their limit, 1 with an end other than" in text
    assert "**step 3: other loss**" in text
    assert "| killed | 1 | dp2 | 10% | 2.0 s |" in text
    assert "| slow rank | 0 |" in text


def test_fault_without_notice_is_counted() -> None:
    silent = replace(NOTICED, noticed="", wrong=["the fault was not noticed"])
    said = verdict([NOTICED, NOTICED, silent], 64)
    assert "3 of 64 faults: 1 not noticed, 0 noticed after" in said
    assert said.endswith("1 with anything wrong")


@pytest.mark.parametrize("options", [["--faults", "8"], ["--record", "r.jsonl"], ["--ordeals", "--faults", "0"]])
def test_wrong_options_are_refused(options: list[str]) -> None:
    with pytest.raises(UsageError):
        parse(options)
