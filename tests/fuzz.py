"""Hostile values for keys and commands: each ends in seconds with an exit code of its own, and none with a traceback.

    python -m tests.fuzz --seed 7 --cases 3000 [--only keys|commands]

A case is a function of (seed, number). It runs in a child of this process, which has torch and megatron imported, with
a limit of time, of memory and of open output. Cases that fail are printed as a command line with its last words.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 240  # far above what any case takes on a busy machine
MEMORY = 6 << 30  # bytes beside what the parent holds
CODES = (0, 2)  # done, or refused
FAULTS_SEEN = 1  # of the commands that look for faults

RECIPES = ("laptop", "samba_421m", "laptop_phases", "chat_laptop", "gdn_laptop", "mamba3_laptop", "rwkv6_laptop")
VALUES = (
    "", " ", "null", "true", "no", "-1", "0", "1", "3", "7.5", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30,
    "0x10", "1_000", "1.5B", "-4M", "200%", "4%", "1e3e3", "[]", "[1]", "[null]", "[[1], 2]", "[-1, -1]", "{}",
    "{a: 1}", "{a: {b: {c: 1}}}", "[{}]", "${.}", "${..}", "${run.name}", "${run.dir}", "${nowhere}",
    "${oc.env:HOME}", "${oc.env:}", "${", "$", "}", "'", '"', "\\", "../..", "/", "/dev/null", "/dev/null/x",
    "/proc/self/mem", "~", "~root/x", "a" * 300, "a" * 5000, "é☕日本", "\u202e", "\x7f", "%s%n", "$(touch no)", "`id`",
    "; ls", "a b", "a=b", "=", "-", "--", "!!python/none", "*x", "&x 1", "? x", "|", "s3://", "s3://bucket",
    "gs://x/y", "hf://", "file:///etc", "http://[", "M-W-", "(M", "(M-)*9999", "(M-W-)*1000000", "[[[[[[[[[[[[[[[[",
    "{" * 40, "fp8_block", "cosine", "laptop", "step-00000002", "best", "auto", "never",
)  # fmt: skip
"""Words that any key may be set to."""


@dataclass(frozen=True)
class Case:
    """A command line of `hybridtron`, as words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return "hybridtron " + " ".join(map(shortened, self.words))


def shortened(word: str) -> str:
    if len(word) < 120:
        return repr(word)
    return f"{word[:100]!r}..."


def key_case(draw: random.Random) -> Case:
    """One to three keys of the reference at hostile values, under a command that only reads the configuration."""
    settings = [f"{draw.choice(keys())}={draw.choice(VALUES)}" for _ in range(draw.choice((1, 1, 2, 3)))]
    recipe = f"recipe={draw.choice(RECIPES)}"
    command = draw.choice((
        ("train", recipe, "run.dir=new", *settings, "run.plan=true"),
        ("inspect", recipe, *settings),
        ("inspect", recipe, *settings, "--json"),
        ("submit", recipe, "run.dir=new", *settings, "--dry-run"),
    ))  # fmt: skip
    return Case(command)


@functools.cache
def keys() -> list[str]:
    """Every key of docs/keys.md, with a phase and a letter in place of N and LETTER."""
    text = (ROOT / "docs" / "keys.md").read_text()
    places = []
    for section in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]:
        title = section.split("\n", 1)[0].strip()
        prefix = "model.layers.M." * title.startswith("kind: ")
        places += [prefix + name for name in re.findall(r"^\| `([\w.]+)`", section, flags=re.MULTILINE)]
    return [re.sub(r"\bN\b", "0", name).replace("LETTER", "M") for name in places]


