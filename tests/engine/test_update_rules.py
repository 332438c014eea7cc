"""Optimizers by their update rules: a rule that needs full tensors, Lion of docs/extending.md, and AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.lion.lion import Lion
from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, OptimConfig, ParallelConfig
from hybridtron.config.update_rule import unread_problems
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import UpdateRule, UpdateSettings, like, per_row
from hybridtron.optimizers.muon import QUINTIC, orthogonalized
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from tests.conftest import serving, small_config, small_run
from tests.distributed import run_distributed

LR = 1e-2
STEPS = 4
SAVED = 2
OPTIM = OptimConfig(name="row_scaled", eps=1e-4, weight_decay=0.1, clip=1e9)


class AdamWByRule(AdamW):
    in_megatron = False


class RowScaled(UpdateRule):
    """Muon with rows divided by their running root mean squares: state of two shapes, from full tensors."""

    def __init__(self) -> None:
        self.others = AdamW()

    def parts(self, name: str, weight: Parameter) -> dict[str, Parameter]:
        if self.needs_whole(name, weight):
            return {"momentum": like(weight), "row_squares": per_row(weight)}
        return self.others.parts(name, weight)

    def needs_whole(self, name: str, weight: Parameter) -> bool:
        return weight.fp8

    def direction(
        self, name: str, weight: Parameter, gradient: Tensor, parts: dict[str, Tensor], settings: UpdateSettings
    ) -> Tensor:
        if not self.needs_whole(name, weight):
            return self.others.direction(name, weight, gradient, parts, settings)
        first, second = settings.betas
        straight = straightened(parts["momentum"].mul_(first).add_(gradient))
        rows = parts["row_squares"].mul_(second).add_(straight.square().mean(1), alpha=1 - second)
        return straight / (rows / (1 - second**settings.step)).sqrt().add(settings.eps)[:, None]


def straightened(matrix: Tensor) -> Tensor:
    return orthogonalized(matrix, [QUINTIC] * 5)


@contextmanager
def registered() -> Iterator[None]:
    """Add the lines to the registry that the documentation asks for."""
    rules: dict[str, type[UpdateRule]] = {"row_scaled": RowScaled, "adamw_by_rule": AdamWByRule, "lion": Lion}
    OPTIMIZERS.update(rules)
    try:
        yield
    finally:
        for name in rules:
            del OPTIMIZERS[name]


def config_of(parallel: ParallelConfig, name: str = "row_scaled") -> Config:
    return replace(
        small_run(replace(small_config("M-W-"), vocab_size=64), replace(OPTIM, name=name)), parallel=parallel
    )


def batches_of(step: int, groups: Groups) -> list[Batch]:
    """Return this data-parallel rank's share of a step's two rows."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(61, (2, 25), generator=generator)
    mask = torch.ones(2, 24, dtype=torch.bool)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, SeqInfo.stream(2, 24))
    count = 2 // groups.data.size
    rows = slice(groups.data.rank * count, (groups.data.rank + 1) * count)
    return [batch.map(lambda tensor: tensor[rows])]


def steps(engine: Engine, numbers: range) -> None:
    for step in numbers:
        engine.forward_backward(batches_of(step, engine.groups), step)
        assert engine.step(LR)[1]


def weights_after(seat: Seat, config: Config, folder: Path | None = None) -> dict[str, Tensor]:
    """Train STEPS steps; with a folder write a checkpoint on the way, or resume from the one that is there."""
    with registered(), seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        first = 0
        if folder is not None and folder.exists():
            restore_newest(valid_checkpoints(folder), serving(engine), folder)
            first = SAVED
        steps(engine, range(first, SAVED))
        if folder is not None and first == 0:
            tokenizer = folder.with_suffix(".json")
            tokenizer.write_text("{}")
            Saver(RunPlan.of(config), folder, groups).save(engine, meta_of(engine, SAVED, {}), tokenizer)
        steps(engine, range(SAVED, STEPS))
        return dict(engine.weights())


def serial() -> dict[str, Tensor]:
    """Take the same steps on one process by autograd and the formulas alone, without an optimizer of a library."""
    (weights,) = run_distributed(by_hand, 1, config_of(ParallelConfig()))
    return weights


