"""An export at the end of a phase never stops a run: it is retried, and reported where it fails for good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridtron.interop import phase_exports
from hybridtron.storage.durable import temporary_of
from hybridtron.train.supervisor.sections import Section
from hybridtron.train.watchdog import Watchdog
from tests.train.conftest import Train

SIZES = "seq_len: 16, global_batch: 4, micro_batch: 2"
PHASES = (
    f"phases=[{{name: a, tokens: 64, {SIZES}, lr: 1e-3, export: custom}},{{name: b, tokens: 64, {SIZES}, lr: 1e-3}}]"
)


def exporting(monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> list[int]:
    """Answers of the exports to come, in order; of each attempt, how many steps had been trained."""
    attempts: list[int] = []

    def export(_checkpoint: object, output: Path, _wanted: object) -> None:
        attempts.append(len((output.parents[1] / "metrics.jsonl").read_text().splitlines()))
        if (answer := answers[len(attempts) - 1]) is not None:
            raise answer
        output.mkdir(parents=True)
        (output / "hybridtron_export.json").write_text('{"step": 1}')

    monkeypatch.setattr(phase_exports, "export_phase", export)
    return attempts


def outcome(run: Path) -> dict:
    return json.loads((run / "outcome.json").read_text())


@pytest.mark.slow
def test_training_continues_after_an_export_that_fails(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    full = OSError(28, "No space left on device")
    attempts = exporting(monkeypatch, full, full, full, None)
    assert train_small(PHASES) == 1
    assert attempts == [1, 2]  # at its own end, and at the end of the run
    assert (run / "logs/export-0.txt").exists()
    assert outcome(run)["outcome"] == "finished"
    assert list(outcome(run)["failed_exports"]) == ["a"]
    assert train_small(PHASES) == 1  # nothing to train: it tries again
    assert list(outcome(run)["failed_exports"]) == ["a"]
    assert train_small(PHASES) == 0
    assert "failed_exports" not in outcome(run)
    assert outcome(run)["outcome"] == "finished"
    assert train_small(PHASES) == 0
    assert attempts == [1, 2, 2, 2]


def test_exports_that_succeed_at_the_second_try_are_no_failures(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = exporting(monkeypatch, MemoryError(), None)
    assert train_small(PHASES) == 0
    assert attempts == [1, 2]
    assert "failed_exports" not in outcome(tmp_path / "run")


def test_each_export_has_the_whole_time_limit(train_small: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog gets a beat before each export, also where several follow one another."""
    events: list[str] = []
    beat = Watchdog.beat
    two_exports = PHASES.replace("lr: 1e-3}]", "lr: 1e-3, export: custom}]")

    def noted(watchdog: Watchdog, doing: str, section: Section, at_least_s: float = 0.0) -> None:
        events.append(doing)
        beat(watchdog, doing, section, at_least_s)

    def export(_checkpoint: object, output: Path, _wanted: object) -> None:
        events.append(f"export {output.name}")
        raise MemoryError

    monkeypatch.setattr(Watchdog, "beat", noted)
    monkeypatch.setattr(phase_exports, "export_phase", export)
    assert train_small(two_exports) == 1
    exports = [number for number, event in enumerate(events) if event.startswith("export ")]
    assert [events[number] for number in exports] == ["export a", "export a", "export b"]
    assert [events[number - 1] for number in exports] == [f"the work after phase {name}" for name in "aab"]


def test_killed_exports_are_retried_after_training(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = exporting(monkeypatch, None)
    temporary_of(tmp_path / "run/export/a").mkdir(parents=True)
    assert train_small(PHASES) == 0
    assert attempts == [2]
