"""The optimizer: Megatron's AdamW, or another update rule inside Megatron's optimizers.

With the distributed optimizer, each data-parallel rank keeps the fp32 masters and the state of its shard of the
weights. Only weights that the parameter table marks for it are decayed, unless `decay_all` is set: Megatron's own rule
decides by shape and would decay A_log.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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
from hybridtron.parallel.cut import mesh_sizes
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.mcore import gradients_for_norm, optimizer_config
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
        (self.only,) = self.megatron.chained_optimizers
        self.shards = shards_of(stages, self.only)
        self.rule = OPTIMIZERS[config.optim.name]()
        inner = self.only.optimizer
        narrow = config.precision.moments == KeptFormat.bf16
        if inner is not None and (narrow or not self.rule.in_megatron):
            settings = (config.optim.betas[0], config.optim.betas[1]), config.optim.eps
            if narrow:
                state_dtype = torch.bfloat16
            else:
                state_dtype = self.state_dtype
            inner = RuleOptimizer(
                inner.param_groups, self.rule, self.shards, self.table, groups.mesh, settings, state_dtype
            )
            self.only.optimizer = inner
        elif inner is not None:  # None if all weights of this stage are frozen
            make_moments(inner, self.shards.values())
        self.accepted_steps = 0

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
        (optimizer,) = self.megatron.chained_optimizers
        gradients = gradients_for_norm(optimizer)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients)).to(torch.get_default_dtype())
            squares = torch.linalg.vector_norm(norms).float() ** 2.0
        else:
            squares = torch.zeros((), device=compute_device())
        dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
        return squares

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
            if grad_norm > self.settings.clip and (weights := self.only.get_parameters()):
                clip_grad_by_total_norm_fp32(weights, self.settings.clip, grad_norm)
            self.megatron.step_with_ready_grads()
            self.accepted_steps += 1
        self.zero_grad()
        return accepted

    def norms(self) -> dict[str, float]:
        """Return weight and gradient norms over all ranks, by layer, shared weights, embedding, final norm and head."""
        squares = {_part_of_model(weight): torch.zeros(2, dtype=torch.float64) for weight in self.table.values()}
        for name, shard in self.shards.items():
            weight: Any = shard.weight
            second_copy = getattr(weight, "shared", False)
            if not second_copy and (weight.tensor_model_parallel or self.groups.tensor.rank == 0):
                squares[_part_of_model(self.table[name])] += shard.squares()
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
            cuts = declared.active_cuts(mesh_sizes(self.groups.mesh))
            main = writes(name, self.groups, cuts, copied_over_data=shard.everywhere or not follows)
            main = main and not getattr(shard.weight, "shared", False)
            if follows:
                flat = flat_rectangles(entries.detach().view(-1), shard.start, shard.weight.shape)
            else:
                flat = [full_rectangle(entries)]
            blocks += weight_blocks(f"{kind}.{name}", list(flat), declared, self.groups.mesh, main)
        return blocks

    def resume(self, steps: int) -> None:
        """Set the step count, after masters and moments were restored."""
        self.accepted_steps = steps
        set_steps(self.only.optimizer, steps)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight's full gradient, summed over all ranks; call it before a step is taken."""
        shares = {name: partial(_whole_gradient, shard) for name, shard in self.shards.items()}
        return gathered(shares, self.table, self.groups, self.state_dtype)

    def _own_master(self, parameter: Parameter) -> bool:
        """Check if a weight is its own master, since it is not bf16."""
        return parameter.fp32 or self.dtype != torch.bfloat16


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

    `master` is None if other data-parallel ranks hold these entries or the weight is frozen. `everywhere` is True if
    all data-parallel ranks hold the same entries. `parts` is the optimizer's state for these entries.
    """

    weight: Any  # an nn.Parameter with the attributes that Megatron sets
    master: Tensor | None
    start: int
    stop: int
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
        dist.all_reduce(share, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return share.view(shape)

    def squares(self) -> Tensor:
        """Return the squared norm of these entries, and that of their gradients.

        Both are zero on ranks with a second copy.
        """
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if self.master is None or (self.everywhere and copy > 0):
            return torch.zeros(2, dtype=torch.float64)
        tensors = (self.master, self.tensor("gradient"))
        return torch.stack([t.detach().double().square().sum().cpu() for t in tensors if t is not None])


def shards_of(stages: Sequence[DistributedDataParallel], optimizer: Any) -> dict[str, Shard]:
    """Return the optimizer's shard of every weight in these stages, by the weight's name in the model."""
    models: list[Any] = [stage.module for stage in stages]
    weights = {name: weight for module in models for name, weight in module.model.named_parameters()}
    if not isinstance(optimizer, DistributedOptimizer):
        return {
            name: Shard(w, getattr(w, "main_param", w), 0, w.numel(), everywhere=True)
            if w.requires_grad
            else Shard(w, None, 0, 0)
            for name, w in weights.items()
        }
    masters = _masters(optimizer)
    return {name: _shard(weight, masters.get(weight), optimizer) for name, weight in weights.items()}


def _whole_gradient(shard: Shard) -> Tensor:
    """Return a gradient's full tensor-parallel shard on the CPU."""
    return shard.over_data(shard.tensor("gradient")).cpu()


def _shard(weight: nn.Parameter, master: Tensor | None, optimizer: DistributedOptimizer) -> Shard:
    """Return a weight's shard in the distributed optimizer."""
    if master is None:
        return Shard(weight, None, 0, 0)
    entries = optimizer._get_model_param_range_map(weight)["param"]
    return Shard(weight, master, entries.start, entries.end)


def _masters(optimizer: DistributedOptimizer) -> dict[nn.Parameter, Tensor]:
    """Return each weight's fp32 master shard. (Megatron's own index is wrong if a group mixes bf16 and fp32.)"""
    pairs = (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
    )
    return {
        weight: master
        for weight_groups, master_groups in pairs
        for weights, masters in zip(weight_groups, master_groups, strict=True)
        for weight, master in zip(weights, masters, strict=True)
    }


def _part_of_model(weight: Parameter) -> str:
    """Return the part of the model whose norm a weight counts in, such as `layers.3`, `shared` or `embedding`."""
    assert weight.owner is not None
    return "shared" if isinstance(weight.owner, LetterOwner) else weight.owner.path
