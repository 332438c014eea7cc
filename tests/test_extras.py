"""Every extra resolves on the public package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hybridtron import requirements
from hybridtron.cli.doctor import inside

ROOT = Path(__file__).parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# pip asks these packages' own build scripts for their dependencies. The scripts want CUDA's compiler or a torch build
# with CUDA, but nothing is built here.
METADATA_ALONE = {
    "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE",
    "MAMBA_SKIP_CUDA_BUILD": "TRUE",
    "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE",
}
TORCH_WITH_CUDA = """
import torch.version
torch.version.cuda = torch.version.cuda or "13.0"
"""


def resolved(texts: list[str], folder: Path) -> dict[str, str]:
    """Return the version that pip would install of each distribution, with those that are installed left out."""
    (folder / "sitecustomize.py").write_text(TORCH_WITH_CUDA)
    report = folder / "report.json"
    environment = {**os.environ, **METADATA_ALONE, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", "--report", str(report)]
    done = subprocess.run(
        [*command, "--quiet", *texts], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    if "No matching distribution" in done.stderr and "from versions: none" in done.stderr:
        if os.environ.get("HYBRIDTRON_CI"):
            pytest.fail(done.stderr)
        pytest.skip("the package index is out of reach")
    assert done.returncode == 0, done.stderr
    installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in installs}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "extra", ["te", "kernels", "dali", "streaming", "mlflow", "metrics", "rehearse", "gguf", "vllm"]
)
def test_extra_resolves_on_the_index(extra: str, tmp_path: Path) -> None:
    versions = resolved(DECLARED[extra], tmp_path)
    wanted = requirements.requirements().extras[extra]
    for name, version_range in wanted.items():
        version = versions.get(name) or requirements.installed(name)
        assert version is not None or name in requirements.ALONE.get(extra, {}), name
        assert version is None or inside(version, version_range)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_package_that_is_nowhere_does_not_resolve(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        resolved(["mlflow-skinny>=9999"], tmp_path)


@pytest.mark.parametrize(("extra", "flag"), [("kernels", True), ("te", True), ("dali", False), ("mlflow", False)])
def test_command_builds_kernels_against_the_installed_torch(extra: str, flag: bool) -> None:
    command = requirements.install_command(DECLARED[extra], [extra])
    assert f"[{extra}]" in command
    assert ("--no-build-isolation" in command) == flag
