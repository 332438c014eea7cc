"""Experts that ranks divide, in runs with carried states: steps, routers and checkpoints of one process, in float64.

One of the steps is refused. It moves no weight, no correction and no state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import newest
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, ParallelConfig, Recompute, StateMode, StatesConfig
from hybridtron.engine import engine as engines
from hybridtron.engine import optimizer as optimizers
from hybridtron.engine.engine import Engine
from hybridtron.engine.routers import move_corrections
from hybridtron.parallel.blocks import writes
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mesh import Mesh
from hybridtron.parallel.pool import Seat, WorkerError
from hybridtron.proving.audit.audit import default_dtype
from hybridtron.proving.audit.cases import EXPERTS
from tests.distributed import run_distributed
from tests.parallel import test_bptt as through_time
from tests.parallel.test_states import LANES, LAYERS, LR, ROWS, VOCABULARY, config_of, step_of, write
from tests.slow import slow_except

pytestmark = [pytest.mark.gloo, pytest.mark.timeout(240)]
STEPS = 4
REFUSED = 2  # the step that is refused
CHUNKS = 2
MODEL = ModelConfig(32, VOCABULARY, "MeSxW", {**LAYERS, **EXPERTS})
CORRECTION = "layers.3.mixer.correction"
ALONE = ParallelConfig(distributed_optimizer=False)
FULL = ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1)
LAYOUTS = {
    "dp2-ep2": (ParallelConfig(expert=2), 2),
    "dp4-ep4": (ParallelConfig(expert=4), 4),
    "dp4-ep2": (ParallelConfig(expert=2), 4),
    "tp2-dp2-ep2": (ParallelConfig(tensor=2, expert=2), 4),
    "tp2-ep2-et1": (FULL, 2),
    "tp2-dp2-ep4-et1": (replace(FULL, expert=4), 4),
    "pp2-dp2-ep2": (ParallelConfig(pipeline=2, expert=2), 4),
    "cp2-ep2": (ParallelConfig(context=2, expert=2), 2),
}
RECOMPUTED = ("dp4-ep4", "tp2-ep2-et1", "pp2-dp2-ep2", "cp2-ep2")
KINDS = ("states carried", "chunks through time")


@dataclass(frozen=True)
class Trained:
    """Results of all steps: losses, gradient norms, the loads of both routers by step, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    loads: list[Tensor]
    weights: dict[str, Tensor]


def configured(parallel: ParallelConfig, kind: str) -> Config:
    config = config_of(StateMode.tbtt, replace(parallel, distributed_optimizer=False))
    config = replace(config, model=MODEL, optim=replace(config.optim, clip=1e9))
    if kind == KINDS[1]:
        phase = replace(config.phases[0], global_batch=LANES * CHUNKS)
        states = StatesConfig(mode=StateMode.tbtt, chunks=CHUNKS, through_time=True)
        config = replace(config, states=states, phases=[phase])
    return config


@contextmanager
def planted(mistake: str) -> Iterator[None]:
    """Plant a mistake in this process."""
    with pytest.MonkeyPatch.context() as patch:
        if mistake == "writer missing":
            for module in (engines, optimizers):
                patch.setattr(module, "writes", writes_in_joint_mesh)
        yield


def writes_in_joint_mesh(name: str, mesh: Mesh, *rest: Any, **options: Any) -> bool:
    """Choose writers as if one mesh had all dimensions: a rank's index would count twice, in the copies too."""
    joint = replace(mesh, dimensions={**mesh.dimensions, "expert": mesh.copies})
    return writes(name, joint, *rest, **options)


