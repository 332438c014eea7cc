"""Shipped code is the package's own code: copied in full, renamed where necessary, and refused where impossible."""

from __future__ import annotations

import ast
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hybridtron.architecture import SPECS
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.interop import definitions
from hybridtron.interop.definitions import SourceFile
from hybridtron.interop.shipped_code import NotShippable, is_shipped, mixers_file, shipped_code

ARCHIVE = Path(__file__).parents[1] / "compatibility/written_by_0.1.0.tar.xz"
Edit = Callable[[str, str, str], None]


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Changes a file of the package in a copy that everything is taken from; the old text "" adds to its end."""
    copy = tmp_path / "hybridtron"
    shutil.copytree(definitions.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(definitions, "PACKAGE", copy)

    def change(file: str, old: str, new: str) -> None:
        text = (copy / file).read_text()
        assert old in text
        if old:
            changed = text.replace(old, new, 1)
        else:
            changed = text + new
        (copy / file).write_text(changed)
        forget()

    def forget() -> None:
        SourceFile.of.cache_clear()
        mixers_file.cache_clear()

    forget()
    yield change
    forget()


def generated_names() -> dict[str, Any]:
    """Run the generated file with its neighbours, and return its names."""
    import hybridtron.hf

    module = ModuleType(f"{hybridtron.hf.__name__}.generated")
    sys.modules[module.__name__] = module  # where dataclasses look for it
    try:
        exec(compile(mixers_file(), "generated", "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def test_generated_file_has_every_mixer_and_no_choice_of_forms() -> None:
    text = mixers_file()
    assert set(generated_names()["MIXERS"]) == set(SPECS)
    tree = ast.parse(text)
    assert not [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("form", "reference")
    ]
    modules = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "hybridtron" not in {module.split(".")[0] for module in modules}


def test_change_of_an_op_changes_the_shipped_code(edit: Edit) -> None:
    before = mixers_file()
    old = "F.silu(multiply(gate, inputs.multiplier)) * up"
    new = "F.gelu(multiply(gate, inputs.multiplier)) * up"
    edit("ops/swiglu/reference.py", old, new)
    assert mixers_file() == before.replace(old, new) != before


def test_equal_names_of_two_files_stay_apart(edit: Edit) -> None:
    """An argument or a local variable may have the same name too."""
    edit("ops/swiglu/reference.py", "", "\n\ndef twice(x: Tensor) -> Tensor:\n    return x + x\n")
    edit("ops/conv/reference.py", "", "\n\ndef twice(x: Tensor, by: int = 3) -> Tensor:\n    return by * x\n")
    edit(
        "mixers/swiglu.py",
        "    def forward(",
        "    def probe(self, x: Tensor) -> list[Tensor]:\n"
        "        return [twice(x), apart(x, x), *(twice for twice in (x,))]\n\n"
        "    def forward(",
    )
    edit(
        "mixers/swiglu.py",
        "from hybridtron.parallel",
        "from hybridtron.ops.conv.reference import twice\n"
        "from hybridtron.ops.swiglu.reference import twice as other\nfrom hybridtron.parallel",
    )
    edit(
        "mixers/swiglu.py",
        "",
        "\n\ndef apart(x: Tensor, twice: Tensor) -> Tensor:\n    y = other(twice)\n    return other(x) - y + x\n",
    )
    x = torch.ones(1)
    names = generated_names()
    assert [part.item() for part in names["SwiGLU"].probe(None, x)] == [3, 1, 1]
    assert names["twice_of_ops_conv_reference"](x) == 3
    assert names["twice_of_ops_swiglu_reference"](x) == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import numpy\nnumpy.ones", "numpy"),
        ("from hybridtron.ops import scan\nscan.reference", "scan"),
        ("lost", "lost"),
    ],
)
def test_unshippable_name_is_reported_with_its_file(line: str, named: str, edit: Edit) -> None:
    statement, _, expression = line.rpartition("\n")
    edit("mixers/swiglu.py", "import annotations\n", f"import annotations\n{statement}\n")
    edit("mixers/swiglu.py", "        return MixerOutput(", f"        {expression}\n        return MixerOutput(")
    with pytest.raises(NotShippable, match=rf"mixers/swiglu.py: SwiGLU uses {named}"):
        mixers_file()


def test_files_of_an_earlier_version_are_known() -> None:
    with tarfile.open(ARCHIVE) as archive:
        code = [member for member in archive if member.name.startswith("hf/") and member.name.endswith(".py")]
        before = {Path(m.name).name: file.read() for m in code if (file := archive.extractfile(m)) is not None}
    now = shipped_code()
    assert is_shipped(before)
    assert is_shipped(now)
    for files in (before, now):
        name = min(files)
        assert not is_shipped({**files, name: files[name] + b" "})
        assert not is_shipped({key: code for key, code in files.items() if key != name})
    assert not is_shipped({**before, **now})


def test_unused_code_is_not_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtron.interop.shipped_code.SPECS", {"swiglu": SwiGLUSpec})
    mixers_file.cache_clear()
    assert list(generated_names()["MIXERS"]) == ["swiglu"]
    assert "class Mamba" not in mixers_file()
    mixers_file.cache_clear()
