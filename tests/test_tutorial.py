"""The tutorial of docs/extending.md works as written: its two files make a mixer that holds the contract and trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.model import ModelConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.conftest import random_batch, small_run
from tests.mixers import test_contract as contract

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def tutorial_files() -> dict[str, str]:
    """The page's Python blocks by the file that their first line names."""
    blocks = re.findall(r"```python\n# (hybridtron/\S+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


@pytest.fixture
def ema(monkeypatch: pytest.MonkeyPatch) -> Iterator[MixerSpec]:
    """The tutorial's mixer, registered as the tutorial says."""
    for path, code in tutorial_files().items():
        module = types.ModuleType(path.removesuffix(".py").replace("/", "."))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, path, "exec"), module.__dict__)
    monkeypatch.setitem(SPECS, "ema", sys.modules["hybridtron.architecture.ema"].EMASpec)
    return SPECS["ema"](expand=2)


def test_the_tutorial_is_short() -> None:
    files = tutorial_files()
    assert set(files) == {"hybridtron/architecture/ema.py", "hybridtron/mixers/ema.py"}
    assert sum(code.count("\n") for code in files.values()) < 80


def test_holds_the_contract(ema: MixerSpec) -> None:
    contract.test_module_has_the_parameters_that_its_spec_lists(ema)
    contract.test_state_has_the_parts_that_its_spec_lists(ema)
    contract.test_none_equals_a_state_of_zeros(ema)
    contract.test_document_in_mid_row_is_a_fresh_start(ema)
    contract.test_a_later_token_changes_nothing_before_it(ema)
    contract.test_no_document_sees_another(ema, None)
    contract.test_gradcheck(ema)
    contract.test_computes_in_bf16_with_fp32_weights_where_the_spec_says_so(ema)
    contract.test_flops_grow_with_nothing_but_what_is_seen(ema)
    for documents in (None, [[5, 16], [13, 8]]):
        for cut in (1, 13):
            contract.test_chunks_with_carried_state_equal_the_whole(ema, documents, cut)


@pytest.mark.usefixtures("ema")
def test_trains(alone: Groups) -> None:
    layers = {"E": {"kind": "ema"}, "-": {"kind": "swiglu", "hidden": 48}}
    config = ModelConfig(width=32, vocab_size=61, pattern="E-E-", layers=layers)
    engine, batch = Engine(small_run(config), alone), random_batch()
    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward([batch]).mean.item())
        engine.optimizer.step(1e-2)
    assert losses[-1] < losses[0] - 1


def test_is_exported_loaded_and_imported_with_the_stated_files_only(tmp_path: Path) -> None:
    """In a copy of the package: the page's two files and the line in the registry, nothing else."""
    root = PAGE.parents[1]
    shutil.copytree(root / "hybridtron", tmp_path / "hybridtron", ignore=shutil.ignore_patterns("__pycache__"))
    for path, code in tutorial_files().items():
        (tmp_path / path).write_text(code)
    registry = tmp_path / "hybridtron/architecture/__init__.py"
    text = registry.read_text().replace("\nSPECS", "from hybridtron.architecture.ema import EMASpec\n\nSPECS", 1)
    registry.write_text(text.replace("] = {\n", '] = {\n    "ema": EMASpec,\n', 1))
    check = (
        "from hybridtron.architecture import SPECS\n"
        "from tests.mixers import test_contract as contract\n"
        "contract.test_it_is_exported_by_the_shipped_class_and_imported_again(SPECS['ema'](expand=2))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", check], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