def trained(seat: Seat, config: Config, folder: Path, mistake: str = "") -> Trained:
    """Train all steps in float64, and write a checkpoint."""
    with default_dtype(torch.float64), planted(mistake), seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups, None, torch.float64)
        result = Trained([], [], [], {})
        lanes = lanes_of(groups)
        engine.start_phase(engine.phase, lanes)
        make = through_time.step_of if config.states.chunks > 1 else step_of
        for step in range(STEPS):
            batch = make(step).map(lambda tensor: tensor[lanes.start : lanes.stop])
            loss = engine.forward_backward(batch.split(ROWS), step)
            result.losses.append(loss.mean.item())
            result.loads.append(torch.stack([routed.loads_E for routed in loss.choices.values()]))
            result.norms.append(stepped(engine, step == REFUSED, mistake))
        result.weights.update((name, weight.clone()) for name, weight in engine.weights())
        write(engine, folder)
        return result


def lanes_of(groups: Groups) -> range:
    count = LANES // groups.data.size
    return range(groups.data.rank * count, (groups.data.rank + 1) * count)


def stepped(engine: Engine, refused: bool, mistake: str) -> float:
    """Take or refuse a step; return its gradient norm."""
    if refused and mistake == "moved when refused":
        move_corrections([stage.model for stage in engine.stages], engine._loss.choices)
    with pytest.MonkeyPatch.context() as patch:
        if refused:
            patch.setattr(engine.guard, "accepts", lambda *values: False)
        norm, accepted = engine.step(LR)
    assert accepted is not refused
    return norm


@functools.cache
def of_one_process(kind: str, folder: Path) -> Trained:
    (result,) = run_distributed(trained, 1, configured(ALONE, kind), folder)
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / (expected.norm() + 1e-12))


def stored(folder: Path) -> Checkpoint:
    checkpoint = newest(folder)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize(
    ("layout", "kind"),
    slow_except(
        [(layout, kind) for layout in LAYOUTS for kind in KINDS if kind == KINDS[0] or "cp2" not in layout],
        ("dp2-ep2", KINDS[0]),
    ),
)
def test_steps_with_carried_states_equal_those_of_one_process(
    layout: str, kind: str, alone: Path, tmp_path: Path
) -> None:
    parallel, ranks = LAYOUTS[layout]
    if layout in RECOMPUTED:
        parallel = replace(parallel, recompute=Recompute.layer)
    expected = of_one_process(kind, alone / kind)
    several, *_ = run_distributed(trained, ranks, configured(parallel, kind), tmp_path / "run")
    assert several.losses == pytest.approx(expected.losses, rel=1e-9)
    assert several.norms == pytest.approx(expected.norms, rel=1e-6)  # Megatron sums squares in fp32
    assert all(map(torch.equal, several.loads, expected.loads))
    apart = {name: difference(several.weights[name], weight) for name, weight in expected.weights.items()}
    assert max(apart.values()) < 1e-9, apart
    assert torch.equal(several.weights[CORRECTION], expected.weights[CORRECTION])
    ours = stored(tmp_path / "run")
    theirs = stored(alone / kind)
    keys = {key for key in theirs.shapes if not key.startswith("random.")}
    assert keys == {key for key in ours.shapes if not key.startswith("random.")}
    assert any(key.startswith("held.") for key in keys)
    assert all(difference(ours.whole(key).double(), theirs.whole(key).double()) < 1e-8 for key in keys)


def test_a_correction_that_a_refused_step_moves_is_noticed(alone: Path, tmp_path: Path) -> None:
    expected = of_one_process(KINDS[0], alone / KINDS[0])
    config = configured(LAYOUTS["dp2-ep2"][0], KINDS[0])
    wrong, *_ = run_distributed(trained, 2, config, tmp_path / "run", "moved when refused")
    assert not torch.equal(wrong.weights[CORRECTION], expected.weights[CORRECTION])


def test_a_weight_that_no_rank_writes_is_noticed(tmp_path: Path) -> None:
    config = configured(LAYOUTS["dp2-ep2"][0], KINDS[0])
    config = replace(config, checkpoint=replace(config.checkpoint, failures=1))
    with pytest.raises(WorkerError, match=r"written by no process: .*layers\.1\.mixer\.router"):
        run_distributed(trained, 2, config, tmp_path / "run", "writer missing")
    assert newest(tmp_path / "run") is None
