"""Every command in the docs is parsed, and most are run as they are written.

Options go through the command's own parser, keys through the loader. Commands that run find runs/... that are copies of
one tiny run, and folders with a few thousand tokens; training commands get the sizes of that run. ONLY_PARSED names the
commands that are not run, and why.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow
import pytest
from tokenizers import Tokenizer

from hybridtron.cli import main as cli
from hybridtron.cli import train
from hybridtron.config.load import CONFIGS, load
from tests.docs.conftest import PAGES, ROOT, Command, blocks, commands, name_of
from tests.interop.conftest import Stored
from tests.interop.conftest import own_module_cache as own_module_cache  # the fixture: exported models are loaded
from tests.interop.conftest import stored as stored  # the fixture: a run of a Llama
from tests.train.conftest import small_run_arguments

RUNS = ("laptop", "samba_421m", "samba_1.3b", "mamba2_130m", "a", "b")  # that the docs name
SIZES = ["phases.0.tokens=256", "phases.0.seq_len=16", "phases.0.global_batch=4", "phases.0.micro_batch=2"]
TUTORIAL = "a mixer that the package does not have: tests/test_tutorial.py"
AVERAGED = "a run with run.ema: tests/train/test_moving_average.py"
ONLY_PARSED = {  # by how a command begins
    "audit": "starts processes: tests/proving/test_audit.py",
    "bench": "tests/benchmarks/test_bench.py",
    "checkpoint average runs/a runs/b --ema": "runs with run.ema: tests/checkpoint/test_average.py",
    "checkpoint import iter_0001000": "a folder that core wrote: tests/interop/test_core.py",
    "checkpoint fetch s3:": "a bucket: tests/checkpoint/test_mirror.py",
    "data prepare --input chats.jsonl": "a tokenizer with words: tests/docs/test_answers.py",
    "data prepare --input embedded --packages": "minutes: tests/data/prepare/test_corpus.py",
    "data prepare --input sets/tuning": "a tokenizer with words: tests/docs/test_answers.py",
    "inspect data=folder data.path=data/chats": "a tokenizer with words: tests/docs/test_answers.py",
    "evaluate runs/laptop --harness": "the extra harness: tests/evaluate/test_harness.py",
    "data prepare --input data/chats": "minutes: tests/examples/test_chat.py",
    "data prepare --input embedded --vocab-size": "minutes: tests/examples/test_chat.py",
    "doctor": "starts a process for each package: tests/cli/test_doctor.py",
    "export imported --output tuned-hf": "an adapter of peft: tests/interop/test_peft_import.py",
    "evaluate runs/averaged": AVERAGED,
    "export runs/averaged": AVERAGED,
    "export runs/base": "a phase with adapters: tests/interop/test_peft_adapter.py",
    "export runs/ema": TUTORIAL,
    "export runs/tuned": "a phase with adapters: tests/interop/test_peft_adapter.py",
    "generate runs/averaged": AVERAGED,
    "generate imported": "an adapter of peft: tests/interop/test_peft_import.py",
    "generate runs/chat_laptop": "minutes: tests/examples/test_chat.py",
    "generate runs/ema": TUTORIAL,
    "generate runs/mine": "test_the_example_of_a_recipe_trains",
    "generate runs/tuned --chat": "a model of conversations: tests/cli/test_generate_chat.py",
    "check cards": "needs a folder of records: tests/rehearse/test_cards.py",
    "check gpu": "needs a GPU",
    "check mup": "a minute: tests/proving/test_coordinates.py",
    "gguf": "a tokenizer of byte pairs: tests/interop/test_gguf.py",
    "import adapter": "an adapter of peft: tests/interop/test_peft_import.py",
    "import ema-hf": TUTORIAL,
    "inspect recipe=ema": TUTORIAL,
    "inspect recipe=samba_1.3b parallel.pipeline=4 --gpus 64 --exact": "rehearses: tests/rehearse/test_exact.py",
    "inspect recipe=samba_3.8b --gpus 256 --fit": "rehearses: tests/rehearse/test_exact.py",
    "inspect recipe=mine": "test_the_example_of_a_recipe_trains",
    "replay": "a refused step: tests/train/test_refused.py",
    "rehearse": "a process of its own: tests/rehearse",
    "submit": "needs SLURM; with --dry-run it is run",
    "sweep": "minutes, and starts processes: tests/sweep",
    "tasks download": "a network: tests/tasks/test_download.py",
    "tasks show niah_single_2": "a corpus of essays: tests/tasks/test_ruler.py",
    "tasks write passkey --length 512 --training": "a tokenizer with words: tests/docs/test_answers.py",
    "torchrun": "starts processes: tests/train/test_launchers.py",
    "train recipe=decayed.yaml": "a recipe of the page: tests/train/test_branched_decay.py",
    "train run.dir=runs/decayed": "resumes the run before: tests/train/test_branched_decay.py",
    "train run.evaluate=mine.yaml": "a file of tasks: tests/evaluate/test_in_training.py",
    "train data.mixture=": "a bucket: tests/train/test_mixture_from_s3.py",
    "train data=slimpajama": "the sources of SlimPajama: tests/train/test_mixture_from_s3.py trains on a mixture",
    "train recipe=chat_laptop": "minutes: tests/examples/test_chat.py",
    "train recipe=ema": TUTORIAL,
    "train recipe=laptop_phases": "minutes: tests/train/test_phases.py; with run.plan=true it is run",
    "train recipe=length/official": "the official checkpoints: tests/config/test_weights.py",
    "train recipe=mine": "test_the_example_of_a_recipe_trains",
    "train recipe=samba": "models of full size; with run.plan=true it is run",
}
WALKED = "from_download"  # the folder of pages that download: tests/studies/test_from_download.py runs them
WITH_COMMANDS = [page for page in PAGES if page.parent.name != WALKED and any(commands(page))]
SLOW = (
    "debugging.md",
    "evaluation.md",
    "export.md",
    "parallel.md",
    "profiling.md",
    "serving.md",
    "states.md",
    "tasks.md",
)
RUN = [pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else []) for page in WITH_COMMANDS]


class Parsed(Exception):
    """Raised with a parser's result for a command line."""


