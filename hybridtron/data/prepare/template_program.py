"""The program that renders an untrusted chat template, in Jinja's sandbox and with limited time and memory.

`template_process.py` runs this program as a separate process, which imports neither torch nor this package. The
processes exchange JSON messages through pipes, and each message is preceded by its length in 8 bytes:

    first request    {"template", "tokens", "marks" and limits}
    answer           {"fault": the reason if the template does not parse, else null}
    later requests   {"messages", "tools", "prompt", "cuts"}
    answer           {"text", "ends"}, or {"error", "bound": true if a limit was exceeded}

"text" is the rendering of all messages; if "prompt" is true, the start of the assistant's next message follows. For
each cut [n, prompt], "ends" has the length of the rendering of the first n messages, or null if this rendering is not a
prefix of "text". "ends" is empty if "text" contains the marks of {% generation %}. If a rendering exceeds its time
limit, the process ends without an answer.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<Q")


class _Generation(Extension):
    """The Jinja tag {% generation %}, which surrounds its contents with two marks."""

    tags = {"generation"}  # noqa: RUF012 (declared by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marks: list[str] = self.environment.marks  # type: ignore[attr-defined]
        begin, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in marks)
        return [begin, *body, end]


def main() -> None:
    """Answer requests until stdin closes."""
    opening = _heard()
    if opening is None:
        return
    _bound(opening["memory"])
    with _timed(opening):
        try:
            template = _compiled(opening["template"], opening["marks"])
            fault = None
        except Exception as error:
            template = None
            fault = _words(error, opening)
    _say({"fault": fault})
    while template is not None and (request := _heard()) is not None:
        with _timed(opening):
            answer = _answer(template, opening, request)
        _say(answer)


def _bound(memory: int) -> None:
    """Limit memory, disable core dumps, and let the timers' signals end the process."""
    for kind, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        with suppress(OSError, ValueError):  # macOS refuses to set RLIMIT_AS
            resource.setrlimit(kind, (limit, limit))
    ending = (signal.SIGPROF, signal.SIGALRM)
    for number in ending:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending)


@contextmanager
def _timed(opening: dict[str, Any]) -> Iterator[None]:
    """End the process if the `with` block exceeds its time limits, even while it runs C code."""
    signal.setitimer(signal.ITIMER_PROF, opening["seconds"])
    signal.setitimer(signal.ITIMER_REAL, opening["wall"])
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(template: Template, opening: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    ends: list[int | None] = []
    try:
        whole = _rendered(template, opening, request, len(request["messages"]), request["prompt"])
        if len(whole) > opening["longest"]:
            return {"error": f"it writes more than {opening['longest']:,} characters", "bound": True}
        for count, prompt in [] if opening["marks"][0] in whole else request["cuts"]:
            text = _rendered(template, opening, request, count, prompt)
            ends.append(len(text) if whole.startswith(text) else None)
    except Exception as error:  # a template may raise anything
        return {"error": _words(error, opening), "bound": isinstance(error, MemoryError | RecursionError)}
    return {"text": whole, "ends": ends}


def _rendered(template: Template, opening: dict[str, Any], request: dict[str, Any], count: int, prompt: bool) -> str:
    return template.render(
        messages=request["messages"][:count],
        tools=request["tools"],
        documents=None,
        add_generation_prompt=prompt,
        **opening["tokens"],
    )


def _words(error: Exception, opening: dict[str, Any]) -> str:
    if isinstance(error, MemoryError):
        return f"it takes more than {opening['memory'] // 10**6:,} MB of memory"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(error) or type(error).__name__


def _compiled(text: str, marks: list[str]) -> Template:
    loops = "jinja2.ext.loopcontrols"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loops])
    environment.extend(marks=marks)
    environment.filters["tojson"] = _as_json
    return environment.from_string(text, globals={"raise_exception": _refuse})


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON. Jinja's own filter would also escape characters for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _heard() -> dict[str, Any] | None:
    """Read the next message; return None when stdin has closed."""
    head = sys.stdin.buffer.read(LENGTH.size)
    if len(head) == LENGTH.size:
        return json.loads(sys.stdin.buffer.read(*LENGTH.unpack(head)))
    return None


def _say(answer: dict[str, Any]) -> None:
    data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
