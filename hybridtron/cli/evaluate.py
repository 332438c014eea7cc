"""Evaluate checkpoints: tasks, perplexity, and length generalization on text longer than the training rows.

    hybridtron evaluate runs/laptop
    hybridtron evaluate runs/laptop --suite samba
    hybridtron evaluate runs/samba runs/mamba --tasks mine.yaml --output compared
    hybridtron evaluate runs/samba/checkpoints/step-00000500 --data /data/pg19 --length 65536 --rows 16
    torchrun --nproc-per-node 8 -m hybridtron evaluate runs/samba --suite span parallel.tensor=2

Without --suite and --tasks it runs the instruments of length generalization. They read held-out documents that are long
enough, or the validation split packed end to end if there are none; the report says which. Results go to
RUN/evaluation/STEP, or --output:

    positions.jsonl, .png     loss and perplexity of the prediction after `position` tokens, and its loss if the context
                              is limited to the training length
    remembrance.jsonl, .png   change of the next token's distribution when the first `t` tokens are not shown
    states.jsonl, .png        standard deviation of every layer's recurrent state, by head if it has heads
    entropy.jsonl, .png       entropy by layer: of attention weights, and of the step sizes of scans
    results.json, samples.jsonl
    index.html                all of it on one page that opens without a network

hybridtron/evaluate/length.py, within.py and entropy.py define these measures. --suite samba|span|length|hax|all, or a
file by --tasks, adds samples of tasks and perplexity. Recorded results are not measured again: an evaluation that was
killed continues with the next sample, and a complete one is only shown. With --harness, tasks and groups of
lm-evaluation-harness run instead (samba_short, samba_instruct, span_short, span_long, recall, hax_short, longbench,
tiny).

Exit codes: 0 all was written, 2 no checkpoint, too little text, or a wrong argument.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table

from hybridtron.architecture.attention import ReadingAttention
from hybridtron.architecture.rope import SelfExtendOptions
from hybridtron.cli.given import newest_checkpoint, positive, progress_bar
from hybridtron.config.asked import read_keys
from hybridtron.evaluate.instruments import INSTRUMENTS
from hybridtron.evaluate.served import layout, served
from hybridtron.file_errors import in_words
from hybridtron.limits import limit_problems, path_of, possible_path
from hybridtron.problems import Unusable
from hybridtron.requirements import demand, is_there, missing

if TYPE_CHECKING:
    from hybridtron.evaluate.results import Evaluated
    from hybridtron.evaluate.run import Wishes
    from hybridtron.evaluate.served import Served

SUITES = ("samba", "span", "length", "hax", "all")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong values end the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="hybridtron evaluate", description="Tasks, perplexity and length generalization of checkpoints."
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="RUN", help="runs/NAME, or runs/NAME/checkpoints/step-00000100; parallel.KEY=N")
    add("--suite", choices=SUITES, help="tasks of a paper, at multiples of the training length")
    add("--tasks", type=path_of, metavar="FILE", help="a YAML file of tasks and lengths")
    add("--harness", nargs="+", metavar="NAME", help="tasks and groups of lm-evaluation-harness")
    add("--include", type=path_of, metavar="DIR", help="a folder of tasks of your own, for --harness")
    add("--max-length", type=positive, metavar="N", help="tokens of a row, for --harness (default: as trained)")
    add("--run-code", action="store_true", help="for --harness: run the code that the model writes")
    add("--chat", action="store_true", help="for --harness: ask in chats, by the model's chat template")
    add("--lengths", nargs="+", metavar="N", help="lengths of all tasks: tokens, or training lengths such as 4x")
    add("--samples", type=positive, metavar="N", help="samples of each task and length")
    add("--batch", type=positive, default=16, metavar="N", help="samples that are read together (default: %(default)s)")
    add("--data", metavar="PATH", help="prepared tokens, here or at a URL (default: those of the run)")
    add("--length", default="16x", metavar="N", help="of the instruments: tokens, or training lengths (%(default)s)")
    add("--seq-len", type=positive, metavar="N", help="training length (default: as the checkpoint says)")
    add("--rows", type=positive, default=8, metavar="B", help="of the instruments, at most (default: %(default)s)")
    add("--attention", choices=list(ReadingAttention), help="read with full attention, or as in training")
    add("--self-extend", type=grouped, metavar="G,W", help="full attention reads tokens W and more away in groups of G")
    add("--instruments", metavar="A,B", help=f"default: {','.join(INSTRUMENTS)}")
    add("--output", type=path_of, metavar="DIR", help="where to write (default: RUN/evaluation/STEP)")
    chosen = parser.parse_intermixed_args(arguments)
    require_consistent(parser, chosen)
    return chosen


def grouped(text: str) -> SelfExtendOptions:
    """Parse a group size and a number of neighbours, such as `4,1024`, for argparse."""
    if not re.fullmatch(r"\d{1,9},\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"is {text}, must be a group and a number of neighbours, such as 4,1024")
    options = SelfExtendOptions(*map(int, text.split(",")))
    if faults := [f"{problem.key} {problem.message}" for problem in limit_problems(options)]:
        raise argparse.ArgumentTypeError("; ".join(faults))
    return options


def require_consistent(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Separate runs from layout settings. Options that contradict each other end the process with exit code 2."""
    chosen.layout = [word for word in (*chosen.paths, *(chosen.harness or ())) if word.startswith("parallel.")]
    words = [word for word in chosen.paths if word not in chosen.layout]
    if fault := next(filter(None, map(possible_path, words)), None):
        parser.error(f"RUN {fault.message}")
    chosen.paths = [Path(word) for word in words]
    chosen.harness = [word for word in chosen.harness or () if word not in chosen.layout]
    if chosen.instruments is not None:
        chosen.instruments = chosen.instruments.split(",")
    if wrong := [name for name in chosen.instruments or [] if name not in INSTRUMENTS]:
        parser.error(f"--instruments: there is no {wrong[0]!r}; there are {', '.join(INSTRUMENTS)}")
    if not re.fullmatch(r"0*[1-9]\d*x?", chosen.length, re.ASCII):
        parser.error(f"--length is {chosen.length}, must be a number of tokens such as 8192, or of lengths such as 16x")
    if not (chosen.suite or chosen.tasks) and chosen.lengths:
        parser.error(
            "--lengths belongs to --suite NAME or --tasks FILE, whose tasks have lengths; --length to all else"
        )
    if not (chosen.suite or chosen.tasks or chosen.harness) and chosen.samples:
        parser.error(
            "--samples belongs to --suite NAME, --tasks FILE or --harness NAME; --rows says how many rows else"
        )
    if chosen.suite and chosen.tasks:
        parser.error(f"--suite {chosen.suite} and --tasks {chosen.tasks}: one of them")
    if chosen.harness and (chosen.suite or chosen.tasks or chosen.lengths or chosen.instruments):
        parser.error("--harness asks its own tasks: leave --suite, --tasks, --lengths and --instruments")
    if not chosen.harness and (chosen.include or chosen.max_length or chosen.run_code or chosen.chat):
        parser.error("--include, --max-length, --run-code and --chat belong to --harness NAME")
    if not chosen.paths or (len(chosen.paths) > 1 and chosen.output is None):
        parser.error("several runs need --output DIR, where they are compared" if chosen.paths else "no run is named")


