"""Local checkpoints: lost and damaged parts, full disks, and other layouts, on simulated nodes."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint import local_files, local_restore, local_save
from hybridtron.checkpoint.folder import newest, step_folders
from hybridtron.checkpoint.local import LocalCheckpoint, NodePartRecord, drop_after, part_name
from hybridtron.checkpoint.local_identity import Identity, identity_for, stored_identity
from hybridtron.checkpoint.local_restore import newest_local
from hybridtron.checkpoint.local_save import LocalWriter
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, layout_of, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config
from hybridtron.engine.engine import Engine
from hybridtron.parallel import control as controls
from hybridtron.parallel import passing
from hybridtron.parallel.control import Control
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from tests.conftest import random_batch, serving, small_run
from tests.distributed import run_distributed

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(280)]
Outcome = dict[str, Any]
RUN_ID = "0123456789abcdef"


def flip(path: Path) -> None:
    stored = bytearray(path.read_bytes())
    stored[-5] ^= 1
    path.write_bytes(stored)


def blocks_of(engine: Engine) -> list[Tensor]:
    return [block.data for of_kind in engine.blocks().values() for block in of_kind]


def noting(outcome: dict[str, Any], printed: io.StringIO) -> Callable[[str, object], None]:
    """Return a function that notes a value under a name, with the text that was printed since the last note."""

    def note(name: str, value: object) -> None:
        outcome[name] = (value, printed.getvalue())
        printed.truncate(0)
        printed.seek(0)

    return note


class Node:
    """A rank of a simulated node, with an engine and local checkpoints of steps 1 to 3."""

    def __init__(self, seat: Seat, nodes: str, groups: Groups, config: Config, folder: Path) -> None:
        self.name = nodes[seat.rank]
        self.groups = groups
        self.control = groups.control
        self.layout = layout_of(config, groups)
        self.folder = folder / "disks" / self.name
        self.run_dir = folder / "run"
        background = controls.form_again(self.control, timedelta(seconds=120))
        (self.run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        writer = LocalWriter(
            self.folder, self.control, background, self.layout, run_dir=self.run_dir, identity=Identity(RUN_ID)
        )
        self.engine = Engine(resolve(config)[0], groups)
        self.saver = Saver(RunPlan.of(config), self.run_dir, groups, local=writer)
        self.tokenizer = folder / "tokenizer.json"
        self.states: dict[int, list[Tensor]] = {}

    def train_and_save(self, step: int) -> None:
        self.engine.forward_backward([random_batch()])
        self.engine.step(1e-2)
        self.states[step] = [data.clone() for data in blocks_of(self.engine)]
        self.saver.save_locally(self.engine, meta_of(self.engine, step, {}), self.tokenizer)
        self.saver.settle()

    def on(self, name: str, work: Callable[[], object]) -> None:
        """Do something on the first rank of a node, between two barriers."""
        self.control.barrier()
        if self.name == name and self.control.leads:
            work()
        self.control.barrier()

    def restart(self, layout: str | None = None) -> int | None:
        """Spoil all blocks and resume; return the step, or None. Afterwards the blocks must be those of the step."""
        with torch.no_grad():
            for data in blocks_of(self.engine):
                data.zero_()
        identity = stored_identity(self.run_dir) or Identity(RUN_ID)
        start = newest_local(self.folder, self.control, layout or self.layout, identity, lambda _: True)
        if start is None:
            return None
        restore_newest([start], serving(self.engine), self.run_dir)
        assert all(map(torch.equal, blocks_of(self.engine), self.states[start.meta.step]))
        return start.meta.step

    def part(self, step: int, part: int) -> Path:
        return self.folder / f"step-{step:08}" / part_name(part)


def lived(seat: Seat, nodes: str, asynchronous: bool, folder: Path) -> Outcome:
    """Let faults happen to local checkpoints one after another; return the steps of the restarts and the messages."""
    for module in (controls, local_restore, local_save):
        module.node_name = lambda: nodes[seat.rank]
    passing.PIECE = 10_000  # so that files need several messages
    config = small_run(precision="bf16")
    config.phases[0].global_batch = 2 * seat.world_size
    config.checkpoint.asynchronous = asynchronous
    outcome: Outcome = {}
    with seat.groups(config.parallel) as groups, redirect_stderr(io.StringIO()) as printed:
        node = Node(seat, nodes, groups, config, folder)
        note = noting(outcome, printed)

        for step in (1, 2, 3):
            node.train_and_save(step)
        note("kept", [path.name for path in step_folders(node.folder)])
        note("sizes", {str(path): path.stat().st_size for path in node.folder.rglob("*") if path.is_file()})
        chunks = LocalCheckpoint.open(node.part(3, node.control.node)).manifest.chunks
        note("repeated", len(chunks) - len({(chunk.key, chunk.offset, chunk.size) for chunk in chunks}))
        note("whole", node.restart())
        note("other layout", node.restart("tensor 8"))
        node.on("b", lambda: shutil.rmtree(node.folder))
        note("lost node", node.restart())
        node.on("b", lambda: flip(node.part(3, 1) / "optimizer-00001.safetensors"))
        note("flipped bit", node.restart())
        node.on("b", lambda: flip(node.part(3, 1) / "manifest.json"))
        note("flipped manifest", node.restart())
        node.on("a", lambda: flip(node.part(3, 1) / "optimizer-00001.safetensors"))
        node.on("b", lambda: flip(node.part(3, 1) / "optimizer-00001.safetensors"))
        note("both damaged", node.restart())
        for step in (4, 5):
            node.train_and_save(step)
        node.on("a", lambda: flip(node.part(5, 1) / "optimizer-00001.safetensors"))
        node.on("b", lambda: flip(node.part(5, 1) / "optimizer-00001.safetensors"))
        note("both damaged again", node.restart())
        _reject_with_a_fault(node)
        note("rejected", [path.name for path in step_folders(node.folder)])
        note("not removed", node.restart())
        node.train_and_save(5)
        note("again", node.restart())
        assert node.saver.local is not None
        node.saver.local.reject_after(4)
        note("dropped", [path.name for path in step_folders(node.folder)])
        _fill_disk(node)
        note("full", node.restart())
        note("after full", [path.name for path in step_folders(node.folder)])
        node.saver.save(node.engine, meta_of(node.engine, 7, {}), node.tokenizer)
        node.saver.settle()
        shared = newest(node.run_dir)
        note("shared", None if shared is None else shared.meta.step)
    return outcome


def _reject_with_a_fault(node: Node) -> None:
    """Save step 5 again, and reject it while the disk of node b, which has both parts, removes nothing."""

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    node.train_and_save(5)
    assert node.saver.local is not None
    if node.name == "b":
        local_save.drop_after = fail  # type: ignore[assignment]
    node.saver.local.reject_after(4)
    local_save.drop_after = drop_after


def _fill_disk(node: Node) -> None:
    """Save step 6 while the disk of node b is full: neither its part nor the copy of a's part can be written."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_bytes = local_save.write_bytes
    take = local_files.Receiver.take
    if node.name == "b":
        local_save.write_bytes = full  # type: ignore[assignment]

        def taken(receiver: local_files.Receiver, _: memoryview) -> None:
            receiver._next += 1
            receiver.fault = OSError(28, "No space left on device")

        local_files.Receiver.take = taken  # type: ignore[method-assign]
    node.train_and_save(6)
    local_save.write_bytes = write_bytes
    local_files.Receiver.take = take  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("nodes", "asynchronous"),
    [("ab", False), pytest.param("aabb", True, marks=pytest.mark.slow)],
)
def test_local_checkpoints_survive_faults_of_a_node(nodes: str, asynchronous: bool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    results = run_distributed(lived, len(nodes), nodes, asynchronous, tmp_path, timeout_s=240)

    def steps(name: str) -> list[Any]:
        return [result[name][0] for result in results]

    def said(name: str) -> str:
        return results[0][name][1]

    same = len(nodes)
    assert steps("kept") == [["step-00000002", "step-00000003"]] * same
    assert steps("repeated") == [0] * same
    assert steps("whole") == [3] * same
    assert said("whole") == ""
    assert steps("other layout") == [None] * same
    assert "step 3 is not used: its layout is tensor 1, pipeline 1 x 1, data " in said("other layout")
    assert steps("lost node") == [3] * same
    assert "node b has its part of step 3 from node a" in said("lost node")
    assert steps("flipped bit") == [3] * same
    assert "optimizer-00001.safetensors is damaged" in said("flipped bit")
    assert "from node a" in said("flipped bit")
    assert steps("flipped manifest") == [3] * same
    assert "manifest.json is damaged" in said("flipped manifest")
    assert steps("both damaged") == [2] * same  # of this step, too, the lost node gets its part from the other node
    assert "the copy on node a of the part of node b is damaged" in said("both damaged")
    assert steps("both damaged again") == [4] * same
    rejected = [["step-00000004"], ["step-00000004", "step-00000005"]]
    assert steps("rejected") == [rejected[name == "b"] for name in nodes]
    assert steps("not removed") == [4] * same
    assert "step 5 is not used: a rollback, or silent corruption, has left steps up to 4" in said("not removed")
    assert steps("again") == [5] * same  # the limit concerns earlier saves of this step alone
    assert steps("dropped") == [["step-00000004"]] * same
    assert "LOCAL CHECKPOINT NOT WRITTEN at step 6: OSError: node b: rank " in said("full")
    assert "No space left on device" in said("full")
    assert steps("full") == [4] * same
    assert steps("after full") == [["step-00000004"]] * same  # no node replaces a complete step
    assert steps("shared") == [7] * same
    if nodes == "ab":
        _check_sizes(results)


def _check_sizes(results: list[Outcome]) -> None:
    """Each node holds its part and the other's, of two steps, with equal bytes."""
    first, second = (
        {"/".join(Path(path).parts[-3:]): size for path, size in result["sizes"][0].items()} for result in results
    )
    assert first == second
    names = {"config.yaml", "tokenizer.json", "local.json", "manifest.json"}
    kinds = ("model", "optimizer", "random")
    files = {f"part-{node:05}/{name}" for node in (0, 1) for name in names}
    files |= {f"part-{node:05}/{kind}-{node:05}.safetensors" for node in (0, 1) for kind in kinds}
    assert first.keys() == {f"step-0000000{step}/{file}" for step in (2, 3) for file in files}


def test_each_holder_of_a_copy_is_tried_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node b has lost its part. Of the three copies only the last is whole."""
    control = Control(0, [[0], [1], [2], [3]], 0, None, None)
    step = local_restore.LocalSave(7, "save", {0: [0], 1: [0, 2, 3], 2: [2], 3: [3]})
    sources: list[int] = []

    def fetch(_: object, node: int, source: int, *__: object) -> str | None:
        assert node == 1
        sources.append(source)
        return "the disk of node a is broken" if source == 0 else None

    def faults(part: Path | None, _: object) -> list[str | None]:
        return [None, "one bit is flipped" if sources == [0, 2] else None, None, None]

    monkeypatch.setattr(local_restore, "_fetch", fetch)
    monkeypatch.setattr(local_restore, "_faults", faults)
    assert local_restore._missing(step, tmp_path, control, "abcd") is None
    assert sources == [0, 2, 3]
    assert "node b has its part of step 7 from node d" in capsys.readouterr().err
    step.holders[1] = [0, 2]
    sources.clear()
    damaged = "the copy on node c of the part of node b is damaged: one bit is flipped"
    reason = local_restore._missing(step, tmp_path, control, "abcd")
    assert reason == f"the disk of node a is broken; {damaged}"


RECORD = {"save": "1f", "part": 1, "nodes": [[0, 1], [2, 3]], "layout": "tensor 1", "limits": 0}


@pytest.mark.parametrize(
    "changed",
    [
        {"part": "1"},
        {"part": 2},
        {"part": True},
        {"limits": -1},
        {"limits": None},
        {"save": ["1f"]},
        {"layout": 3},
        {"nodes": [[0], "a"]},
        {"nodes": [[0, None]]},
        {"nodes": {}},
        {"version": 2},
    ],
)
def test_record_of_another_form_is_refused(changed: dict[str, Any]) -> None:
    assert NodePartRecord.of_values(RECORD).nodes == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"its keys are not|must be|it is part"):
        NodePartRecord.of_values({**RECORD, **changed})
    with pytest.raises(ValueError, match="its keys are not"):
        NodePartRecord.of_values([*RECORD])


def test_a_part_serves_only_rectangles_that_its_ranks_wrote(tmp_path: Path, alone: Groups) -> None:
    node_folder = tmp_path / "disk"
    config = small_run()
    engine = Engine(resolve(config)[0], alone)
    identity = Identity(RUN_ID)
    writer = LocalWriter(
        node_folder, alone.control, alone.control, "layout", run_dir=tmp_path / "run", identity=identity
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    saver = Saver(RunPlan.of(config), tmp_path, alone, local=writer)
    saver.save_locally(engine, meta_of(engine, 5, {}), tmp_path / "tokenizer.json")
    part = LocalCheckpoint.open(node_folder / "step-00000005" / part_name(0))
    assert part.fault(0, 1) is None
    assert part.record.nodes == [[0]]
    _check_refused_start(part, engine, tmp_path)
    with pytest.raises(BrokenCheckpoint) as refused:
        part._fill("norm.weight", [(torch.empty(3), (1,))])
    assert refused.value.code == "mismatch"
    drop_after(node_folder, 4)
    assert step_folders(node_folder) == []


def _check_refused_start(part: LocalCheckpoint, engine: Engine, run_dir: Path) -> None:
    """A part that lacks a tensor can't be restored. The next start must not try it again."""
    (run_dir / "checkpoints").mkdir()
    assert identity_for(run_dir).limits == ()
    chunks = [chunk for chunk in part.manifest.chunks if chunk.key != "norm.weight"]
    lacking = LocalCheckpoint(part.folder, replace(part.manifest, chunks=tuple(chunks)))
    with pytest.raises(BrokenCheckpoint, match=r"norm\.weight.* uses no local checkpoint after step 4"):
        restore_newest([lacking], serving(engine), run_dir)
    identity = stored_identity(run_dir)
    assert identity is not None
    assert identity.limits == (4,)
    assert identity.limit_of(5, 0) == 4
