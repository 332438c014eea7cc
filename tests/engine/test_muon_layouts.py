"""Muon under parallel layouts: the same steps as a single process, the same bits from the same gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter, linear
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Documents, OptimConfig, ParallelConfig
from hybridtron.engine.engine import Engine
from hybridtron.optimizers.muon import IterationFormat, MuonOptions, Orthogonalization, polynomials
from hybridtron.parallel import matrix_owners
from hybridtron.parallel.matrix_owners import DividedWeight, balanced_owners, cost, exchanges, overlapped, pieces_of
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.sharding import cut
from hybridtron.planning.memory import plan
from hybridtron.proving.audit.audit import micro_batches
from hybridtron.proving.audit.cases import Layout, small, small_model
from tests.conftest import serving
from tests.distributed import run_distributed
from tests.slow import slow_except

LR = 1e-2
TOLERANCE = 1e-3  # largest difference of a weight after twenty steps, relative to its norm
ROWS = 8  # of a step, for every layout
OPTIM = OptimConfig(name="muon", eps=1e-3, clip=0.05, muon=MuonOptions(iteration=IterationFormat.master))
SERIAL = ParallelConfig(distributed_optimizer=False)
PATTERN = "M-WG"  # fused weights of which each tensor-parallel rank has rows or columns; kv and bc may be replicated
HEADS = {
    "layers.2.mixer.q.weight": [4],
    "layers.2.mixer.kv.weight": [2, 2],
    "layers.3.mixer.in_proj.weight": [16, 16, 1],  # z, x, dt
    "layers.3.mixer.bc_proj.weight": [2, 2],
}
"""Heads of each fused part in the pattern's model, by the weight's name; all other weights have none."""
BY_HEAD = replace(OPTIM, muon=replace(OPTIM.muon, heads=True))


def configured(layout: Layout, optim: OptimConfig = OPTIM, distributed: bool = True) -> Config:
    model = small_model(PATTERN, tied=True, heads={"kv_heads": 2})
    config = small(model, layout.on(ParallelConfig()), Documents.isolate, data=layout.data)
    phases = [replace(config.phases[0], global_batch=ROWS * config.phases[0].micro_batch)]
    parallel = replace(config.parallel, distributed_optimizer=distributed)
    return replace(config, phases=phases, optim=optim, parallel=parallel)


def take_steps(engine: Engine, count: int) -> None:
    batches = micro_batches(engine.phase)
    share = len(batches) // engine.groups.data.size
    own_batches = batches[engine.groups.data.rank * share :][:share]
    for _ in range(count):
        engine.forward_backward(own_batches)
        assert engine.step(LR)[1]


def trained(seat: Seat, config: Config, steps: int, mistake: str = "") -> dict[str, Tensor]:
    with planted(mistake), seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        take_steps(engine, steps)
        return {name: weight.clone() for name, weight in engine.weights()}


def trained_with_stop(seat: Seat, config: Config, steps: int, folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint before the last two steps, or resume from the checkpoint that is there."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        if folder.exists():
            restore_newest(valid_checkpoints(folder), serving(engine), folder)
        else:
            take_steps(engine, steps)
            tokenizer = folder.with_suffix(".json")
            if groups.is_first:
                tokenizer.write_text("{}")
            Saver(RunPlan.of(config), folder, groups).save(engine, meta_of(engine, steps, {}), tokenizer)
        take_steps(engine, 2)
        return {name: weight.clone() for name, weight in engine.weights()}


@contextmanager
def planted(mistake: str) -> Iterator[None]:
    """Plant a mistake in this process."""
    with pytest.MonkeyPatch.context() as patch:
        if mistake == "cut before the iteration":
            whole = Orthogonalization.direction

            def halves(self: Orthogonalization, matrix: Tensor) -> Tensor:
                return torch.cat([whole(self, half) for half in matrix.split((len(matrix) + 1) // 2)])

            patch.setattr(Orthogonalization, "direction", halves)
        elif mistake == "scale by the cut shape":
            by_shape = Orthogonalization.scale
            patch.setattr(Orthogonalization, "scale", lambda self, rows, columns: by_shape(self, rows // 2, columns))
        elif mistake == "every n-th row to a head":
            right = Orthogonalization.direction

            def rearranged(self: Orthogonalization, matrix: Tensor) -> Tensor:
                if matrix.dim() == 2:
                    return right(self, matrix)
                heads, rows, columns = matrix.shape
                turned = right(self, matrix.reshape(rows, heads, columns).transpose(0, 1))
                return turned.transpose(0, 1).reshape(matrix.shape)

            patch.setattr(Orthogonalization, "direction", rearranged)
        yield


@dataclass(frozen=True)
class Wrong:
    """The weight that differs most between two results, and by how much relative to its norm."""

    name: str
    difference: float


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Wrong:
    assert actual.keys() == expected.keys()
    differences = {name: float((actual[name] - w).norm() / (w.norm() + 1e-9)) for name, w in expected.items()}
    assert all(np.isfinite(list(differences.values()))), differences
    name = max(differences, key=lambda name: differences[name])
    return Wrong(name, differences[name])


def by_hand(seat: Seat, config: Config, steps: int) -> dict[str, Tensor]:
    """Take the same steps by autograd and the formulas in float64, without an optimizer of a library."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        table = architecture(config.model).table
        masters = {name: weight.double().numpy() for name, weight in engine.weights()}
        state = {name: [np.zeros_like(weight), np.zeros_like(weight)] for name, weight in masters.items()}
        for step in range(1, steps + 1):
            engine.forward_backward(micro_batches(engine.phase))
            gradients = {name: gradient.double().numpy() for name, gradient in engine.optimizer.gradients()}
            norm = sum((gradient**2).sum() for gradient in gradients.values()) ** 0.5
            for name, gradient in gradients.items():
                clipped = gradient * min(1.0, config.optim.clip / (norm + 1e-6))
                direction = hand_direction(name, table[name], clipped, state[name], step, config.optim)
                decay = config.optim.weight_decay * table[name].decay
                masters[name] = masters[name] * (1 - LR * decay) - LR * direction
            engine.optimizer.zero_grad()
            for name, weight in engine.stages[0].model.named_parameters():
                weight.data.copy_(torch.from_numpy(masters[name]))
        return {name: torch.from_numpy(master) for name, master in masters.items()}