def main(arguments: list[str]) -> int:
    """Evaluate the checkpoints, write the results and print them. Returns the exit code."""
    chosen = parse(arguments)
    checkpoints = {path: newest_checkpoint(path) for path in chosen.paths}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        measure(checkpoints, chosen, console)
    except OSError as error:
        raise Unusable(in_words(error, chosen.output), code="unreadable") from error
    return 0


def folder_for(path: Path, checkpoint: Path, chosen: argparse.Namespace) -> Path:
    """Return the folder for a checkpoint's results."""
    checkpoint = named(checkpoint)
    run = named(checkpoint.parent)
    if run.name == "checkpoints":
        run = named(run.parent)
    if chosen.output is None:
        return run / "evaluation" / checkpoint.name
    if len(chosen.paths) == 1:
        return chosen.output
    return chosen.output / f"{run.name}-{checkpoint.name}"


def named(path: Path) -> Path:
    """Return a path that ends in a name: one that ends in `.` or `..` is resolved."""
    if path.name in ("", ".."):
        return path.resolve()
    return path


def measure(checkpoints: dict[Path, Path], chosen: argparse.Namespace, console: Console) -> None:
    """Evaluate every checkpoint, and compare them if there are several. Only the first process prints."""
    from hybridtron.evaluate.run import compared

    ask = asking(chosen)
    evaluations = []
    folders = {path: folder_for(path, checkpoint, chosen) for path, checkpoint in checkpoints.items()}
    if len(set(folders.values())) < len(chosen.paths):
        raise Unusable(
            "two of the runs have the same name and step, and so the same folder below --output", code="duplicate"
        )
    for path, checkpoint in checkpoints.items():
        with served(checkpoint, layout(chosen.layout), chosen.self_extend, chosen.attention) as model:
            if chosen.output is None:
                run = folders[path].parent.parent
            else:
                run = named(path)
            evaluation = ask(model, f"{run.name}, step {model.step}", folders[path])
            if model.first:
                evaluations.append(evaluation)
                report(evaluation, console)
    if len(evaluations) > 1:
        subject = chosen.suite or chosen.tasks or ", ".join(chosen.harness) or "length generalization"
        compared(str(subject), evaluations, chosen.output)
        console.print(f"compared in {chosen.output / 'index.html'}")


