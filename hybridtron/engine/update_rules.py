"""Run the update rules in `optimizers/` inside Megatron's optimizers, in place of AdamW.

Megatron keeps fp32 masters, finishes gradients, clips them, and gathers the weights after a step. Its distributed
optimizer shards the flattened masters over data-parallel ranks, with cuts anywhere within a row. A rule that needs full
matrices can't run on such shards. For it, gradient and state are gathered over data- and tensor-parallel ranks, every
rank computes the same direction, and takes its own entries. That costs 4 bytes for each entry of the gradient and of
each gathered state part, per such weight and step, and the memory of one full matrix at a time.

State that is stored in bf16 is converted to fp32 for the update, and rounded to the nearest after each step. A step
changes a moment by 1 - beta of its distance to the new value, and bf16 rounds by up to 0.004 of the moment. Second
moments of random gradients (normal, and cubed) are then on average within 0.1% of those in fp32 at beta = 0.95 and
within 0.5% at 0.98, but 4% above them at 0.99 and up to 30% at 0.999, where they rise and hardly fall: the
configuration's check stops at 0.98. Stochastic rounding would allow more, with random numbers that are the same under
every layout; no recipe needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.optimizers.base import UpdateRule, UpdateSettings
from hybridtron.parallel.cut import cut, gather
from hybridtron.parallel.mesh import Mesh

if TYPE_CHECKING:
    from hybridtron.engine.optim import Shard


class RuleOptimizer(torch.optim.Optimizer):
    """Optimizer that applies an update rule to the masters in Megatron's parameter groups.

    Each group has a learning rate and weight decay. State parts with the weight's shape are allocated as this rank's
    flattened entries (none where other ranks hold all of them), other parts as this tensor-parallel rank's shard.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        shards: Mapping[str, Shard],
        table: Mapping[str, Parameter],
        meshes: Mapping[str, Mesh],
        settings: tuple[tuple[float, float], float],
        kept: torch.dtype,
    ) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # set here, as torch's constructor rejects views of Megatron's buffers
        self.rule = rule
        self.table = table
        self.meshes = meshes
        self.settings = settings
        self.kept = kept
        self.shards = {name: shard for name, shard in shards.items() if shard.weight.requires_grad}
        self.steps = 0  # number of accepted steps
        for name, shard in self.shards.items():
            shard.parts = self._zeros(name, shard)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the masters. All ranks visit their stage's weights in the same order, since some are gathered."""
        assert closure is None
        self.steps += 1
        group_of = {master: group for group in self.param_groups for master in group["params"]}
        for name, shard in self.shards.items():
            whole = self.rule.needs_whole(name, self.table[name])
            if whole:
                direction = self._of_whole(name, shard)
            else:
                direction = self._of_shard(name, shard)
            if shard.master is not None and direction is not None:
                group = group_of[shard.master]
                shard.master.mul_(1 - group["lr"] * group["weight_decay"])
                shard.master.sub_(direction.view_as(shard.master), alpha=group["lr"])

    def _zeros(self, name: str, shard: Shard) -> dict[str, Tensor]:
        """Allocate a weight's state parts, by name."""
        weight = self.table[name]
        parts: dict[str, Tensor] = {}
        for part, declared in self.rule.parts(name, weight).items():
            if declared.shape != weight.shape:
                shape = declared.share_shape(self.meshes[weight.family].sizes)
                parts[part] = torch.zeros(shape, dtype=self.kept, device=shard.weight.device)
            elif shard.master is not None:
                parts[part] = torch.zeros_like(shard.master, dtype=self.kept).view(-1)
        return parts

    def _now(self) -> UpdateSettings:
        betas, eps = self.settings
        return UpdateSettings(betas, eps, self.steps)

    def _of_shard(self, name: str, shard: Shard) -> Tensor | None:
        """Return the update direction for this rank's entries, and update their state; None if it has no entries."""
        if shard.master is None:
            return None
        assert shard.master.grad is not None
        gradient = shard.master.grad.view(-1)
        parts = _computed_with(shard)
        direction = self.rule.direction(name, self.table[name], gradient, parts, self._now())
        for part, stored in shard.parts.items():
            if stored is not parts[part]:
                stored.copy_(parts[part])
        return direction

    def _of_whole(self, name: str, shard: Shard) -> Tensor:
        """Compute the direction for a full weight; return this rank's entries, and update its state."""
        weight = self.table[name]
        mesh = self.meshes[weight.family]
        stored = shard.parts
        wide = _computed_with(shard)
        declared = self.rule.parts(name, weight)
        if shard.master is None or shard.master.grad is None:
            gradient = None
        else:
            gradient = shard.master.grad.view(-1)
        whole = {
            part: gather(wide[part], spec, mesh)
            if spec.shape != weight.shape
            else gather(shard.over_data(wide.get(part)), spec, mesh)
            for part, spec in declared.items()
        }
        gathered = gather(shard.over_data(gradient), weight, mesh)
        direction = self.rule.direction(name, weight, gathered, whole, self._now())
        for part, spec in declared.items():
            if part in stored:
                share = cut(whole[part], spec, mesh)
                stored[part].copy_(_entries(share, shard) if spec.shape == weight.shape else share)
        return _entries(cut(direction, weight, mesh), shard)


def _computed_with(shard: Shard) -> dict[str, Tensor]:
    """Return the state parts in the rule's precision: themselves, or fp32 copies of those stored in bf16."""
    return {part: stored.to(torch.promote_types(stored.dtype, torch.float32)) for part, stored in shard.parts.items()}


def _entries(share: Tensor, shard: Shard) -> Tensor:
    """Return the flattened entries of a tensor-parallel shard that this data-parallel rank holds."""
    return share.reshape(-1)[shard.start : shard.stop]
