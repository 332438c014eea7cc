"""Messages about paths that are no checkpoints: an export, a name on the Hub, a run that needs no import."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.cli import rehearse
from hybridtron.cli.given import checkpoints_at, importable
from hybridtron.cli.main import main
from hybridtron.config.exportable import RECORD
from hybridtron.problems import Unusable


@pytest.mark.parametrize("command", [["generate"], ["evaluate"], ["export", "--output", "out"], ["checkpoint", "list"]])
def test_an_exported_folder_is_recognized(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "laptop-hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "hybridtron"}')
    (folder / RECORD).write_text("{}")
    assert main([*command, str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"`hybridtron import {folder} --output DIR`" in said


def test_a_model_of_transformers_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Unusable) as refused:
        checkpoints_at(tmp_path)
    assert refused.value.code == "unreadable"


def test_names_on_the_hub_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert main(["generate", "meta-llama/Llama-3.2-1B"]) == 2
    said = capsys.readouterr().err
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`" in said
    assert "`hybridtron import Llama-3.2-1B --output DIR`" in said
    for name in ("runs/laptop", "laptop", "/meta/llama", "../meta/llama"):
        with pytest.raises(Unusable) as refused:
            checkpoints_at(Path(name))
        assert "hf download" not in str(refused.value), name


def test_import_of_a_run_or_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/laptop/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "runs/laptop/checkpoints/step-00000001/manifest.json").touch()
    for name in ("runs/laptop", "runs/laptop/checkpoints/step-00000001"):
        assert main(["import", name, "--output", "out"]) == 2
        said = capsys.readouterr().err
        assert f"run.weights={name}" in said
    assert main(["import", "meta-llama/Llama-3.2-1B", "--output", "out"]) == 2
    said = capsys.readouterr().err
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B` gets it" in said
    assert "hybridtron import" not in said
    assert importable(tmp_path) == tmp_path


@pytest.mark.parametrize("gpus", ["0", "-4", "two"])
def test_processes_to_rehearse_are_at_least_one(gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        rehearse.parse(["recipe=samba_421m", f"--gpus={gpus}"])
    assert f"argument --gpus: '{gpus}' must be a whole number of at least 1" in capsys.readouterr().err
    assert rehearse.parse(["recipe=samba_421m", "--gpus=16"]).gpus == 16