def asking(chosen: argparse.Namespace) -> Callable[[Served, str, Path], Evaluated]:
    """Return a function (model, name, folder) that runs the suite or the harness and writes to the folder."""
    if not chosen.harness:
        from hybridtron.evaluate.run import evaluate

        wished = wishes(chosen)
        return lambda model, name, folder: evaluate(model, name, wished, folder, progress_bar)
    demand("harness")
    from hybridtron.evaluate.harness_run import HarnessWishes, measured

    request = HarnessWishes(
        chosen.harness,
        include=chosen.include,
        samples=chosen.samples,
        batch=chosen.batch,
        max_length=chosen.max_length,
        run_code=chosen.run_code,
        chat=chosen.chat,
    )
    return lambda model, name, folder: measured(model, name, request, folder / "harness", progress_bar)


def wishes(chosen: argparse.Namespace) -> Wishes:
    """Build the request from the command line, a suite or a file of tasks."""
    from hybridtron.evaluate.run import Wishes
    from hybridtron.evaluate.suites import KEYS
    from hybridtron.evaluate.suites import SUITES as KNOWN

    if chosen.tasks:
        suite = dict(read_keys(chosen.tasks, KEYS[""], "--tasks"))
    else:
        suite = dict(KNOWN[chosen.suite] if chosen.suite else {"instruments": list(INSTRUMENTS)})
        suite["instrument_length"] = chosen.length
    if chosen.instruments is not None:
        suite["instruments"] = list(dict.fromkeys(chosen.instruments))
    return Wishes(
        suite,
        named=bool(chosen.suite),
        lengths=chosen.lengths,
        samples=chosen.samples,
        batch=chosen.batch,
        rows=chosen.rows,
        data=chosen.data,
        seq_len=chosen.seq_len,
    )


def report(one: Evaluated, console: Console) -> None:
    """Print an evaluation's results as tables, and the path of its page."""
    from hybridtron.evaluate.results import shown

    console.print(one.name)
    if one.tables:
        data_read = next(line["text"] for line in reversed(one.lines) if line["task"] in one.tables)
        console.print(f"trained on rows of {one.about['seq_len']} tokens; read: {data_read}")
    if attention := one.about["attention"]:
        console.print("attention: " + ", ".join(f"{kind} ({letter})" for letter, kind in attention.items()))
    for text in one.left_out:
        console.print(f"left out: {text}")
    if one.rows:
        table = titled("results", Column("task", overflow="fold"), "length", "metric", "value", "n")  # all options
        for row in one.rows:
            table.add_row(row["task"], str(row["length"]), row["metric"], shown(row), str(row["n"]))
        console.print(table)
    for result_table in one.tables.values():
        table = titled(result_table.title, *result_table.header)
        for cells in result_table.cells:
            table.add_row(*cells)
        console.print(table)
        if result_table.note:
            console.print(result_table.note)
    if is_there("matplotlib"):
        unseen = ""
    else:
        unseen = f", without pictures: {missing('plot')}"
    console.print(f"\nwritten: {one.folder / 'index.html'}{unseen}")


def titled(title: str, *columns: str | Column) -> Table:
    """Build a table with its title on the left."""
    return Table(*columns, title=f"\n{title}", title_justify="left", box=None)