def only_parsed(command: Command) -> bool:
    harmless = {"run.plan=true", "--dry-run"} & set(command.words)
    return not harmless and any(str(command).startswith(start) for start in ONLY_PARSED)


def split(command: Command) -> tuple[str, list[str]]:
    """The name of a sub-command, and its arguments."""
    count = 2 if command.words[0] in cli.FAMILIES else 1
    return " ".join(command.words[:count]), list(command.words[count:])


@pytest.fixture(scope="session")
def a_run(counting_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a tiny model."""
    run = tmp_path_factory.mktemp("docs") / "run"
    assert train.main(small_run_arguments(counting_folder, run)) == 0
    return run


@pytest.fixture
def workplace(
    a_run: Path, stored: Stored, counting_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Create a folder with everything that the docs name, under the same names; paths below / are below this folder."""
    monkeypatch.chdir(tmp_path)
    for name in RUNS:
        shutil.copytree(a_run, tmp_path / "runs" / name)
    shutil.copytree(stored("llama").folder.parents[1], tmp_path / "runs/llama2_438m")
    for name in ("books", "slimpajama"):
        shutil.copytree(counting_folder, tmp_path / "data" / name)
    shutil.copy(CONFIGS / "recipe/laptop.yaml", tmp_path / "mine.yaml")
    shutil.copy(CONFIGS / "cluster/h100.yaml", tmp_path / "ours.yaml")
    write_recipes(tmp_path)
    (tmp_path / "tokenizers" / "llama").mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(counting_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizers/llama/tokenizer.json"))
    texts = [" ".join(str((start + step) % 30) for step in range(40)) for start in range(400)]
    (tmp_path / "SlimPajama/train/chunk1").mkdir(parents=True)
    with pyarrow.output_stream(tmp_path / "SlimPajama/train/chunk1/a.jsonl.zst", compression="zstd") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    return tmp_path


def write_recipes(folder: Path) -> None:
    """Write the recipes of docs/phases.md, whose first line is a comment with the file's name."""
    for block in blocks(ROOT / "docs/phases.md", "yaml"):
        if named := re.match(r"# (\w+\.yaml)\n", block):
            (folder / named[1]).write_text(block)


@pytest.fixture(scope="session")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configurations, with the recipes of examples where their READMEs copy them."""
    configs = tmp_path_factory.mktemp("docs") / "configs"
    shutil.copytree(CONFIGS, configs)
    for example, recipe in (("laptop", "mine"), ("ema_mixer", "ema")):
        shutil.copy(ROOT / "examples" / example / "config.yaml", configs / "recipe" / f"{recipe}.yaml")
    return configs


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, configs: Path, workplace: Path) -> Callable[[Command], None]:
    """Parses a command, and loads the configuration that it sets."""
    shutil.copytree(workplace / "runs/laptop", workplace / "imported")
    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, raising(getattr(argparse.ArgumentParser, name)))

    def parsed(command: Command) -> None:
        name, settings = split(command)
        if name != "train":
            with pytest.raises(Parsed) as reached:
                cli.main([*name.split(), *settings])
            settings = [
                text for text in getattr(reached.value.args[0], "settings", []) if not text.startswith("nodes=")
            ]
        load(settings, configs)

    return parsed


def raising(real: Callable[..., argparse.Namespace]) -> Callable[..., None]:
    def raising(*arguments: object, **options: object) -> None:
        raise Parsed(real(*arguments, **options))

    return raising


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_of_a_page_are_parsed(page: Path, parse: Callable[[Command], None]) -> None:
    for command in commands(page):
        parse(command)


@pytest.mark.parametrize("page", RUN, ids=name_of)
@pytest.mark.timeout(300)
def test_commands_of_a_page_run(page: Path, workplace: Path, counting_folder: Path) -> None:
    for number, command in enumerate(command for command in commands(page) if not only_parsed(command)):
        name, arguments = split(command)
        arguments = [_here(argument, workplace) for argument in arguments]
        if name == "data prepare":
            shutil.rmtree(workplace / "data" / "slimpajama")
        if name == "train" and "run.plan=true" not in arguments:
            from_weights = any(argument.startswith("run.weights=") for argument in arguments)
            run = workplace / f"run-{number}"
            sizes = SIZES if from_weights else small_run_arguments(counting_folder, run)
            assert train.main([*arguments, *sizes]) == 0, str(command)
        else:
            assert cli.main([*name.split(), *arguments]) == 0, str(command)


def _here(argument: str, workplace: Path) -> str:
    """A path of the docs as one below the workplace; one worker where they take many."""
    named = {"16": "1", "DIR": "~/tokenizers/llama"}
    return named.get(argument, argument).replace("~/", f"{workplace}/").replace("/data/", f"{workplace}/data/")


def test_every_reason_belongs_to_a_command_of_a_page() -> None:
    every = [str(command) for page in WITH_COMMANDS for command in commands(page)]
    assert [start for start in ONLY_PARSED if not any(text.startswith(start) for text in every)] == []


def test_the_example_of_a_recipe_trains(
    configs: Path, counting_folder: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "load", partial(load, configs=configs))
    data = ["data=folder", f"data.path={counting_folder}", "data.epochs=null", "model.vocab_size=32"]
    assert train.main(["recipe=mine", *data, *SIZES]) == 0
    assert cli.main(["generate", "runs/mine", "--prompt", "1 2 3"]) == 0
