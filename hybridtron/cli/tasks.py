"""List, show, write and prepare tasks of retrieval, recall and reasoning, at any length.

    hybridtron tasks list
    hybridtron tasks show passkey --length 512 digits=3
    hybridtron tasks prepare copying --length 43 --training 300000 --output data/copying longest=20 shortest=10
    hybridtron tasks write ruler_se --length 4096 8192 --evaluation 500 --tokenizer DIR --output sets/ruler
    hybridtron tasks download squad hotpotqa

`show` prints the prompt and the answer after `>>>`, and the sample's metadata on stderr. `prepare` writes tasks on
token ids as tokens with loss masks; a run trains on them by data=folder. `download` fetches the data sets of RULER's
qa_1 and qa_2. Without --tokenizer every byte is a token.

Exit codes: 0 done, 2 unknown task, wrong option, a length that can't fit a sample, a missing corpus, or a failed
download.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from hybridtron.cli.given import not_there_yet, positive, progress_bar
from hybridtron.file_errors import in_words
from hybridtron.limits import path_of
from hybridtron.problems import Unusable
from hybridtron.tasks import GROUPS, TASKS
from hybridtron.tasks.base import MOST_TOKENS, Task, TaskError
from hybridtron.tasks.download import FOLDER, PUBLISHED, download
from hybridtron.tasks.options import all_named, named, options_of
from hybridtron.tasks.tokens import BYTES, ByteTokens, open_tokens
from hybridtron.tasks.write import WrittenSet, write


def list_main(arguments: list[str]) -> int:
    """Run `tasks list`: print the tasks with their options, and the groups. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hybridtron tasks list", description="Tasks, their options, and groups.")
    parser.parse_args(arguments)
    for name, task in TASKS.items():
        options = " ".join(f"{option}={value}" for option, value in options_of(task).items())
        print(f"{name:<25}{task.about}\n{'':<25}{options}".rstrip())
    for group, names in GROUPS.items():
        print(f"{group:<25}{' '.join(names)}")
    return 0


def show_main(arguments: list[str]) -> int:
    """Run `tasks show`: print one sample. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="hybridtron tasks show", description="Print a sample of a task.")
    add = parser.add_argument
    add("task", metavar="NAME", help="one that `hybridtron tasks list` names")
    add("options", nargs="*", metavar="OPTION=VALUE", help="options of the task")
    add("--length", type=length, required=True, metavar="N", help="tokens, those of the answer included")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--index", type=int, default=0, metavar="I", help="which sample of the seed; default: 0")
    add("--tokenizer", default=BYTES, metavar="DIR", help="a folder with tokenizer.json, or that file; default: bytes")
    chosen = parser.parse_intermixed_args(arguments)
    task = named(chosen.task, chosen.options)
    try:
        sample = task.sample(chosen.seed, chosen.index, open_tokens(chosen.tokenizer), chosen.length)
    except (ValueError, OverflowError) as error:
        if isinstance(error, Unusable):
            raise
        raise TaskError(
            f"{task.name}: these options must be others, as no sample can be made: {error}", code="conflict"
        ) from error
    print(f"{sample.prompt}>>>{sample.answer}")
    about = {"prompt_tokens": len(sample.prompt_tokens), "learned": sum(sample.mask), "generate": sample.generate}
    print(json.dumps(about | sample.meta), file=sys.stderr)
    return 0


def write_main(arguments: list[str]) -> int:
    """Run `tasks write`: write files of samples. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hybridtron tasks write", description="Write samples of tasks as jsonl, for evaluation and for training."
    )
    add = parser.add_argument
    add("tasks", nargs="+", metavar="NAME", help="tasks and groups; OPTION=VALUE of those that have it")
    add("--output", type=path_of, required=True, metavar="DIR", help="a folder that does not exist yet")
    add("--length", type=length, nargs="+", required=True, metavar="N", help="lengths in tokens")
    add("--evaluation", type=int, default=100, metavar="N", help="samples of a task and length; default: 100")
    add("--training", type=int, default=0, metavar="N", help="samples of a task and length, by other seeds; default: 0")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--tokenizer", default=BYTES, metavar="DIR", help="a folder with tokenizer.json, or that file; default: bytes")
    chosen = parser.parse_intermixed_args(arguments)
    if min(chosen.evaluation, chosen.training) < 0 or not chosen.evaluation + chosen.training:
        parser.error(f"--evaluation {chosen.evaluation} --training {chosen.training}: at least one sample is written")
    try:
        files = _write(chosen)
    except OSError as error:
        raise Unusable(in_words(error, chosen.output), code="unreadable") from error
    for file in files:
        print(file)
    return 0