def by_hand(seat: Seat, config: Config) -> dict[str, Tensor]:
    with registered(), seat.groups(config.parallel) as groups:
        engine = Engine(resolve(config)[0], groups)
        table = architecture(config.model).table
        masters = {name: weight.clone() for name, weight in engine.weights()}
        state: dict[str, list[Tensor]] = {
            name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in masters.items()
        }
        for step in range(STEPS):
            engine.forward_backward(batches_of(step, groups), step)
            for name, gradient in engine.optimizer.gradients():
                weight = table[name]
                momentum, squares = state[name]
                if weight.fp8:
                    momentum.mul_(0.9).add_(gradient)
                    straight = straightened(momentum)
                    squares[:, 0] = 0.95 * squares[:, 0] + 0.05 * (straight**2).mean(1)
                    direction = straight / ((squares[:, :1] / (1 - 0.95 ** (step + 1))) ** 0.5 + config.optim.eps)
                else:
                    momentum.copy_(0.9 * momentum + 0.1 * gradient)
                    squares.copy_(0.95 * squares + 0.05 * gradient**2)
                    mean = momentum / (1 - 0.9 ** (step + 1))
                    square = squares / (1 - 0.95 ** (step + 1))
                    direction = mean / (square.sqrt() + config.optim.eps)
                decay = config.optim.weight_decay * weight.decay
                masters[name] = masters[name] * (1 - LR * decay) - LR * direction
            engine.optimizer.zero_grad()
            for name, weight in engine.stages[0].model.named_parameters():
                weight.data.copy_(masters[name])
        return masters


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.gloo
def test_update_rule_over_tensor_and_data_ranks_equals_hand_computed_steps(tmp_path: Path) -> None:
    """Use two tensor ranks and the distributed optimizer over two data ranks; then resume on one process."""
    expected = serial()
    folder = tmp_path / "run"
    (alone,) = run_distributed(weights_after, 1, config_of(ParallelConfig()))
    assert_same(alone, expected)
    first, *_ = run_distributed(weights_after, 4, config_of(ParallelConfig(tensor=2)), folder)
    assert_same(first, expected)
    whole = replace(config_of(ParallelConfig()), parallel=ParallelConfig(distributed_optimizer=False))
    (resumed,) = run_distributed(weights_after, 1, whole, folder)
    assert_same(resumed, expected)


def test_adamw_by_its_rule_equals_megatron(alone: Groups) -> None:
    with registered():
        pair = [Engine(resolve(config_of(ParallelConfig(), name))[0], alone) for name in ("adamw", "adamw_by_rule")]
        for engine in pair:
            steps(engine, range(STEPS))
        theirs, ours = (dict(engine.weights()) for engine in pair)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)


def test_lion_equals_its_formulas(alone: Groups) -> None:
    with registered():
        config = config_of(ParallelConfig(), "lion")
        engine = Engine(resolve(config)[0], alone)
        masters = {name: weight.clone() for name, weight in engine.weights()}
        momenta = {name: torch.zeros_like(weight) for name, weight in masters.items()}
        for step in range(STEPS):
            engine.forward_backward(batches_of(step, alone), step)
            for name, gradient in engine.optimizer.gradients():
                sign = (0.9 * momenta[name] + 0.1 * gradient).sign()
                momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
                decay = config.optim.weight_decay * engine.optimizer.table[name].decay
                masters[name] = masters[name] * (1 - LR * decay) - LR * sign
            assert engine.step(LR)[1]
            changed = {name: (weight - masters[name]).abs() > 1e-6 for name, weight in engine.weights()}
            # rounding may flip the sign where the interpolation is nearly 0
            assert sum(int(flipped.sum()) for flipped in changed.values()) <= 5
            masters = {name: weight.clone() for name, weight in engine.weights()}
        problems = [problem.key for problem in unread_problems(replace(config.optim, eps=1e-4))]
    assert problems == ["optim.eps"]


def test_planned_optimizer_bytes_equal_the_kept_bytes(alone: Groups) -> None:
    with registered():
        config = config_of(ParallelConfig())
        engine = Engine(resolve(config)[0], alone)
        kept = sum(part.nbytes for shard in engine.optimizer.shards.values() for part in shard.parts.values())
        planned = plan(resolve(config)[0], 1).ranks[0].memory.optimizer
        table = architecture(config.model).table
    assert planned == kept
    assert kept == sum(4 * _values_kept(weight) for weight in table.values())


def _values_kept(weight: Parameter) -> int:
    """Momentum and a value a row for large matrices, two moments for all others."""
    if weight.fp8:
        return weight.size + weight.shape[0]
    return 2 * weight.size
