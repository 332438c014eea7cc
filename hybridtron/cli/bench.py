"""Measure implementations from this package and from named peers in one run, and write a table of the results.

    hybridtron bench mixer                           write benchmarks/mixer.md
    hybridtron bench step recipe=samba_421m          measure the step of this recipe; takes a run's settings
    hybridtron bench decode runs/laptop llama3_1.6b  compare runs and recipes
    hybridtron bench scan --quick                    tiny sizes: a test of the benchmark in seconds, without valid times

Each round measures every implementation once, so a temporary slowdown of the machine affects all implementations. Each
implementation's fastest round counts, and the table also gives the spread over the rounds. CPU times are reported only
as ratios of two measurements in the same run. With one thread (the default), processor time is measured, which other
work on the machine hardly changes. With more threads, wall-clock time is measured, which is reliable only on an idle
machine.

Exit codes: 0 measured, 2 wrong arguments, or a package that a peer needs is not installed.
"""

from __future__ import annotations

import argparse
import importlib

from hybridtron.cli.arguments import positive
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser
from hybridtron.resources import BENCHMARKS, pages

WHAT = {
    "mixer": ("mixer", "Mamba-1 mixer", "forward and backward, against transformers' MambaMixer with the same weights"),
    "mamba2_mixer": ("mixer", "Mamba-2 mixer", "forward and backward, against transformers' Mamba2Mixer"),
    "scan": ("scan", "Selective scan (Mamba-1)", "time, ratio to its floor, and memory, against transformers' scan"),
    "recurrences": ("recurrences", "Recurrences", "SSD, retention, GLA and the delta rule, at equal sizes"),
    "attention": ("attention", "Sliding-window attention", "against full attention and a dense mask, by length"),
    "span": ("attention", "Span-expanded attention", "against a window and full attention: time and peak memory"),
    "sparse": ("sparse", "Sparse attention", "every pattern next to a recurrence, against full attention, by length"),
    "experts": (
        "experts",
        "Experts",
        "a mixture of experts against a dense MLP of equal active FLOPs",
    ),
    "kernels": ("kernels", "Kernels", "rehearsed bytes and time, and on a GPU measured time, next to other packages"),
    "data": ("data", "Data", "the loader against mosaicml-streaming's dataset, finding a far step, and tokenizing"),
    "states": (
        "states",
        "Carried states",
        "a step from carried states against one from zero; peak memory of long TBTT steps",
    ),
    "checkpoint": ("checkpoint", "Checkpoints", "writing and loading, against torch.save and megatron-core's own"),
    "convert": ("convert", "Conversion", "to the format of Hugging Face and back, against a plain copy: rate, memory"),
    "fp8": ("fp8", "FP8 against bf16", "the loss of the laptop recipe in every FP8 precision, emulated"),
    "rounding": (
        "rounding",
        "Losses and rounding",
        "losses with torch ops, with compiled CPU ops, and from weights changed in their last bit",
    ),
    "cores": (
        "cores",
        "One thread and two",
        "processor and wall-clock time of short, long and crowded steps, and of a start",
    ),
    "context": ("context", "Rows over two processes", "a step over a long row, against one process with two threads"),
    "llama": ("llama", "A recipe and a plain Llama", "tokens/s in training, at the same number of parameters"),
    "decode": ("decode", "Decoding", "time per token and bytes of states by length; several models, and transformers"),
    "scoring": ("decode", "Scoring", "losses of held-out rows, against training's forward pass; several models"),
    "prefill": (
        "decode",
        "Reading prompts",
        "time for the same number of tokens in rows of every length; several models",
    ),
    "optimizer": ("optimizer", "Optimizer step", "of Muon, against AdamW's step and a bare loop of Muon's products"),
    "step": ("step", "Training step", "with this package's schedule and optimizer, against a plain PyTorch loop"),
}
"""Each benchmark's name -> (module in benchmarks/, title of the report, comparison for --help).

The module contains a function with the benchmark's name, which fills the report. Terms of the comparisons:

- floor: the time of the work that every implementation must do
- rehearsal: a simulated GPU step
- far step: a step late in the data; a new loader must find the step's batch
- TBTT: truncated backpropagation through time
- crowded steps: steps with more processes than the machine has cores
"""
TAKES_SETTINGS = ("step", "fp8", "llama", "rounding", "optimizer")
TAKES_MODELS = ("decode", "prefill", "scoring")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong arguments end the process with exit code 2."""
    listed = "\n".join(f"  {name:<13} {title}: {text}" for name, (_, title, text) in WHAT.items())
    parser = CommandParser(
        prog="hybridtron bench",
        description=f"Measure implementations of this package and of named peers in one run.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(WHAT), metavar="NAME", help=", ".join(WHAT))
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value|MODEL",
        help="for step, fp8, llama, rounding, optimizer: settings of a run; for decode, prefill, scoring: models",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes a table only with --output")
    parser.add_argument("--output", type=path_of, metavar="FILE", help="table file (default: benchmarks/NAME.md)")
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="threads of torch (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=positive, default=5, metavar="N", help="rounds (default: %(default)s)")
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.output is None and not chosen.quick and pages() is None:
        parser.refuse(
            "--output",
            "missing",
            "--output FILE is needed: without a checkout there is no folder benchmarks/ for the table",
        )
    if chosen.settings and chosen.name not in (*TAKES_SETTINGS, *TAKES_MODELS):
        taking = f"{', '.join(TAKES_SETTINGS)} take settings; {', '.join(TAKES_MODELS)} take models"
        parser.refuse(
            "settings",
            "unsupported",
            f"{chosen.name} takes no settings: leave out {chosen.settings[0]}; {taking}",
        )
    return chosen


def main(arguments: list[str]) -> int:
    """Run one benchmark, print it, and write its table. Returns the exit code."""
    chosen = parse(arguments)
    import torch

    from hybridtron.problems import Unusable
    from hybridtron.proving.measuring import BenchReport, publish
    from hybridtron.requirements import missing

    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    file, title, _ = WHAT[chosen.name]
    report = BenchReport(title, chosen.quick, chosen.repetitions, tuple(chosen.settings))
    try:
        module = importlib.import_module(f"{BENCHMARKS}.{file}")
        getattr(module, chosen.name)(report)
    except ModuleNotFoundError as error:
        raise Unusable(missing("export") or str(error), code="not-installed") from error
    if chosen.quick:
        report.goals.clear()  # goals are for full sizes
    suffix = "" if report.device == "cpu" else f"_{report.device}"
    folder = None if chosen.quick else pages()
    publish(report, command(chosen), chosen.output or (folder and folder / f"{chosen.name}{suffix}.md"))
    return 0


def command(chosen: argparse.Namespace) -> str:
    """Return the command that repeats the measurement."""
    words = ["hybridtron bench", chosen.name, *chosen.settings]
    words += ["--quick"] if chosen.quick else []
    words += [f"--threads {chosen.threads}"] if chosen.threads != 1 else []
    words += [f"--repetitions {chosen.repetitions}"] if chosen.repetitions != 5 else []
    return " ".join(words)
