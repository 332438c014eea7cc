"""Exact peaks: kept until code or configuration change, and deciding which of the fastest layouts fit."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtron.cli import inspect
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.fit import fit, settings_of
from hybridtron.problems import Unusable
from hybridtron.rehearse import exact
from hybridtron.rehearse.exact import rehearsed_peaks
from tests.rehearse.programs import PATIENT

LAPTOP = ["recipe=laptop", "precision=bf16"]
GB = 10**9


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """Return the settings that were rehearsed; the cache is a folder of the test's own."""
    calls: list[Sequence[str]] = []

    def rehearse(settings: Sequence[str], gpus: int, gpu: str) -> list[int]:
        calls.append(settings)
        return [len(calls)]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(exact, "_rehearse", rehearse)
    return calls


def test_rehearsed_peaks_are_cached_until_code_or_configuration_change(
    rehearsed: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearsed_peaks(LAPTOP, 1, "h100") == rehearsed_peaks(LAPTOP, 1, "h100") == [1]
    assert rehearsed_peaks([*LAPTOP, "phases.0.micro_batch=4"], 1, "h100") == [2]
    assert rehearsed_peaks(LAPTOP, 1, "b200") == [3]
    assert rehearsed_peaks(LAPTOP, 1, "h100") == [1]
    monkeypatch.setattr(exact, "code_digest", lambda: "changed")
    assert rehearsed_peaks(LAPTOP, 1, "h100") == [4]


def test_damaged_file_of_the_cache_is_written_again(rehearsed: list[Sequence[str]], tmp_path: Path) -> None:
    rehearsed_peaks(LAPTOP, 1, "h100")
    (file,) = (tmp_path / "hybridtron" / exact.FOLDER).iterdir()
    file.write_text("{")
    assert rehearsed_peaks(LAPTOP, 1, "h100") == rehearsed_peaks(LAPTOP, 1, "h100") == [2]


def test_peaks_are_rehearsed_again_without_a_cache(
    rehearsed: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [rehearsed_peaks(LAPTOP, 1, "h100") for _ in range(2)] == [[1], [2]]


def finalists(peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """Return rows of a micro-batch and rehearsed bytes of each layout, with these peaks by micro-batch."""

    def peak(settings: Sequence[str], gpus: int, gpu: str) -> list[int]:
        row = next(setting for setting in settings if "micro_batch" in setting).partition("=")[2]
        if row not in peaks:
            raise Unusable("no kernel for this", code="unavailable")
        return [1, peaks[row]]

    monkeypatch.setattr(inspect, "missing", lambda extra: None)
    monkeypatch.setattr(inspect, "rehearsed_peaks", peak)
    config = load(LAPTOP)
    fitting = fit(RunPlan.of(config), 1, 8 * GB)
    chosen = Namespace(settings=[*LAPTOP, "phases.0.micro_batch=8"], gpus=1, gpu="h100", fit=8 * GB)
    assert [layout.micro_batch for layout in fitting] == [8, 4, 2, 1]
    kept = inspect.with_rehearsals(fitting, config, chosen)
    return [(layout.micro_batch, layout.rehearsed) for layout in kept]


def test_fastest_layouts_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not fit exactly is left out, and one that can't be rehearsed keeps its plan."""
    assert finalists({"8": 8 * GB, "4": 7 * GB}, monkeypatch) == [(4, 7 * GB), (2, None), (1, None)]


def test_fit_without_triton_reports_planned_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect, "missing", lambda extra: "triton is absent")
    config = load(LAPTOP)
    fitting = fit(RunPlan.of(config), 1, 8 * GB)
    assert inspect.with_rehearsals(fitting, config, Namespace()) == fitting
    note = capsys.readouterr().err
    assert "10%" in note
    assert "triton is absent" in note


def test_settings_of_a_layout_replace_those_of_the_user() -> None:
    config = load(["recipe=samba_421m", "parallel.tensor=2"])
    settings = inspect.replace_settings(
        ["recipe=samba_421m", "parallel.tensor=2"], settings_of(fit(RunPlan.of(config), 1, 8e10)[0], config)
    )
    assert [setting for setting in settings if "tensor" in setting] == ["parallel.tensor=1"]
    assert load(settings).parallel.tensor == 1


@pytest.mark.slow
@PATIENT
def test_exact_peak_equals_that_of_a_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peaks = rehearsed_peaks(["recipe=laptop", "precision=bf16", "parallel.pipeline=2"], 2, "h100")
    assert len(peaks) == 2
    assert min(peaks) > 1e6
    with pytest.raises(Unusable) as refused:
        rehearsed_peaks(["recipe=laptop", "precision=bf16", "parallel.pipeline=2"], 3, "h100")
    assert refused.value.code == "unavailable"
    assert "2 or 4" in str(refused.value)
