"""The process that renders a chat template, started once for many conversations. Its program is template_program.py.

A template that computes too long, takes too much memory or crashes ends only its process. The next conversation gets a
new process.
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

BEGIN = "\ufdd0"  # mark before a learned part: a noncharacter of Unicode, which no text has
END = "\ufdd1"  # mark after a learned part: a noncharacter too
PROGRAM = Path(__file__).with_name("template_program.py")
LENGTH = struct.Struct("<Q")
SECONDS = 5  # of CPU time for an answer
WALL_SECONDS = 120  # of wall-clock time for an answer, on a busy machine
MEMORY = 2**30  # bytes that the process may use
LONGEST = 2**26  # characters in a rendered text
ENDING_SECONDS = 10  # for a process that has closed its pipe
MOST_LOST = 3  # lost processes after which no more conversations are tried
TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TIMED_OUT = (-signal.SIGPROF, -signal.SIGALRM)


class Unparsed(ValueError):
    """Raised when a text is not a chat template. The message gives the reason."""


class TemplateProcess:
    """Renderer for one template, in a process of its own that starts with the first request.

    lost: number of processes that the template has ended
    """

    def __init__(self, text: str, tokens: tuple[tuple[str, str], ...]) -> None:
        bounds = {"seconds": SECONDS, "wall": WALL_SECONDS, "memory": MEMORY, "longest": LONGEST}
        self._opening = {"template": text, "tokens": dict(tokens), "marks": [BEGIN, END], **bounds}
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        self.lost = 0

    def fault(self) -> str | None:
        """Return why the template does not parse, or exceeds its limits on two short messages; None otherwise."""
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
        """Render messages; return the text, and the ends that `cuts` ask for (template_program.py).

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
            raise ValueError(f"a message is no JSON: {error}") from error
        with self._one_at_a_time:
            if self._process is None:
                self._start()
            assert self._process is not None
            return self._said(self._process, request)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],  # -P: the program's folder would shadow other modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is only for the process that asks
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
        except BaseException:  # a late answer would be taken for the next one
            self._drop()
            raise

    def _drop(self) -> None:
        self._end()
        self._process = None


@lru_cache(maxsize=1)
def _kept(text: str, tokens: tuple[tuple[str, str], ...], process: int) -> TemplateProcess:
    return TemplateProcess(text, tokens)


def template_process(text: str, tokens: tuple[tuple[str, str], ...]) -> TemplateProcess:
    """Return the template's process for this Python process. A forked process must not use its parent's pipes."""
    return _kept(text, tokens, os.getpid())


def _framed(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def _read(pipe: IO[bytes]) -> bytes:
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(head)
    if len(data := pipe.read(min(size, 8 * LONGEST))) < size:
        raise EOFError
    return data


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # in a forked process: it belongs to the parent
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # unsent bytes have no reader any more
            pipe.close()


def _why(code: int | None) -> str:
    if code in TIMED_OUT:
        return f"it computes for more than {SECONDS} seconds"
    if code is None:
        how = "without a word"
    elif code < 0:
        how = f"signal {-code}"
    else:
        how = f"exit code {code}"
    return f"it ended the process that renders it ({how})"
