"""The command `hybridtron` and its sub-commands.

`COMMANDS` maps each sub-command to a function. The function takes the remaining arguments and returns the exit code.
The function's module is imported only when the sub-command runs, so that packages of other sub-commands cost no time. A
sub-command raises Unusable for a user's mistake, such as a wrong configuration or a missing folder. `main` then prints
the exception's message and returns exit code 2.
"""

from __future__ import annotations

import importlib
import os
import sys

from hybridtron import __version__
from hybridtron.cli import fast_start
from hybridtron.file_errors import in_words, is_of_the_user
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.requirements import demand, hide_known_warnings

COMMANDS = {
    "train": ("train:program", "train a model, or resume a run"),
    "inspect": ("inspect:main", "layers, parameters, FLOPs, memory and layout of a configuration"),
    "rehearse": (
        "rehearse:main",
        "simulate a GPU's training step without a GPU: memory, traffic, syncs, estimated time",
    ),
    "doctor": ("doctor:main", "what is installed, what is missing, and which kernels will run"),
    "data prepare": ("data_prepare:main", "convert text or tokens to a folder that training reads"),
    "data verify": ("data_verify:main", "check every byte of a folder of prepared tokens"),
    "generate": ("generate:main", "generate text from a checkpoint"),
    "tasks list": ("tasks:list_main", "list tasks of retrieval, recall and reasoning, and their options"),
    "tasks show": ("tasks:show_main", "print a sample of a task"),
    "tasks prepare": ("tasks:prepare_main", "write tasks on token ids as training data with loss masks"),
    "tasks download": ("tasks:download_main", "download the data sets of RULER's question answering"),
    "tasks write": ("tasks:write_main", "write samples of tasks as jsonl, for evaluation and training"),
    "evaluate": ("evaluate:main", "measure tasks, perplexity and length generalization of checkpoints"),
    "sweep": ("sweep:main", "run a grid of training runs, and tabulate their results"),
    "replay": ("replay:main", "repeat a refused step of a run, with usual and with reference ops"),
    "plot": ("plot:main", "draw a run's losses"),
    "checkpoint": ("checkpoint:main", "list, verify, diff, average, reshard, fetch or convert checkpoints"),
    "export": ("convert:export_main", "convert a checkpoint to the format of Hugging Face"),
    "import": ("convert:import_main", "convert a model in the format of Hugging Face to a checkpoint"),
    "gguf": ("gguf:main", "write an export as a GGUF file for llama.cpp"),
    "push": ("push:main", "upload an export to a repository on the Hugging Face Hub"),
    "audit": ("audit:main", "compare every gradient of a parallel layout with one process"),
    "bench": ("bench:main", "measure this package and other packages"),
    "check gpu": ("hybridtron.proving.gpu.main:main", "check a GPU: correctness of every kernel, and speed"),
    "check mup": ("check_mup:main", "check muP: outputs must change equally at every width"),
    "check cards": ("hybridtron.rehearse.cards:main", "write a page per recipe with measured and rehearsed results"),
    "chaos": ("hybridtron.proving.chaos.main:program", "kill and damage a run, and compare its final weights"),
    "submit": ("hybridtron.cluster.submit:main", "submit a run to SLURM"),
    "status": ("hybridtron.cluster.status:main", "state, speed and remaining time of runs"),
}
"""Name -> (MODULE:FUNCTION, help line). Modules without a dot in the name are in this folder."""

RENAMED = {"gpu-check": "check gpu"}
"""Former name of a command -> present name."""

FAMILIES = {name.split()[0] for name in COMMANDS if " " in name}  # first words of two-word commands


def program() -> int:
    """Run the console script `hybridtron`. Returns the exit code."""
    return main(sys.argv[1:])


def sleeping_threads() -> None:
    """Make torch's OpenMP threads sleep between operations, unless the user has set OMP_WAIT_POLICY.

    By default, waiting OpenMP threads spin and so keep their cores busy. The compiled CPU ops of this package use other
    threads, which need the cores. OpenMP reads OMP_WAIT_POLICY only once, when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(arguments: list[str]) -> int:
    """Run one command. Returns its exit code, or 2 if there is no such command."""
    if arguments[:1] == ["--version"]:
        print(f"hybridtron {__version__}")
        return 0
    if arguments and arguments[0] in RENAMED:
        name = RENAMED[arguments[0]]
        print(f"warning: `hybridtron {arguments[0]}` has been renamed: use `hybridtron {name}`", file=sys.stderr)
        arguments = [*name.split(), *arguments[1:]]
    if arguments and arguments[0] in FAMILIES:
        family = arguments[0]
    else:
        family = ""
    words = arguments[:2] if family else arguments[:1]
    name = " ".join(words)
    if name not in COMMANDS:
        return no_command(family, words[-1] if words and words != [family] else None)
    hide_known_warnings()
    sleeping_threads()
    fast_start.install()
    if name == "train":  # other commands need only some packages: inspect and submit run without torch
        demand()
    module_name, function = COMMANDS[name][0].split(":")
    try:
        with fast_start.uncollected():
            module = importlib.import_module(module_name if "." in module_name else f"hybridtron.cli.{module_name}")
        code: int = getattr(module, function)(arguments[len(words) :])
    except ModuleNotFoundError:
        demand()  # exits with a one-line message if the missing module is a requirement
        raise
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        if not is_of_the_user(error):
            raise
        print(in_words(error), file=sys.stderr)
        return 2
    return code


def no_command(family: str, word: str | None) -> int:
    """Print help, or a message that `word` is not a command. Returns the exit code.

    The exit code is 0 for `--help`. It is 2 if the command is unknown, or if it is missing (`word` is None).
    """
    if word in ("-h", "--help"):
        print(usage(family))
        return 0
    if word is None:
        print(usage(family), file=sys.stderr)
        return 2
    prefix = f"{family} " if family else ""
    names = [name.removeprefix(prefix) for name in COMMANDS if name.startswith(prefix)]
    cure = f"run `hybridtron {prefix}--help` for a list"
    print(f"hybridtron {prefix}has no command {word!r}{did_you_mean(word, names)}; {cure}", file=sys.stderr)
    return 2


def usage(family: str) -> str:
    """Return the help text with all commands, or with the commands of a family such as `data`."""
    chosen = {name: text for name, (_, text) in COMMANDS.items() if not family or name.split()[0] == family}
    lines = "\n".join(f"  {name:<15}{text}" for name, text in chosen.items())
    name = f"hybridtron {family}".strip()
    return f"usage: {name} COMMAND ...\n\n{lines}\n\nrun `hybridtron COMMAND --help` for a command's arguments"
