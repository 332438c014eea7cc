"""The tutorial on a mixer in docs/extending.md works as written: its files, its lines, its commands, its Python.

All of it happens in a copy of the package, with nothing else added. Training gets small sizes, by further settings.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.checkpoint import Checkpoint
from tests.docs.conftest import blocks
from tests.train.conftest import counting_folder as counting_folder  # the fixture

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending.md"
REGISTRY = "hybridtron/architecture/__init__.py"
OPTIONS = '"ema": [{"expand": 2}]'
STEPS = 20
CONTRACT = "python -m pytest"
ALONE = (
    "cp", "hybridtron inspect", "hybridtron train recipe=ema", "hybridtron generate", "hybridtron export",
    "hybridtron import",
)  # fmt: skip
AUDIT = ("cp", "hybridtron audit")
PARALLEL = ("cp", "hybridtron train recipe=ema states", "torchrun")
"""How the page's commands begin, by the test that runs them."""
IN_ONE_PROCESS = """
import pytest
from hybridtron.cli.main import main
for program, words in {}:
    assert (main(words) if program == "hybridtron" else pytest.main(words[2:])) == 0, words
"""


def tutorial_files() -> dict[str, str]:
    """The page's Python blocks by the file that their first line names."""
    blocks = re.findall(r"```python\n# (hybridtron/\S+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


def block_with(text: str) -> str:
    """The page's one block of Python that has this in it, and is no file."""
    candidates = (block for block in blocks(PAGE, "python") if not block.startswith("# hybridtron/"))
    (match,) = (block for block in candidates if text in block)
    return match


def commands_of(*starts: str) -> list[str]:
    """The commands of the page's section that begin so, each as written."""
    section = PAGE.read_text().split("\n## A mixer\n")[1].split("\n## ")[0]
    shells = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    lines = "".join(shells).splitlines()
    return [next(line for line in lines if line.startswith(start)) for start in starts] or lines


class Workplace:
    """A copy of the package with the tutorial's files and lines, in which the page's commands run."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        for name in ("hybridtron", "configs", "examples"):
            shutil.copytree(ROOT / name, folder / name)
        for path, code in tutorial_files().items():
            (folder / path).write_text(code)
        with (folder / REGISTRY).open("a") as registry:
            registry.write(block_with('SPECS["ema"]'))
        self.small = [
            "data=folder", f"data.path={data}", "data.epochs=null", "model.width=32", "model.vocab_size=32",
            "model.layers.-.hidden=64", "phases.0.seq_len=16", "phases.0.global_batch=4", "phases.0.micro_batch=2",
            f"phases.0.tokens={STEPS * 4 * 16}", "run.eval_tokens=256", "run.sample_tokens=0",
            "optim.eps=1e-4",  # or AdamW's first steps make whole updates of tiny gradients, whose rounding differs
        ]  # fmt: skip

    def run(self, *words: str) -> str:
        """Run Python with these arguments in the copy; return its output."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "home"),
        }
        command = [sys.executable, "-P", *words]
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def execute(self, *commands: str) -> str:
        """Run a page's commands, those of Python in one process; training gets the small sizes."""
        in_process = []
        for program, *words in map(shlex.split, commands):
            words += self.small * ("train" in words)
            if program == "cp":
                shutil.copy(self.folder / words[0], self.folder / words[1])
            elif program == "torchrun":
                self.run("-m", "torch.distributed.run", *words)
            else:
                assert program == "hybridtron" or words[:2] == ["-m", "pytest"]
                in_process.append((program, words))
        if not in_process:
            return ""
        return self.run("-c", IN_ONE_PROCESS.format(in_process))

    def losses(self, run: str) -> list[float]:
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


@pytest.fixture
def workplace(tmp_path: Path, counting_folder: Path) -> Workplace:
    return Workplace(tmp_path / "copy", counting_folder)


def test_tutorial_is_short() -> None:
    files = tutorial_files()
    assert set(files) == {"hybridtron/architecture/ema.py", "hybridtron/mixers/ema.py"}
    assert sum(code.count("\n") for code in files.values()) < 110


def test_every_command_of_the_tutorial_is_run() -> None:
    assert set(commands_of()) == set(commands_of(CONTRACT, *ALONE, *AUDIT, *PARALLEL))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tutorial_mixer_holds_the_contract_trains_and_is_exported_and_imported(workplace: Workplace) -> None:
    """The contract's tests have the one line that the page adds to them."""
    assert OPTIONS in PAGE.read_text()
    for name in ("tests/conftest.py", "tests/mixers/test_contract.py", "pyproject.toml"):
        (workplace.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, workplace.folder / name)
    contract = workplace.folder / "tests/mixers/test_contract.py"
    contract.write_text(contract.read_text().replace("\nOPTIONS = {\n", f"\nOPTIONS = {{\n    {OPTIONS},\n", 1))
    reported = workplace.execute(*commands_of(CONTRACT, *ALONE))
    assert "skipped" not in reported
    assert int(re.findall(r"(\d+) passed", reported)[0]) > 20
    losses = workplace.losses("ema")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
    workplace.run("-c", block_with("AutoModelForCausalLM") + "import sys\nassert 'hybridtron' not in sys.modules\n")
    trained = Checkpoint.open(max((workplace.folder / "runs/ema/checkpoints").glob("step-*")))
    back = Checkpoint.open(workplace.folder / "ema-back")
    assert "layers.0.mixer.in_proj.weight.gate" in back.shapes
    assert all(torch.equal(trained.whole(key), back.whole(key)) for key in back.shapes)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_tutorial_mixer_over_two_tensor_ranks_has_the_gradients_of_one_process(workplace: Workplace) -> None:
    workplace.execute(*commands_of(*AUDIT))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_tutorial_mixer_over_two_tensor_ranks_trains_as_one_process(workplace: Workplace) -> None:
    """The run passes states on from row to row."""
    workplace.execute(*commands_of(*PARALLEL))
    losses_of_one = workplace.losses("ema_passing")
    two = workplace.losses("ema_tp2")
    assert len(losses_of_one) == STEPS
    assert two == pytest.approx(losses_of_one, rel=1e-4)
