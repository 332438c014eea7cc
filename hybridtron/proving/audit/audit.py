"""The audit's two sides: a serial step, and the same step in a parallel layout.

The serial side is a plain loop: the model as one torch module, autograd, and torch's AdamW. This side uses no
engine, no megatron-core and no process groups. The parallel side is the code that trains: an `Engine` on every process.

Both sides start from equal full weights. In fp32 these are the initial weights of `model/init.py`. In float64, noise is
added to the initial weights. Without noise, many elements are equal (in norms, D, and the rows of A_log), and the audit
would not notice if these elements had a wrong order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybridtron.architecture.inits import Normal
from hybridtron.architecture.moe import MoESpec
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.data.batch import Batch, SeqInfo, step_key
from hybridtron.data.order.phase_order import phase_seed
from hybridtron.engine.bptt import added_choices
from hybridtron.engine.engine import Engine
from hybridtron.mixers.base import Routed
from hybridtron.model.init import initialise, starting_value
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import CrossEntropyInputs, cross_entropy
from hybridtron.parallel.pool import Pool, Seat
from hybridtron.proving.audit.bugs import inject_bug
from hybridtron.proving.audit.cases import Case
from hybridtron.proving.audit.differences import MOVES, AuditPrecision, Disagreement, Step, differences
from hybridtron.proving.steps import plain_adamw


class Audit:
    """Compares a model's layouts with a serial step. The serial step runs once for all these layouts.

    With `by_one_rank`, the engine on one process replaces the serial step. On GPUs both sides then run the same
    kernels, so that all differences come from communication.
    """

    def __init__(self, pool: Pool, timeout_s: float = 300.0, by_one_rank: bool = False) -> None:
        self.pool = pool
        self.timeout_s = timeout_s
        self.by_one_rank = by_one_rank
        self.truths: dict[str, Step] = {}
        self.moved: dict[str, list[Step]] = {}

    def compare(self, case: Case, precision: AuditPrecision, bug: str | None = None) -> list[Disagreement]:
        """Return the difference of every compared number and tensor, sorted by difference / limit, largest first.

        Raises WorkerError if the parallel side fails.
        """
        config = as_computed(case.config, precision)
        table = case.plan.arch.table
        ranks = self.pool.run(parallel_step, case.world_size, config, precision, bug, timeout_s=self.timeout_s)
        key = f"{precision.name} {replace(config, parallel=ParallelConfig())}"
        if key not in self.truths:
            self.truths[key] = self._truth(config, precision)
        compared = list(differences(self.truths[key], ranks, table, precision))
        # the serial steps from moved weights take time, so they run only after a difference has exceeded its limit
        if precision.rounding and not all(d.passes for d in compared):
            if key not in self.moved:
                self.moved[key] = [self._truth(config, precision, move) for move in range(1, MOVES + 1)]
            compared = list(differences(self.truths[key], ranks, table, precision, self.moved[key]))
        return sorted(compared, key=lambda d: math.inf if math.isnan(d.of_limit) else d.of_limit, reverse=True)

    def _truth(self, config: Config, precision: AuditPrecision, move: int = 0) -> Step:
        """Run the step with which layouts are compared: the serial step, or the engine on one process (`by_one_rank`).

        If `move` is not 0, the step starts from moved weights (`starting_weight`).
        """
        if not self.by_one_rank:
            return serial_step(config, precision, move)
        alone = replace(config, parallel=replace(ParallelConfig(), distributed_optimizer=False))
        return self.pool.run(parallel_step, 1, alone, precision, None, move, timeout_s=self.timeout_s)[0]


def as_computed(config: Config, precision: AuditPrecision) -> Config:
    """Return the configuration with the precision's settings for the distributed optimizer and for clipping."""
    # overlap_param_gather is allowed only with a distributed optimizer; None selects the default
    parallel = replace(
        config.parallel, distributed_optimizer=precision.distributed_optimizer, overlap_param_gather=None
    )
    if precision.clip:
        optim = config.optim
    else:
        optim = replace(config.optim, clip=1e9)
    return replace(config, parallel=parallel, optim=optim)


