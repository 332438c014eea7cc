"""The optimizer: Megatron's AdamW, or another update rule inside Megatron's optimizers.

With the distributed optimizer, each data-parallel rank keeps the fp32 masters and the state of its shard of the
weights. Only weights that the parameter table marks for it are decayed, unless `decay_all` is set: Megatron's own rule
decides by shape and would decay A_log.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import Tensor, nn

from hybridtron.architecture.base import LetterOwner, Parameter
from hybridtron.architecture.table import parameter_table
from hybridtron.config.choices import KeptFormat
from hybridtron.config.schema import Config
from hybridtron.device import compute_device
from hybridtron.engine.update_rules import RuleOptimizer
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.parallel.blocks import flat_rectangles, full_rectangle, weight_blocks, writes
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mcore import gradients_for_norm, optimizer_config
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.whole import gathered


class Optimizer:
    """Optimizer for a rank's stages: clips the accumulated gradients by their global norm, then updates the weights."""

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],
        config: Config,
        groups: Groups,
        dtype: torch.dtype,
    ) -> None:
        self.stages = stages
        self.groups = groups
        self.dtype = dtype
        self.state_dtype = torch.promote_types(dtype, torch.float32)
        self.table = parameter_table(config.model)
        self.settings = config.optim  # of the current phase
        undecayed: Any = {ParamKey(attr="undecayed"): {"wd_mult": 0.0}}
        settings = optimizer_config(config.optim, config.parallel, dtype)
        self.megatron = cast(Any, get_megatron_optimizer(settings, list(stages), config_overrides=undecayed))
        self.shards = shards_of(stages, self.megatron.chained_optimizers, self.table, groups.meshes)
        self.rule = OPTIMIZERS[config.optim.name]()
        # Megatron has an optimizer for the dense weights, and a second one if there is another family
        for dense, optimizer in zip((True, False), self.megatron.chained_optimizers, strict=False):
            shards = {name: shard for name, shard in self.shards.items() if shard.weight.allreduce is dense}
            self._make_state(optimizer, config, shards)
        self.accepted_steps = 0

    def _make_state(self, optimizer: Any, config: Config, shards: Mapping[str, Shard]) -> None:
        """Allocate the moments of these weights, and replace Megatron's AdamW if another rule moves them."""
        if optimizer.optimizer is None:  # all weights of this stage are frozen
            return
        narrow = config.precision.moments == KeptFormat.bf16
        if self.rule.in_megatron and not narrow:
            make_moments(optimizer.optimizer, shards.values())
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
            kept=state_dtype,
        )

    def step(self, lr: float) -> tuple[float, bool]:
        """Clip and update; return the gradient norm before clipping and True if the step was taken."""
        grad_norm = self.grad_norm()
        return grad_norm, self.take(lr, grad_norm)

    def grad_norm(self) -> float:
        """Return the norm of the accumulated gradients over all ranks. Synchronizes."""
        return self.squared_norm().item() ** 0.5

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Return the squared gradient norm on the device. Megatron's own function would synchronize once per weight."""
        self.megatron.prepare_grads()
        return functools.reduce(torch.add, map(_squared_norm, self.megatron.chained_optimizers))

    def take(self, lr: float, grad_norm: float, wanted: bool = True, weight_decay: float | None = None) -> bool:
        """Clip gradients and apply the update if `wanted`; return False if the step was refused.

        A step whose gradients are not finite is refused on every rank and leaves weights and moments unchanged.
        Gradients are reset in either case. `weight_decay` defaults to the phase's.
        """
        accepted = wanted and math.isfinite(grad_norm)
        if accepted:
            if weight_decay is None:
                decay = self.settings.weight_decay
            else:
                decay = weight_decay
            for group in self.megatron.param_groups:
                group["lr"] = lr
                if self.settings.decay_all:
                    group["weight_decay"] = decay
                else:
                    group["weight_decay"] = decay * group["wd_mult"]
            # Megatron clips only fp32 gradients; skipping it when unneeded lets an audit run in float64.
            if grad_norm > self.settings.clip:
                for optimizer in self.megatron.chained_optimizers:
                    if weights := optimizer.get_parameters():
                        clip_grad_by_total_norm_fp32(weights, self.settings.clip, grad_norm)
            self.megatron.step_with_ready_grads()
            self.accepted_steps += 1
        self.zero_grad()
        return accepted

    def norms(self) -> dict[str, float]:
        """Return weight and gradient norms over all ranks, by layer, shared weights, embedding, final norm and head."""
        squares = {_part_of_model(weight): torch.zeros(2, dtype=torch.float64) for weight in self.table.values()}
        for name, shard in self.shards.items():
            parameter = self.table[name]
            mesh = self.groups.meshes[parameter.family]
            second_copy = getattr(shard.weight, "shared", False)
            if not second_copy and all(ranks.rank == 0 for ranks in mesh.uncut(parameter.active_cuts(mesh.sizes))):
                squares[_part_of_model(parameter)] += shard.squares()
        totals = torch.stack(list(squares.values()))
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
        """Return this rank's masters and state parts, as `exp_avg.NAME`, with their offsets in the full tensors.

        Only bf16 weights have masters, since an fp32 weight is its own.
        """
        parts = {name: self.rule.parts(name, self.table[name]) for name in self.shards}
        kinds = dict.fromkeys(["master", *itertools.chain.from_iterable(parts.values())])
        blocks = []
        for kind, (name, shard) in itertools.product(kinds, self.shards.items()):
            parameter = self.table[name]
            if kind == "master":
                declared = parameter
            else:
                declared = parts[name].get(kind)
            if declared is None:
                entries = None
            else:
                entries = shard.tensor(kind)
            if declared is None or entries is None or (kind == "master" and self._own_master(parameter)):
                continue
            follows = declared.shape == parameter.shape  # then it is sharded over data-parallel ranks like the weight
            mesh = self.groups.meshes[parameter.family]
            main = writes(name, mesh, declared.active_cuts(mesh.sizes), copied=shard.everywhere or not follows)
            main = main and not getattr(shard.weight, "shared", False)
            if follows:
                flat = flat_rectangles(entries.detach().view(-1), shard.start, shard.weight.shape)
            else:
                flat = [full_rectangle(entries)]
            blocks += weight_blocks(f"{kind}.{name}", list(flat), declared, mesh, main)
        return blocks

    def resume(self, steps: int) -> None:
        """Set the step count, after masters and moments were restored."""
        self.accepted_steps = steps
        for optimizer in self.megatron.chained_optimizers:
            set_steps(optimizer.optimizer, steps)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight's full gradient, summed over all ranks; call it before a step is taken."""
        shares = {name: partial(_whole_gradient, shard) for name, shard in self.shards.items()}
        return gathered(shares, self.table, self.groups, self.state_dtype)

    def _own_master(self, parameter: Parameter) -> bool:
        """Check if a weight is its own master, since it is not bf16."""
        return parameter.fp32 or self.dtype != torch.bfloat16


