"""Runs the update rules of `optimizers/` inside Megatron's optimizers, in place of Megatron's AdamW.

Megatron keeps fp32 master weights, reduces and clips gradients, and gathers the weights after a step. Its distributed
optimizer flattens the masters and divides them among data-parallel ranks at arbitrary elements. A rule that needs full
matrices can't run on such shards. For such a rule, a weight's gradient and state are gathered over data- and
tensor-parallel ranks. Every rank computes the full update direction, and applies its own elements. In each step, this
communicates 4 bytes per element of the weight's gradient and of each state part. It needs memory for one full weight at
a time.

A rule with a second stage for full matrices, such as Muon, keeps its state in shards. Each matrix has one owner among
the ranks. A rank sends its results of the first stage to the owners, which return the directions
(`parallel/matrix_owners.py`). In bf16, a rank communicates at most 4 bytes per element that it updates. An owner
communicates more. Transfers overlap with the computation for other matrices. The last transfer overlaps with the
updates of weights without a matrix stage.

State that is stored in bf16 is converted to fp32 for the update, and rounded to the nearest bf16 number after a step.
If beta, the moving average's decay, is close to 1, the change in a step is smaller than the rounding error. In a
simulation with random gradients, the second moment in bf16 had these mean errors, relative to fp32:

    beta      0.95       0.98       0.99    0.999
    error     < 0.1%     < 0.5%     4%      up to 30%

So the configuration's check allows bf16 only for beta up to 0.98.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtron.architecture.base import Parameter
from hybridtron.device import plain_torch
from hybridtron.optimizers.base import UpdateRule, UpdateSettings
from hybridtron.parallel.matrix_owners import DividedWeight, Exchange, Transfer, exchanges, overlapped
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.sharding import cut, gather

if TYPE_CHECKING:
    from hybridtron.engine.optimizer import Shard


class RuleOptimizer(torch.optim.Optimizer):
    """Optimizer that applies an update rule to the master weights in Megatron's parameter groups.

    groups: Megatron's parameter groups; each has a learning rate and a weight decay
    shards: for each weight, the elements that this rank updates
    table: for each weight, its full shape, and how tensor-parallel ranks divide it
    settings: ((beta1, beta2), epsilon)
    state_dtype: dtype in which state is stored
    stage_ranks: all ranks in this pipeline stage

    A state part with the weight's shape is allocated for this rank's elements only. Any other part is allocated as this
    tensor-parallel rank's shard.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        rule: UpdateRule,
        shards: Mapping[str, Shard],
        table: Mapping[str, Parameter],
        meshes: Mapping[str, Mesh],
        settings: tuple[tuple[float, float], float],
        state_dtype: torch.dtype,
        stage_ranks: RankGroup,
    ) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # set here, because torch's constructor rejects tensors that are views of a buffer
        self.rule = rule
        self.table = table
        self.meshes = meshes
        self.settings = settings
        self.state_dtype = state_dtype
        self.shards = {name: shard for name, shard in shards.items() if shard.weight.requires_grad}
        self.steps = 0  # number of accepted steps
        for name, shard in self.shards.items():
            shard.parts = self._zeros(name, shard)
        by_head = rule.matrix_stage is not None and rule.matrix_stage.by_head
        divided = [
            DividedWeight(name, table[name], meshes[table[name].family], shard.ranges, shard.everywhere, by_head)
            for name, shard in self.shards.items()
            if rule.has_matrix_stage(name, table[name])
        ]
        if rule.matrix_stage is not None and rule.matrix_stage.by_shard and divided:
            self.exchanges = exchanges([weight.in_shards() for weight in divided], divided[0].mesh.copies)
        else:
            self.exchanges = exchanges(divided, stage_ranks)

    @torch.no_grad()
    @plain_torch()
    def step(self, closure: Any = None) -> None:
        """Update the masters. All ranks of a stage process the weights in one order, because some are gathered."""
        assert closure is None
        self.steps += 1
        group_of = {master: group for group in self.param_groups for master in group["params"]}
        if not self.exchanges:
            self._update_others(group_of)
            return
        stage = self.rule.matrix_stage
        assert stage is not None
        weight = next(iter(self.shards.values())).weight
        empty = stage.narrow(torch.empty(0, dtype=self.master_dtype, device=weight.device))
        for exchange, returning in overlapped(self.exchanges, self._narrow_updates, stage.direction, empty):
            if exchange is self.exchanges[-1]:
                self._update_others(group_of)  # while the last directions travel
            for name, direction in self._matrix_directions(exchange, returning).items():
                master = self.shards[name].master
                assert master is not None
                self._apply(name, master, direction, group_of[master])

    def _update_others(self, group_of: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Update the weights without a matrix stage; `group_of` has each master's parameter group."""
        for name, shard in self.shards.items():
            if self.rule.has_matrix_stage(name, self.table[name]):
                continue
            if self.rule.needs_whole(name, self.table[name]):
                direction = self._full_direction(name, shard)
            else:
                direction = self._shard_direction(name, shard)
            if shard.master is not None and direction is not None:
                self._apply(name, shard.master, direction, group_of[shard.master])

    def _apply(self, name: str, master: Tensor, direction: Tensor, group: Mapping[str, Any]) -> None:
        """Update the master of this rank's elements. `group` has the learning rate and the weight decay."""
        lr = group["lr"] * self.rule.lr_factor(name, self.table[name])
        master.mul_(1 - lr * group["weight_decay"])
        master.sub_(direction.view_as(master), alpha=lr)

    def _narrow_updates(self, exchange: Exchange) -> dict[str, Tensor]:
        """Return {weight's name: the first stage's results for this rank's elements} for the weights in a round."""
        stage = self.rule.matrix_stage
        assert stage is not None
        updates = {}
        for name in exchange.names:
            update = self._shard_direction(name, self.shards[name])
            if update is not None:
                updates[name] = stage.narrow(update)
        return updates

    def _matrix_directions(self, exchange: Exchange, returning: Transfer) -> dict[str, Tensor]:
        """Return {weight's name: direction of this rank's elements} for the weights in a round."""
        stage = self.rule.matrix_stage
        assert stage is not None
        shards = {name: self.shards[name] for name in exchange.names}
        directions = {
            name: torch.empty(shard.stop - shard.start, dtype=self.master_dtype, device=shard.master.device)
            for name, shard in shards.items()
            if shard.master is not None
        }
        for name, piece, entries in exchange.directions(returning):
            piece.view(directions[name]).copy_(entries).mul_(stage.scale(*exchange.shapes[piece.matrix][-2:]))
        return directions

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the masters: fp32, or float64 in an audit."""
        return torch.promote_types(next(iter(self.shards.values())).weight.dtype, torch.float32)

    def _zeros(self, name: str, shard: Shard) -> dict[str, Tensor]:
        """Return a weight's state parts by name, filled with zeros."""
        weight = self.table[name]
        parts: dict[str, Tensor] = {}
        for part, declared in self.rule.parts(name, weight).items():
            if declared.shape != weight.shape:
                shape = declared.shard_shape(self.meshes[weight.family].sizes)
                parts[part] = torch.zeros(shape, dtype=self.state_dtype, device=shard.weight.device)
            elif shard.master is not None:
                parts[part] = torch.zeros_like(shard.master, dtype=self.state_dtype).view(-1)
        return parts

    def _update_settings(self) -> UpdateSettings:
        betas, eps = self.settings
        return UpdateSettings(betas, eps, self.steps)

    def _shard_direction(self, name: str, shard: Shard) -> Tensor | None:
        """Update the state for this rank's elements of a weight, and return the elements' update direction.

        Returns None if this rank has no elements of the weight.
        """
        if shard.master is None:
            return None
        assert shard.master.grad is not None
        gradient = shard.master.grad.view(-1)
        parts = _wide_parts(shard)
        direction = self.rule.direction(name, self.table[name], gradient, parts, self._update_settings())
        for part, stored in shard.parts.items():
            if stored is not parts[part]:
                stored.copy_(parts[part])
        return direction

    def _full_direction(self, name: str, shard: Shard) -> Tensor:
        """Compute a full weight's update direction, update this rank's state, and return this rank's elements."""
        weight = self.table[name]
        mesh = self.meshes[weight.family]
        stored = shard.parts
        wide = _wide_parts(shard)
        declared = self.rule.parts(name, weight)
        if shard.master is None or shard.master.grad is None:
            gradient = None
        else:
            gradient = shard.master.grad.view(-1)
        whole = {
            part: gather(wide[part], spec, mesh)
            if spec.shape != weight.shape
            else gather(shard.gather_over_data(wide.get(part)), spec, mesh)
            for part, spec in declared.items()
        }
        gathered = gather(shard.gather_over_data(gradient), weight, mesh)
        direction = self.rule.direction(name, weight, gathered, whole, self._update_settings())
        for part, spec in declared.items():
            if part in stored:
                share = cut(whole[part], spec, mesh)
                stored[part].copy_(_entries(share, shard) if spec.shape == weight.shape else share)
        return _entries(cut(direction, weight, mesh), shard)


def _wide_parts(shard: Shard) -> dict[str, Tensor]:
    """Return the state parts by name, with fp32 copies of parts that are stored in bf16."""
    return {part: stored.to(torch.promote_types(stored.dtype, torch.float32)) for part, stored in shard.parts.items()}


def _entries(share: Tensor, shard: Shard) -> Tensor:
    """Return the elements of a flattened tensor-parallel shard that this data-parallel rank holds."""
    return share.reshape(-1)[shard.start : shard.stop]
