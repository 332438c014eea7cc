"""A family of weights with a mesh of its own is written once, gathered, normed, clipped and moved as by one process.

The family is made up: every token visits all experts, which the ranks of a second mesh divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import EXPERTS, Cut, MixerSpec, ModelSizes, Parameter
from hybridtron.architecture.inits import Normal
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.optimizers.base import UpdateRule, UpdateSettings, like
from hybridtron.parallel.blocks import writes
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.distributed import run_distributed

COUNT = 4
HIDDEN = 6
LEARNING_RATE = 1e-2
EXPERT_WEIGHT = "layers.0.mixer.up"


@dataclass(frozen=True)
class AllExpertsSpec(MixerSpec):
    """Experts that every token visits."""

    kind: ClassVar[str] = "all_experts"
    module: ClassVar[str] = f"{__name__}:AllExperts"

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        up = Parameter(
            (COUNT, 2 * HIDDEN, model.width),
            Normal(0.3),
            parts=(("gate", HIDDEN), ("up", HIDDEN)),
            parts_axis=1,
            cuts=(Cut(0, "expert"),),
            family=EXPERTS,
        )
        return {"up": up, "down": replace(up, shape=(COUNT, model.width, HIDDEN), parts=())}

    def activation_values(self, model: ModelSizes) -> int:
        return COUNT * 2 * HIDDEN


class Gathered(torch.autograd.Function):
    """Tokens of all ranks, in order; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x_LBD: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        shares = [torch.empty_like(x_LBD) for _ in range(ranks.size)]
        dist.all_gather(shares, x_LBD.contiguous(), group=ranks.group)
        return torch.cat(shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Summed.forward(ctx, grads[0], ctx.ranks), None


class Summed(torch.autograd.Function):
    """A rank's own tokens of a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, y_LBD: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        total_LBD = y_LBD.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total_LBD, group=ranks.group)
        return total_LBD.chunk(ranks.size)[ranks.rank]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return Gathered.forward(ctx, grads[0], ctx.ranks), None


class AllExperts(Mixer):
    """Sum over experts of down (tanh(gate x) * up x), on the tokens of all ranks that divide the experts."""

    ranks: ClassVar[RankGroup]

    def __init__(self, spec: AllExpertsSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        count = self.ranks.share(COUNT)
        self.up = nn.Parameter(torch.empty(count, 2 * HIDDEN, sizes.width))
        self.down = nn.Parameter(torch.empty(count, sizes.width, HIDDEN))

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        every_LBD: Tensor = Gathered.apply(x_LBD, self.ranks)  # type: ignore[assignment]
        gate_LBEH, up_LBEH = torch.einsum("lbd,ehd->lbeh", every_LBD, self.up).chunk(2, -1)
        y_LBD = torch.einsum("lbeh,edh->lbd", torch.tanh(gate_LBEH) * up_LBEH, self.down)
        return MixerOutput(Summed.apply(y_LBD, self.ranks), {}, {})  # type: ignore[arg-type]


class UnitSteps(UpdateRule):
    """Steps of length 1 along the momentum, which needs the norm of full weights."""

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        return {"momentum": like(weight)}

    def needs_whole(self, name: str, weight: Parameter) -> bool:
        return True

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        momentum = parts["momentum"].mul_(0.5).add_(gradient)
        return momentum / (momentum.norm() + settings.eps)


@contextmanager
def with_experts(seat: Seat, parallel: ParallelConfig) -> Iterator[Groups]:
    """The layout's groups, with a mesh in which two ranks side by side, or the only one, divide the experts."""
    size = min(2, seat.world_size)
    SPECS[AllExpertsSpec.kind] = AllExpertsSpec  # the job's process ends with it
    OPTIMIZERS["unit_steps"] = UnitSteps
    with seat.groups(replace(parallel, expert=size, expert_tensor=1)) as groups:
        AllExperts.ranks = groups.meshes[EXPERTS].dimensions["expert"]
        yield groups


@dataclass(frozen=True)
class Trained:
    """Results of two steps: the gradients and norms of the second, and the weights after it."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    norms: dict[str, float]
    grad_norm: float


def train(seat: Seat, config: Config, folder: Path) -> Trained:
    """Take two steps, and write a checkpoint."""
    with with_experts(seat, config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        batches = micro_batches(resolve(config)[0])
        count = len(batches) // groups.data.size
        batches = batches[groups.data.rank * count :][:count]
        engine.forward_backward(batches)
        engine.optimizer.step(LEARNING_RATE)
        engine.forward_backward(batches)
        gradients = {name: gradient.clone() for name, gradient in engine.optimizer.gradients()}
        norms = engine.optimizer.norms()
        grad_norm, _ = engine.optimizer.step(LEARNING_RATE)
        tokenizer = folder / "tokenizer.json"
        if groups.is_first:
            folder.mkdir()
            tokenizer.write_text("{}")
        Saver(RunPlan.of(config), folder, groups).save(engine, meta_of(engine, 2, {}), tokenizer)
        weights = {name: weight.clone() for name, weight in engine.weights()}
        return Trained(gradients, weights, norms, grad_norm)


def read(seat: Seat, config: Config, folder: Path) -> dict[str, Tensor]:
    """The full weights of an engine that has read a checkpoint's blocks into other values."""
    with with_experts(seat, config.parallel) as groups:
        engine = Engine(resolve(replace(config, run=replace(config.run, seed=1)))[0], groups)
        blocks = engine.blocks()
        opened(folder).fill([*blocks["model"], *blocks["optimizer"]])
        return {name: weight.clone() for name, weight in engine.weights()}


def opened(folder: Path) -> Checkpoint:
    checkpoint = newest(folder)
    assert checkpoint is not None
    return checkpoint


def configured(layout: Layout, **optim: Any) -> Config:
    model = replace(small_model("E-", tied=False, heads={}), layers={"E": {"kind": AllExpertsSpec.kind}})
    model = replace(model, layers={**model.layers, "-": {"kind": "swiglu", "hidden": 48}})
    config = small(model, layout.on(ParallelConfig()), Documents.isolate, data=layout.data)
    rows = 16  # the same for every layout
    phases = [replace(config.phases[0], global_batch=rows)]
    return replace(config, phases=phases, optim=replace(config.optim, **optim))


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (actual[name] - tensor).norm()
        assert difference <= 1e-5 * tensor.norm() + 1e-9, f"{name} is off by {difference / tensor.norm():.1e}"


def stored(folder: Path) -> dict[str, Tensor]:
    checkpoint = opened(folder)
    return {key: checkpoint.whole(key) for key in checkpoint.shapes if not key.startswith("random.")}


@pytest.mark.gloo
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("layout", "distributed", "optimizer"),
    [
        pytest.param(Layout(data=4), True, "adamw", marks=pytest.mark.slow),
        pytest.param(Layout(data=4), False, "adamw", marks=pytest.mark.slow),
        pytest.param(Layout(data=2), True, "unit_steps", marks=pytest.mark.slow),
        (Layout(tensor=2, sequence=True, data=2), True, "adamw"),
        (Layout(tensor=2, sequence=True, data=2), False, "unit_steps"),
    ],
    ids=["dp4", "dp4-plain", "dp2-whole", "tp2-sp-dp2", "tp2-sp-dp2-plain-whole"],
)
def test_second_mesh_trains_as_one_process(layout: Layout, distributed: bool, optimizer: str, tmp_path: Path) -> None:
    config = configured(layout, name=optimizer)
    config = replace(config, parallel=replace(config.parallel, distributed_optimizer=distributed))
    alone = replace(config, parallel=ParallelConfig(distributed_optimizer=False))
    several, *_ = run_distributed(train, layout.world_size, config, tmp_path / "several")
    (serial,) = run_distributed(train, 1, alone, tmp_path / "one")
    assert serial.gradients[EXPERT_WEIGHT].norm() > 0
    assert serial.grad_norm > config.optim.clip
    assert several.grad_norm == pytest.approx(serial.grad_norm, rel=1e-5)
    assert several.norms == pytest.approx(serial.norms, rel=1e-5)
    assert_close(several.gradients, serial.gradients)
    assert_close(several.weights, serial.weights)
    assert_close(stored(tmp_path / "several"), stored(tmp_path / "one"))
    assert f"{EXPERT_WEIGHT}.gate" in stored(tmp_path / "several")
    again, *_ = run_distributed(read, layout.world_size, config, tmp_path / "one")
    assert all(torch.equal(again[name], weight) for name, weight in serial.weights.items())


def test_every_shard_of_both_families_has_one_writer() -> None:
    """Eight ranks: four copies of two tensor-parallel ranks, and two copies of four that divide the experts."""
    dense = [Mesh({"tensor": RankGroup(2, rank % 2)}, RankGroup(4, rank // 2)) for rank in range(8)]
    experts = [Mesh({"expert": RankGroup(4, rank % 4)}, RankGroup(2, rank // 4)) for rank in range(8)]
    for name in map(str, range(50)):
        for meshes, cuts, shares in ((dense, (), 1), (dense, (Cut(0),), 2), (experts, (Cut(0, "expert"),), 4)):
            writers = [rank for rank, mesh in enumerate(meshes) if writes(name, mesh, cuts)]
            assert sorted(rank % shares for rank in writers) == list(range(shares))


def test_joint_mesh_of_both_families_would_lose_writers() -> None:
    ranks = [(RankGroup(2, rank % 2), RankGroup(4, rank % 4), RankGroup(4, rank // 2)) for rank in range(8)]
    joint = [Mesh({"tensor": tensor, "expert": expert}, copies) for tensor, expert, copies in ranks]
    lost = [name for name in map(str, range(50)) if not any(writes(name, mesh, (Cut(0),)) for mesh in joint)]
    assert lost
