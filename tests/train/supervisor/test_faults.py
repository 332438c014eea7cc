"""The log of faults, and the time lost by cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.faults import RankFault

KILLED = RankFault(
    time=0.0, cause="killed", rank=1, host="n2", detail="ended by signal 9", section="step", doing="step 8",
    limit_s=10.0, step=7, found_s=0.0, resumed=5, restart_s=8.0, repeated_s=4.0,
)  # fmt: skip
HUNG = replace(KILLED, cause="hung in save", found_s=30.0)


def test_time_is_added_up_by_cause_and_the_largest_comes_first() -> None:
    assert faults.words([KILLED, HUNG, KILLED]) == (
        "42.0 s hung in save (found 30.0, restarted 8.0, repeated 4.0; 1 fault), "
        "24.0 s killed (found 0.0, restarted 16.0, repeated 8.0; 2 faults)"
    )


def test_faults_are_read_as_they_were_recorded(tmp_path: Path) -> None:
    assert faults.read(tmp_path) == []
    for fault in (KILLED, HUNG):
        faults.record(tmp_path, fault)
    assert faults.read(tmp_path) == [KILLED, HUNG]


def test_fault_names_rank_and_host_unless_all_ranks_hang() -> None:
    assert KILLED.words() == "rank 1 on n2: killed (step 8): ended by signal 9"
    assert replace(HUNG, rank=-1).words().startswith("no single rank: hung in save")
