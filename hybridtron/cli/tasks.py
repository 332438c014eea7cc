"""List, show, write and prepare tasks of retrieval, recall and reasoning, at any length.

    hybridtron tasks list
    hybridtron tasks show passkey --length 512 digits=3
    hybridtron tasks prepare copying --length 43 --training 300000 --output data/copying longest=20 shortest=10
    hybridtron tasks write ruler_se --length 4096 8192 --evaluation 500 --tokenizer DIR --output sets/ruler
    hybridtron tasks download squad hotpotqa

    list      print all tasks with their options, and the groups of tasks
    show      print a sample's prompt, then `>>>` and the answer; the sample's metadata are printed to stderr
    write     write samples as text, in jsonl files
    prepare   write samples of tasks on token ids as prepared tokens with loss masks, for training with data=folder
    download  download the data sets of RULER's tasks qa_1 and qa_2

A task on token ids, such as copying, needs no text and no tokenizer. For other tasks, every byte is a token unless
--tokenizer names a tokenizer.

Exit codes: 0 done, 2 unknown task, wrong option, a length that is too short for a sample, a missing corpus, or a failed
download.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from hybridtron.cli.arguments import not_there_yet, positive
from hybridtron.cli.downloads import file_with_progress
from hybridtron.file_errors import in_words
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, Unusable
from hybridtron.progress import progress_bar
from hybridtron.storage.published import DownloadError
from hybridtron.tasks import GROUPS, TASKS
from hybridtron.tasks.base import MAX_TOKENS, Task, TaskError
from hybridtron.tasks.options import all_named, named, options_of
from hybridtron.tasks.ruler.data_sets import FOLDER, PUBLISHED
from hybridtron.tasks.tokens import BYTES, ByteTokens, open_tokens
from hybridtron.tasks.write import WrittenSet, write


def list_main(arguments: list[str]) -> int:
    """Run `tasks list`: print the tasks with their options, and the groups. Returns the exit code."""
    parser = CommandParser(
        prog="hybridtron tasks list", description="List tasks with their options, and groups of tasks."
    )
    parser.parse_args(arguments)
    for name, task in TASKS.items():
        options = " ".join(f"{option}={value}" for option, value in options_of(task).items())
        print(f"{name:<25}{task.about}\n{'':<25}{options}".rstrip())
    for group, names in GROUPS.items():
        print(f"{group:<25}{' '.join(names)}")
    return 0


def show_main(arguments: list[str]) -> int:
    """Run `tasks show`: print one sample. Returns the exit code."""
    parser = CommandParser(prog="hybridtron tasks show", description="Print a sample of a task.")
    add = parser.add_argument
    add("task", metavar="NAME", help="a task of `hybridtron tasks list`")
    add("options", nargs="*", metavar="OPTION=VALUE", help="options of the task")
    add("--length", type=length, required=True, metavar="N", help="tokens of the prompt and the answer together")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--index", type=int, default=0, metavar="I", help="index of the sample; default: 0")
    add("--tokenizer", default=BYTES, metavar="DIR", help="a folder with tokenizer.json, or that file; default: bytes")
    chosen = parser.parse_intermixed_args(arguments)
    task = named(chosen.task, chosen.options)
    try:
        sample = task.sample(chosen.seed, chosen.index, open_tokens(chosen.tokenizer), chosen.length)
    except (ValueError, OverflowError) as error:
        if isinstance(error, Unusable):
            raise
        raise TaskError(
            f"{task.name}: no sample can be made with these options: {error}; change the options or --length",
            code="conflict",
        ) from error
    print(f"{sample.prompt}>>>{sample.answer}")
    about = {"prompt_tokens": len(sample.prompt_tokens), "learned": sum(sample.mask), "generate": sample.generate}
    print(json.dumps(about | sample.meta), file=sys.stderr)
    return 0


def write_main(arguments: list[str]) -> int:
    """Run `tasks write`: write jsonl files of samples. Returns the exit code."""
    parser = CommandParser(
        prog="hybridtron tasks write", description="Write samples of tasks as jsonl, for evaluation and for training."
    )
    add = parser.add_argument
    add("tasks", nargs="+", metavar="NAME", help="tasks and groups; OPTION=VALUE sets an option of all tasks with it")
    add("--output", type=path_of, required=True, metavar="DIR", help="a folder that does not exist yet")
    add("--length", type=length, nargs="+", required=True, metavar="N", help="lengths in tokens")
    add("--evaluation", type=int, default=100, metavar="N", help="samples for each task and length; default: 100")
    add("--training", type=int, default=0, metavar="N", help="training samples of a task and length; default: 0")
    add("--seed", type=int, default=0, metavar="S", help="default: 0")
    add("--tokenizer", default=BYTES, metavar="DIR", help="a folder with tokenizer.json, or that file; default: bytes")
    chosen = parser.parse_intermixed_args(arguments)
    if min(chosen.evaluation, chosen.training) < 0 or not chosen.evaluation + chosen.training:
        parser.refuse(
            "--evaluation",
            "out-of-range",
            f"--evaluation {chosen.evaluation} --training {chosen.training}: use numbers of at least 0, not both 0",
        )
    try:
        files = _write(chosen)
    except OSError as error:
        raise Unusable(in_words(error, chosen.output), code="unreadable") from error
    for file in files:
        print(file)
    return 0


def prepare_main(arguments: list[str]) -> int:
    """Run `tasks prepare`: write samples as prepared tokens with loss masks. Returns the exit code."""
    parser = CommandParser(
        prog="hybridtron tasks prepare",
        description="Write samples of tasks on token ids as prepared tokens with loss masks.",
    )
    add = parser.add_argument
    add("tasks", nargs="+", metavar="NAME", help="tasks on token ids; OPTION=VALUE sets an option of all tasks with it")
    add("--output", type=path_of, required=True, metavar="DIR", help="a folder that does not exist yet")
    add("--length", type=length, nargs="+", required=True, metavar="N", help="lengths in tokens")
    add("--training", type=positive, required=True, metavar="N", help="samples of a task and length")
    add(
        "--validation",
        type=positive,
        default=100,
        metavar="N",
        help="held-out samples of a task and length; default: 100",
    )
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
    print(f"{output}: {manifest.tokens('train')} training tokens, {manifest.tokens('validation')} validation tokens")
    print(f"to train on these samples, use data=folder data.path={output} model.vocab_size={manifest.vocab_size}")
    return 0


def download_main(arguments: list[str]) -> int:
    """Run `tasks download`: download data sets and check their digests. Returns the exit code."""
    listed = "\n".join(
        f"  {name:<10} {data_set.title}: {data_set.file.url}, {data_set.file.size:,} bytes"
        for name, data_set in PUBLISHED.items()
    )
    parser = CommandParser(
        prog="hybridtron tasks download",
        description=f"Download data sets of tasks, and check their digests.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=PUBLISHED, metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--output", type=path_of, default=FOLDER, metavar="DIR", help="default: %(default)s")
    chosen = parser.parse_args(arguments)
    for name in chosen.names:
        file = PUBLISHED[name].file
        try:
            print(file_with_progress(file, chosen.output))
        except DownloadError as error:
            copy = f"If you have {file.name} on another machine, copy it and set the task's option data=FILE."
            raise TaskError(f"{error}. {copy}", code=error.code) from error
    return 0


def length(text: str) -> int:
    """Parse a sample's length in tokens, for argparse."""
    if not re.fullmatch(r"[0-9]{1,12}", text) or not 0 < int(text) <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"is {text}, must be a number of tokens from 1 to {MAX_TOKENS:,}")
    return int(text)


def _write(chosen: argparse.Namespace) -> list[Path]:
    tasks = _named_tasks(chosen.tasks)
    tokenizer = open_tokens(chosen.tokenizer)
    output = not_there_yet(chosen.output)
    request = WrittenSet(tasks, tuple(chosen.length), chosen.evaluation, chosen.training, chosen.seed, tokenizer)
    with progress_bar(str(output)) as report_progress:
        return write(request, output, report_progress)


def _named_tasks(words: list[str]) -> tuple[Task, ...]:
    """Return the tasks that the words name, by the names of tasks or groups.

    Words such as OPTION=VALUE are options. Each task gets only the options that it has.
    """
    settings = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if not names:
        raise TaskError(f"{' '.join(words)}: no task is named: add a task of `hybridtron tasks list`", code="missing")
    return tuple(all_named(names, settings))
