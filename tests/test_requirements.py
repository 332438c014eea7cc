"""Requirements in pyproject.toml, and programs without some of the packages."""

from __future__ import annotations

import email
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtron import requirements
from hybridtron.cli.main import main
from hybridtron.requirements import is_there, missing

ROOT = Path(__file__).parents[1]
WITHOUT = """
import os, runpy, sys
absent, sys.argv = set(sys.argv[1].split(",")), sys.argv[2:]
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
sys.path[:0] = [os.path.dirname(sys.argv[0]), ""]  # the former as Python itself does
if sys.argv[0] == "hybridtron":
    runpy.run_module("hybridtron", run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def started_without(absent: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A program that finds everything but some modules."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, absent, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("absent", "command", "cure"),
    [
        ("hydra", ["train.py", "run.max_steps=1"], "pip install"),
        ("matplotlib", ["hybridtron", "plot", "."], "[plot]"),
        ("transformers", ["tools/convert.py", "export", "--checkpoint", "a", "--output", "b"], "[export]"),
    ],
)
def test_programs_report_a_missing_package_on_one_line(absent: str, command: list[str], cure: str) -> None:
    done = started_without(absent, command)
    assert done.returncode == 2
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    assert cure in line


@pytest.mark.parametrize("arguments", [["recipe=laptop"], ["--suite"], ["recipe=samba_421m", "--no-kernels"]])
def test_rehearse_reports_its_missing_extra(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        f"import sys; from hybridtron.cli.main import main; sys.exit(main({['rehearse', *arguments]!r}))"
    )
    done = started_without("triton", [str(tmp_path / "program.py")])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'triton is not installed: pip install --editable ".[rehearse]"\n'


def test_mirror_without_its_package_is_reported_before_training() -> None:
    done = started_without("boto3", ["train.py", "run.max_steps=1", "checkpoint.mirror=s3://bucket/a"])
    assert done.returncode == 2
    assert "checkpoint.mirror" in done.stderr
    assert "[s3]" in done.stderr


OF_LOCAL_FOLDERS = """
import sys
from pathlib import Path
import numpy as np
from hybridtron.data.mds.opening import open_folder
from hybridtron.data.mds.store import DocumentStore
from hybridtron.data.mds.verify import verify
from hybridtron.data.prepare.input_files import find
from hybridtron.data.prepare.parts import FolderSettings
from hybridtron.data.prepare.prepare_folder import prepare
from hybridtron.data.prepare.vocabulary import vocabulary_of
from hybridtron.storage.cache import CacheOptions
from tokenizers import Tokenizer, models
here = Path(sys.argv[1])
(here / "a.jsonl").write_text('{"text": "w1 w2"}')
tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(400)}, "w0"))
tokenizer.add_special_tokens(["</s>"])
vocabulary = vocabulary_of(tokenizer.to_str(), "words", "</s>")
prepare(find([str(here / "a.jsonl")]).inputs, here / "out", vocabulary, FolderSettings(validation=0))
assert not verify(here / "out").faults
cache = CacheOptions(here / "cache")
assert DocumentStore(open_folder(str(here / "out"), cache), "train", "text", cache).read(0, 1, 1)[0] == 400
again = prepare(find([str(here / "out/train/text")]).inputs, here / "again", vocabulary, FolderSettings(validation=0))
assert again.manifest.tokens("train") == 2
"""
ONLY_OF_STORES = "streaming,boto3,botocore,brotli,catalogue,filelock,PIL,snappy,tqdm"


def test_local_folders_need_no_package_of_stores(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OF_LOCAL_FOLDERS)
    done = started_without(ONLY_OF_STORES, [str(tmp_path / "program.py"), str(tmp_path)])
    assert done.returncode == 0, done.stderr


def test_benchmarks_report_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "benchmarks.mixer", raising=False)
    assert main(["bench", "mixer", "--quick"]) == 2
    assert "[export]" in capsys.readouterr().err


def test_help_needs_no_extra() -> None:
    done = started_without("matplotlib", ["hybridtron", "plot", "--help"])
    assert (done.returncode, done.stderr) == (0, "")


def test_extras_of_the_tests_are_installed() -> None:
    assert missing("prepare", "plot", "export", "s3", "streaming") is None


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"numpy", "pyarrow", "mosaicml-streaming"}
    monkeypatch.setattr(requirements, "is_there", lambda name: name not in absent)
    assert missing("prepare") == 'numpy, pyarrow are not installed: pip install --editable ".[prepare]"'
    assert missing("prepare", "streaming") == (
        'numpy, pyarrow, mosaicml-streaming are not installed: pip install --editable ".[prepare,streaming]" && '
        'pip install --no-deps "mosaicml-streaming==0.13.0"'
    )
    absent.clear()
    assert missing("streaming") is None


def test_installed_package_reads_requirements_from_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    about = email.message_from_string(
        "Requires-Python: <3.14,>=3.11\nProvides-Extra: s3\nProvides-Extra: streaming\nProvides-Extra: dev\n"
        "Requires-Dist: numpy<3,>=2.0\nRequires-Dist: boto3<2,>=1.40; extra == 's3'\n"
        'Requires-Dist: brotli<2,>=1.1; extra == "streaming"\nRequires-Dist: hybridtron[s3]; extra == "dev"\n'
    )
    monkeypatch.setattr(requirements, "PROJECT", Path("/nowhere/pyproject.toml"))
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: about)
    declared = requirements.requirements()
    assert declared.python == "<3.14,>=3.11"
    assert declared.required == {"numpy": "<3,>=2.0"}
    streaming = {"brotli": "<2,>=1.1", "mosaicml-streaming": "==0.13.0"}
    assert declared.extras == {"s3": {"boto3": "<2,>=1.40"}, "streaming": streaming, "dev": {}}
    monkeypatch.setattr(requirements, "is_there", lambda name: name != "boto3")
    assert missing("s3") == 'boto3 is not installed: pip install "hybridtron[s3]"'


def test_project_file_of_another_package_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert requirements.is_checkout()
    monkeypatch.setattr(requirements, "PROJECT", tmp_path / "pyproject.toml")
    assert not requirements.is_checkout()
    requirements.PROJECT.write_text('[project]\nname = "another"\n')
    assert not requirements.is_checkout()


def test_make_installs_the_packages_without_dependencies() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    alone = [f"{name}{version}" for of_extra in requirements.ALONE.values() for name, version in of_extra.items()]
    assert groups["without-dependencies"] == alone


def test_installed_and_absent_packages_are_distinguished() -> None:
    assert not is_there("no-such-package")
    assert is_there("megatron-core")


def test_extra_of_extras_lists_its_own_packages() -> None:
    extras = requirements.requirements().extras
    assert "pytest" in extras["dev"]
    assert not any("hybridtron" in names for names in extras.values())


def test_known_warnings_about_an_absent_gpu_are_hidden(capfd: pytest.CaptureFixture[str]) -> None:
    said = "import logging; log = logging.getLogger('torch.utils.cpp_extension'); "
    records = "log.warning('No CUDA runtime is found, using CUDA_HOME=/usr/local'); log.warning('another')"
    hidden = "from hybridtron.requirements import hide_known_warnings; hide_known_warnings(); "
    subprocess.run([sys.executable, "-c", said + hidden + records], check=True)
    assert capfd.readouterr().err == "another\n"
