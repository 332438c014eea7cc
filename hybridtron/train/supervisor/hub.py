"""The coordinator with its connections to all supervisors, in the first supervisor's process."""

from __future__ import annotations

import socket

from hybridtron.train.supervisor.coordinator import Coordinator
from hybridtron.train.supervisor.lines import TOKEN_S, LineClosed, MeetingPlace, MessageLine


class Hub:
    """Passes messages between the coordinator and the supervisors.

    coordinator: decides what the supervisors do
    listener: accepts the other supervisors' connections; None if there is a single supervisor
    own_line: the connection to the supervisor in this process, which is task 0
    """

    def __init__(self, coordinator: Coordinator, listener: MeetingPlace | None, own_line: MessageLine) -> None:
        self.coordinator = coordinator
        self.listener = listener
        self.lines = {0: own_line}
        self.strangers: list[MessageLine] = []  # connections that have not sent the token yet

    @property
    def sockets(self) -> list[socket.socket]:
        """All sockets from which something may arrive."""
        listening = [] if self.listener is None else [self.listener.socket]
        return [*listening, *(line.socket for line in (*self.lines.values(), *self.strangers))]

    @property
    def is_alone(self) -> bool:
        """True if no other supervisor is connected."""
        return self.lines.keys() <= {0}

    def tick(self, now: float) -> None:
        """Receive all messages, let the coordinator decide, and send its messages."""
        self._welcome(now)
        for task, line in list(self.lines.items()):
            try:
                for message in line.receive():
                    self.coordinator.receive(task, message)
                line.tick(now)
            except LineClosed as error:
                line.close()
                del self.lines[task]
                self.coordinator.lose(task, str(error), error.silent_s)
        self.coordinator.tick(now)
        for task, message in self.coordinator.take_messages():
            if task in self.lines:
                self.lines[task].send(message)

    def close(self) -> None:
        """Close all connections, and remove the file with the coordinator's address."""
        for line in (*self.lines.values(), *self.strangers):
            line.close()
        if self.listener is not None:
            self.listener.close()

    def _welcome(self, now: float) -> None:
        """Accept new connections, and close those whose first message is no greeting with the token."""
        if self.listener is None:
            return
        self.strangers += self.listener.accept()
        for line in list(self.strangers):
            try:
                messages = line.receive()
                if not messages and now < line.sent_at + TOKEN_S:
                    continue
                if not messages or not self.listener.is_welcome(messages[0]):
                    raise LineClosed("no token")
                hello = messages[0]
                task = int(hello["task"])
                if hello.get("kind") != "hello" or task in self.lines:
                    raise LineClosed("a second supervisor of the same task")
                self.lines[task] = line
                self.coordinator.receive(task, hello)
            except LineClosed:
                line.close()
            self.strangers.remove(line)
