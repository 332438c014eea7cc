"""Local checkpoints on three simulated nodes, where the next node is not the node before."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtron.checkpoint import local_restore, local_save
from hybridtron.checkpoint.local import part_name
from hybridtron.parallel import control as controls
from hybridtron.parallel import passing
from hybridtron.parallel.pool import Seat
from tests.checkpoint.test_local import Node, noting
from tests.conftest import small_run
from tests.distributed import run_distributed

NODES = "abc"


def part_sizes(node: Node) -> dict[str, int]:
    """Return the bytes of each part that this node holds of its newest step."""
    newest = sorted(node.folder.glob("step-*"))[-1]
    return {
        f"{newest.name} {part.name}": sum(file.stat().st_size for file in part.iterdir())
        for part in sorted(newest.glob("part-*"))
    }


def fill_disk(node: Node, name: str, step: int) -> None:
    """Save a step while the disk of a node is full."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    write_bytes = local_save.write_bytes
    if node.name == name:
        local_save.write_bytes = full  # type: ignore[assignment]
    node.train_and_save(step)
    local_save.write_bytes = write_bytes


def ring(seat: Seat, folder: Path) -> dict[str, Any]:
    """Let nodes lose disks, and change places; return the steps of the restarts and the messages."""
    for module in (controls, local_restore, local_save):
        module.node_name = lambda: NODES[seat.rank]
    passing.PIECE = 10_000  # so that parts need different numbers of messages
    config = small_run(precision="bf16")
    config.phases[0].global_batch = 2
    config.parallel = replace(config.parallel, pipeline=3)
    outcome: dict[str, Any] = {}
    with seat.groups(config.parallel) as groups, redirect_stderr(io.StringIO()) as printed:
        node = Node(seat, NODES, groups, config, folder)
        note = noting(outcome, printed)

        def lose(name: str) -> None:
            node.on(name, lambda: shutil.rmtree(node.folder))

        node.train_and_save(1)
        note("parts", part_sizes(node))
        fill_disk(node, "b", 2)
        fill_disk(node, "b", 3)
        note("two failures", node.restart())
        node.train_and_save(4)
        lose("b")
        note("lost b", node.restart())
        node.train_and_save(5)
        lose("b")
        lose("c")
        note("lost b and c", node.restart())
        node.train_and_save(6)
        node.folder = node.folder.with_name({"a": "c", "b": "a", "c": "b"}[node.name])
        note("changed places", node.restart())
    return outcome


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(280)
def test_each_node_keeps_a_copy_of_the_node_before(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    results = run_distributed(ring, len(NODES), tmp_path, timeout_s=240)

    def steps(name: str) -> list[Any]:
        return [result[name][0] for result in results]

    def printed(name: str) -> str:
        return results[0][name][1]

    held = [{name.split()[1]: size for name, size in sizes.items()} for sizes in steps("parts")]
    for index, sizes in enumerate(held):
        before = (index - 1) % len(NODES)
        assert sizes.keys() == {part_name(index), part_name(before)}
        assert sizes[part_name(before)] == held[before][part_name(before)]
    assert len({sizes[part_name(index)] for index, sizes in enumerate(held)}) > 1
    assert steps("two failures") == [1] * len(NODES)
    assert steps("lost b") == [4] * len(NODES)
    assert "node b has its part of step 4 from node c" in printed("lost b")
    assert steps("lost b and c") == [None] * len(NODES)
    lost = "local checkpoint of step 5 is not used: no other node has a copy of the part of node b"
    assert lost in printed("lost b and c")
    assert steps("changed places") == [6] * len(NODES)
    assert "has its part of step 6 from node" in printed("changed places")
