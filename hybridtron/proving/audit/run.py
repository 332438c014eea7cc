"""The audit's two sides: a serial step, and the same step in a layout.

The serial side is a plain loop: the model as one module of plain matrix products, autograd, and torch's AdamW. It uses
nothing of the engine, of megatron-core or of process groups. The parallel side is the code that trains: `Engine` on
every process.

Both start from the same full weights: in fp32 as `model/init.py` makes them, in float64 with noise added, because a
wrong order of equal values (norms, D, the rows of A_log) would never show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybridtron.architecture.inits import Normal
from hybridtron.architecture.table import parameter_table
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.data.batch import Batch, SeqInfo, step_key
from hybridtron.data.order.phase_order import phase_seed
from hybridtron.engine.engine import Engine
from hybridtron.model.init import initialise, starting_value
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import CrossEntropyInputs, cross_entropy
from hybridtron.parallel.pool import Pool, Seat
from hybridtron.proving.audit.bugs import injected
from hybridtron.proving.audit.cases import Case
from hybridtron.proving.audit.compared import MOVES, AuditPrecision, Disagreement, Step, differences
from hybridtron.proving.steps import plain_adamw


class Audit:
    """Compares layouts with a serial step, which runs once for all layouts of a model.

    With `by_one_rank` the reference is the engine on one process instead. On a GPU both sides then run the same
    kernels, so that the differences come from communication.
    """

    def __init__(self, pool: Pool, timeout_s: float = 300.0, by_one_rank: bool = False) -> None:
        self.pool = pool
        self.timeout_s = timeout_s
        self.by_one_rank = by_one_rank
        self.truths: dict[str, Step] = {}
        self.moved: dict[str, list[Step]] = {}

    def compare(self, case: Case, precision: AuditPrecision, bug: str | None = None) -> list[Disagreement]:
        """Return every difference between the two sides, the largest first. Raises WorkerError if the parallel side
        fails.
        """
        config = as_computed(case.config, precision)
        ranks = self.pool.run(parallel_step, case.world_size, config, precision, bug, timeout_s=self.timeout_s)
        key = f"{precision.name} {replace(config, parallel=ParallelConfig())}"
        if key not in self.truths:
            self.truths[key] = self._truth(config, precision)
        compared = list(differences(self.truths[key], ranks, config, precision))
        if precision.rounding and not all(d.passes for d in compared):  # measure the effect of rounding only then
            if key not in self.moved:
                self.moved[key] = [self._truth(config, precision, move) for move in range(1, MOVES + 1)]
            compared = list(differences(self.truths[key], ranks, config, precision, self.moved[key]))
        return sorted(compared, key=lambda d: math.inf if math.isnan(d.of_limit) else d.of_limit, reverse=True)

    def _truth(self, config: Config, precision: AuditPrecision, move: int = 0) -> Step:
        """Run the reference step: serial, or the engine on one process."""
        if not self.by_one_rank:
            return serial_step(config, precision, move)
        alone = replace(config, parallel=replace(ParallelConfig(), distributed_optimizer=False))
        return self.pool.run(parallel_step, 1, alone, precision, None, move, timeout_s=self.timeout_s)[0]


def as_computed(config: Config, precision: AuditPrecision) -> Config:
    """Return the configuration with the optimizer that the precision needs."""
    # overlap_param_gather depends on the distributed optimizer: leave it to the default
    parallel = replace(
        config.parallel, distributed_optimizer=precision.distributed_optimizer, overlap_param_gather=None
    )
    if precision.clip:
        optim = config.optim
    else:
        optim = replace(config.optim, clip=1e9)
    return replace(config, parallel=parallel, optim=optim)


def parallel_step(seat: Seat, config: Config, precision: AuditPrecision, bug: str | None, move: int = 0) -> Step:
    """Run the step on one process of the layout, as the trainer does."""
    with default_dtype(precision.dtype), injected(bug), seat.groups(config.parallel) as groups:
        if precision.noisy_start or move:
            start = partial(starting_weight, config, precision, move)
        else:
            start = None
        engine = Engine(config, groups, start, precision.dtype)
        batches = micro_batches(config)
        batches_per_rank = len(batches) // groups.data.size
        batches = batches[groups.data.rank * batches_per_rank : (groups.data.rank + 1) * batches_per_rank]
        if engine.config.parallel.overlap_grad_reduce:  # Megatron overlaps only from the second step on
            engine.forward_backward(batches)
            engine.optimizer.zero_grad()
        step_loss = engine.forward_backward(batches)
        loss = step_loss.mean.item()
        tokens = step_loss.tokens.item()
        auxiliary = {name: float(total) / tokens for name, total in step_loss.auxiliary.items()}
        gradients = dict(engine.optimizer.gradients())
        grad_norm, _ = engine.optimizer.step(rate_of(config))
        loss_after = engine.loss(batches).mean.item()
        weights = {name: shard.weight.detach().cpu() for name, shard in engine.optimizer.shards.items()}
        meshes = {family: mesh.without_groups() for family, mesh in groups.meshes.items()}
        return Step(loss, grad_norm, loss_after, gradients, weights, auxiliary, meshes)


def rate_of(config: Config) -> float:
    """Return the first phase's peak learning rate."""
    rate = config.phases[0].lr
    assert rate is not None
    return rate


