"""A run that was killed continues from a local checkpoint with the same bits, or says why it does not."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.local_identity import Identity, identity_for, limit_stored, renew_identity, stored_identity
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import RunConfig
from hybridtron.engine.corruption import WEIGHTS
from hybridtron.engine.engine import Engine
from hybridtron.parallel.control import Control
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError
from hybridtron.train import corruption
from hybridtron.train.corruption import CheckFailed, CorruptionWatch
from hybridtron.train.local_checkpoints import SavePlace, SaveTimes, check_host_names, layout_of_parts
from hybridtron.train.outcome import CorruptRank
from hybridtron.train.run_training import open_folder
from hybridtron.train.supervisor.sections import Section, SectionPipe, SectionWork
from hybridtron.train.watchdog import Watchdog
from tests.conftest import small_run
from tests.train.conftest import Refused, Train, small_run_arguments
from tests.train.faults import happening, trained
from tests.train.test_corruption import flip_state
from tests.train.test_launchers import TORCHRUN, descendants, started, wait_until_step

LAST = 20
TEXT = "0123456789abcdef"
CARRIED = "states.mode=passing"
MORE = (CARRIED, "checkpoint.async=true")


def tensors_of(run: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder_of(run, LAST))
    return {key: checkpoint.whole(key) for key in checkpoint.shapes}


def steps_on(disk: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in disk.glob("*/*/step-*"))


def settings(disk: Path) -> list[str]:
    return ["checkpoint.every=100", "checkpoint.local_every=3", f"checkpoint.local_dir={disk}"]


def interrupted(train_small: Train, disk: Path, call: int, *more: str) -> None:
    """Let a run fail before the forward and backward pass with a number, counted from 1 in this start."""
    with happening("raise", Engine, "forward_backward", call), pytest.raises(RuntimeError, match="out of luck"):
        train_small(*settings(disk), *more)


def test_run_continues_from_its_local_checkpoint(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    assert train_small("checkpoint.every=100", CARRIED) == 0
    undisturbed = tensors_of(run)
    shutil.rmtree(run)
    disk = tmp_path / "disk"
    interrupted(train_small, disk, 12, CARRIED)
    assert steps_on(disk) == [6, 9]
    assert not list((run / "checkpoints").glob("step-*"))
    (newest,) = disk.glob("*/*/step-00000009/part-00000/model-00000.safetensors")
    stored = bytearray(newest.read_bytes())
    stored[-1] ^= 1
    newest.write_bytes(stored)
    capsys.readouterr()
    assert train_small(*settings(disk), CARRIED) == 0
    said = capsys.readouterr().err
    assert "model-00000.safetensors is damaged" in said
    assert "local checkpoint of step 9 is not used" in said
    assert "resuming from the local checkpoint of step 6" in caplog.text
    assert [line["step"] for line in trained(run)] == list(range(1, LAST + 1))
    resumed = tensors_of(run)
    assert resumed.keys() == undisturbed.keys()
    assert all(torch.equal(resumed[key], undisturbed[key]) for key in undisturbed)


def test_newer_checkpoint_in_the_folder_of_the_run_goes_first(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    interrupted(train_small, disk, 12, "checkpoint.every=10")
    assert steps_on(disk) == [6, 9]
    capsys.readouterr()
    interrupted(train_small, disk, 2, "checkpoint.every=10")
    assert "local checkpoint" not in capsys.readouterr().err.lower()
    assert [line["step"] for line in trained(tmp_path / "run")] == list(range(1, 12))


def test_start_from_scratch_does_not_find_earlier_local_checkpoints(train_small: Train, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    interrupted(train_small, disk, 8)
    interrupted(train_small, disk, 2, "run.resume=never")
    assert steps_on(disk) == [3, 6]
    interrupted(train_small, disk, 2)
    assert [line["step"] for line in trained(tmp_path / "run")] == [1]


def test_start_from_scratch_renews_the_identity_before_it_trains(tmp_path: Path) -> None:
    """A start that is killed before its first step, or has no folder for local checkpoints, abandons them too."""
    run = tmp_path / "run"
    config = load([*small_run_arguments(tmp_path / "data", run), "run.resume=never"])
    open_folder(None, None, config, [])
    assert stored_identity(run) is None
    first = identity_for(run)
    open_folder(None, None, config, [])
    second = stored_identity(run)
    assert second is not None
    assert second.text != first.text
    open_folder(None, None, load([*small_run_arguments(tmp_path / "data", run), "run.resume=auto"]), [])
    assert stored_identity(run) == second


@pytest.mark.parametrize(
    "content",
    [
        "",
        "id x\n",
        "../../elsewhere\n",
        f"{TEXT} 3\n",
        f"{TEXT}\n-3\n",
        f"{TEXT}\n1_0\n",
        f"{TEXT}\n\n3\n",
        "x" * 2**17,
    ],
)
def test_damaged_identity_is_refused_until_a_start_from_scratch(content: str, refused: Refused, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = run / "checkpoints" / "local"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert refused(*settings(tmp_path / "disk"))[str(path)].code == "unreadable"
    limit_stored(run, 9)
    assert path.read_text() == content
    renew_identity(run)
    assert stored_identity(run) is not None


def test_nodes_with_one_host_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gathered(Control):
        def all_gather(self, value: Any) -> list[Any]:
            return ["n1", "n1", "n2", "n2", hosts[2], hosts[2]]

    control = Gathered(0, [[0, 1], [2, 3], [4, 5]], 0, None, None)
    hosts = ["n1", "n2", "n3"]
    check_host_names(control)
    hosts[2] = "n1"
    with pytest.raises(ConfigError) as refusal:
        check_host_names(control)
    (problem,) = refusal.value.problems
    assert (problem.key, problem.code) == ("checkpoint.local_dir", "conflict")
    assert "2 nodes are named n1" in problem.message


@pytest.mark.slow
def test_start_from_a_path_continues_from_its_first_local_checkpoint(
    train_small: Train, refused: Refused, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = tmp_path / "base"
    assert train_small("checkpoint.every=5", "run.max_steps=5", f"run.dir={base}") == 0
    disk = tmp_path / "disk"
    named = f"run.resume={folder_of(base, 5)}"
    interrupted(train_small, disk, 6, named)
    assert steps_on(disk) == [6, 9]
    interrupted(train_small, disk, 2)
    assert "resuming from the local checkpoint of step 9" in caplog.text
    shutil.rmtree(disk)
    assert refused(*settings(disk))["run.resume"].code == "missing"


def test_an_evaluation_after_the_first_step_announces_this_step(
    train_small: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[SectionWork] = []
    monkeypatch.setattr(SectionPipe, "announce", lambda _, work: works.append(work))
    assert train_small("run.eval_every=1", "run.max_steps=2") == 0
    first = next(work for work in works if work.section is Section.evaluation)
    assert first.step == 1


def test_corruption_limits_local_checkpoints_of_earlier_starts(
    tmp_path: Path, alone: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a checkpoint in the run's folder can't be renamed."""
    (tmp_path / "checkpoints").mkdir()
    text = identity_for(tmp_path).text
    watch = CorruptionWatch(RunConfig(verify_state=100), alone, tmp_path)
    monkeypatch.setattr(corruption.checkpoints, "archive_later", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        watch.archive_suspects(CheckFailed(WEIGHTS, 21, "weights differ", rank=-1, newest=9), None)
    assert stored_identity(tmp_path) == Identity(text, (9,))


def test_full_local_disk_is_a_warning(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hybridtron.checkpoint.local_save.write_kinds", full)
    assert train_small(*settings(tmp_path / "disk"), "run.max_steps=4") == 0
    assert "LOCAL CHECKPOINT NOT WRITTEN at step 3: " in capsys.readouterr().err
    assert Checkpoint.open(folder_of(tmp_path / "run", 4)).meta.step == 4


def test_supervisors_hear_of_local_saves_in_a_section_of_their_own(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves: list[tuple[str, Section]] = []
    beat = Watchdog.beat

    def noted(watchdog: Watchdog, doing: str, section: Section, at_least_s: float = 0.0) -> None:
        if "checkpoint of step" in doing and section is not Section.settle:
            saves.append((doing, section))
        beat(watchdog, doing, section, at_least_s)

    monkeypatch.setattr(Watchdog, "beat", noted)
    assert train_small(*settings(tmp_path / "disk"), "run.max_steps=4") == 0
    assert saves == [
        ("the local checkpoint of step 3", Section.local_save),
        ("the checkpoint of step 4", Section.save),
    ]


def test_start_after_corruption_uses_no_local_checkpoint_after_the_last_verified_step(
    train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    chosen = [*settings(disk), "checkpoint.local_every=2", "run.verify_state=1"]
    update = Engine.step
    updates: list[int] = []

    def faulty(engine: Engine, *arguments: Any) -> Any:
        updates.append(1)
        if len(updates) == 7:
            shutil.copytree(disk, tmp_path / "before")
            flip_state("exp_avg", engine)
        return update(engine, *arguments)

    monkeypatch.setattr(Engine, "step", faulty)
    with pytest.raises(CorruptRank):
        train_small(*chosen)
    assert steps_on(tmp_path / "before") == [4, 6]
    assert steps_on(disk) == [4]
    assert "local checkpoints after step 5 may be corrupt" in caplog.text
    shutil.rmtree(disk)
    shutil.copytree(tmp_path / "before", disk)  # as if the disk had been away
    assert train_small(*chosen, "run.max_steps=8") == 0
    assert "resuming from the local checkpoint of step 4" in caplog.text


def test_checkpoints_in_the_folder_of_the_run_replace_local_ones(tmp_path: Path) -> None:
    config = load([*small_run_arguments(tmp_path / "data", tmp_path / "run"), *settings(tmp_path)])
    config.checkpoint.every = "6"
    times = SaveTimes(config, RunPlan.of(config).phases[0])
    places = [times.after(step, refused=step in (3, 6), at_once=step == 8) for step in range(1, 10)]
    assert places[:6] == [None, None, None, SavePlace.local, None, None]
    assert places[6:] == [SavePlace.shared, SavePlace.shared, SavePlace.local]


def test_layout_of_parts_names_what_decides_the_rectangles_of_a_rank(alone: Groups) -> None:
    plain = small_run()
    settings_of_layout: list[dict[str, Any]] = [
        {},
        {"virtual_pipeline": 2},
        {"expert": 2},
        {"expert_tensor": 2},
        {"distributed_optimizer": False},
        {"overlap_grad_reduce": True},
    ]
    layouts = [
        layout_of_parts(replace(plain, parallel=replace(plain.parallel, **changed)), alone)
        for changed in settings_of_layout
    ]
    assert len(set(layouts)) == len(layouts)
    same = replace(plain, parallel=replace(plain.parallel, overlap_grad_reduce=False, expert_tensor=1))
    assert layout_of_parts(same, alone) == layouts[0]  # null chooses these values


def test_local_checkpoint_of_another_layout_is_refused_with_both_layouts(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    interrupted(train_small, disk, 5)
    capsys.readouterr()
    interrupted(train_small, disk, 2, "parallel.distributed_optimizer=false")
    said = capsys.readouterr().err
    assert "local checkpoint of step 3 is not used: its layout is tensor 1" in said
    assert "distributed_optimizer True" in said
    assert "distributed_optimizer False" in said
    assert [line["step"] for line in trained(tmp_path / "run")] == [1]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_killed_ranks_continue_from_a_local_checkpoint(
    counting_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*small_run_arguments(counting_folder, tmp_path / "run"), *settings(tmp_path / "disk"), *MORE]
    whole = [*small_run_arguments(counting_folder, tmp_path / "whole"), "checkpoint.every=100", *MORE]
    with started([*TORCHRUN, "train.py", *whole]) as torchrun:
        assert torchrun.wait(200) == 0
    with started([*TORCHRUN, "train.py", *arguments]) as torchrun:
        wait_until_step(tmp_path / "run", 8, torchrun)
        for process in descendants(torchrun.pid):
            os.kill(process, signal.SIGKILL)
    with started([*TORCHRUN, "train.py", *arguments]) as torchrun:
        assert torchrun.wait(200) == 0
    assert "resuming from the local checkpoint of step" in capfd.readouterr().out
    first = tensors_of(tmp_path / "whole")
    second = tensors_of(tmp_path / "run")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
