"""Connections between supervisors: messages, the token, and what ends a connection."""

from __future__ import annotations

import json
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtron.train.supervisor.coordinator import Coordinator, LaunchPlan
from hybridtron.train.supervisor.hub import Hub
from hybridtron.train.supervisor.lines import (
    ALIVE_S,
    LONGEST_LINE,
    SILENCE_S,
    LineClosed,
    MeetingPlace,
    MessageLine,
    connect,
    meeting_file,
)

HELLO = {"kind": "hello", "task": 1, "node": 1, "local": 0, "host": "n2"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """The coordinator of two supervisors, of which the first one is connected."""
    ours, theirs = socket.socketpair()
    coordinator = Coordinator(LaunchPlan(tmp_path, 2, 0, 1), lambda text: None)
    hub = Hub(coordinator, MeetingPlace(tmp_path / "run" / "place.json", "127.0.0.1"), MessageLine(theirs))
    MessageLine(ours).send({**HELLO, "task": 0, "node": 0})
    yield hub
    hub.close()
    ours.close()


def tick(hub: Hub) -> None:
    for _ in range(5):  # a connection may take a moment
        hub.tick(time.monotonic())
        time.sleep(0.01)


def test_supervisor_with_the_token_takes_part(hub: Hub, tmp_path: Path) -> None:
    line = connect(tmp_path / "run" / "place.json", HELLO)
    tick(hub)
    assert hub.coordinator.state == "running"
    (start,) = line.receive()
    assert (start["kind"], start["rank"]) == ("start", 1)
    line.close()
    tick(hub)
    assert hub.coordinator.state == "looking"  # the node is lost


@pytest.mark.parametrize("message", [HELLO, {**HELLO, "token": "0" * 32}, [1], "garbage"], ids=str)
def test_connection_without_the_token_is_closed(message: object, hub: Hub, tmp_path: Path) -> None:
    place = json.loads((tmp_path / "run" / "place.json").read_text())
    with socket.create_connection((place["address"], place["port"])) as stranger:
        stranger.sendall(json.dumps(message).encode() + b"\n")
        tick(hub)
        assert hub.coordinator.state == "joining"
        stranger.settimeout(5)
        assert stranger.recv(10) == b""


def test_address_is_readable_for_its_user_only_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run" / "place.json"
    place = MeetingPlace(path, "127.0.0.1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert place.socket.getsockname()[0] == "127.0.0.1"
    place.close()
    assert not path.parent.exists()


def test_messages_arrive_whole_and_in_order() -> None:
    left, right = (MessageLine(end) for end in socket.socketpair())
    messages = [{"kind": "work", "doing": "x" * 50_000, "number": number} for number in range(40)]
    for message in messages:
        left.send(message)  # more than the socket takes at once
    received: list[dict[str, object]] = []
    while len(received) < len(messages):
        received += right.receive()
        left.tick(time.monotonic())
    assert received == messages


def test_signs_of_life_are_sent_and_missed() -> None:
    left, right = (MessageLine(end) for end in socket.socketpair())
    now = time.monotonic()
    left.tick(now + ALIVE_S + 1)
    assert right.receive() == []
    right.tick(right.received_at + SILENCE_S - 1)
    with pytest.raises(LineClosed) as closed:
        right.tick(right.received_at + SILENCE_S + 1)
    assert closed.value.silent_s > SILENCE_S


def test_endless_line_is_refused() -> None:
    left, right = socket.socketpair()
    line = MessageLine(right)
    left.sendall(b"x" * (LONGEST_LINE + 1))
    with pytest.raises(LineClosed):
        line.receive()


def test_file_belongs_to_one_launch(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"}
    others = [job | {name: "9"} for name in job]
    others += [{"TORCHELASTIC_RUN_ID": "../x", "MASTER_PORT": "1"}, {"MASTER_PORT": "2"}]
    paths = {meeting_file(tmp_path, variables) for variables in [job, *others]}
    assert len(paths) == 6
    assert {path.parent for path in paths} == {tmp_path}
