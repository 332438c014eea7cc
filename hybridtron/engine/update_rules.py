"""Update rules of `optimizers/` inside Megatron's optimizers, in the place of AdamW.

Megatron keeps fp32 masters, finishes gradients, clips them, and gathers the weights after a step; its distributed
optimizer cuts the flattened masters over data-parallel ranks, wherever a row may end. A rule that needs whole matrices
can't run on such shards: for it the gradient and the state are gathered over data- and tensor-parallel ranks, every
rank computes the same direction, and takes its own entries of it. That costs 4 bytes for each entry of the gradient and
of each gathered part, for each such weight and step, and the memory of one whole matrix at a time.
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
    ) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # not handed over: torch refuses masters that are views of Megatron's buffers
        self.rule, self.table, self.mesh, self.settings = rule, table, mesh, settings
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
        weight, dtype = self.table[name], torch.promote_types(shard.weight.dtype, torch.float32)
        found: dict[str, Tensor] = {}
        for part, declared in self.rule.parts(name, weight).items():
            if declared.shape != weight.shape:
                shape = declared.share_shape(mesh_sizes(self.mesh))
                found[part] = torch.zeros(shape, dtype=dtype, device=shard.weight.device)
            elif shard.master is not None:
                found[part] = torch.zeros_like(shard.master).view(-1)
        return found

    def _now(self) -> UpdateSettings:
        betas, eps = self.settings
        return UpdateSettings(betas, eps, self.steps)

    def _of_shard(self, name: str, shard: Shard) -> Tensor | None:
        if shard.master is None:
            return None
        assert shard.master.grad is not None
        gradient = shard.master.grad.view(-1)
        return self.rule.direction(name, self.table[name], gradient, shard.parts, self._now())

    def _of_whole(self, name: str, shard: Shard) -> Tensor:
        """This rank's entries of the direction of a whole weight, whose parts are updated on the way."""
        weight, held = self.table[name], shard.parts
        declared = self.rule.parts(name, weight)
        gradient = None if shard.master is None or shard.master.grad is None else shard.master.grad.view(-1)
        whole = {
            part: gather(held[part], spec, self.mesh)
            if spec.shape != weight.shape
            else gather(shard.over_data(held.get(part)), spec, self.mesh)
            for part, spec in declared.items()
        }
        gathered = gather(shard.over_data(gradient), weight, self.mesh)
        direction = self.rule.direction(name, weight, gathered, whole, self._now())
        for part, spec in declared.items():
            if part in held:
                share = cut(whole[part], spec, self.mesh)
                held[part].copy_(_entries(share, shard) if spec.shape == weight.shape else share)
        return _entries(cut(direction, weight, self.mesh), shard)


def _entries(share: Tensor, shard: Shard) -> Tensor:
    """Those of a share that this data-parallel rank holds, flattened."""
    return share.reshape(-1)[shard.start : shard.stop]
