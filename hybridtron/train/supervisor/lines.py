"""Connections between supervisors: JSON lines over TCP, and the file through which supervisors find the coordinator.

The supervisor of the first task is the coordinator. It listens on a port that the operating system picks, and writes
its address, the port and a random token into a file in the run's folder. Only the file's user can read it. Each other
supervisor reads the file, connects, and sends the token first. A connection without the token is closed. Nothing is
unpickled.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridtron.listening import listen_at
from hybridtron.train.jsonl import read_record
from hybridtron.train.launcher import GRACE_S

ALIVE_S = 5.0  # seconds between signs of life on a connection
SILENCE_S = 30.0  # seconds without a sign of life after which the other side counts as lost
TOKEN_S = 10.0  # seconds for a new connection to send the token
LONGEST_LINE = 2**16  # bytes
RETRY_S = 0.2  # seconds between attempts to connect
JOIN_S = 300.0 + GRACE_S  # seconds for all supervisors to connect
Message = dict[str, Any]


class LineClosed(Exception):
    """Raised when the other side has closed a connection, sends no JSON lines, or is silent for `silent_s` seconds."""

    def __init__(self, why: str, silent_s: float = 0.0) -> None:
        super().__init__(why)
        self.silent_s = silent_s


class MessageLine:
    """A connection that sends and receives messages without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        self._unsent = b""
        self._unread = b""
        now = time.monotonic()
        self.received_at = now  # the time of the last bytes from the other side
        self.sent_at = now  # the time of this side's last sign of life

    def send(self, message: Message) -> None:
        """Send a message without waiting; `tick` sends the bytes that the connection can't take now."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Raises LineClosed if there is none, and the connection is closed."""
        try:
            while chunk := self.socket.recv(LONGEST_LINE):
                self._unread += chunk
                self.received_at = time.monotonic()
            closed = True
        except BlockingIOError:
            closed = False
        except OSError as error:
            raise LineClosed(str(error)) from error
        *lines, self._unread = self._unread.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError as error:
            raise LineClosed("the other side sent no JSON") from error
        if len(self._unread) > LONGEST_LINE or not all(isinstance(message, dict) for message in messages):
            raise LineClosed("the other side sent no messages")
        if closed and not messages:
            raise LineClosed("the other side has closed the connection")
        return [message for message in messages if message.get("kind") != "alive"]

    def tick(self, now: float) -> None:
        """Send a sign of life if one is due. Raises LineClosed if the other side is silent for SILENCE_S seconds."""
        if now > self.sent_at + ALIVE_S:
            self.send({"kind": "alive"})
            self.sent_at = now
        self._flush()
        if now > self.received_at + SILENCE_S:
            raise LineClosed(f"no sign of life for {SILENCE_S:.0f} s", now - self.received_at)

    def close(self) -> None:
        self.socket.close()

    def _flush(self) -> None:
        with suppress(BlockingIOError, OSError):  # `receive` notices a broken connection
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]


def meeting_file(run_dir: Path, environment: Mapping[str, str]) -> Path:
    """Return the path of the file with the coordinator's address, which every launch names differently."""
    if "SLURM_JOB_ID" in environment:
        names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    else:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
    launch = "-".join(environment.get(name, "0") for name in names)
    return run_dir / f".supervisors-{re.sub(r'[^A-Za-z0-9_-]', '-', launch)}.json"


class MeetingPlace:
    """The coordinator's listening socket, and the file with its address for other supervisors."""

    def __init__(self, path: Path, address: str) -> None:
        self.path = path
        self.token = secrets.token_hex(16)
        self.socket = listen_at(address, 0)
        self.socket.setblocking(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        text = json.dumps({"address": address, "port": self.socket.getsockname()[1], "token": self.token})
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        temporary.rename(path)

    def accept(self) -> list[MessageLine]:
        """Return the new connections, whose first message must pass `is_welcome`."""
        lines = []
        with suppress(OSError):  # none is left, or this process has too many open files
            while True:
                lines.append(MessageLine(self.socket.accept()[0]))
        return lines

    def is_welcome(self, message: Message) -> bool:
        """Return True if a connection's first message has the token."""
        return hmac.compare_digest(str(message.get("token", "")), self.token)

    def close(self) -> None:
        self.socket.close()
        with suppress(OSError):
            self.path.unlink()
            self.path.parent.rmdir()  # succeeds only if the run was refused, so that the folder is empty


def connect(path: Path, hello: Message) -> MessageLine:
    """Connect to the coordinator and send `hello` with the token.

    The file may not exist yet, or belong to a killed launch, so attempts are repeated. Raises LineClosed after JOIN_S
    seconds.
    """
    until = time.monotonic() + JOIN_S
    while time.monotonic() < until:
        with suppress(OSError):
            list(path.parent.iterdir())  # makes a network file system look for the file again
        place = read_record(path)
        if place:
            with suppress(OSError):
                line = MessageLine(socket.create_connection((place["address"], place["port"]), timeout=ALIVE_S))
                line.send({**hello, "token": place["token"]})
                return line
        time.sleep(RETRY_S)
    raise LineClosed(f"no coordinator in {path} within {JOIN_S:.0f} s: check that all nodes share this folder")
