"""Update rules of `optimizers/` inside Megatron's optimizers, in the place of AdamW.

Megatron keeps fp32 masters, finishes gradients, clips them, and gathers the weights after a step; its distributed
optimizer cuts the flattened masters over data-parallel ranks, wherever a row may end. A rule that needs whole matrices
can't run on such shards: for it the gradient and the state are gathered over data- and tensor-parallel ranks, every
rank computes the same direction, and takes its own entries of it. That costs 4 bytes for each entry of the gradient and
of each gathered part, for each such weight and step, and the memory of one whole matrix at a time.

State that is kept in bf16 is computed with in fp32, and rounded to the nearest after each step. A step changes a moment
by 1 - beta of its distance to the new value, and bf16 rounds by up to 0.004 of the moment. Second moments of random
gradients (normal, and cubed) are then on average within 0.1% of those in fp32 at beta = 0.95 and within 0.5% at 0.98,
but 4% above them at 0.99 and up to 30% at 0.999, where they rise and hardly fall: the configuration's check stops at
0.98. Stochastic rounding would allow more, with random numbers that are the same under every layout; no recipe
needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.optimizers.base import UpdateRule, UpdateSettings
from hybridtron.parallel.cut import Mesh, cut, gather, mesh_sizes

if TYPE_CHECKING:
    from hybridtron.engine.optim import Shard


class RuleOptimizer(torch.optim.Optimizer):
    """Steps the masters of Megatron's parameter groups; each group has its learning rate and weight decay.

    It makes the parts of each trained weight's shard: those of the weight's shape as this rank's entries, flattened
    (none where other ranks hold all of them), others as this tensor-parallel rank's share.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        shards: Mapping[str, Shard],
        table: Mapping[str, Parameter],
        mesh: Mesh,
        settings: tuple[tuple[float, float], float],
        kept: torch.dtype,
    ) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # not handed over: torch refuses masters that are views of Megatron's buffers
        self.rule, self.table, self.mesh, self.settings, self.kept = rule, table, mesh, settings, kept
        self.shards = {name: shard for name, shard in shards.items() if shard.weight.requires_grad}
        self.steps = 0  # accepted so far
        for name, shard in self.shards.items():
            shard.parts = self._zeros(name, shard)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """All ranks walk through the weights of their stage in the same order, as some are gathered."""
        assert closure is None
        self.steps += 1
        group_of = {master: group for group in self.param_groups for master in group["params"]}
        for name, shard in self.shards.items():
            whole = self.rule.needs_whole(name, self.table[name])
            direction = self._of_whole(name, shard) if whole else self._of_shard(name, shard)
            if shard.master is not None and direction is not None:
                group = group_of[shard.master]
                shard.master.mul_(1 - group["lr"] * group["weight_decay"])
                shard.master.sub_(direction.view_as(shard.master), alpha=group["lr"])

    def _zeros(self, name: str, shard: Shard) -> dict[str, Tensor]:
        weight = self.table[name]
        found: dict[str, Tensor] = {}
        for part, declared in self.rule.parts(name, weight).items():
            if declared.shape != weight.shape:
                shape = declared.share_shape(mesh_sizes(self.mesh))
                found[part] = torch.zeros(shape, dtype=self.kept, device=shard.weight.device)
            elif shard.master is not None:
                found[part] = torch.zeros_like(shard.master, dtype=self.kept).view(-1)
        return found

    def _now(self) -> UpdateSettings:
        betas, eps = self.settings
        return UpdateSettings(betas, eps, self.steps)

    def _of_shard(self, name: str, shard: Shard) -> Tensor | None:
        if shard.master is None:
            return None
        assert shard.master.grad is not None
        gradient = shard.master.grad.view(-1)
        parts = _computed_with(shard)
        direction = self.rule.direction(name, self.table[name], gradient, parts, self._now())
        for part, held in shard.parts.items():
            if held is not parts[part]:
                held.copy_(parts[part])
        return direction

    def _of_whole(self, name: str, shard: Shard) -> Tensor:
        """This rank's entries of the direction of a whole weight, whose parts are updated on the way."""
        weight, held = self.table[name], shard.parts
        wide = _computed_with(shard)
        declared = self.rule.parts(name, weight)
        gradient = None if shard.master is None or shard.master.grad is None else shard.master.grad.view(-1)
        whole = {
            part: gather(wide[part], spec, self.mesh)
            if spec.shape != weight.shape
            else gather(shard.over_data(wide.get(part)), spec, self.mesh)
            for part, spec in declared.items()
        }
        gathered = gather(shard.over_data(gradient), weight, self.mesh)
        direction = self.rule.direction(name, weight, gathered, whole, self._now())
        for part, spec in declared.items():
            if part in held:
                share = cut(whole[part], spec, self.mesh)
                held[part].copy_(_entries(share, shard) if spec.shape == weight.shape else share)
        return _entries(cut(direction, weight, self.mesh), shard)


def _computed_with(shard: Shard) -> dict[str, Tensor]:
    """The parts as a rule computes with them: themselves, or fp32 copies of those that are kept in bf16."""
    return {part: held.to(torch.promote_types(held.dtype, torch.float32)) for part, held in shard.parts.items()}


def _entries(share: Tensor, shard: Shard) -> Tensor:
    """Those of a share that this data-parallel rank holds, flattened."""
    return share.reshape(-1)[shard.start : shard.stop]