def hand_direction(
    name: str, weight: Parameter, gradient: np.ndarray, state: list[np.ndarray], step: int, optim: OptimConfig
) -> np.ndarray:
    by_expert = gradient.ndim == 3
    if not weight.is_mixer_projection and not by_expert:
        for index, (beta, value) in enumerate(zip(optim.betas, (gradient, gradient**2), strict=True)):
            state[index] = beta * state[index] + (1 - beta) * value
        mean, square = (moment / (1 - beta**step) for moment, beta in zip(state, optim.betas, strict=True))
        return mean / (np.sqrt(square) + optim.eps)
    mu = optim.muon.momentum
    state[0] = mu * state[0] + (1 - mu) * gradient
    update = mu * state[0] + (1 - mu) * gradient
    if by_expert:
        ends = np.cumsum(weight.fused_sizes(1))[:-1]
        matrices = [part for expert in update for part in np.split(expert, ends)]
    else:
        matrices = np.split(update, np.cumsum(weight.fused_sizes(0))[:-1])
    if optim.muon.heads and name in HEADS:
        matrices = [head for part, heads in zip(matrices, HEADS[name], strict=True) for head in np.split(part, heads)]
    return np.concatenate([hand_orthogonal(matrix, optim) for matrix in matrices]).reshape(update.shape)


