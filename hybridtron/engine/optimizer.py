"""The optimizer: Megatron's AdamW, or another update rule inside Megatron's optimizers (`update_rules.py`).

With the distributed optimizer, each data-parallel rank keeps fp32 master weights and optimizer state only for its shard
of the weights. Weight decay applies to the weights that the parameter table marks, or to all weights if `decay_all` is
set. Megatron's own rule is not used: it selects weights by shape, and would decay a recurrence's A_log.

With `run.ema`, each rank also keeps a moving average of its masters. After the accepted step number t:

    average <- d average + (1 - d) master        d = min(run.ema, (t - 1) / t)

So the first steps of training count equally, and the weights before the first step do not count. Steps are counted
since the moments were last set to zero. The average is in fp32, so a change that is too small is rounded away: a step
does not change an element if |master - average| < 3e-8 / (1 - d) * |average|.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from hybridtron.architecture.base import LetterOwner, Parameter
from hybridtron.config.choices import KeptFormat
from hybridtron.config.schema import Config
from hybridtron.config.update_rule import update_rule
from hybridtron.device import compute_device, copied_to_device
from hybridtron.engine.update_rules import RuleOptimizer
from hybridtron.parallel.blocks import flat_rectangles, full_rectangle, weight_blocks, writes
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mcore import copy_masters_together, gradients_for_norm, optimizer_config
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.sharding import gather_full_tensors

AVERAGE = "ema"  # name of the moving average in the keys of a checkpoint


class Optimizer:
    """Optimizer for a rank's pipeline stages, with gradient clipping by the norm over all ranks."""

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],
        config: Config,
        groups: Groups,
        *,
        table: Mapping[str, Parameter],
        dtype: torch.dtype,
    ) -> None:
        self.stages = stages
        self.groups = groups
        self.dtype = dtype
        self.state_dtype = torch.promote_types(dtype, torch.float32)
        self.table = table
        self.settings = config.optim  # of the current phase
        overrides: Any = {ParamKey(attr="undecayed"): {"wd_mult": 0.0}}
        for factor in sorted({weight.lr_factor for weight in table.values()} - {1.0}):
            overrides[ParamKey(predicate=ParamPredicate(f"lr_factor {factor}", partial(_has_factor, factor)))] = {
                "lr_mult": factor
            }
        settings = optimizer_config(config.optim, config.parallel, dtype)
        self.megatron = cast(
            Any,
            get_megatron_optimizer(settings, list(stages), config_overrides=overrides, use_gloo_process_groups=False),
        )
        for optimizer in self.megatron.chained_optimizers:
            if isinstance(optimizer, DistributedOptimizer):
                copy_masters_together(optimizer)
        self.shards = shards_of(stages, self.megatron.chained_optimizers, self.table, groups.meshes)
        self.rule = update_rule(config.optim)
        # Megatron has one optimizer for dense weights, and a second optimizer if there are experts
        for dense, optimizer in zip((True, False), self.megatron.chained_optimizers, strict=False):
            shards = {name: shard for name, shard in self.shards.items() if shard.weight.allreduce is dense}
            self._make_state(optimizer, config, shards)
        self.accepted_steps = 0
        self.digests: Tensor | None = None  # of the state after the last update (`corruption.py`); None if unknown
        self.average_decay = config.run.ema
        if self.average_decay is not None:
            for shard in self.shards.values():
                if shard.master is not None:
                    shard.average = shard.master.detach().clone()

    def _make_state(self, optimizer: Any, config: Config, shards: Mapping[str, Shard]) -> None:
        """Allocate the state for these weights.

        If the configuration selects another rule, or moments in bf16, a `RuleOptimizer` takes the place of Megatron's
        AdamW.
        """
        if optimizer.optimizer is None:  # all weights of this rank are frozen
            return
        narrow = config.precision.moments == KeptFormat.bf16
        if self.rule.in_megatron and not narrow:
            allocate_moments(optimizer.optimizer, shards.values())
            return
        if narrow:
            state_dtype = torch.bfloat16
        else:
            state_dtype = self.state_dtype
        optimizer.optimizer = RuleOptimizer(
            optimizer.optimizer.param_groups,
            self.rule,
            shards,
            table=self.table,
            meshes=self.groups.meshes,
            settings=((config.optim.betas[0], config.optim.betas[1]), config.optim.eps),
            state_dtype=state_dtype,
            stage_ranks=self.groups.stage,
        )

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip gradients and update weights; return the norm before clipping, and True if the step was accepted."""
        grad_norm = self.grad_norm()
        return grad_norm, self.apply_update(lr, grad_norm)

    def grad_norm(self) -> float:
        """Return the norm of the accumulated gradients over all ranks. The host waits for the device."""
        squared_norm, _ = self.squared_norm()
        return squared_norm.item() ** 0.5

    @torch.no_grad()
    def squared_norm(self, numbers: Sequence[float] = (), flags: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """Return the squared gradient norm, and the sum of each number and each flag, over all ranks.

        Flags and results are on the device, and the host does not wait for them. With Megatron's own function it would
        wait once per weight. Numbers and flags are reduced together with the norm of the dense weights. Without the
        distributed optimizer this reduction spans the ranks of one replica, so numbers and flags are reduced over the
        replicas too.
        """
        self.megatron.prepare_grads()  # sets the gradients of the masters, from which the norm is computed
        dense, *experts = self.megatron.chained_optimizers
        squares = [_squares(optimizer) for optimizer in (dense, *experts)]
        summed = squares[0].reshape(1)
        added = list(flags)
        if numbers:
            added.insert(0, copied_to_device(torch.tensor(numbers)))
        if added:
            summed = torch.cat([summed, *added])  # the norm stays at index 0
        group = dense.get_grad_stats_parallel_group()
        dist.all_reduce(summed, group=group)
        if added and dist.get_world_size(group) < self.groups.world_size:
            dist.all_reduce(summed[1:], group=self.groups.dense.copies.group)
        for optimizer, square in zip(experts, squares[1:], strict=True):
            dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
        return functools.reduce(torch.add, [summed[0], *squares[1:]]), summed[1:]

    def apply_update(self, lr: float, grad_norm: float, wanted: bool = True, weight_decay: float | None = None) -> bool:
        """Clip the gradients and update the weights; return False if the step is refused.

        A step is refused if `wanted` is False or the gradient norm is not finite. Weights and moments then stay
        unchanged. Gradients are reset in either case.

        weight_decay: None for the phase's value
        """
        accepted = wanted and math.isfinite(grad_norm)
        if accepted:
            if weight_decay is None:
                decay = self.settings.weight_decay
            else:
                decay = weight_decay
            for group in self.megatron.param_groups:
                group["lr"] = lr * group["lr_mult"]
                # AdamW decays a weight by the product of the group's learning rate and weight decay, which must not
                # depend on the weight's own factor
                own_decay = decay / group["lr_mult"]
                if self.settings.decay_all:
                    group["weight_decay"] = own_decay
                else:
                    group["weight_decay"] = own_decay * group["wd_mult"]
            # Megatron can clip only fp32 gradients. An audit in float64 works if its gradients need no clipping.
            if grad_norm > self.settings.clip:
                for optimizer in self.megatron.chained_optimizers:
                    if weights := optimizer.get_parameters():
                        clip_grad_by_total_norm_fp32(weights, self.settings.clip, grad_norm)
            self.megatron.step_with_ready_grads()
            self.accepted_steps += 1
            self._update_average()
        self.zero_grad()
        return accepted

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the averages towards the masters after a step, with one call for all weights."""
        if self.average_decay is None:
            return
        decay = min(self.average_decay, 1 - 1 / self.accepted_steps)
        averages = []
        masters = []
        for shard in self.shards.values():
            if shard.average is not None and shard.master is not None:
                averages.append(shard.average)
                masters.append(shard.master)
        if averages:  # none on a rank whose weights are all frozen
            torch._foreach_lerp_(averages, masters, 1 - decay)

    def norms(self) -> dict[str, float]:
        """Return the weight norm and the gradient norm of each part of the model, over all ranks.

        Parts are the layers, the weights that layers share, the embedding, the final norm and the head. The keys are
        PART.weight_norm and PART.grad_norm.
        """
        squares = {_part_of_model(weight): torch.zeros(2, dtype=torch.float64) for weight in self.table.values()}
        for name, shard in self.shards.items():
            parameter = self.table[name]
            mesh = self.groups.meshes[parameter.family]
            # A replicated weight counts once: only on the rank with index 0 in each group that replicates it.
            second_copy = getattr(shard.weight, "shared", False)
            if not second_copy and all(ranks.rank == 0 for ranks in mesh.uncut(parameter.active_cuts(mesh.sizes))):
                squares[_part_of_model(parameter)] += shard.squared_norms()
        totals = torch.stack(list(squares.values())).to(compute_device())
        dist.all_reduce(totals)
        roots = totals.sqrt().tolist()
        kinds = ("weight_norm", "grad_norm")
        return {f"{part}.{kind}": roots[i][k] for i, part in enumerate(squares) for k, kind in enumerate(kinds)}

    def zero_grad(self) -> None:
        """Reset the gradients."""
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.megatron.zero_grad()

    def blocks(self) -> list[Any]:
        """Return this rank's master weights and optimizer states, with their offsets in the full tensors.

        The keys are `master.NAME` and, for the state parts of AdamW, `exp_avg.NAME` and `exp_avg_sq.NAME`. Only bf16
        weights have a key `master.NAME`, because an fp32 weight is its own master. With `run.ema` each trained weight
        also has `ema.NAME`.
        """
        parts = {name: self.rule.parts(name, self.table[name]) for name in self.shards}
        kinds = dict.fromkeys(["master", AVERAGE, *itertools.chain.from_iterable(parts.values())])
        blocks = []
        for kind, (name, shard) in itertools.product(kinds, self.shards.items()):
            parameter = self.table[name]
            if kind in ("master", AVERAGE):
                declared = parameter
            else:
                declared = parts[name].get(kind)
            if declared is None:
                entries = None
            else:
                entries = shard.tensor(kind)
            if declared is None or entries is None or (kind == "master" and self._is_own_master(parameter)):
                continue
            is_divided = declared.shape == parameter.shape  # divided among data-parallel ranks
            mesh = self.groups.meshes[parameter.family]
            main = writes(name, mesh, declared.active_cuts(mesh.sizes), copied=shard.everywhere or not is_divided)
            main = main and not getattr(shard.weight, "shared", False)
            if is_divided:
                flat = flat_rectangles(entries.detach().view(-1), shard.start, shard.weight.shape)
            else:
                flat = [full_rectangle(entries)]
            blocks += weight_blocks(f"{kind}.{name}", list(flat), declared, mesh, main)
        return blocks

    @torch.no_grad()
    def load_masters(self, load_shard: Callable[[str], Tensor]) -> None:
        """Set the fp32 masters of bf16 weights. Before this call they equal the rounded weights.

        `load_shard` returns this rank's shard of a weight by name. Moving averages start as the masters.
        """
        for name, shard in self.shards.items():
            if shard.master is None or self._is_own_master(self.table[name]):
                continue
            entries = load_shard(name).reshape(-1)[shard.start : shard.stop]
            shard.master.copy_(entries.view_as(shard.master))
            if shard.average is not None:
                shard.average.copy_(shard.master)

    def resume(self, steps: int) -> None:
        """Set how many steps have been accepted, after a checkpoint was loaded."""
        self.accepted_steps = steps
        self.digests = None
        for optimizer in self.megatron.chained_optimizers:
            set_step_count(optimizer.optimizer, steps)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full gradient) for every weight, summed over all ranks. Call this method before `step`."""
        shares = {name: partial(_full_shard_gradient, shard) for name, shard in self.shards.items()}
        return gather_full_tensors(shares, self.table, self.groups, self.state_dtype)

    def _is_own_master(self, parameter: Parameter) -> bool:
        """Return True if a weight has no separate master, because it is not stored in bf16."""
        return parameter.fp32 or self.dtype != torch.bfloat16


def _has_factor(factor: float, weight: Any) -> bool:
    return weight.lr_factor == factor


def _squares(optimizer: Any) -> Tensor:
    """Return the squared gradient norm of this rank's share, for one Megatron optimizer."""
    gradients = gradients_for_norm(optimizer)
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients)).to(torch.get_default_dtype())
        return torch.linalg.vector_norm(norms).float() ** 2.0
    return torch.zeros((), dtype=torch.float32, device=compute_device())