def parallel_step(seat: Seat, config: Config, precision: AuditPrecision, bug: str | None, move: int = 0) -> Step:
    """Run the parallel step on one of the layout's processes, with the engine that trains. Return this rank's results.

    `bug` is a planted bug. If `move` is not 0, the step starts from moved weights (`starting_weight`).
    """
    phase = RunPlan.of(config).phases[0]
    with default_dtype(precision.dtype), inject_bug(bug), seat.groups(config.parallel) as groups:
        if precision.noisy_start or move:
            start = partial(starting_weight, phase, precision, move)
        else:
            start = None
        engine = Engine(phase, groups, start, precision.dtype)
        batches = micro_batches(phase)
        batches_per_rank = len(batches) // groups.data.size
        batches = batches[groups.data.rank * batches_per_rank : (groups.data.rank + 1) * batches_per_rank]
        # Megatron overlaps communication only from the second step on, so a step is taken first
        if engine.config.parallel.overlap_grad_reduce:
            engine.forward_backward(batches)
            engine.optimizer.zero_grad()
        step_loss = engine.forward_backward(batches)
        loss = step_loss.mean.item()
        tokens = step_loss.tokens.item()
        auxiliary = {name: float(total) / tokens for name, total in step_loss.auxiliary.items()}
        gradients = dict(engine.optimizer.gradients())
        grad_norm, _ = engine.step(rate_of(config))
        loss_after = engine.loss(batches).mean.item()
        weights = {name: shard.weight.detach().cpu() for name, shard in engine.optimizer.shards.items()}
        loads = {index: routed.loads_E.cpu() for index, routed in step_loss.choices.items()}
        dropped = {index: routed.dropped.cpu() for index, routed in step_loss.choices.items()}
        meshes = {family: mesh.without_groups() for family, mesh in groups.meshes.items()}
        return Step(loss, grad_norm, loss_after, gradients, weights, auxiliary, loads, dropped, meshes)


def rate_of(config: Config) -> float:
    """Return the first phase's peak learning rate."""
    rate = config.phases[0].lr
    assert rate is not None
    return rate


def serial_step(config: Config, precision: AuditPrecision, move: int = 0) -> Step:
    """Run the step in plain torch.

    If `move` is not 0, the step starts from moved weights (`starting_weight`).
    """
    optim = config.optim
    phase = RunPlan.of(config).phases[0]
    batches = micro_batches(phase)
    with default_dtype(precision.dtype):
        model = LanguageModel(phase.arch).cast(precision.dtype)
        initialise(model, config.run.seed)
        weights = dict(model.named_parameters())
        for name, weight in weights.items():
            if precision.noisy_start or move:
                weight.data.copy_(starting_weight(phase, precision, move, name))
            weight.requires_grad_(phase.learns(name))
        seed = phase_seed(config.run.seed, 0)
        rows = phase.settings.micro_batch
        keyed = [batch.keyed(step_key(seed, 0, 0, index * rows)) for index, batch in enumerate(batches)]
        loss, tokens, auxiliary, routed = _add_up(model, keyed, optim.z_loss)
        loads = {index: choices.loads_E for index, choices in routed.items()}
        dropped = {index: choices.dropped for index, choices in routed.items()}
        gradients = {name: torch.zeros_like(w) if w.grad is None else w.grad / tokens for name, w in weights.items()}
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        for name, weight in weights.items():
            if weight.requires_grad:
                weight.grad = gradients[name] * min(1.0, optim.clip / norm)
            else:
                weight.grad = None
        plain_adamw(model, config, rate_of(config)).step()
        _move_corrections(phase, weights, loads)
        loss_after, *_ = _add_up(model, batches, 0.0)
    after = {name: weight.detach() for name, weight in weights.items()}
    return Step(loss, norm, loss_after, gradients, after, auxiliary, loads, dropped)


