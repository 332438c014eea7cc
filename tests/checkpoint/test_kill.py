"""A real SIGKILL at every flush and rename of a save: afterwards either the old or the new checkpoint loads in full."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import CheckpointConfig
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from tests.checkpoint.conftest import Write, trained
from tests.conftest import serving

CALLS = ("fsync", "rename", "unlink", "rmdir")


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Do the work in a forked process that kills itself before its n-th such call; whether it came to that."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # a process group that is garbage would be torn down here, where its threads are not
        # The first use after a fork replaces torch's thread pool; two threads at once would race for it.
        torch.set_num_threads(torch.get_num_threads())
        seen = 0

        def counting(call: Callable[..., object]) -> Callable[..., object]:
            def counted(*arguments: object, **options: object) -> object:
                nonlocal seen
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return counted

        for name in CALLS:
            setattr(os, name, counting(getattr(os, name)))
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WTERMSIG(status) in (0, signal.SIGKILL), f"the process that saves died of signal {os.WTERMSIG(status)}"
    return os.WIFSIGNALED(status)


@pytest.mark.slow
@pytest.mark.parametrize(
    "again",
    [pytest.param(False, id="a new step"), pytest.param(True, id="a step that is there")],
)
def test_kill_at_any_step_of_a_save_leaves_a_valid_checkpoint(
    alone: Groups, write: Write, tmp_path: Path, again: bool
) -> None:
    engine = trained(alone)
    before = trained(alone, steps=3)
    settings = CheckpointConfig(keep=1)
    tokenizer = tmp_path / "tokenizer.json"
    loaded = {1: before, 2: engine}
    survived = []
    other = Engine(resolve(engine.config)[0], alone)
    for number in range(1, 100):
        write(before, 1, settings=CheckpointConfig(keep=9))
        if again:
            write(engine, 2, settings=CheckpointConfig(keep=9))
        engine.config.checkpoint = settings

        def save() -> None:
            saver = Saver(RunPlan.of(engine.config), tmp_path, alone)
            saver.save(engine, meta_of(engine, 2, {}), tokenizer)

        died = killed_at(number, save)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restored = restore_newest(valid_checkpoints(tmp_path), serving(other), tmp_path)
        survived.append(restored.meta.step)
        wanted = loaded[restored.meta.step]
        ours, theirs = ([b.data for of_file in e.blocks().values() for b in of_file] for e in (other, wanted))
        assert all(map(torch.equal, ours, theirs)), f"killed at call {number}"
        if not died:
            break
        shutil.rmtree(tmp_path / "checkpoints")
    assert len(survived) > 12
    assert survived[-1] == 2
    assert set(survived) == {1, 2}
