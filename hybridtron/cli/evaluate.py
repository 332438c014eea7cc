"""Evaluate checkpoints: tasks, perplexity, and length generalization on text longer than the training rows.

    hybridtron evaluate runs/laptop
    hybridtron evaluate runs/laptop --suite samba
    hybridtron evaluate runs/samba runs/mamba --tasks mine.yaml --output compared
    hybridtron evaluate runs/samba/checkpoints/step-00000500 --data /data/pg19 --length 65536 --rows 16
    torchrun --nproc-per-node 8 -m hybridtron evaluate runs/samba --suite span parallel.tensor=2

There are three kinds of evaluation:

    default           the instruments: measurements on text longer than the training rows
    --suite, --tasks  a suite: tasks, perplexities and instruments, by name or as a YAML file
    --harness         tasks and groups of lm-evaluation-harness, such as hellaswag; groups in this package: samba_short,
                      samba_instruct, span_short, span_long, recall, hax_short, longbench, tiny

With --ema the evaluated weights are the moving average that a run with `run.ema` keeps. The results are then written to
RUN/evaluation/STEP-ema.

Instruments take each row from a single held-out document. If no document is long enough for a row, shorter held-out
documents are joined, and the report says so. The files length.py, short_context.py and entropy.py in
hybridtron/evaluate define the measurements. Results are written to RUN/evaluation/STEP, or to --output:

    positions.jsonl, .png     loss and perplexity at each position, and the loss with the context limited to the
                              training length
    remembrance.jsonl, .png   change of the next token's distribution if the context's first `t` tokens are left out
    states.jsonl, .png        standard deviation of every layer's recurrent state, for each head if there are heads
    entropy.jsonl, .png       entropy of every layer's attention weights, or of its scan's step sizes
    results.json              values of all metrics
    samples.jsonl             a line for each sample
    index.html                all results on one page that opens without a network

Recorded results are not measured again. So an evaluation that was killed continues with the next sample, and a complete
evaluation is only printed.

Exit codes: 0 all results were written, 2 no checkpoint, too little text, or a wrong argument.
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
from hybridtron.cli.arguments import newest_checkpoint, positive
from hybridtron.config.yaml_file import read_keys
from hybridtron.evaluate.instruments import INSTRUMENTS
from hybridtron.evaluate.loaded_model import layout, load_model
from hybridtron.file_errors import in_words
from hybridtron.limits import limit_problems, path_of, possible_path
from hybridtron.problems import CommandParser, Unusable
from hybridtron.progress import progress_bar
from hybridtron.requirements import demand, is_there, missing

if TYPE_CHECKING:
    from hybridtron.evaluate.evaluation import EvalRequest
    from hybridtron.evaluate.loaded_model import LoadedModel
    from hybridtron.evaluate.results import Evaluated

SUITES = ("samba", "span", "length", "hax", "all")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong values end the process with exit code 2."""
    parser = CommandParser(
        prog="hybridtron evaluate", description="Tasks, perplexity and length generalization of checkpoints."
    )
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        metavar="RUN",
        help="runs/NAME, or runs/NAME/checkpoints/step-00000100; layout: parallel.KEY=N",
    )
    add("--suite", choices=SUITES, help="named list of tasks and measurements")
    add("--tasks", type=path_of, metavar="FILE", help="a suite as a YAML file")
    add("--harness", nargs="+", metavar="NAME", help="tasks and groups of lm-evaluation-harness")
    add("--include", type=path_of, metavar="DIR", help="a folder of tasks of your own, for --harness")
    add("--max-length", type=positive, metavar="N", help="for --harness: tokens of a row (default: training length)")
    add("--run-code", action="store_true", help="for --harness: run the code that the model writes")
    add("--chat", action="store_true", help="for --harness: format prompts by the model's chat template")
    add("--lengths", nargs="+", metavar="N", help="lengths of tasks: tokens, or multiples of the training length: 4x")
    add("--samples", type=positive, metavar="N", help="samples of each task and length")
    add("--batch", type=positive, default=16, metavar="N", help="samples in a batch (default: %(default)s)")
    add("--data", metavar="PATH", help="folder or URL of prepared tokens (default: data of the run)")
    add(
        "--length",
        default="16x",
        metavar="N",
        help="for instruments: tokens, or multiples of the training length (%(default)s)",
    )
    add("--seq-len", type=positive, metavar="N", help="training length (default: from the checkpoint)")
    add("--rows", type=positive, default=8, metavar="B", help="for instruments: maximum rows (default: %(default)s)")
    add("--attention", choices=list(ReadingAttention), help="attention of the evaluated model (default: as trained)")
    add("--self-extend", type=grouped, metavar="G,W", help="Self-Extend: groups of G tokens, beyond W neighbours")
    add("--ema", action="store_true", help="evaluate the moving average of the weights, which run.ema keeps")
    add("--instruments", metavar="A,B", help=f"default: {','.join(INSTRUMENTS)}")
    add("--output", type=path_of, metavar="DIR", help="folder of the results (default: RUN/evaluation/STEP)")
    chosen = parser.parse_intermixed_args(arguments)
    require_consistent(parser, chosen)
    return chosen


