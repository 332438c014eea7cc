"""Decisions after a fault: who is blamed, when ranks start again and where, and when the launch ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.train.collectives import write_calls
from hybridtron.train.supervisor import faults
from hybridtron.train.supervisor.coordinator import JOIN_S, Coordinator, LaunchPlan
from hybridtron.train.supervisor.lines import Message

LATER = 1e9  # on the monotonic clock


class Nodes:
    """Supervisors of nodes with two tasks each, whose messages the test sends."""

    def __init__(self, run_dir: Path, nodes: int = 2, spares: int = 0, restarts: int = 2) -> None:
        self.said: list[str] = []
        plan = LaunchPlan(run_dir, 2 * nodes, spares, restarts)
        self.coordinator = Coordinator(plan, self.said.append)
        for task in range(2 * nodes):
            self.join(task)

    def join(self, task: int) -> None:
        place = {"task": task, "node": task // 2, "local": task % 2, "host": f"n{task // 2}"}
        self.coordinator.receive(task, {"kind": "hello", **place})

    def asked(self, kind: str) -> dict[int, Message]:
        """Return the messages of a kind by task, and forget all messages."""
        return {task: message for task, message in self.coordinator.take_messages() if message["kind"] == kind}

    def message(self, task: int, kind: str, **fields: object) -> None:
        self.coordinator.receive(task, {"kind": kind, "generation": self.coordinator.generation, **fields})

    def work(self, task: int, kind: str = "work", **fields: object) -> None:
        usual = {"section": "step", "doing": "step 8", "step": 7, "elapsed": 9.0, "limit": 8.0, "step_s": 2.0}
        self.message(task, kind, **{**usual, "pieces": 20, "fault": "", **fields})

    def tick(self) -> None:
        self.coordinator.tick(LATER if self.coordinator.state == "looking" else 0.0)

    def fail(self, task: int, code: int = -9) -> None:
        """Let a rank end with a code, and all others be ended."""
        self.work(task, "ended", code=code)
        self.tick()
        for other in self.asked("stop"):
            self.work(other, "ended", code=-9)
        self.tick()


def checkpoint(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def test_ranks_start_in_the_order_of_nodes_without_the_spares(tmp_path: Path) -> None:
    started = Nodes(tmp_path, nodes=3, spares=1).asked("start")
    assert {task: message["rank"] for task, message in started.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert {message["ranks"] for message in started.values()} == {4}
    assert len({message["port"] for message in started.values()}) == 1


def test_launch_ends_with_the_code_of_its_ranks(tmp_path: Path) -> None:
    for code in (0, 2, 75):
        nodes = Nodes(tmp_path)
        for task in range(4):
            nodes.work(task, "ended", code=code)
        assert nodes.coordinator.code == code
        assert set(nodes.asked("end")) == {0, 1, 2, 3}


def test_time_of_a_fault_is_before_its_description(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.message(0, "hung")
    nodes.coordinator.looked_at = 5.0
    nodes.coordinator.tick(LATER)
    assert nodes.coordinator.fault is not None
    assert nodes.coordinator.fault.time == 5.0


def test_refused_rank_ends_the_launch_although_others_hang(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.work(2, "ended", code=2)
    nodes.coordinator.tick(0.0)
    assert nodes.coordinator.code is None
    nodes.coordinator.tick(LATER)
    assert nodes.coordinator.code == 2


def test_killed_rank_is_blamed_and_all_start_again(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    nodes = Nodes(tmp_path)
    first = nodes.asked("start")
    nodes.fail(2)
    again = nodes.asked("start")
    assert {task: message["rank"] for task, message in again.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert again[0]["generation"] == first[0]["generation"] + 1
    assert again[0]["resumes"]
    nodes.message(0, "trained", resumed=5)
    (fault,) = faults.read(tmp_path)
    assert (fault.cause, fault.rank, fault.host, fault.step, fault.resumed) == ("killed", 2, "n1", 7, 5)
    assert fault.repeated_s == 4.0  # two steps of 2 s
    assert fault.found_s == 0.0


@pytest.mark.parametrize(
    ("reports", "rank"),
    [
        ({2: {"fault": "is stopped (SIGSTOP)"}}, 2),
        ({3: {"pieces": 19}}, 3),
        ({3: {"pieces": 19}, 1: {"fault": "is stopped (SIGSTOP)"}}, 1),
        ({}, -1),
    ],
    ids=["suspended", "behind", "suspended before behind", "all at the same point"],
)
def test_hang_is_blamed_on_the_rank_that_lags_behind(
    reports: dict[int, dict[str, object]], rank: int, tmp_path: Path
) -> None:
    nodes = Nodes(tmp_path)
    nodes.message(0, "hung")
    assert set(nodes.asked("look")) == {0, 1, 2, 3}
    for task in range(4):
        nodes.work(task, **reports.get(task, {}))
    nodes.coordinator.tick(0.0)
    fault = nodes.coordinator.fault
    assert fault is not None
    assert (fault.cause, fault.rank, fault.found_s) == ("hung in step", rank, 9.0)
    assert set(nodes.asked("stop")) == {0, 1, 2, 3}


def test_collectives_name_the_rank_of_a_hang_in_which_all_are_at_the_same_point(tmp_path: Path) -> None:
    call = {"group": "0", "number": 7, "sizes": [], "dtypes": [], "ended": False, "time": 1.0}
    (tmp_path / "logs").mkdir()
    nodes = Nodes(tmp_path)
    nodes.message(0, "hung")
    for task in range(4):
        name = "gloo:barrier" if task == 2 else "gloo:all_reduce"
        recorded = {"groups": {"0": [0, 1, 2, 3]}, "calls": [{**call, "name": name}], "lost": False, "started": 5.0}
        write_calls(tmp_path / "logs", task, {**recorded, "ranks": 4}, waits=True)
        nodes.work(task)
    nodes.coordinator.tick(0.0)
    fault = nodes.coordinator.fault
    assert fault is not None
    assert (fault.cause, fault.rank, fault.host) == ("hung in step", 2, "n1")
    assert "rank 2 called gloo:barrier" in fault.detail


def test_error_of_a_rank_is_taken_from_the_outcome(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "failed", "rank": 1, "reason": "out of luck"}))
    nodes.work(0, "ended", code=1)
    nodes.tick()
    fault = nodes.coordinator.fault
    assert fault is not None
    assert (fault.cause, fault.rank, fault.detail) == ("failed", 1, "out of luck")


def test_outcome_of_an_earlier_start_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "finished"}))
    nodes = Nodes(tmp_path)
    nodes.fail(1, code=1)
    assert nodes.coordinator.code is None
    assert nodes.asked("start")


def test_failed_export_of_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    (tmp_path / "outcome.json").write_text(json.dumps({"outcome": "finished"}))
    nodes.fail(0, code=1)
    assert nodes.coordinator.code == 1


def test_restarts_without_a_newer_checkpoint_are_limited(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, restarts=2)
    nodes.fail(1)
    nodes.fail(1)
    assert nodes.coordinator.code is None
    checkpoint(tmp_path, 5)
    nodes.fail(1)
    nodes.fail(1)
    assert nodes.coordinator.code is None
    nodes.fail(1)
    assert nodes.coordinator.code == 1
    assert "no newer checkpoint (run.restarts)" in nodes.said[-1]


def test_fault_before_the_first_step_of_a_restart_leaves_the_record_of_the_fault_before(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, restarts=5)
    nodes.fail(2)
    nodes.fail(1)
    nodes.message(0, "trained", resumed=0)
    first, second = faults.read(tmp_path)
    assert (first.rank, first.repeated_s) == (2, 0.0)
    assert (second.rank, second.repeated_s) == (1, 14.0)


def test_checkpoints_newer_than_the_ones_left_after_corruption_count_as_newer(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10)
    nodes = Nodes(tmp_path, restarts=2)
    path = tmp_path / "checkpoints/step-00000010"
    path.rename(path.with_name("suspect-step-00000010"))
    nodes.fail(1)
    for step in (6, 7, 8):
        checkpoint(tmp_path, step)
        nodes.fail(1)
    assert nodes.coordinator.code is None


def test_error_that_comes_again_ends_the_launch(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, restarts=5)
    nodes.fail(1, code=1)
    assert nodes.coordinator.code is None
    nodes.fail(1, code=1)
    assert nodes.coordinator.code == 1


def test_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=3, spares=1)
    nodes.coordinator.take_messages()
    nodes.coordinator.lose(3, "gone", 0.0)
    asked = nodes.coordinator.take_messages()
    assert (2, {"kind": "end", "code": 1}) in asked  # the node's other supervisor
    nodes.tick()
    for task in (0, 1):
        nodes.work(task, "ended", code=-9)
    nodes.tick()
    started = nodes.asked("start")
    assert {task: message["rank"] for task, message in started.items()} == {0: 0, 1: 1, 4: 2, 5: 3}
    nodes.message(0, "trained", resumed=0)
    (fault,) = faults.read(tmp_path)
    assert (fault.cause, fault.host, fault.spare) == ("lost node", "n1", "n2")


def test_lost_node_without_a_spare_ends_the_launch(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.coordinator.lose(3, "gone", 0.0)
    nodes.tick()
    for task in (0, 1):
        nodes.work(task, "ended", code=-9)
    nodes.tick()
    assert nodes.coordinator.code == 1
    assert "node n1 is lost and no spare node is left (cluster.spares)" in nodes.said[-1]
    (fault,) = faults.read(tmp_path)
    assert fault.resumed is None


def test_lost_spare_disturbs_nobody(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=3, spares=1)
    nodes.coordinator.take_messages()
    nodes.coordinator.lose(4, "gone", 0.0)
    assert nodes.coordinator.state == "running"
    assert not nodes.asked("look")


def test_node_at_fault_twice_in_a_row_is_replaced(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=3, spares=1)
    nodes.fail(2)
    assert 4 not in nodes.asked("start")
    nodes.fail(3)
    assert nodes.asked("start")[4]["rank"] == 2


@pytest.mark.parametrize(("rank", "spare"), [(2, "n2"), (0, ""), (-1, "")], ids=["named", "first node", "undecided"])
def test_node_of_a_corrupt_rank_is_replaced_at_once(tmp_path: Path, rank: int, spare: str) -> None:
    """All ranks end with the same error. The ranks' store is on the first node, so that this node stays."""
    nodes = Nodes(tmp_path, nodes=3, spares=1)
    outcome = {"outcome": "failed", "rank": rank, "corrupt": True, "reason": "CORRUPT"}
    (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    nodes.asked("start")
    nodes.fail(1, code=1)
    nodes.message(0, "trained", resumed=5)
    (fault,) = faults.read(tmp_path)
    assert (fault.cause, fault.rank, fault.spare) == ("corrupt", rank, spare)


def test_run_that_was_asked_to_stop_does_not_start_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.coordinator.receive(1, {"kind": "signal"})
    nodes.fail(1)
    assert nodes.coordinator.code == 1


def test_signal_between_two_starts_ends_the_launch(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.work(1, "ended", code=-9)
    nodes.tick()
    nodes.coordinator.receive(0, {"kind": "signal"})
    assert nodes.coordinator.code == 75


def test_missing_node_at_the_start_is_a_spare_or_ends_the_launch(tmp_path: Path) -> None:
    for spares, code in ((1, None), (0, 1)):
        coordinator = Coordinator(LaunchPlan(tmp_path, 2 + spares, spares, 1), lambda text: None)
        for task in range(1 + spares):
            coordinator.receive(task, {"kind": "hello", "task": task, "node": task, "local": 0, "host": f"n{task}"})
        assert coordinator.state == "joining"
        coordinator.tick(coordinator.until + JOIN_S)
        assert coordinator.code == code


def test_messages_of_an_earlier_start_are_ignored(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.coordinator.receive(1, {"kind": "ended", "generation": -1, "code": 1})
    assert nodes.coordinator.state == "running"


def test_rank_that_can_not_be_ended_costs_its_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.work(0, "ended", code=-9)
    nodes.tick()
    nodes.coordinator.tick(LATER)
    assert nodes.coordinator.code == 1
    assert any("could not be ended" in text for text in nodes.said)
