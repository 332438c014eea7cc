"""The optimizer: AdamW by Megatron's optimizers, or another rule inside of them; weights are treated as the table says.

With the distributed optimizer each data-parallel rank keeps the fp32 masters and state of its share of the weights.
Only weights that the table marks for it are decayed, unless all are asked for: Megatron's own rule goes by shape and
would decay A_log.
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

from hybridtron.architecture.base import Parameter
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
    """One step: clip the accumulated gradients by their norm over all ranks, and update the weights."""

    def __init__(
        self,
        stages: Sequence[DistributedDataParallel],
        config: Config,
        groups: Groups,
        dtype: torch.dtype,
    ) -> None:
        self.stages, self.groups, self.dtype = stages, groups, dtype
        self.state_dtype = torch.promote_types(dtype, torch.float32)
        self.table = parameter_table(config.model)
        self.settings = config.optim  # of the phase under way
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
            kept = torch.bfloat16 if narrow else self.state_dtype
            inner = RuleOptimizer(inner.param_groups, self.rule, self.shards, self.table, groups.mesh, settings, kept)
            self.only.optimizer = inner
        elif inner is not None:  # None where all weights of this stage are frozen
            make_moments(inner, self.shards.values())
        self.accepted_steps = 0

    def step(self, lr: float) -> tuple[float, bool]:
        """Update with this learning rate; returns the gradient norm before clipping and whether the step was taken."""
        grad_norm = self.grad_norm()
        return grad_norm, self.take(lr, grad_norm)

    def grad_norm(self) -> float:
        """The norm of the accumulated gradients over all ranks; waits for the device."""
        return self.squared_norm().item() ** 0.5

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """The square of that norm, on the device: Megatron's own would wait for it once for each weight."""
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
        """Update with this learning rate, if that is wanted; returns whether the step was taken.

        A step whose gradients are not finite is refused on every rank, and leaves weights and moments as they were.
        """
        accepted = wanted and math.isfinite(grad_norm)
        if accepted:
            decay = self.settings.weight_decay if weight_decay is None else weight_decay
            for group in self.megatron.param_groups:
                group["lr"] = lr
                group["weight_decay"] = decay if self.settings.decay_all else decay * group["wd_mult"]
            # Megatron clips gradients in fp32 only; without need for it, float64 can be audited.
            if grad_norm > self.settings.clip and (weights := self.only.get_parameters()):
                clip_grad_by_total_norm_fp32(weights, self.settings.clip, grad_norm)
            self.megatron.step_with_ready_grads()
            self.accepted_steps += 1
        self.zero_grad()
        return accepted

    def norms(self) -> dict[str, float]:
        """Weight and gradient norms of each layer, of the embedding, the final norm and the head, over all ranks."""
        squares = {name: torch.zeros(2, dtype=torch.float64) for name in _layers_of(self.table)}
        for name, shard in self.shards.items():
            weight: Any = shard.weight
            second_copy = getattr(weight, "shared", False)
            if not second_copy and (weight.tensor_model_parallel or self.groups.tensor.rank == 0):
                squares[_layer_of(name)] += shard.squares()
        totals = torch.stack(list(squares.values()))
        dist.all_reduce(totals)
        roots = totals.sqrt().tolist()
        kinds = ("weight_norm", "grad_norm")
        return {f"{layer}.{kind}": roots[i][k] for i, layer in enumerate(squares) for k, kind in enumerate(kinds)}

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        for stage in self.stages:
            stage.zero_grad_buffer()
        self.megatron.zero_grad()

    def blocks(self) -> list[Any]:
        """Masters and state parts of this process, as `exp_avg.NAME`, with their places in the whole tensors.

        Masters are there for bf16 weights only, since an fp32 weight is its own.
        """
        parts = {name: self.rule.parts(name, self.table[name]) for name in self.shards}
        kinds = dict.fromkeys(["master", *itertools.chain.from_iterable(parts.values())])
        blocks = []
        for kind, (name, shard) in itertools.product(kinds, self.shards.items()):
            parameter = self.table[name]
            declared = parameter if kind == "master" else parts[name].get(kind)
            own = None if declared is None else shard.tensor(kind)
            if declared is None or own is None or (kind == "master" and self._own_master(parameter)):
                continue
            follows = declared.shape == parameter.shape  # cut over data-parallel ranks as the weight is
            cuts = declared.active_cuts(mesh_sizes(self.groups.mesh))
            main = writes(name, self.groups, cuts, copied_over_data=shard.everywhere or not follows)
            main = main and not getattr(shard.weight, "shared", False)
            flat = (
                flat_rectangles(own.detach().view(-1), shard.start, shard.weight.shape)
                if follows
                else [full_rectangle(own)]
            )
            blocks += weight_blocks(f"{kind}.{name}", list(flat), declared, self.groups.mesh, main)
        return blocks

    def resume(self, steps: int) -> None:
        """Continue as after `steps` accepted steps, when masters and moments are in place."""
        self.accepted_steps = steps
        set_steps(self.only.optimizer, steps)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The whole gradient of every weight, summed over all ranks, before a step is taken."""
        shares = {name: partial(_whole_gradient, shard) for name, shard in self.shards.items()}
        return gathered(shares, self.table, self.groups, self.state_dtype)

    def _own_master(self, parameter: Parameter) -> bool:
        return parameter.fp32 or self.dtype != torch.bfloat16


def set_steps(inner: torch.optim.Optimizer | None, steps: int) -> None:
    """Correct the moments' bias as after `steps` steps.

    Megatron takes Transformer Engine's or apex's AdamW where one is installed. Those count steps for a group of
    weights, and torch's for each weight.
    """
    if isinstance(inner, RuleOptimizer):
        inner.steps = steps
    elif isinstance(inner, torch.optim.AdamW):
        for state in inner.state.values():
            state["step"].fill_(steps)
    elif inner is not None:  # a rank whose weights are all frozen has none
        for group in inner.param_groups:
            group["step"] = steps


def make_moments(inner: torch.optim.Optimizer, shards: Iterable[Shard]) -> None:
    """Make the state of the AdamW that Megatron chose as its first step would, and let the shards know it."""
    if isinstance(inner, torch.optim.AdamW):  # Megatron leaves torch's at its slow form
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False
    for shard in shards:
        if shard.master is not None:
            state = inner.state[shard.master]
            if isinstance(inner, torch.optim.AdamW):  # others count steps elsewhere, see `set_steps`
                state["step"] = torch.zeros((), device=shard.master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(shard.master), torch.zeros_like(shard.master)
            shard.parts = state


@dataclass
class Shard:
    """What this rank's optimizer keeps of one weight: the entries `start` to `stop` of it, flattened.

    `master is None`: these entries are held by other data-parallel ranks, or the weight is frozen. `everywhere`: all
    data-parallel ranks hold the same entries. `parts` are the state that the optimizer keeps of them.
    """

    weight: Any  # an nn.Parameter with the attributes that Megatron sets
    master: Tensor | None
    start: int
    stop: int
    everywhere: bool = False
    parts: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, kind: str) -> Tensor | None:
        """The master, the gradient of a step not yet taken, or a part; None where this rank has none."""
        if kind == "gradient" and self.master is not None:
            return self.weight.main_grad.flatten()[self.start : self.stop]
        return self.master if kind == "master" else self.parts.get(kind)

    def over_data(self, entries: Tensor | None) -> Tensor:
        """This tensor-parallel rank's share, from the entries that data-parallel ranks hold of it."""
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
        """Sums of squares of these entries, and of their gradients."""
        copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        if self.master is None or (self.everywhere and copy > 0):
            return torch.zeros(2, dtype=torch.float64)
        kept = (self.master, self.tensor("gradient"))
        return torch.stack([t.detach().double().square().sum().cpu() for t in kept if t is not None])


def shards_of(stages: Sequence[DistributedDataParallel], optimizer: Any) -> dict[str, Shard]:
    """The shard of every weight of these stages, by the weight's name in the model."""
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
    """This tensor-parallel rank's share of a gradient."""
    return shard.over_data(shard.tensor("gradient")).cpu()


def _shard(weight: nn.Parameter, master: Tensor | None, optimizer: DistributedOptimizer) -> Shard:
    if master is None:
        return Shard(weight, None, 0, 0)
    entries = optimizer._get_model_param_range_map(weight)["param"]
    return Shard(weight, master, entries.start, entries.end)


def _masters(optimizer: DistributedOptimizer) -> dict[nn.Parameter, Tensor]:
    """The fp32 shard that stands for each weight. (Megatron's own index is off where a group mixes bf16 and fp32.)"""
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


def _layer_of(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "layers" else parts[:1])


def _layers_of(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(_layer_of(name) for name in names))