def _squared_norm(optimizer: Any) -> Tensor:
    """Return the squared norm of the gradients of one of Megatron's optimizers, over all ranks."""
    gradients = gradients_for_norm(optimizer)
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients)).to(torch.get_default_dtype())
        squares = torch.linalg.vector_norm(norms).float() ** 2.0
    else:
        squares = torch.zeros((), device=compute_device())
    dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
    return squares


def set_steps(inner: torch.optim.Optimizer | None, steps: int) -> None:
    """Set the optimizer's step count, which corrects the bias of the moments.

    Megatron uses Transformer Engine's or apex's AdamW if one is installed. Those count steps per parameter group,
    torch's counts them per weight.
    """
    if isinstance(inner, RuleOptimizer):
        inner.steps = steps
    elif isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state["step"].fill_(steps)
    elif inner is not None:  # None on a rank whose weights are all frozen
        for group in inner.param_groups:
            group["step"] = steps


def make_moments(inner: torch.optim.Optimizer, shards: Iterable[Shard]) -> None:
    """Allocate AdamW's state as Megatron's first step would, and give the shards access to it."""
    if isinstance(inner, torch.optim.AdamW):  # Megatron does not enable torch's fused implementation
        for group in inner.param_groups:
            group["fused"] = True
            group["foreach"] = False
    for shard in shards:
        if shard.master is not None:
            state = inner.state[shard.master]
            if isinstance(inner, torch.optim.AdamW):  # others count steps elsewhere, see `set_steps`
                state["step"] = torch.zeros((), device=shard.master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(shard.master), torch.zeros_like(shard.master)
            shard.parts = state


@dataclass
class Shard:
    """Entries `start` to `stop` of a flattened weight, for which this rank's optimizer keeps state.

    `master` is None if other data-parallel ranks hold these entries or the weight is frozen. `copies` are the ranks
    that hold the same weight; with `everywhere` they keep the same entries. `parts` is the optimizer's state.
    """

    weight: Any  # an nn.Parameter with the attributes that Megatron sets
    master: Tensor | None
    start: int
    stop: int
    copies: RankGroup
    everywhere: bool = False
    parts: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, kind: str) -> Tensor | None:
        """Return the master, the gradient before a step, or a state part; None if this rank has none."""
        if kind == "gradient" and self.master is not None:
            return self.weight.main_grad.flatten()[self.start : self.stop]
        if kind == "master":
            return self.master
        return self.parts.get(kind)

    def over_data(self, entries: Tensor | None) -> Tensor:
        """Assemble this tensor-parallel rank's full shard from the entries on all data-parallel ranks."""
        shape = self.weight.shape
        if self.everywhere:
            assert entries is not None
            return entries.view(shape).clone()
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        share = torch.zeros(shape.numel(), dtype=dtype, device=self.weight.device)
        if entries is not None:
            share[self.start : self.stop] = entries
        dist.all_reduce(share, group=self.copies.group)
        return share.view(shape)

    def squares(self) -> Tensor:
        """Return the squared norm of these entries, and that of their gradients.

        Both are zero on ranks with a second copy.
        """
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
    """Return the shard of every weight in these stages that Megatron's optimizers keep, by the weight's name."""
    models: list[Any] = [stage.module.model for stage in stages]
    weights = {name: weight for model in models for name, weight in model.named_parameters()}
    distributed = all(isinstance(optimizer, DistributedOptimizer) for optimizer in optimizers)
    held: dict[nn.Parameter, HeldEntries] = {}
    for optimizer in optimizers if distributed else ():
        held |= _held(optimizer)
    shards = {}
    for name, weight in weights.items():
        copies = meshes[table[name].family].copies
        if weight in held:
            entries = held[weight]
            shards[name] = Shard(weight, entries.master, entries.start, entries.stop, copies)
        elif distributed or not weight.requires_grad:
            shards[name] = Shard(weight, None, 0, 0, copies)
        else:
            master = getattr(weight, "main_param", weight)
            shards[name] = Shard(weight, master, 0, weight.numel(), copies, everywhere=True)
    return shards


def _whole_gradient(shard: Shard) -> Tensor:
    """Return a gradient's full tensor-parallel shard on the CPU."""
    return shard.over_data(shard.tensor("gradient")).cpu()


@dataclass(frozen=True)
class HeldEntries:
    """Flattened fp32 entries of a weight, from `start` to `stop`, that the distributed optimizer keeps here."""

    master: Tensor
    start: int
    stop: int


def _held(optimizer: DistributedOptimizer) -> dict[nn.Parameter, HeldEntries]:
    """Return the entries of each weight on this rank. Megatron's own index is wrong if a group mixes bf16 and fp32."""
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


def _part_of_model(weight: Parameter) -> str:
    """Return the part of the model whose norm a weight counts in, such as `layers.3`, `shared` or `embedding`."""
    assert weight.owner is not None
    return "shared" if isinstance(weight.owner, LetterOwner) else weight.owner.path
