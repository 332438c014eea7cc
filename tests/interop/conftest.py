"""Checkpoints that several tests read are written once; shipped code runs from a folder of each test's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.schema import ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.parallel import groups as process_groups
from tests.interop.models import checkpoint_of, model_config

Stored = Callable[[str], Checkpoint]


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Return a function from a model's name to its checkpoint. All tests share it; a test that changes files copies
    them.
    """
    folder = tmp_path_factory.mktemp("stored")

    @cache
    def written(name: str) -> Checkpoint:
        with megatron_context():
            groups = process_groups.start(ParallelConfig(), launch=ProcessLaunch(0, 1))
            try:
                return checkpoint_of(model_config(name), groups, folder / name)
            finally:
                process_groups.stop()

    return written


@pytest.fixture(autouse=True)
def own_module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own module cache, where transformers copies shipped code, and forget imported modules.

    The modules are forgotten afterwards too: they name the test's cache, in which the next test would look for its own.
    """
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, "transformers_modules").exists()])
    forget_shipped_modules()
    yield
    forget_shipped_modules()


def forget_shipped_modules() -> None:
    """Remove all modules with shipped code from Python's table of imported modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]
