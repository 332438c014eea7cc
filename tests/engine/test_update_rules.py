"""An optimizer by its update rule: the example of docs/extending.md, on one process and cut, saved and counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.table import parameter_table
from hybridtron.checkpoint.folder import valid_checkpoints
from hybridtron.checkpoint.restore import restore_newest
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, OptimConfig, ParallelConfig
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import UpdateRule
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.planning.memory import plan
from tests.conftest import serving, small_config, small_run
from tests.distributed import run_distributed

EXAMPLE = Path(__file__).parents[2] / "examples" / "muon_like"
LR = 1e-2
STEPS = 4
SAVED = 2
OPTIM = OptimConfig(name="muon_like", eps=1e-4, weight_decay=0.1, clip=1e9)


class AdamWByRule(AdamW):
    in_megatron = False


@contextmanager
def registered() -> Iterator[None]:
    """Add the line to the registry that the documentation asks for."""
    sys.path.insert(0, str(EXAMPLE))
    from muon_like import MuonLike  # type: ignore[import-not-found]

    rules: dict[str, type[UpdateRule]] = {"muon_like": MuonLike, "adamw_by_rule": AdamWByRule}
    OPTIMIZERS.update(rules)
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in rules:
            del OPTIMIZERS[name]


def config_of(parallel: ParallelConfig, name: str = "muon_like") -> Config:
    return replace(
        small_run(replace(small_config("M-W-"), vocab_size=64), replace(OPTIM, name=name)), parallel=parallel
    )


def batches_of(step: int, groups: Groups) -> list[Batch]:
    """Return this data-parallel rank's share of a step's two rows."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(61, (2, 25), generator=generator)
    mask = torch.ones(2, 24, dtype=torch.bool)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], mask, SeqInfo.stream(2, 24))
    own = 2 // groups.data.size
    rows = slice(groups.data.rank * own, (groups.data.rank + 1) * own)
    return [batch.map(lambda tensor: tensor[rows])]


def steps(engine: Engine, numbers: range) -> None:
    for step in numbers:
        engine.forward_backward(batches_of(step, engine.groups), step)
        assert engine.step(LR)[1]


def weights_after(seat: Seat, config: Config, folder: Path | None = None) -> dict[str, Tensor]:
    """Train STEPS steps; with a folder write a checkpoint on the way, or resume from the one that is there."""
    with registered(), seat.groups(config.parallel) as groups:
        engine = Engine(config, groups)
        first = 0
        if folder is not None and folder.exists():
            restore_newest(valid_checkpoints(folder), serving(engine), folder)
            first = SAVED
        steps(engine, range(first, SAVED))
        if folder is not None and first == 0:
            tokenizer = folder.with_suffix(".json")
            tokenizer.write_text("{}")
            Saver(config, folder, groups).save(engine, meta_of(engine, SAVED, {}), tokenizer)
        steps(engine, range(SAVED, STEPS))
        return dict(engine.weights())


def serial() -> dict[str, Tensor]:
    """Take the same steps on one process by autograd and the formulas alone, without an optimizer of a library."""
    (found,) = run_distributed(by_hand, 1, config_of(ParallelConfig()))
    return found


def by_hand(seat: Seat, config: Config) -> dict[str, Tensor]:
    with registered(), seat.groups(config.parallel) as groups:
        from muon_like import orthogonalized  # type: ignore[import-not-found]

        engine = Engine(config, groups)
        table = parameter_table(config.model)
        masters = {name: weight.clone() for name, weight in engine.weights()}
        state: dict[str, list[Tensor]] = {
            name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in masters.items()
        }
        for step in range(STEPS):
            engine.forward_backward(batches_of(step, groups), step)
            for name, gradient in engine.optimizer.gradients():
                weight = table[name]
                (one, two) = state[name]
                if weight.fp8:
                    one.mul_(0.9).add_(gradient)
                    straight = orthogonalized(one)
                    two[:, 0] = 0.95 * two[:, 0] + 0.05 * (straight**2).mean(1)
                    direction = straight / ((two[:, :1] / (1 - 0.95 ** (step + 1))) ** 0.5 + config.optim.eps)
                else:
                    one.copy_(0.9 * one + 0.1 * gradient)
                    two.copy_(0.95 * two + 0.05 * gradient**2)
                    mean = one / (1 - 0.9 ** (step + 1))
                    square = two / (1 - 0.95 ** (step + 1))
                    direction = mean / (square.sqrt() + config.optim.eps)
                decay = config.optim.weight_decay if weight.decay else 0.0
                masters[name] = masters[name] * (1 - LR * decay) - LR * direction
            engine.optimizer.zero_grad()
            for name, weight in engine.stages[0].model.named_parameters():
                weight.data.copy_(masters[name])
        return masters


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.gloo
def test_cut_by_tensor_and_data_ranks_it_moves_weights_as_by_hand(tmp_path: Path) -> None:
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


def test_adamw_by_its_rule_is_megatrons(alone: Groups) -> None:
    with registered():
        pair = [Engine(config_of(ParallelConfig(), name), alone) for name in ("adamw", "adamw_by_rule")]
        for engine in pair:
            steps(engine, range(STEPS))
        theirs, ours = (dict(engine.weights()) for engine in pair)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)


def test_the_planner_counts_what_is_kept(alone: Groups) -> None:
    with registered():
        config = config_of(ParallelConfig())
        engine = Engine(config, alone)
        kept = sum(part.nbytes for shard in engine.optimizer.shards.values() for part in shard.parts.values())
        planned = plan(resolve(config)[0], 1).ranks[0].memory.optimizer
        table = parameter_table(config.model)
    assert planned == kept
    assert kept == sum(4 * _values_kept(weight) for weight in table.values())


def _values_kept(weight: Parameter) -> int:
    """Momentum and a value a row for large matrices, two moments for all others."""
    return weight.size + weight.shape[0] if weight.fp8 else 2 * weight.size
