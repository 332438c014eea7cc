"""Packages that are hidden during one package's import, and available again afterwards."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hybridtron.cli import fast_start

LIKE_MEGATRON = """
import torch
try:
    import a_logger
except ImportError:
    a_logger = None

@torch.compile
def fused(x):
    return x + 1
"""


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that looks for a logger and compiles a function, imported so."""
    (tmp_path / "a_logger.py").touch()
    (tmp_path / "like_megatron").mkdir()
    (tmp_path / "like_megatron" / "__init__.py").write_text(LIKE_MEGATRON)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(fast_start, "LOOKED_FOR", "like_megatron")
    monkeypatch.setattr(fast_start, "HIDDEN", ("a_logger",))
    fast_start.install()
    fast_start.install()
    yield importlib.import_module("like_megatron")
    for name in ("like_megatron", "a_logger"):
        sys.modules.pop(name, None)


def test_unused_packages_and_compilers_are_hidden(core: ModuleType) -> None:
    assert core.a_logger is None
    assert type(core.fused) is type(lambda: None)
    assert core.fused(1) == 2


def test_hidden_packages_are_available_afterwards(core: ModuleType) -> None:
    assert importlib.import_module("a_logger").__file__
    assert torch.compile.__module__ == "torch"
    assert type(core.__spec__.loader).__name__ == "SourceFileLoader"
    assert core.__path__
    assert sum(isinstance(finder, fast_start.FastStartFinder) for finder in sys.meta_path) == 1


def test_missing_package_stays_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(fast_start, "LOOKED_FOR", "no_such_package")
    fast_start.install()
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        importlib.import_module("no_such_package")


def test_garbage_collection_is_off_during_imports() -> None:
    with fast_start.uncollected():
        assert not gc.isenabled()
        with fast_start.uncollected():
            pass
        assert not gc.isenabled(), "as it was before"
    assert gc.isenabled()


@pytest.mark.slow
def test_optimizer_needs_no_compiler() -> None:
    code = f"""
import sys
from hybridtron.cli import fast_start
fast_start.install()
import torch, hybridtron.ops.registry, {fast_start.LOOKED_FOR}
weight = torch.ones(1, requires_grad=True)
weight.sum().backward()
optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0, fused=True)
optimizer.load_state_dict(optimizer.state_dict())
optimizer.step()
optimizer.zero_grad()
assert abs(weight.item() - 0.5) < 1e-6, "Adam's first step is the learning rate"
assert not {{"torch._dynamo", "torch._inductor"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