def set_step_count(inner: torch.optim.Optimizer | None, steps: int) -> None:
    """Set the optimizer's step count, from which AdamW computes the bias correction for its moments.

    Megatron uses AdamW from Transformer Engine or apex if either package is installed. Their AdamW stores the step
    count per parameter group, and torch's AdamW stores it per weight.
    """
    if isinstance(inner, RuleOptimizer):
        inner.steps = steps
    elif isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state["step"].fill_(steps)
    elif inner is not None:  # None on a rank whose weights are all frozen
        for group in inner.param_groups:
            group["step"] = steps


def allocate_moments(inner: torch.optim.Optimizer, shards: Iterable[Shard]) -> None:
    """Allocate AdamW's state before the first step, so that a checkpoint can be loaded into it.

    A shard's `parts` is then the state that AdamW keeps for the shard's master.
    """
    if isinstance(inner, torch.optim.AdamW):  # Megatron does not enable torch's fused implementation, which is faster
        for group in inner.param_groups:
            group["fused"] = True
            group["foreach"] = False
    for shard in shards:
        if shard.master is not None:
            state = inner.state[shard.master]
            if isinstance(inner, torch.optim.AdamW):  # other versions store the step count in the parameter group
                state["step"] = torch.zeros((), device=shard.master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(shard.master), torch.zeros_like(shard.master)
            shard.parts = state


@dataclass
class Shard:
    """The elements of a weight that this rank's optimizer updates.

    weight: this tensor-parallel rank's weight, an nn.Parameter with attributes that Megatron sets
    master: fp32 master of the elements; None if this rank updates no element, or if the weight is frozen
    start, stop: the elements' range in the flattened weight
    copies: the ranks that hold the same weight
    ranges: for each rank in `copies`, the range that it updates
    everywhere: True if each rank in `copies` updates all elements, because the optimizer is not distributed
    parts: name of a state part -> its values for the elements
    average: moving average of the master; None without `run.ema`, or without a master
    """

    weight: Any
    master: Tensor | None
    start: int
    stop: int
    copies: RankGroup
    ranges: Sequence[range]
    everywhere: bool = False
    parts: dict[str, Tensor] = field(default_factory=dict)
    average: Tensor | None = None

    def tensor(self, kind: str) -> Tensor | None:
        """Return the elements' "master", "gradient", "ema" or the state part `kind`; None if it does not exist."""
        if kind == "gradient" and self.master is not None:
            return self.weight.main_grad.flatten()[self.start : self.stop]
        if kind == "master":
            return self.master
        if kind == AVERAGE:
            return self.average
        return self.parts.get(kind)

    def gather_over_data(self, entries: Tensor | None) -> Tensor:
        """Return a tensor with the weight's shape, gathered from the elements on all data-parallel ranks.

        entries: this rank's elements; None if it has none
        """
        shape = self.weight.shape
        if self.everywhere:
            assert entries is not None
            return entries.view(shape).clone()
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        # an all-reduce of zero-padded elements, because ranks hold different numbers of elements
        share = torch.zeros(shape.numel(), dtype=dtype, device=self.weight.device)
        if entries is not None:
            share[self.start : self.stop] = entries
        dist.all_reduce(share, group=self.copies.group)
        return share.view(shape)

    def squared_norms(self) -> Tensor:
        """Return [squared norm of the elements, squared norm of their gradient]; zeros if another rank counts them."""
        if self.master is None or (self.everywhere and self.copies.rank > 0):
            return torch.zeros(2, dtype=torch.float64)
        tensors = (self.master, self.tensor("gradient"))
        return torch.stack([t.detach().double().square().sum().cpu() for t in tensors if t is not None])


def shards_of(
    stages: Sequence[DistributedDataParallel],
    optimizers: Sequence[Any],
    table: Mapping[str, Parameter],
    meshes: Mapping[str, Mesh],
) -> dict[str, Shard]:
    """Return, for every weight in these stages, the elements that Megatron's optimizers update on this rank."""
    models: list[Any] = [stage.module.model for stage in stages]
    weights = {name: weight for model in models for name, weight in model.named_parameters()}
    distributed = all(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers)
    held: dict[nn.Parameter, HeldEntries] = {}
    ranges: dict[nn.Parameter, list[range]] = {}
    for optimizer in optimizers if distributed else ():
        if optimizer.is_stub_optimizer:  # all weights of this stage are frozen
            continue
        held |= _held(optimizer)
        ranges |= _ranges_of_copies(optimizer)
    shards = {}
    for name, weight in weights.items():
        copies = meshes[table[name].family].copies
        if weight in held:
            entries = held[weight]
            assert ranges[weight][copies.rank] == range(entries.start, entries.stop)
            shards[name] = Shard(weight, entries.master, entries.start, entries.stop, copies, ranges[weight])
        elif distributed or not weight.requires_grad:
            shards[name] = Shard(weight, None, 0, 0, copies, ranges.get(weight, ()))
        else:
            master = getattr(weight, "main_param", weight)
            full = [range(weight.numel())] * copies.size
            shards[name] = Shard(weight, master, 0, weight.numel(), copies, full, everywhere=True)
    return shards


def _full_shard_gradient(shard: Shard) -> Tensor:
    """Return this tensor-parallel rank's gradient of a weight on the CPU, gathered over data-parallel ranks."""
    return shard.gather_over_data(shard.tensor("gradient")).cpu()


@dataclass(frozen=True)
class HeldEntries:
    """Elements of a flattened weight, from `start` to `stop`, that the distributed optimizer updates on this rank."""

    master: Tensor
    start: int
    stop: int


def _held(optimizer: DistributedOptimizer) -> dict[nn.Parameter, HeldEntries]:
    """Return, for each weight, the elements that this rank updates.

    Megatron's own index of these elements is wrong if a parameter group has both bf16 and fp32 weights.
    """
    pairs = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    )
    held = {}
    for weight_groups, master_groups in pairs:
        for weights, masters in zip(weight_groups, master_groups, strict=True):
            for weight, master in zip(weights, masters, strict=True):
                entries = optimizer._get_model_param_range_map(weight)["param"]
                held[weight] = HeldEntries(master, entries.start, entries.end)
    return held


def _ranges_of_copies(optimizer: DistributedOptimizer) -> dict[nn.Parameter, list[range]]:
    """Return, for each flattened weight, the ranges that the data-parallel ranks update.

    Megatron concatenates flattened weights in buckets, and divides each bucket evenly among the ranks.
    """
    ranges = {}
    for buffer in optimizer.buffers:
        count = buffer.data_parallel_world_size
        for weight, (start, stop, index, *_) in buffer.param_index_map.items():
            bucket = buffer.buckets[index]
            share = bucket.grad_data.numel() // count
            firsts = [bucket.offset - start + rank * share for rank in range(count)]
            ranges_of_ranks = [range(max(0, first), min(stop - start, first + share)) for first in firsts]
            ranges[weight] = [entries if entries else range(0) for entries in ranges_of_ranks]
    return ranges


def _part_of_model(weight: Parameter) -> str:
    """Return the part of the model to which a weight belongs, such as `layers.3`, `shared` or `embedding`."""
    assert weight.owner is not None
    return "shared" if isinstance(weight.owner, LetterOwner) else weight.owner.path