def grouped(text: str) -> SelfExtendOptions:
    """Parse Self-Extend's group size and number of neighbours, such as `4,1024`, for argparse."""
    if not re.fullmatch(r"\d{1,9},\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"is {text}, must be a group size and a number of neighbours, such as 4,1024")
    options = SelfExtendOptions(*map(int, text.split(",")))
    if faults := [f"{problem.key} {problem.message}" for problem in limit_problems(options)]:
        raise argparse.ArgumentTypeError("; ".join(faults))
    return options


def require_consistent(parser: CommandParser, chosen: argparse.Namespace) -> None:
    """Move layout settings (`parallel.KEY=N`) from `chosen.paths` and `chosen.harness` to `chosen.layout`.

    Invalid values, and options that contradict each other, end the process with exit code 2.
    """
    chosen.layout = [word for word in (*chosen.paths, *(chosen.harness or ())) if word.startswith("parallel.")]
    words = [word for word in chosen.paths if word not in chosen.layout]
    if fault := next(filter(None, map(possible_path, words)), None):
        parser.refuse("RUN", fault.code, f"RUN {fault.message}")
    chosen.paths = [Path(word) for word in words]
    chosen.harness = [word for word in chosen.harness or () if word not in chosen.layout]
    if chosen.instruments is not None:
        chosen.instruments = chosen.instruments.split(",")
    if wrong := [name for name in chosen.instruments or [] if name not in INSTRUMENTS]:
        parser.refuse(
            "--instruments",
            "unknown-name",
            f"--instruments: no instrument is named {wrong[0]!r}; use {', '.join(INSTRUMENTS)}",
        )
    if not re.fullmatch(r"0*[1-9]\d*x?", chosen.length, re.ASCII):
        parser.refuse(
            "--length",
            "malformed",
            f"--length is {chosen.length}, must be tokens such as 8192, or training lengths such as 16x",
        )
    if not (chosen.suite or chosen.tasks) and chosen.lengths:
        where = "is only for --suite NAME and --tasks FILE; use --length to set the length of instruments"
        parser.refuse("--lengths", "misplaced", f"--lengths {where}")
    if not (chosen.suite or chosen.tasks or chosen.harness) and chosen.samples:
        where = "is only for --suite NAME, --tasks FILE and --harness NAME; use --rows to set the rows of instruments"
        parser.refuse("--samples", "misplaced", f"--samples {where}")
    if chosen.suite and chosen.tasks:
        parser.refuse(
            "--suite", "conflict", f"--suite {chosen.suite} and --tasks {chosen.tasks} can't be combined: leave one out"
        )
    if chosen.harness and (chosen.suite or chosen.tasks or chosen.lengths or chosen.instruments):
        parser.refuse(
            "--harness",
            "conflict",
            "--harness has its own tasks: leave out --suite, --tasks, --lengths and --instruments",
        )
    if not chosen.harness and (chosen.include or chosen.max_length or chosen.run_code or chosen.chat):
        parser.refuse(
            "--harness", "missing", "--include, --max-length, --run-code and --chat are only for --harness NAME"
        )
    if not chosen.paths or (len(chosen.paths) > 1 and chosen.output is None):
        if not chosen.paths:
            parser.refuse("RUN", "missing", "no run is named: give a run's folder or a checkpoint")
        parser.refuse("--output", "missing", "several runs need --output DIR, the folder of the comparison")


def main(arguments: list[str]) -> int:
    """Evaluate the checkpoints, write the results and print them. Returns the exit code."""
    chosen = parse(arguments)
    checkpoints = {path: newest_checkpoint(path) for path in chosen.paths}
    folders = {path: folder_for(path, checkpoint, chosen) for path, checkpoint in checkpoints.items()}
    if len(set(folders.values())) < len(chosen.paths):
        raise Unusable(
            "two runs have the same name and step, so they need the same folder: evaluate each run by itself",
            code="duplicate",
        )
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        measure(checkpoints, folders, chosen, console)
    except OSError as error:
        place = chosen.output or folders[chosen.paths[0]]  # several runs always have --output
        raise Unusable(in_words(error, place), code="unreadable") from error
    return 0


def folder_for(path: Path, checkpoint: Path, chosen: argparse.Namespace) -> Path:
    """Return the folder for a checkpoint's results."""
    checkpoint = named(checkpoint)
    run = named(checkpoint.parent)
    if run.name == "checkpoints":
        run = named(run.parent)
    if chosen.output is None:
        return run / "evaluation" / f"{checkpoint.name}{'-ema' if chosen.ema else ''}"
    if len(chosen.paths) == 1:
        return chosen.output
    return chosen.output / f"{run.name}-{checkpoint.name}"


def named(path: Path) -> Path:
    """Return a path that ends in a name: paths that end in `.` or `..` are resolved."""
    if path.name in ("", ".."):
        return path.resolve()
    return path


def measure(
    checkpoints: dict[Path, Path], folders: dict[Path, Path], chosen: argparse.Namespace, console: Console
) -> None:
    """Evaluate every checkpoint, and write a comparison if there are several. Only the first process prints.

    `checkpoints` maps each path on the command line to its checkpoint's folder. `folders` maps each path to the folder
    for its results.
    """
    from hybridtron.evaluate.evaluation import write_comparison

    evaluate_model = evaluator(chosen)
    evaluations = []
    for path, checkpoint in checkpoints.items():
        parallel = layout(chosen.layout)
        with load_model(checkpoint, parallel, chosen.self_extend, chosen.attention, averaged=chosen.ema) as model:
            if chosen.output is None:
                run = folders[path].parent.parent
            else:
                run = named(path)
            average = ", moving average" if chosen.ema else ""
            evaluation = evaluate_model(model, f"{run.name}, step {model.step}{average}", folders[path])
            if model.first:
                evaluations.append(evaluation)
                report(evaluation, console)
    if len(evaluations) > 1:
        subject = chosen.suite or chosen.tasks or ", ".join(chosen.harness) or "length generalization"
        write_comparison(str(subject), evaluations, chosen.output)
        console.print(f"compared in {chosen.output / 'index.html'}")


def evaluator(chosen: argparse.Namespace) -> Callable[[LoadedModel, str, Path], Evaluated]:
    """Return a function that evaluates a model and writes to a folder: (model, name, folder) -> results."""
    if not chosen.harness:
        from hybridtron.evaluate.evaluation import evaluate

        request = eval_request(chosen)
        return lambda model, name, folder: evaluate(model, name, request, folder, progress_bar)
    demand("harness")
    from hybridtron.evaluate.harness_run import HarnessRequest, evaluate_by_harness

    request = HarnessRequest(
        chosen.harness,
        include=chosen.include,
        samples=chosen.samples,
        batch=chosen.batch,
        max_length=chosen.max_length,
        run_code=chosen.run_code,
        chat=chosen.chat,
    )
    return lambda model, name, folder: evaluate_by_harness(model, name, request, folder / "harness", progress_bar)


def eval_request(chosen: argparse.Namespace) -> EvalRequest:
    """Build the request for a suite: the file from --tasks, the suite from --suite, or the instruments."""
    from hybridtron.evaluate.evaluation import EvalRequest
    from hybridtron.evaluate.suites import KEYS
    from hybridtron.evaluate.suites import SUITES as KNOWN

    if chosen.tasks:
        suite = dict(read_keys(chosen.tasks, KEYS[""], "--tasks"))
    else:
        suite = dict(KNOWN[chosen.suite] if chosen.suite else {"instruments": list(INSTRUMENTS)})
        suite["instrument_length"] = chosen.length
    if chosen.instruments is not None:
        suite["instruments"] = list(dict.fromkeys(chosen.instruments))
    return EvalRequest(
        suite,
        named=bool(chosen.suite),
        lengths=chosen.lengths,
        samples=chosen.samples,
        batch=chosen.batch,
        rows=chosen.rows,
        data=chosen.data,
        seq_len=chosen.seq_len,
    )


def report(evaluated: Evaluated, console: Console) -> None:
    """Print an evaluation's results as tables, and the path of index.html."""
    from hybridtron.evaluate.results import shown

    console.print(evaluated.name)
    if evaluated.tables:
        data_read = next(line["text"] for line in reversed(evaluated.lines) if line["task"] in evaluated.tables)
        console.print(f"trained on rows of {evaluated.about['seq_len']} tokens; read: {data_read}")
    if attention := evaluated.about["attention"]:
        console.print("attention: " + ", ".join(f"{kind} ({letter})" for letter, kind in attention.items()))
    for text in evaluated.left_out:
        console.print(f"left out: {text}")
    if evaluated.rows:
        table = titled(
            "results", Column("task", overflow="fold"), "length", "metric", "value", "n"
        )  # fold: all options of a task are shown
        for row in evaluated.rows:
            table.add_row(row["task"], str(row["length"]), row["metric"], shown(row), str(row["n"]))
        console.print(table)
    for result_table in evaluated.tables.values():
        table = titled(result_table.title, *result_table.header)
        for cells in result_table.cells:
            table.add_row(*cells)
        console.print(table)
        if result_table.note:
            console.print(result_table.note)
    if is_there("matplotlib"):
        without = ""
    else:
        without = f", without pictures: {missing('plot')}"
    console.print(f"\nwritten: {evaluated.folder / 'index.html'}{without}")


def titled(title: str, *columns: str | Column) -> Table:
    """Build a table with its title on the left."""
    return Table(*columns, title=f"\n{title}", title_justify="left", box=None)
