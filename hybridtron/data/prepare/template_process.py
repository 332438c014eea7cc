"""Renders a chat template in a process of its own, which runs `template_program.py` for many conversations.

If a template computes too long, takes too much memory or crashes, only this process ends. A new process is started for
the next conversation.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

# marks around the text in {% generation %}: noncharacters of Unicode, which normal text does not contain
BEGIN = "\ufdd0"
END = "\ufdd1"
PROGRAM = Path(__file__).with_name("template_program.py")
LENGTH = struct.Struct("<Q")  # every message is preceded by its length in bytes
SECONDS = 5  # limit of CPU time for a request
WALL_SECONDS = 120  # limit of wall-clock time for a request; far larger, because the machine may be busy
MEMORY = 2**30  # limit of the process's memory in bytes
MAX_CHARACTERS = 2**26  # maximum characters of a rendered text
ENDING_SECONDS = 10  # waiting time for the exit code of a process that has closed its pipe
MAX_LOST = 3  # after this number of ended processes, no more conversations are rendered
TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TIMED_OUT = (-signal.SIGPROF, -signal.SIGALRM)  # exit codes of a process that exceeded a time limit


class Unparsed(ValueError):
    """Raised when a text is not a chat template. The message gives the reason."""


class TemplateProcess:
    """Renderer for one template, in a process that starts with the first request.

    lost: number of processes that the template has ended by exceeding a limit or crashing
    """

    def __init__(self, text: str, tokens: tuple[tuple[str, str], ...]) -> None:
        bounds = {"seconds": SECONDS, "wall": WALL_SECONDS, "memory": MEMORY, "longest": MAX_CHARACTERS}
        self._opening = {"template": text, "tokens": dict(tokens), "marks": [BEGIN, END], **bounds}
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self.lost = 0

    def fault(self) -> str | None:
        """Return a reason if the template does not parse or exceeds its limits on two short messages; else None."""
        try:
            answer = self._asked({"messages": TRIAL, "tools": None, "prompt": False, "cuts": []})
        except Unparsed as error:
            return f"does not parse: {error}"
        except ValueError as error:
            return f"can't write two short messages: {error}"
        if answer.get("bound"):
            return f"can't write two short messages: {answer['error']}"
        return None

    def rendered(
        self, messages: list[Any], tools: Any, prompt: bool, cuts: Sequence[tuple[int, bool]]
    ) -> tuple[str, list[int | None]]:
        """Render messages; return the text, and the length of the rendering for each cut.

        prompt: whether the text ends with the start of the assistant's next message
        cuts: pairs (n, prompt); for each pair, the first n messages are also rendered. The length is None if this
            rendering is not a prefix of the text.

        Raises ValueError with the reason if the template fails or exceeds its limits.
        """
        answer = self._asked({"messages": messages, "tools": tools, "prompt": prompt, "cuts": cuts})
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"], answer["ends"]

    def _asked(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            request = _framed(question)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"a message can't be written as JSON: {error}") from error
        with self._one_at_a_time:
            if self._process is None:
                self._start()
            assert self._process is not None
            return self._said(self._process, request)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],  # -P: do not import modules from the program's folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches only the parent process
        )
        self._end = weakref.finalize(self, _ended, self._process, os.getpid())
        fault = self._said(self._process, _framed(self._opening))["fault"]
        if fault is not None:
            self._drop()
            raise Unparsed(fault)

    def _said(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request)
            process.stdin.flush()
            return json.loads(_read(process.stdout))
        except (OSError, EOFError) as error:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
            code = process.returncode
            self.lost += 1
            self._drop()
            raise ValueError(_why(code)) from error
        except BaseException:  # end the process, so that its late answer is not read as the next request's answer
            self._drop()
            raise

    def _drop(self) -> None:
        self._end()
        self._process = None


@lru_cache(maxsize=1)
def _kept(text: str, tokens: tuple[tuple[str, str], ...], process: int) -> TemplateProcess:
    return TemplateProcess(text, tokens)


def template_process(text: str, tokens: tuple[tuple[str, str], ...]) -> TemplateProcess:
    """Return the template's process. Each Python process starts a process of its own: forks must not share pipes."""
    return _kept(text, tokens, os.getpid())


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(head)
    if len(data := pipe.read(min(size, 8 * MAX_CHARACTERS))) < size:
        raise EOFError
    return data


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # this is a forked process, and the rendering process belongs to the parent
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # closing flushes unsent bytes, for which there is no reader any more
            pipe.close()


def _why(code: int | None) -> str:
    if code in TIMED_OUT:
        return f"it computes for more than {SECONDS} seconds"
    if code is None:
        how = "without an exit code"
    elif code < 0:
        how = f"signal {-code}"
    else:
        how = f"exit code {code}"
    return f"it ended the process that renders it ({how})"
