"""Records of a rank's collectives: what is kept of the entries of torch's flight recorders."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtron.parallel import recorded_calls as recorder


def entry(number: int, group: str = "0", **changed: Any) -> dict[str, Any]:
    usual = {"process_group": [group, "default_pg"], "profiling_name": "gloo:all_reduce", "is_p2p": False}
    numbers = {"record_id": number - 1, "collective_seq_id": number, "time_created_ns": 2 * 10**9}
    state = {"input_sizes": [[3]], "input_dtypes": ["Float"], "retired": True, "state": "scheduled"}
    return {**usual, **numbers, **state, **changed}


def calls_of(monkeypatch: pytest.MonkeyPatch, *entries: dict[str, Any]) -> dict[str, Any]:
    def dump(collectives: bool, active_alone: bool) -> bytes:
        assert (collectives, active_alone) == (True, False)
        return json.dumps({"entries": entries}).encode()

    monkeypatch.setattr(recorder, "c10d", SimpleNamespace(_dump_fr_trace_json=dump))
    return recorder.recorded_calls()


def test_last_calls_of_each_group_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [entry(number) for number in range(1, recorder.KEPT + 3)]
    recorded = calls_of(monkeypatch, *many, entry(1, "7", retired=False))
    assert [call["number"] for call in recorded["calls"]] == [*range(3, recorder.KEPT + 3), 1]
    assert recorded["calls"][-1] == {
        "group": "7",
        "name": "gloo:all_reduce",
        "number": 1,
        "sizes": [[3]],
        "dtypes": ["Float"],
        "ended": False,
        "time": 2.0,
    }
    assert not recorded["lost"]


def test_calls_of_a_destroyed_group_and_a_full_ring_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = calls_of(monkeypatch, entry(8), entry(9), entry(1), entry(2, retired=False, state="completed"))
    assert [(call["number"], call["ended"]) for call in recorded["calls"]] == [(1, True), (2, True)]
    assert recorded["lost"]  # the first entry in the ring is not the first call


def test_messages_between_two_ranks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = calls_of(monkeypatch, entry(3), entry(0, is_p2p=True), entry(4))
    assert [call["number"] for call in recorded["calls"]] == [3, 4]