def hand_orthogonal(matrix: np.ndarray, optim: OptimConfig) -> np.ndarray:
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt((matrix**2).sum())
    for a, b, c in polynomials(optim.muon.coefficients, optim.muon.steps):
        values = a * values + b * values**3 + c * values**5
    return 0.2 * max(matrix.shape) ** 0.5 * (left * values) @ right


@pytest.mark.parametrize("optim", [OPTIM, BY_HEAD], ids=["matrices", "heads"])
def test_steps_equal_the_formulas_in_float64(optim: OptimConfig) -> None:
    config = configured(Layout(), optim, distributed=False)
    (ours,) = run_distributed(trained, 1, config, 3)
    (by_formulas,) = run_distributed(by_hand, 1, config, 3)
    worst = largest_difference({name: weight.double() for name, weight in ours.items()}, by_formulas)
    assert worst.difference < 2e-5, worst


def test_heads_of_other_rows_are_noticed() -> None:
    config = configured(Layout(), BY_HEAD, distributed=False)
    (wrong,) = run_distributed(trained, 1, config, 3, "every n-th row to a head")
    (by_formulas,) = run_distributed(by_hand, 1, config, 3)
    worst = largest_difference({name: weight.double() for name, weight in wrong.items()}, by_formulas)
    assert worst.difference > 5 * TOLERANCE


@pytest.mark.gloo
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "distributed", "steps"),
    slow_except(
        [
            (Layout(tensor=2, data=2), True, 3),
            (Layout(tensor=2, data=2), True, 20),
            (Layout(tensor=2), True, 20),
            (Layout(tensor=2, sequence=True), False, 20),
            (Layout(pipeline=2), True, 20),
            (Layout(data=2), True, 20),
            (Layout(data=2), False, 20),
            (Layout(data=4), True, 20),
            (Layout(context=2), True, 20),
            (Layout(context=2, data=2), False, 20),
        ],
        (Layout(tensor=2, data=2), True, 3),
    ),
    ids=str,
)
def test_steps_equal_those_of_one_process(layout: Layout, distributed: bool, steps: int) -> None:
    several, *_ = run_distributed(trained, layout.world_size, configured(layout, distributed=distributed), steps)
    (serial,) = run_distributed(trained, 1, configured(Layout(), distributed=False), steps)
    worst = largest_difference(several, serial)
    assert worst.difference < TOLERANCE, worst


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mistake", ["cut before the iteration", "scale by the cut shape"])
def test_a_planted_mistake_makes_another_step(mistake: str) -> None:
    layout = Layout(tensor=2)
    wrong, *_ = run_distributed(trained, layout.world_size, configured(layout), 2, mistake)
    (serial,) = run_distributed(trained, 1, configured(Layout(), distributed=False), 2)
    assert largest_difference(wrong, serial).difference > 5 * TOLERANCE


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_resumed_run_has_the_same_bits_and_continues_under_another_layout(tmp_path: Path) -> None:
    config = configured(Layout(tensor=2, data=2), replace(OPTIM, muon=MuonOptions()))
    whole, *_ = run_distributed(trained_with_stop, 4, config, 4, tmp_path / "run")
    again, *_ = run_distributed(trained_with_stop, 4, config, 4, tmp_path / "run")
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    (alone,) = run_distributed(trained_with_stop, 1, configured(Layout(), config.optim), 4, tmp_path / "run")
    worst = largest_difference(alone, whole)
    assert worst.difference < 5e-3, worst


def stepped_from_gradients(seat: Seat, config: Config, steps: int) -> dict[str, Tensor]:
    """Take steps from gradients that depend on the weight's name alone, as if they were reduced."""
    with seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        table = architecture(config.model).table
        for step in range(steps):
            for name, shard in engine.optimizer.shards.items():
                if not shard.weight.requires_grad:  # the correction of a router
                    continue
                generator = torch.Generator().manual_seed(1000 * step + sorted(table).index(name))
                gradient = torch.randn(table[name].shape, generator=generator)
                shard.weight.main_grad.copy_(cut(gradient, table[name], groups.meshes[table[name].family]))
            engine.optimizer.squared_norm()  # prepares the gradients
            assert engine.optimizer.apply_update(LR, 0.0)
        return {name: weight.clone() for name, weight in engine.weights()}


