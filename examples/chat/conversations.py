"""Conversations about Python's standard library, made from the first sentences of its docstrings.

    python -m examples.chat.conversations data/embedded-2048 data/chats

Each conversation asks for the purpose of one function or class. The command writes chats.jsonl for
`hybridtron data prepare`, and next to it the tokenizer of a prepared folder with a chat template.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
MODULES = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bisect", "calendar", "cmath", "codecs",
    "collections", "contextlib", "copy", "csv", "ctypes", "datetime", "decimal", "difflib", "dis", "email",
    "enum", "fnmatch", "fractions", "functools", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq",
    "html", "http", "inspect", "io", "ipaddress", "itertools", "json", "logging", "math", "mimetypes",
    "multiprocessing", "operator", "os", "pathlib", "pickle", "platform", "pprint", "queue", "random", "re",
    "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "signal", "socket", "sqlite3", "ssl",
    "statistics", "string", "struct", "subprocess", "sys", "sysconfig", "tarfile", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "traceback", "types", "typing", "unicodedata", "unittest",
    "urllib.parse", "uuid", "warnings", "wave", "weakref", "xml.dom.minidom", "zipfile", "zlib",
)  # fmt: skip
LONGEST = 160  # characters of an answer


def conversations() -> Iterator[tuple[str, str]]:
    """Yield pairs of question and answer, one for each documented callable of MODULES."""
    asked = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for member in sorted(vars(module)):
            thing = getattr(module, member)
            if member.startswith("_") or not callable(thing) or f"{name}.{member}" in asked:
                continue
            asked.add(f"{name}.{member}")
            answer = first_sentence(inspect.getdoc(thing) or "")
            if answer:
                yield f"What does {name}.{member} do?", answer


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, or an empty string if it has no end or is longer than LONGEST."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence, stop, _ = (paragraph + " ").partition(". ")
    return f"{sentence}." if stop and len(sentence) <= LONGEST else ""


def main(text: str, output: str) -> int:
    """Write chats.jsonl and the tokenizer into the folder `output`.

    `text` is the prepared folder whose tokenizer the model has. Returns the exit code 0.
    """
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(text) / "tokenizer.json", folder / "tokenizer.json")
    manifest = json.loads((Path(text) / "manifest.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    eos = next(token for token, number in vocabulary.items() if number == manifest["eos"])
    template = (HERE / "chat_template.jinja").read_text()
    config = {"eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    with (folder / "chats.jsonl").open("w") as file:
        for question, answer in conversations():
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
