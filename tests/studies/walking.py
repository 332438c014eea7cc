"""A walk through a page of studies/papers/from_download: its commands run at tiny size, with a local server's files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridtron.cli import main as cli
from hybridtron.storage.published import MODELS, download
from studies.length_story.runs import QUICK, write_copying_data
from studies.results import ROOT
from tests.docs.conftest import blocks, command_lines

FOLDER = ROOT / "studies/papers/from_download"
ROW = 64  # tokens of a training row, in the place of the page's thousands
TINY = (
    "precision=fp32", "data.epochs=null", "data.workers=0", "phases.0.tokens=512", "phases.0.global_batch=2",
    "phases.0.micro_batch=2", "run.eval_tokens=256", "run.eval_lengths=[1]", "run.sample_tokens=0",
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes with which a test runs a page's commands, in place of the page's own.

    numbers: numbers of words and of files of tasks, by the page's number; "" leaves one out of a list
    models: further settings of a recipe's run, by the first words of its command
    rows: tokens of a row, if not ROW, by the first words of a command
    """

    numbers: Mapping[str, str]
    models: Mapping[str, Sequence[str]]
    rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Walk:
    """The page's commands that have run, and what the dry runs of `submit` printed."""

    ran: list[str]
    printed: str


def walk(name: str, workplace: Path, sizes: Sizes, output: Callable[[], str]) -> Walk:
    """Run all commands of a page in `workplace`; paths below / are below it. `output` returns what was printed."""
    page = FOLDER / f"{name}.md"
    write_tasks(page, workplace, sizes)
    ran = []
    printed = ""
    for line in command_lines(page):
        words = [here(word, workplace, sizes.numbers) for word in line]
        output()
        run(words, sizes)
        if "--dry-run" in words:
            printed += output()
        ran.append(" ".join(line))
    return Walk(ran, printed)


def write_tasks(page: Path, workplace: Path, sizes: Sizes) -> None:
    """Write the page's files of tasks, whose first line is a comment with the file's name."""
    for block in blocks(page, "yml"):
        named = re.match(r"# (\w+\.yaml)\n", block)
        assert named, block
        (workplace / named[1]).write_text(yaml.safe_dump(smaller(yaml.safe_load(block), sizes.numbers)))


def smaller(value: Any, numbers: Mapping[str, str]) -> Any:
    """Replace numbers in the content of a file."""
    if isinstance(value, dict):
        return {key: smaller(entry, numbers) for key, entry in value.items()}
    if isinstance(value, list):
        return [smaller(entry, numbers) for entry in value if numbers.get(str(entry)) != ""]
    if isinstance(value, int) and str(value) in numbers:
        return int(numbers[str(value)])
    return value


def here(word: str, workplace: Path, numbers: Mapping[str, str]) -> str:
    if word.startswith("studies/"):
        return str(ROOT / word)
    return re.sub(r"^(\w[\w.]*=)?/data/", rf"\1{workplace}/data/", numbers.get(word, word))


def run(words: Sequence[str], sizes: Sizes) -> None:
    """Run a command. `submit` trains here, and only prints with --dry-run; a sweep's array job is only written."""
    program, *arguments = words
    if program == "hf":
        fetch(arguments)
    elif program == "cp":
        shutil.copy(arguments[0], arguments[1])
    elif program == "python":
        assert arguments[:2] == ["-m", "studies.length_story.runs"], words
        write_copying_data(QUICK, Path(arguments[2]))
    else:
        assert program == "hybridtron", words
        assert cli.main(command(arguments, sizes)) == 0, " ".join(words)


def command(words: Sequence[str], sizes: Sizes) -> list[str]:
    if words[0] == "sweep":
        return [*words, "--plan"]
    if words[0] == "data" and "--validation" not in words:
        return [*words, "--validation", "10%"]
    if words[0] != "submit" or "--dry-run" in words:
        return [*words]
    text = " ".join(words[1:])
    seq_len = next((row for start, row in sizes.rows.items() if start in text), ROW)
    models = next(settings for start, settings in sizes.models.items() if text.startswith(start))
    kept = [word for word in words[1:] if not word.startswith(("nodes=", "cluster="))]
    return ["train", *kept, "cluster=local", *TINY, f"phases.0.seq_len={seq_len}", *models]


def fetch(arguments: Sequence[str]) -> None:
    """Download from the server as `hf download` does: files of a repository into a folder."""
    assert arguments[0] == "download"
    name, *files = arguments[1 : arguments.index("--local-dir")]
    folder = Path(arguments[arguments.index("--local-dir") + 1])
    for file in files:
        download(f"hf:{name}@main:{file}", folder, MODELS, [], lambda name, done, size: None)


def lines(documents: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(document) + "\n" for document in documents).encode()