@pytest.mark.gloo
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("layout", "distributed"),
    slow_except(
        [(Layout(data=3), True), (Layout(data=2), True), (Layout(data=2), False), (Layout(data=4), True)],
        (Layout(data=3), True),
    ),
    ids=str,
)
def test_equal_gradients_give_equal_bits_on_any_number_of_ranks(layout: Layout, distributed: bool) -> None:
    optim = replace(OPTIM, muon=MuonOptions())
    several, *_ = run_distributed(
        stepped_from_gradients, layout.world_size, configured(layout, optim, distributed=distributed), 3
    )
    (serial,) = run_distributed(stepped_from_gradients, 1, configured(Layout(), optim, distributed=False), 3)
    different = [name for name, weight in serial.items() if not torch.equal(several[name], weight)]
    assert different == []


def divided(name: str, parameter: Parameter, mesh: Mesh, everywhere: bool = False) -> DividedWeight:
    """Divide a weight's shard at odd places, or not at all."""
    size = int(np.prod(parameter.shard_shape(mesh.sizes)))
    count = mesh.copies.size
    if everywhere:
        return DividedWeight(name, parameter, mesh, [range(size)] * count, everywhere)
    ends = [0, *(size * rank // count + 1 for rank in range(1, count)), size]
    ranges = [range(first, last) for first, last in itertools.pairwise(ends)]
    return DividedWeight(name, parameter, mesh, ranges, everywhere)


def mesh_of(tensor: int, copies: int) -> Mesh:
    return Mesh({"tensor": RankGroup(tensor)}, RankGroup(copies))


def sent_counts(weight: DividedWeight) -> list[Tensor]:
    """Return how often each matrix's entries are sent to the owner."""
    counts = {key: torch.zeros(shape, dtype=torch.int64) for key, shape in weight.matrices.items()}
    mesh = weight.mesh
    for rank in range(math.prod(mesh.sizes.values()) * mesh.copies.size):
        for piece in pieces_of(weight, rank):
            counts[piece.matrix][piece.index] += piece.sent
    return list(counts.values())


def small_matrices() -> dict[str, Parameter]:
    table = architecture(small_model(PATTERN, tied=True, heads={"kv_heads": 2})).table
    return {name: weight for name, weight in table.items() if weight.is_mixer_projection}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("tensor", "copies"), [(1, 1), (2, 3), (4, 2)])
def test_every_entry_is_sent_once_and_returned_to_all_holders(tensor: int, copies: int, everywhere: bool) -> None:
    for name, parameter in small_matrices().items():
        weight = divided(name, parameter, mesh_of(tensor, copies), everywhere)
        assert all((count == 1).all() for count in sent_counts(weight)), name
        for rank in range(tensor * copies):
            returned = torch.zeros(len(weight.ranges[weight.mesh.at(rank).copies.rank]), dtype=torch.int64)
            for piece in pieces_of(weight, rank):
                piece.view(returned).add_(1)
            assert (returned == 1).all()


def test_entries_that_are_sent_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_owners, "writes", lambda *_, **__: True)
    for name, parameter in small_matrices().items():
        weight = divided(name, parameter, mesh_of(2, 2), everywhere=True)
        assert any((count > 1).any() for count in sent_counts(weight))


def test_owners_are_balanced_by_cost() -> None:
    shapes = {f"layers.{n}.{k}": shape for n in range(6) for k, shape in {"up": (64, 16), "q": (16, 16)}.items()}
    (owners,) = balanced_owners([shapes], 3)
    loads = [sum(cost(shapes[name]) for name, owner in owners.items() if owner == rank) for rank in range(3)]
    assert len(set(loads)) == 1
    assert cost((64, 16)) == cost((16, 64)) == 64 * 16 * 16
    assert cost((8, 4, 16)) == 8 * cost((4, 16)) == 8 * 4 * 16 * 4


