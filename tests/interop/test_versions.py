"""Other versions of transformers compute an export as the installed version does, exactly if the rules say so.

pip installs each version in a folder of its own, without dependencies (60 MB).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from hybridtron.config.choices import Export
from hybridtron.interop.consumers import NEWEST_TRANSFORMERS, oldest_transformers
from hybridtron.interop.export import ExportPlan, export, target_of
from tests.interop.conftest import Stored
from tests.interop.models import CLASSES, MAMBA2, MODELS

CODE = ("samba", "everything")
ONE_GROUP = {"M": {**MAMBA2, "groups": 1}}
NAMES = (*CLASSES, "nemotron_h-experts", "zamba2-floor", "falcon_h1-normed", "mamba2-group", *CODE)
CHILD = Path(__file__).with_name("load_exports.py")
HUB = {"5.16.0": "huggingface_hub<2"}  # what the version needs instead of the installed package


def exports(stored: Stored, folder: Path) -> None:
    for name in NAMES:
        source = stored(name)
        plan = ExportPlan(source, target_of(source.plan.arch, Export.auto), None, 10**9)
        export(folder / name, plan, lambda _: None, lambda done, of: None)


def results(folder: Path, file: Path, packages: Path | None) -> dict[str, Any]:
    """Load all exports in another process, with packages that come before the installed ones."""
    path = {} if packages is None else {"PYTHONPATH": str(packages)}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = inherited | path | {"HF_MODULES_CACHE": str(file.with_suffix(".modules")), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(CHILD), str(folder), str(file)]
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return torch.load(file, weights_only=True)


def equal(newest: Any, older: Any) -> bool:
    if isinstance(newest, str) or isinstance(older, str):
        return False
    return bool((newest[0] - older[0]).abs().max() <= 1e-5 * newest[0].abs().max()) and torch.equal(newest[1], older[1])


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("version", ["5.16.0", "5.20.0"])
def test_a_version_computes_the_same_exactly_if_the_rules_say_so(
    version: str, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "mamba2-group", ("M*2", ONE_GROUP, True))
    packages = tmp_path / "packages"
    wanted = [f"transformers=={version}", *([HUB[version]] if version in HUB else [])]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), *wanted]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"pip can't install {wanted}: {installed.stderr[-200:]}")
    exports(stored, tmp_path / "exports")
    newest = results(tmp_path / "exports", tmp_path / "here.pt", None)
    older = results(tmp_path / "exports", tmp_path / "there.pt", packages)
    assert (Version(newest["version"]).release[:2], older["version"]) == (Version(NEWEST_TRANSFORMERS).release, version)
    for name in NAMES:
        config = json.loads((tmp_path / f"exports/{name}/config.json").read_text())
        allowed = Version(oldest_transformers(config)) <= Version(version)
        assert equal(newest[name], older[name]) == allowed, (name, older[name])
    for name in CODE:
        assert (newest[f"{name}: use"], older[f"{name}: use"]) == ("", "")