def _move_corrections(phase: ResolvedPhase, weights: Mapping[str, Tensor], loads: Mapping[int, Tensor]) -> None:
    """Move each router's correction towards even loads, as `balance: bias` does after a step."""
    for index, loads_E in loads.items():
        spec = phase.arch.specs[index]
        assert isinstance(spec, MoESpec)
        if spec.balance == "bias":
            below_E = loads_E.double().mean() - loads_E
            weights[f"layers.{index}.mixer.correction"].data += spec.speed * below_E.sign()


def _add_up(
    model: LanguageModel, batches: Sequence[Batch], z_loss: float
) -> tuple[float, int, dict[str, float], dict[int, Routed]]:
    """Run all batches forward and backward. Accumulate gradients of the loss summed over all tokens.

    Return four items: the mean cross entropy over tokens, the token count, the mean auxiliary losses by name, and the
    choices of routers by the sub-layer's index.
    """
    total = 0.0
    tokens = 0
    choices: dict[int, Routed] = {}
    sums: dict[str, float] = {}
    for batch in batches:
        out = model(batch.tokens_BL, None, batch.seq)
        loss = cross_entropy(CrossEntropyInputs(out.output, batch.labels_BL.T, batch.mask_BL.T, z_loss))
        tokens_B = batch.mask_BL.sum(1)
        weighted = {name: (added * tokens_B).sum() for name, added in out.aux.items()}
        (loss.total + sum(weighted.values())).backward()
        total = total + float(loss.cross_entropy)
        tokens = tokens + int(tokens_B.sum())
        for index, routed in out.routed.items():
            choices[index] = added_choices(choices.get(index), routed)
        for name, added in weighted.items():
            sums[name] = sums.get(name, 0.0) + added.item()
    return total / tokens, tokens, {name: weighted_sum / tokens for name, weighted_sum in sums.items()}, choices


def starting_weight(phase: ResolvedPhase, precision: AuditPrecision, move: int, name: str) -> Tensor:
    """Return a full initial weight in torch's default dtype, with noise if the precision has `noisy_start`.

    If `move` is not 0, random changes of about the last bit are applied to all elements. `move` seeds these changes.
    """
    parameter = phase.table[name]
    seed = phase.config.run.seed
    weight = starting_value(parameter.init, parameter.shape, seed, name)
    if precision.noisy_start:
        weight = weight + starting_value(Normal(0.05), parameter.shape, seed, f"noise/{name}")
    if move:
        last_bit = torch.finfo(precision.dtype).eps / 2
        weight = weight * (1 + starting_value(Normal(last_bit), parameter.shape, seed, f"move {move}/{name}"))
    return weight


def micro_batches(phase: ResolvedPhase) -> list[Batch]:
    """Return all micro-batches of the step, for all ranks together, with random tokens.

    Sequences have document boundaries if the phase isolates documents. The micro-batches' loss masks have different
    densities. In one sequence, no token counts in the loss.
    """
    settings = phase.settings
    generator = torch.Generator().manual_seed(phase.config.run.seed)
    count = settings.global_batch // settings.micro_batch
    rows = settings.micro_batch
    length = settings.seq_len
    batches = []
    for index in range(count):
        tokens = torch.randint(phase.model.vocab_size, (rows, length + 1), generator=generator)
        mask = torch.rand(rows, length, generator=generator, dtype=torch.float32) < (index + 1) / (count + 1)
        if index == 0:
            mask[-1] = False
        starts = torch.rand(rows, length, generator=generator, dtype=torch.float32) < 3 / length
        seq = SeqInfo.stream(rows, length)
        if phase.documents is Documents.isolate:
            documents = starts.cumsum(1) - starts[:, :1].long()
            # for each token, the position at which its document begins
            first = (documents[:, None, :] < documents[:, :, None]).sum(-1)
            seq = SeqInfo(seq.positions_BL - first, documents.int())
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], mask, seq))
    return batches


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype while the block runs.

    `dtype` should be the step's dtype, because megatron-core divides gradients by the token count in the default dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