def test_owners_are_balanced_over_rounds() -> None:
    """Each round has one matrix fewer than ranks; the rank that goes without one has fewer sums, and gets the next."""
    rounds = [{f"layers.{n}.{k}": (16, 16) for k in ("q", "out")} for n in range(3)]
    owners = balanced_owners(rounds, 3)
    assert sorted(owner for in_round in owners for owner in in_round.values()) == [0, 0, 1, 1, 2, 2]
    assert all(len(set(in_round.values())) == 2 for in_round in owners)


def test_rounds_limit_the_entries_and_change_no_bits() -> None:
    weights = [divided(name, weight, mesh_of(1, 1)) for name, weight in small_matrices().items()]
    updates = {weight.name: torch.randn(weight.parameter.size) for weight in weights}
    stage = Orthogonalization(MuonOptions())

    def directions(limit: int) -> tuple[int, dict[str, Tensor]]:
        rounds = exchanges(weights, RankGroup(), limit)
        result = {name: torch.zeros_like(update) for name, update in updates.items()}
        for one_round, returning in overlapped(rounds, lambda _: updates, stage.direction, torch.empty(0)):
            for name, piece, entries in one_round.directions(returning):
                piece.view(result[name]).copy_(entries)
        return len(rounds), result

    count, whole = directions(10**9)
    assert count == 1
    many, parted = directions(3000)
    assert many > 3
    assert all(torch.equal(parted[name], direction) for name, direction in whole.items())


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize(("tensor", "copies"), [(1, 4), (2, 2)])
def test_rounds_limit_the_entries_that_a_rank_updates(tensor: int, copies: int, everywhere: bool) -> None:
    limit = 3000
    weights = [divided(name, weight, mesh_of(tensor, copies), everywhere) for name, weight in small_matrices().items()]
    rounds = exchanges(weights, RankGroup(tensor * copies), limit)
    assert sorted(name for one_round in rounds for name in one_round.names) == sorted(w.name for w in weights)
    assert 1 < len(rounds) < len(weights)
    for one_round in rounds:
        entries = sum(piece.size for held in one_round.held for _, piece in held)
        rounding = len(one_round.names)  # from the division at odd places
        assert entries <= limit + rounding or len(one_round.names) == 1


def test_the_entries_in_a_round_are_spread_over_the_ranks() -> None:
    matrix = linear(30, 10)
    copies = 4
    weights = []
    for index in range(16):  # each rank updates four successive weights
        ranges = [range(300) if index // 4 == rank else range(0) for rank in range(copies)]
        weights.append(DividedWeight(f"layers.{index}.mixer.w.weight", matrix, mesh_of(1, copies), ranges, False))
    rounds = exchanges(weights, RankGroup(copies), 300)
    assert [len(one_round.names) for one_round in rounds] == [4] * 4
    for one_round in rounds:
        assert sum(piece.size for held in one_round.held for _, piece in held) == 300


def test_planned_optimizer_bytes_equal_the_allocated_bytes() -> None:
    config = configured(Layout(), distributed=False)
    (allocated,) = run_distributed(allocated_bytes, 1, config)
    assert plan(resolve(config)[0], 1).ranks[0].memory.optimizer == allocated
    adamw = replace(config, optim=replace(OptimConfig(), name="adamw"))
    matrices = sum(4 * weight.size for weight in resolve(config)[0].table.values() if weight.is_mixer_projection)
    assert plan(resolve(adamw)[0], 1).ranks[0].memory.optimizer == allocated + matrices


def allocated_bytes(seat: Seat, config: Config) -> int:
    with seat.groups(config.parallel) as groups:
        shards = Engine(resolve(config)[0], groups).optimizer.shards
        return sum(part.nbytes for shard in shards.values() for part in shard.parts.values())