def serial_step(config: Config, precision: AuditPrecision, move: int = 0) -> Step:
    """Run the step in plain torch, from slightly moved weights if `move` is not 0; each value moves them
    differently.
    """
    optim = config.optim
    batches = micro_batches(config)
    with default_dtype(precision.dtype):
        model = LanguageModel(config.model).cast(precision.dtype)
        initialise(model, config.run.seed)
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            if precision.noisy_start or move:
                weight.data.copy_(starting_weight(config, precision, move, name))
            weight.requires_grad_(resolve(config)[0].learns(name))
        seed = phase_seed(config.run.seed, 0)
        rows = config.phases[0].micro_batch
        keyed = [batch.keyed(step_key(seed, 0, 0, index * rows)) for index, batch in enumerate(batches)]
        loss, tokens, auxiliary = _add_up(model, keyed, optim.z_loss)
        gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad / tokens for name, w in weights.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        for name, weight in weights.items():
            if weight.requires_grad:
                weight.grad = gradients[name] * min(1.0, optim.clip / norm)
            else:
                weight.grad = None
        plain_adamw(model, config, rate_of(config)).step()
        loss_after, *_ = _add_up(model, batches, 0.0)
    after = {name: weight.detach() for name, weight in weights.items()}
    return Step(loss, norm, loss_after, gradients, after, auxiliary)


def _add_up(model: LanguageModel, batches: Sequence[Batch], z_loss: float) -> tuple[float, int, dict[str, float]]:
    """Run all batches forward and backward, accumulating gradients of sums over tokens.

    Return the mean cross entropy, the number of tokens, and the means of auxiliary losses by name.
    """
    total = 0.0
    tokens = 0
    sums: dict[str, float] = {}
    for batch in batches:
        out = model(batch.tokens_BL, None, batch.seq)
        loss = cross_entropy(CrossEntropyInputs(out.output, batch.labels_BL.T, batch.mask_BL.T, z_loss))
        batch_tokens = int(batch.mask_BL.sum())
        (loss.total + sum(out.aux.values()) * batch_tokens).backward()
        total = total + float(loss.cross_entropy)
        tokens = tokens + batch_tokens
        for name, added in out.aux.items():
            sums[name] = sums.get(name, 0.0) + added.item() * batch_tokens
    return total / tokens, tokens, {name: weighted_sum / tokens for name, weighted_sum in sums.items()}


def starting_weight(config: Config, precision: AuditPrecision, move: int, name: str) -> Tensor:
    """Return a full weight as initialised, in torch's default type, with noise added if the precision asks for it.

    If `move` is not 0, each value is moved by about its last bit.
    """
    parameter = parameter_table(config.model)[name]
    seed = config.run.seed
    weight = starting_value(parameter.init, parameter.shape, seed, name)
    if precision.noisy_start:
        weight = weight + starting_value(Normal(0.05), parameter.shape, seed, f"noise/{name}")
    if move:
        last_bit = torch.finfo(precision.dtype).eps / 2
        weight = weight * (1 + starting_value(Normal(last_bit), parameter.shape, seed, f"move {move}/{name}"))
    return weight


def micro_batches(config: Config) -> list[Batch]:
    """Return the step's micro-batches for all ranks.

    They have document boundaries, masks of different density, and one row that is masked entirely.
    """
    phase = config.phases[0]
    generator = torch.Generator().manual_seed(config.run.seed)
    count = phase.global_batch // phase.micro_batch
    rows = phase.micro_batch
    length = phase.seq_len
    batches = []
    for index in range(count):
        tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=generator)
        mask = torch.rand(rows, length, generator=generator, dtype=torch.float32) < (index + 1) / (count + 1)
        if index == 0:
            mask[-1] = False
        starts = torch.rand(rows, length, generator=generator, dtype=torch.float32) < 3 / length
        seq = SeqInfo.stream(rows, length)
        if resolve(config)[0].documents is Documents.isolate:
            documents = starts.cumsum(1) - starts[:, :1].long()
            first = (documents[:, None, :] < documents[:, :, None]).sum(
                -1
            )  # position at which a token's document begins
            seq = SeqInfo(seq.positions_BL - first, documents.int())
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], mask, seq))
    return batches


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default type while the block runs, because megatron-core divides gradients by the token count in
    it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