PATHS = (
    "run", "run/checkpoints/step-00000002", "hf", "tokens", "empty", "file.txt", "text.jsonl", "broken.json",
    "nowhere", "loop", "fifo", "/dev/zero", "/dev/null", "", ".", "/", "a" * 5000, "x/" * 400, "nul\0name", "é☕",
    "-x", "s3://bucket/x", "hf://", "meta-llama/Llama-3.2-1B", "~", "*", "[", "deep.yaml", "deep.json", "sweep.yaml",
)  # fmt: skip
NUMBERS = (
    "0",
    "1",
    "2",
    "-1",
    "64",
    "nan",
    "inf",
    "1e9",
    "9" * 25,
    "",
    "x",
    "1.5",
    "16x",
    "0x",
    "1,2",
    "٣",
    "1_0",
    "4K",
    "-4x",
)
PREPARE = ("data", "prepare", "--input", "text.jsonl", "--tokenizer", "tokens")
FORMS: tuple[tuple[str, ...], ...] = (
    ("generate", "PATH", "--prompt", "TEXT", "--tokens", "NUMBER"),
    ("generate", "run", "--prompt", "TEXT", "--tokens", "2", "--temperature", "NUMBER", "--top-k", "NUMBER"),
    ("generate", "run", "--prompt-file", "PATH", "--tokens", "2"),
    ("generate", "run", "--tokens", "2", "--chat", "--prompt", "TEXT", "--system", "TEXT"),
    ("generate", "run", "--prompt", "a", "--tokens", "2", "--chunk", "NUMBER", "--seed", "NUMBER"),
    ("evaluate", "PATH", "--output", "out", "--instruments", "TEXT"),
    ("evaluate", "run", "--tasks", "PATH", "--output", "out"),
    ("evaluate", "run", "--lengths", "NUMBER", "--samples", "NUMBER", "--output", "out"),
    ("evaluate", "run", "--data", "PATH", "--output", "out", "--rows", "1", "--length", "NUMBER"),
    ("evaluate", "run", "--self-extend", "TEXT", "--output", "out", "--suite", "TEXT"),
    ("import", "PATH", "--output", "imported"),
    ("import", "hf", "--output", "PATH"),
    ("export", "PATH", "--output", "exported"),
    ("export", "run", "--output", "PATH", "--shard-size", "NUMBER"),
    ("export", "run", "--output", "exported", "--base", "PATH", "--target", "TEXT"),
    ("checkpoint", "list", "PATH"),
    ("checkpoint", "verify", "PATH"),
    ("checkpoint", "diff", "PATH", "PATH"),
    ("checkpoint", "average", "PATH", "PATH", "--output", "average", "--weights", "NUMBER", "NUMBER"),
    ("checkpoint", "reshard", "PATH", "reshard", "--file-size", "NUMBER"),
    ("data", "verify", "PATH", "--workers", "1"),
    ("data", "prepare", "--input", "PATH", "--output", "prepared", "--tokenizer", "PATH"),
    (*PREPARE, "--output", "PATH", "--validation", "NUMBER"),
    (*PREPARE, "--output", "prepared", "--shard-size", "NUMBER"),
    (*PREPARE, "--output", "prepared", "--learn", "TEXT"),
    (*PREPARE, "--output", "prepared", "--text-key", "TEXT"),
    ("tasks", "show", "TASK", "--length", "NUMBER"),
    ("tasks", "show", "TASK", "OPTION=NUMBER", "--length", "256", "--seed", "NUMBER", "--index", "NUMBER"),
    ("tasks", "show", "TASK", "data=PATH", "--length", "256"),
    ("tasks", "show", "TASK", "--length", "256", "--tokenizer", "PATH"),
    ("tasks", "write", "TASK", "--length", "NUMBER", "--output", "PATH", "--evaluation", "2"),
    ("replay", "PATH", "--batch", "TEXT"),
    ("plot", "PATH"),
    ("plot", "run", "--output", "PATH"),
    ("sweep", "PATH", "--plan"),
    ("sweep", "sweep.yaml", "--plan", "--only", "TEXT", "--output", "PATH"),
    ("status", "PATH"),
    ("submit", "recipe=laptop", "KEY=TEXT", "--dry-run"),
    ("submit", "cluster=PATH", "nodes=NUMBER", "--dry-run"),
    ("inspect", "recipe=PATH"),
    ("inspect", "run.weights=PATH"),
    ("audit", "--list", "--layouts", "TEXT"),
    ("TEXT", "PATH"),
)  # fmt: skip
OPTIONS = (
    "digits",
    "pairs",
    "sizes",
    "num_keys",
    "num_chains",
    "depth_steps",
    "levels",
    "essay",
    "words",
    "shortest",
    "longest",
)


def command_case(draw: random.Random) -> Case:
    """A command whose places are filled with hostile words, with sometimes a word taken out or put in."""
    filled = [fill(word, draw) for word in draw.choice(FORMS)]
    if draw.random() < 0.1:
        del filled[draw.randrange(len(filled))]
    if draw.random() < 0.1:
        filled.insert(draw.randrange(1, len(filled) + 1), draw.choice(VALUES))
    return Case(tuple(filled))


