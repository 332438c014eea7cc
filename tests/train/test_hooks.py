"""Hooks: at which points a run calls them, which of `run.hooks` are refused, and that stored ones never run."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridtron.checkpoint import manifest
from hybridtron.checkpoint.files import write_bytes
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.manifest import File
from hybridtron.cli.main import main
from hybridtron.config.load import load, load_saved
from hybridtron.problems import Code
from hybridtron.train.hooks import Hook, RunContext, StepContext, load_hooks
from hybridtron.train.metrics import Decision, StepMetrics
from tests.cli.test_evaluate import lines_of
from tests.docs.conftest import ROOT, blocks
from tests.train.conftest import Refused, Train
from tests.train.faults import spoiled

PAGE = ROOT / "docs" / "extending.md"
EVENTS: list[str] = []
CARRIED = "states.mode=passing"


class Recorder(Hook):
    """Records each call, with the step."""

    def on_run_start(self, run: RunContext) -> None:
        EVENTS.append(f"run from {run.resumed_step} to {run.last_step}")

    def on_phase_start(self, context: StepContext) -> None:
        EVENTS.append(f"phase {context.phase.settings.name} at {context.step}")

    def on_evaluation(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        EVENTS.append(f"evaluation {context.step}")
        return metrics.adding({"seen": context.step})

    def on_step(self, context: StepContext, metrics: StepMetrics) -> StepMetrics:
        assert len(context.batches) == 2
        EVENTS.append(f"step {context.step}")
        return metrics

    def on_decision(self, decision: Decision) -> None:
        EVENTS.append(f"{decision.what} {decision.step}")

    def on_checkpoint(self, step: int, folder: Path) -> None:
        assert (folder / "manifest.json").exists()
        EVENTS.append(f"checkpoint {step}")

    def on_phase_end(self, context: StepContext) -> None:
        EVENTS.append(f"phase ends at {context.step}")

    def on_run_end(self, run: RunContext) -> None:
        EVENTS.append("run ends")

    def retry_failed(self, run: RunContext) -> None:
        EVENTS.append(f"retry at {run.resumed_step}")

    def close(self) -> None:
        EVENTS.append("close")


class NoHook:
    """A class of another kind."""


RECORDED = f"run.hooks=[{__name__}.Recorder]"


@pytest.fixture(autouse=True)
def events() -> Iterator[list[str]]:
    EVENTS.clear()
    yield EVENTS
    EVENTS.clear()


def test_hooks_are_called_in_order(train_small: Train, tmp_path: Path, events: list[str]) -> None:
    sizes = "seq_len: 16, global_batch: 4, micro_batch: 2, lr: 1e-3"
    phases = f"phases=[{{name: a, tokens: 128, {sizes}}},{{name: b, tokens: 64, {sizes}}}]"
    assert train_small(phases, RECORDED, "checkpoint.every=1") == 0
    assert events == [
        "run from 0 to 3",
        *("phase a at 0", "step 1", "checkpoint 1"),
        *("evaluation 2", "step 2", "checkpoint 2", "phase ends at 2"),
        *("phase b at 2", "evaluation 3", "step 3", "checkpoint 3", "phase ends at 3"),
        *("run ends", "close"),
    ]
    assert [line.get("hooks") for line in lines_of(tmp_path / "run" / "metrics.jsonl")] == [
        None,
        {"seen": 2.0},
        {"seen": 3.0},
    ]
    events.clear()
    assert train_small(phases, RECORDED, "checkpoint.every=1") == 0
    assert events == ["retry at 3"]


def test_resume_and_rollback_call_hooks_again(train_small: Train, events: list[str]) -> None:
    short = ("run.eval_every=1000", "checkpoint.every=2", "checkpoint.async=true", "optim.skips=2")
    assert train_small(RECORDED, short, "run.max_steps=2") == 0
    assert events[-4:] == ["checkpoint 2", "phase ends at 2", "run ends", "close"]
    events.clear()
    with spoiled(math.nan, [2, 4]):
        assert train_small(RECORDED, short, "run.max_steps=5") == 0
    assert events[:8] == [
        *("run from 2 to 5", "phase pretrain at 2", "refused 3", "step 3", "refused 4", "step 4"),
        *("rolled back 4", "phase pretrain at 2"),
    ]


def test_a_hook_is_closed_after_an_error(
    train_small: Train, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> StepMetrics:
        raise ZeroDivisionError

    monkeypatch.setattr(Recorder, "on_step", broken)
    with pytest.raises(ZeroDivisionError):
        train_small(RECORDED)
    assert events == ["run from 0 to 20", "phase pretrain at 0", "close"]


def test_the_hook_of_the_docs_logs_the_norm_of_states(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    (block,) = [block for block in blocks(PAGE, "python") if block.startswith("# state_norm.py")]
    Path("state_norm.py").write_text(block)
    path_before = list(sys.path)
    try:
        assert train_small("run.hooks=[{state_norm.StateNorm: {every: 2}}]", CARRIED, "run.max_steps=4") == 0
    finally:
        sys.modules.pop("state_norm", None)
    assert sys.path == path_before
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "hooks" in line] == [2, 4]
    assert all(line["hooks"]["state_norm"] > 0 for line in lines if "hooks" in line)
    with_hook = [line["loss"] for line in lines]
    assert train_small(CARRIED, "run.max_steps=4", "run.resume=never") == 0
    assert [line["loss"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")] == with_hook


REFUSED: dict[str, tuple[Code, str]] = {
    "no_such_module.Hook": ("unavailable", "ModuleNotFoundError"),
    f"{__name__}.Recorde": ("unknown-name", "Recorder"),
    f"{__name__}.NoHook": ("wrong-type", "hybridtron.train.hooks.Hook"),
    f"{{{__name__}.Recorder: {{every: 2}}}}": ("unsupported", "TypeError"),
    "Recorder": ("malformed", "MODULE.CLASS"),
    "{a.B: 1}": ("malformed", "MODULE.CLASS"),
    "3": ("malformed", "MODULE.CLASS"),
}


@pytest.mark.parametrize("entry", REFUSED)
@pytest.mark.parametrize("command", [["run.plan=true"], []], ids=["plan", "train"])
def test_unusable_hooks_are_refused_before_training(
    entry: str, command: list[str], refused: Refused, tmp_path: Path
) -> None:
    (problem,) = refused(f"run.hooks=[{__name__}.Recorder,{entry}]", command).values()
    code, named = REFUSED[entry]
    assert (problem.key, problem.code) == ("run.hooks.1", code)
    assert named in problem.message
    assert not (tmp_path / "run").exists()


def test_hook_modules_that_fail_are_refused_with_their_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken_hooks.py").write_text("1 / 0\n")
    hooks, problems = load_hooks(["broken_hooks.Mine"])
    assert hooks == []
    assert "ZeroDivisionError" in problems[0].message


def naming_code(path: Path) -> File:
    """Let a stored configuration name a hook; its entry in a manifest."""
    stored = yaml.safe_load(path.read_text())
    stored["run"]["hooks"] = ["planted.Hook"]
    path.unlink()
    return write_bytes(path, yaml.safe_dump(stored, sort_keys=False).encode())


def test_a_stored_configuration_runs_no_code(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint names a module that must not be imported: by commands, by run.weights and as a recipe."""
    assert train_small("run.max_steps=2") == 0
    monkeypatch.chdir(tmp_path)
    Path("planted.py").write_text("from pathlib import Path\nPath('planted.txt').touch()\n")
    run = tmp_path / "run"
    checkpoint = folder_of(run, 2)
    naming = [naming_code(run / "config.yaml"), naming_code(checkpoint / "config.yaml")]
    written = manifest.read(checkpoint)
    (checkpoint / "manifest.json").write_bytes(
        manifest.to_bytes(replace(written, files=written.files | {"config.yaml": naming[1]}))
    )
    for folder in (run, checkpoint):
        assert load_saved(folder / "config.yaml").run.hooks == []
        assert load([f"recipe={folder}/config.yaml"]).run.hooks == []
    Path("mine.yaml").write_text("defaults: [laptop]\nrun: {hooks: '${weights:run.hooks}'}\n")
    assert load(["recipe=mine.yaml", f"run.weights={run}"]).run.hooks == []
    assert main(["status", str(run)]) == 0
    assert train_small("run.max_steps=4", "run.resume=never", f"run.weights={run}", f"run.dir={tmp_path}/next") == 0
    assert not Path("planted.txt").exists()
    assert train_small("run.hooks=[planted.Hook]") == 2
    assert Path("planted.txt").exists(), "the user's own command may import it"