def prepare_main(arguments: list[str]) -> int:
    """Run `tasks prepare`: write samples as prepared tokens with loss masks. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="hybridtron tasks prepare",
        description="Write samples of tasks on token ids as prepared tokens with masks.",
    )
    add = parser.add_argument
    add("tasks", nargs="+", metavar="NAME", help="tasks on token ids; OPTION=VALUE of those that have it")
    add("--output", type=path_of, required=True, metavar="DIR", help="a folder that does not exist yet")
    add("--length", type=length, nargs="+", required=True, metavar="N", help="lengths in tokens")
    add("--training", type=positive, required=True, metavar="N", help="samples of a task and length")
    add("--validation", type=positive, default=100, metavar="N", help="held-out samples of each; default: 100")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    chosen = parser.parse_intermixed_args(arguments)
    from hybridtron.tasks.prepare import prepare

    tasks = _named_tasks(chosen.tasks)
    output = not_there_yet(chosen.output)
    request = WrittenSet(tasks, tuple(chosen.length), chosen.validation, chosen.training, chosen.seed, ByteTokens())
    try:
        with progress_bar(str(output)) as report_progress:
            folder = prepare(request, output, report_progress)
    except OSError as error:
        raise Unusable(in_words(error, chosen.output), code="unreadable") from error
    manifest = folder.manifest
    print(f"{output}: {manifest.tokens('train')} tokens of training, {manifest.tokens('validation')} of validation")
    print(f"train with data=folder data.path={output} model.vocab_size={manifest.vocab_size}")
    return 0


def download_main(arguments: list[str]) -> int:
    """Run `tasks download`: fetch data sets and check their digests. Returns the exit code."""
    listed = "\n".join(
        f"  {name:<10} {data_set.about}: {data_set.url}, {data_set.size:,} bytes"
        for name, data_set in PUBLISHED.items()
    )
    parser = argparse.ArgumentParser(
        prog="hybridtron tasks download",
        description=f"Fetch data sets of tasks; their digests are checked.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=PUBLISHED, metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--output", type=path_of, default=FOLDER, metavar="DIR", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        with progress_bar(name) as report_progress:
            file = download(PUBLISHED[name], chosen.output, report_progress)
        print(file)
    return 0


def length(text: str) -> int:
    """Parse a sample's length in tokens, for argparse."""
    if not re.fullmatch(r"[0-9]{1,12}", text) or not 0 < int(text) <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"is {text}, must be a number of tokens from 1 to {MOST_TOKENS:,}")
    return int(text)


def _write(chosen: argparse.Namespace) -> list[Path]:
    tasks = _named_tasks(chosen.tasks)
    tokenizer = open_tokens(chosen.tokenizer)
    output = not_there_yet(chosen.output)
    request = WrittenSet(tasks, tuple(chosen.length), chosen.evaluation, chosen.training, chosen.seed, tokenizer)
    with progress_bar(str(output)) as report_progress:
        return write(request, output, report_progress)


def _named_tasks(words: list[str]) -> tuple[Task, ...]:
    """Return the named tasks and those of named groups; each task gets the options that it has."""
    settings = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if not names:
        raise TaskError(f"{' '.join(words)}: no task is named; `hybridtron tasks list` names all", code="missing")
    return tuple(all_named(names, settings))