def fill(word: str, draw: random.Random) -> str:
    """A word of a form with each of its places filled."""
    pools: dict[str, Callable[[], str]] = {
        "PATH": lambda: draw.choice(PATHS),
        "NUMBER": lambda: draw.choice(NUMBERS),
        "TEXT": lambda: draw.choice(VALUES),
        "KEY": lambda: draw.choice(keys()),
        "OPTION": lambda: draw.choice(OPTIONS),
        "TASK": lambda: draw.choice(tasks()),
    }
    return re.sub("|".join(pools), lambda match: pools[match[0]](), word)


def tasks() -> list[str]:
    from hybridtron.tasks import TASKS

    return sorted(TASKS)


KINDS = {"keys": key_case, "commands": command_case}


def failure(case: Case, folder: Path) -> str | None:
    """Run a case in a child; how it ended where that is a fault."""
    said = folder / "said.txt"
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        play(case, said)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > LIMIT_S:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"does not end within {LIMIT_S} s"
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started
    code = os.waitstatus_to_exitcode(ended[1])
    text = said.read_text(errors="replace")
    expected = list(CODES)
    if {"verify", "diff"} & set(case.words[:2]):
        expected.append(FAULTS_SEEN)
    if code in expected and "Traceback (most recent call last)" not in text:
        return None
    return f"ends with {code}: {' | '.join(text.splitlines()[-3:])[-600:]}"


def play(case: Case, said: Path) -> None:
    """Be the child: run the command with its output in a file, and leave by its exit code."""
    from hybridtron.cli.main import main

    os.setpgid(0, 0)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    code: object = 1
    try:
        code = main(list(case.words))
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if not isinstance(code, int):
        code = 0
    os._exit(code)


def furnish(folder: Path) -> None:
    """Create the files that the commands are given: a run, an export, prepared tokens, and files of every bad kind.

    Processes of their own train and export: a case runs in a fork of this process, where the collector would wait
    forever for the threads of a process group that this process had left behind.
    """
    os.chdir(folder)
    small = ["model.width=16", "model.layers.W.window=8", "model.layers.W.heads=2", "model.layers.-.hidden=16"]
    rows = ["phases.0.seq_len=32", "phases.0.global_batch=2", "phases.0.micro_batch=2", "run.eval_lengths=[1]"]
    (folder / "text.jsonl").write_text('{"text": "one text of a few words"}\n' * 40)
    hybridtron = [sys.executable, "-m", "hybridtron"]
    quiet = {"check": True, "capture_output": True, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    train = ["train", *small, *rows, "run.dir=run", "run.max_steps=2", "run.eval_tokens=64"]
    subprocess.run([*hybridtron, *train], **quiet)
    subprocess.run([*hybridtron, "export", "run", "--output", "hf", "--verify", "none"], **quiet)
    Path("tokens").symlink_to(next(Path("data").glob("embedded-*")))
    Path("empty").mkdir()
    Path("file.txt").write_text("text\n")
    Path("broken.json").write_text('{"a": [1, 2')
    Path("loop").symlink_to("loop")
    os.mkfifo("fifo")
    Path("deep.yaml").write_text("[" * 20_000)
    Path("deep.json").write_text('{"a":' * 20_000)
    Path("sweep.yaml").write_text("settings: [recipe=laptop]\ngrid: {phases.0.lr: [1e-3, 2e-3]}\n")


def cases(kind: str, seed: int, count: int) -> Iterator[Case]:
    for number in range(count):
        yield KINDS[kind](random.Random(f"{seed} {kind} {number}"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=300, help="of keys, and as many of commands")
    parser.add_argument("--only", choices=KINDS)
    arguments = parser.parse_args()
    for module in ("torch", "hybridtron.engine.engine", "hybridtron.cli.generate", "transformers"):
        importlib.import_module(module)
    faults = 0
    kinds = list(KINDS)
    if arguments.only:
        kinds = [arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        furnish(Path(folder))
        for kind in kinds:
            for case in cases(kind, arguments.seed, arguments.cases):
                if problem := failure(case, Path(folder)):
                    faults += 1
                    print(f"{case}\n    {problem}", flush=True)
        os.chdir(ROOT)
    print(f"seed {arguments.seed}: {faults} of {arguments.cases * len(kinds)} cases fail")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
