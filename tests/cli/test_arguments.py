"""Messages about paths that are no checkpoints: an export, a name on the Hub, a run that needs no import."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.cli import checkpoint, evaluate, generate, rehearse
from hybridtron.cli.arguments import checkpoints_at, importable
from hybridtron.config.export_class import RECORD
from hybridtron.problems import Unusable
from tests.interop.refusals import refusal as refusal_of_conversion
from tests.refusals import refusal, usage_error


def test_exported_folder_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "hybridtron"}')
    (tmp_path / RECORD).write_text("{}")
    errors = [refusal(command, [tmp_path]) for command in (generate.main, evaluate.main)]
    errors += [refusal(checkpoint.main, ["list", tmp_path])]
    errors += [refusal_of_conversion(["export", tmp_path, "--output", tmp_path / "out"])]
    for error in errors:
        assert error.code == "unreadable"
        assert f"`hybridtron import {tmp_path} --output DIR`" in str(error)


def test_model_of_transformers_is_refused_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Unusable) as refused:
        checkpoints_at(tmp_path)
    assert refused.value.code == "unreadable"


def test_names_on_the_hub_get_the_command_that_downloads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    error = refusal(generate.main, ["meta-llama/Llama-3.2-1B"])
    assert error.code == "no-file"
    assert "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`" in str(error)
    assert "`hybridtron import Llama-3.2-1B --output DIR`" in str(error)
    for name in ("runs/laptop", "laptop", "/meta/llama", "../meta/llama"):
        with pytest.raises(Unusable) as refused:
            checkpoints_at(Path(name))
        assert "hf download" not in str(refused.value), name


def test_import_of_a_run_or_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/laptop/checkpoints/step-00000001").mkdir(parents=True)
    (tmp_path / "runs/laptop/checkpoints/step-00000001/manifest.json").touch()
    for name in ("runs/laptop", "runs/laptop/checkpoints/step-00000001"):
        with pytest.raises(Unusable) as refused:
            importable(Path(name))
        assert refused.value.code == "unsupported"
        assert f"run.weights={name}" in str(refused.value)
    with pytest.raises(Unusable) as refused:
        importable(Path("meta-llama/Llama-3.2-1B"))
    assert refused.value.code == "no-file"
    assert "hybridtron import" not in str(refused.value)
    assert importable(tmp_path) == tmp_path


@pytest.mark.parametrize("gpus", ["0", "-4", "two"])
def test_number_of_processes_to_simulate_is_at_least_one(gpus: str) -> None:
    assert usage_error(rehearse.main, ["recipe=samba_421m", f"--gpus={gpus}"]) == ("--gpus", "malformed")
    assert rehearse.parse(["recipe=samba_421m", "--gpus=16"]).gpus == 16
