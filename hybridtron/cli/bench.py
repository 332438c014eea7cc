"""Benchmark implementations of this package against named peers in one run, and write a table of the results.

    hybridtron bench mixer                     writes benchmarks/mixer.md
    hybridtron bench step recipe=samba_421m    the step of another recipe (any setting of a run)
    hybridtron bench decode runs/laptop llama3_1.6b    runs and recipes side by side
    hybridtron bench scan --quick              tiny sizes, in seconds: a test that it runs, not of speed

All implementations alternate within each round, so that a slower machine slows all of them. The fastest round counts,
and the spread of rounds is reported. CPU times are written only as ratios of two measurements in one run. With one
thread, the default, they are processor time, which other work on the machine hardly changes. With more threads they are
wall-clock time, which is reliable only on an idle machine.

Exit codes: 0 measured, 1 something that the peer needs is missing, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib

from hybridtron.cli.given import positive
from hybridtron.limits import path_of
from hybridtron.shipped import BENCHMARKS, pages

WHAT = {
    "mixer": ("mixer", "Mamba-1 mixer", "forward and backward, against transformers' MambaMixer with the same weights"),
    "mamba2_mixer": ("mixer", "Mamba-2 mixer", "in the same way, against transformers' Mamba2Mixer"),
    "scan": ("scan", "Selective scan (Mamba-1)", "speed, distance from its floor, and memory, against transformers'"),
    "recurrences": ("recurrences", "Recurrences", "SSD, retention, GLA and the delta rule, at equal sizes"),
    "attention": ("attention", "Sliding-window attention", "against full attention and a dense mask, by length"),
    "span": ("attention", "Span-expanded attention", "against a window and full attention: time and peak memory"),
    "sparse": ("sparse", "Sparse attention", "every pattern beside a recurrence, against full attention, by length"),
    "kernels": ("kernels", "Kernels", "bytes and time by a rehearsal, and on a GPU measured, beside other packages"),
    "data": ("data", "Data", "the loader against mosaicml-streaming's dataset, finding a far step, preparing tokens"),
    "states": ("states", "Carried states", "a step with them against one from zero; peak memory of long TBTT steps"),
    "checkpoint": ("checkpoint", "Checkpoints", "writing and loading, against torch.save and megatron-core's own"),
    "convert": ("convert", "Conversion", "to the format of Hugging Face and back, against a plain copy: rate, memory"),
    "fp8": ("fp8", "FP8 against bf16", "the loss of the laptop recipe in each of FP8's precisions, emulated"),
    "rounding": (
        "rounding",
        "Losses and rounding",
        "training by torch alone, by compiled forms, and from weights moved by a rounding",
    ),
    "cores": ("cores", "One thread and two", "by both clocks; short, long and crowded steps; the start of a run"),
    "context": ("context", "Rows over two processes", "a step over a long row, against one process with two threads"),
    "llama": ("llama", "A recipe and a plain Llama", "tokens/s of both in training, with as many parameters"),
    "decode": ("decode", "Decoding", "time per token and bytes of states by length, several models; and transformers'"),
    "scoring": ("decode", "Scoring", "losses of held-out rows, against the forward pass of training, several models"),
    "prefill": ("decode", "Reading prompts", "the same number of tokens in rows of every length, several models"),
    "step": ("step", "Training step", "through our schedule and optimizer, against a plain PyTorch loop"),
}
"""Name -> (file in benchmarks/, report title, comparison). The file has a function of this name that fills a report."""
TAKES_SETTINGS = ("step", "fp8", "llama", "rounding")
TAKES_MODELS = ("decode", "prefill", "scoring")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong arguments end the process with exit code 2."""
    listed = "\n".join(f"  {name:<13} {title}: {text}" for name, (_, title, text) in WHAT.items())
    parser = argparse.ArgumentParser(
        prog="hybridtron bench",
        description=f"Our forms against their peers, in one run.\n\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(WHAT), metavar="NAME", help=", ".join(WHAT))
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value|MODEL",
        help="for step, fp8, llama, rounding: as for `hybridtron train`; for models side by side: recipes or runs",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes no table unless --output says where")
    parser.add_argument("--output", type=path_of, metavar="FILE", help="the table (default: benchmarks/NAME.md)")
    parser.add_argument(
        "--threads", type=positive, default=1, metavar="N", help="threads of torch (default: %(default)s)"
    )
    parser.add_argument("--repetitions", type=positive, default=5, metavar="N", help="rounds (default: %(default)s)")
    chosen = parser.parse_intermixed_args(arguments)
    if chosen.output is None and not chosen.quick and pages() is None:
        parser.error("--output FILE is needed where there is no checkout, whose benchmarks/ the table would go to")
    if chosen.settings and chosen.name not in (*TAKES_SETTINGS, *TAKES_MODELS):
        taking = f"{', '.join(TAKES_SETTINGS)} do, and {' and '.join(TAKES_MODELS)} take models"
        parser.error(f"{chosen.name} takes no settings; {taking}")
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
        report.goals.clear()  # tiny sizes don't measure speed
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
