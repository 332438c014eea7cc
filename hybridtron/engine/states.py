"""Initial recurrent states of rows in training: noise, or the last state of the row's lane.

    random    N(0, sigma^2) for every value
    fitted    N(mu, var) per layer and head, mu <- (1 - beta) mean(h_T) + beta mu, and likewise var; both start at 0
    passing   the state after the lane's last row, which is another text; zero with probability p
    tbtt      the state after the lane's last row, if this row continues its document; else zero

A state belongs to (layer, lane). It stays on the stage that owns the layer, is never changed in place, and carries no
gradient from step to step. The states after a step's rows are recorded, and committed when the step is accepted, so
that a refused step changes nothing. A lane with a state that is not finite restarts from zero, on every layer. All
random numbers are functions of (seed, step, layer, lane), independent of the layout: a rank with a shard of a state
draws the full state and takes its shard. Nothing here depends on a particular mixer.

Letters: B rows in a micro-batch, K lanes on this process, A all lanes, H heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import StatePart
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.config.schema import StateMode
from hybridtron.data.batch import Batch
from hybridtron.data.order.phase_order import phase_seed
from hybridtron.model.stack import States
from hybridtron.parallel.context import of_last_share
from hybridtron.parallel.cut import cut
from hybridtron.parallel.groups import Groups
from hybridtron.planning.states import carried_parts


class Carrier:
    """Initial states for micro-batches, and their recorded final states.

    A step's micro-batches are ordered by chunk, then by group of lanes: chunk 0 for every group, then chunk 1 for every
    group, and so on. If chunks run together, there is one micro-batch per group. A step calls, in order:

        begin, then for every micro-batch and every stage: initial, record_final
        commit, if the step is accepted
    """

    def __init__(
        self,
        phase: ResolvedPhase,
        layers: Sequence[range | None],
        lanes: range,
        groups: Groups,
        device: torch.device,
    ) -> None:
        """Prepare for stages with these layers, on a process that reads these lanes."""
        self.settings = phase.states
        self.groups = groups
        self.device = device
        self.lanes = lanes
        self.all_lanes = phase.lanes
        self.rows = phase.settings.micro_batch
        self.together = phase.chunks_together  # chunks of a lane in one forward pass
        self.seed = phase_seed(phase.config.run.seed, phase.index)
        parts = carried_parts(phase)
        self.chunks = [  # for each pipeline stage, the carried parts of its layers
            {layer: by_name for layer, by_name in parts.items() if stage_layers is None or layer in stage_layers}
            for stage_layers in layers
        ]
        self.lane_groups = len(lanes) // self.rows
        self.held: States = {}  # committed states by layer, lanes on the first axis
        self.moments: dict[int, Tensor] = {}  # mean and variance of each head on this rank, (2, H) by layer
        self.restarts = torch.zeros((), dtype=torch.int64, device=device)  # restarts from zero, over all lanes
        self._ended: dict[tuple[int, int], States] = {}
        self._sums: dict[int, Tensor] = {}  # for fitted: count, sum and sum of squares of this step's final states
        self._step = 0

    @property
    def holds(self) -> bool:
        """True if states are carried from row to row, False if they are drawn."""
        return self.settings.mode not in NOISE

    def begin(self, step: int) -> None:
        """Start a step: discard the records of a refused one."""
        self._ended = {}
        self._sums = {}
        self._step = step

    def invalidate(self) -> None:
        """Discard the held states for tbtt, since the next step's rows don't continue where they ended.

        A row that continues its document elsewhere cannot be distinguished from one that continues here, and a new
        document may have begun in the skipped tokens.
        """
        if self.settings.mode is StateMode.tbtt:
            self.held = {}

    def initial(self, chunk: int, number: int, batch: Batch) -> States | None:
        """Return the initial states of a micro-batch's rows; None for zero."""
        turn, group = divmod(number, self.lane_groups)
        lanes = self.lanes[group * self.rows :][: self.rows]
        if not self.holds:
            return self._noise(self.chunks[chunk], lanes)
        if turn:
            before = self._ended.pop((chunk, number - self.lane_groups))
        elif self.held:
            group_rows = slice(group * self.rows, (group + 1) * self.rows)
            before = _each(self._chosen(chunk, self.held), lambda held: held[group_rows])
        else:
            return None
        return _where(self._keeps_state(batch, lanes), before)

    def handed_over(self, chunk: int, states: States, batch: Batch) -> States:
        """Return the initial states of the next chunk within a forward pass. Gradients flow back through them."""
        assert batch.continues_B is not None
        return _where(batch.continues_B, self._chosen(chunk, states))

    @torch.no_grad()
    def record_final(self, chunk: int, number: int, states: States) -> None:
        """Record a micro-batch's final states: the carried parts, or for fitted noise only their sums."""
        if self.settings.mode is StateMode.random:
            return
        states = _each(self._chosen(chunk, states), self._of_row)
        if self.holds:
            self._ended[chunk, number] = _each(states, _alone)
        elif self.settings.mode is StateMode.fitted:
            for layer, parts in self.chunks[chunk].items():
                ((name, part),) = parts.items()
                sums_3H = _sums(states[layer][name], part)
                if layer in self._sums:
                    self._sums[layer] = self._sums[layer] + sums_3H
                else:
                    self._sums[layer] = sums_3H

    @torch.no_grad()
    def commit(self) -> None:
        """Adopt the final states of an accepted step; lanes that are not finite restart from zero."""
        if self.holds:
            self._take_over(self._find_nonfinite())
        elif self._sums:
            self._measure()
        self._ended = {}
        self._sums = {}

    def _find_nonfinite(self) -> Tensor:
        """Return 1 for every lane whose states are all finite and 0 for the others, the same on all ranks."""
        finite_A = torch.ones(self.all_lanes, dtype=torch.int32, device=self.device)
        for (_, number), layers in self._ended.items():
            first = self.lanes.start + number % self.lane_groups * self.rows
            finite_B = finite_A[first : first + self.rows]
            for tensor in (tensor for parts in layers.values() for tensor in parts.values()):
                if tensor.is_floating_point():
                    finite_B *= tensor.flatten(1).sum(1).isfinite()  # far faster than checking each value
        dist.all_reduce(finite_A, dist.ReduceOp.MIN)
        return finite_A

    def _keeps_state(self, batch: Batch, lanes: Sequence[int]) -> Tensor:
        """Return True for every row that starts from its lane's state, False for zero."""
        if self.settings.mode is StateMode.tbtt:
            assert batch.continues_B is not None
            return batch.continues_B
        share = self.settings.dropout
        drawn = [self._key("dropout", lane) / 2**64 >= share for lane in lanes]
        return torch.tensor(drawn).to(self.device, non_blocking=True)  # avoids a synchronization

    def _of_row(self, state: Tensor) -> Tensor:
        """Return the state after the full row, which the last sequence shard has."""
        return of_last_share(state, self.groups.context)

    def _chosen(self, chunk: int, states: States) -> States:
        return {layer: {name: states[layer][name] for name in parts} for layer, parts in self.chunks[chunk].items()}

    def _take_over(self, finite_A: Tensor) -> None:
        """Adopt the last states of all lanes, in order; zeros on every layer for a lane that restarts."""
        finite_K = finite_A[self.lanes.start : self.lanes.stop].bool()
        self.restarts = self.restarts + (1 - finite_A).sum()
        for chunk, layers in enumerate(self.chunks):
            ended = [self._ended.pop(key) for key in sorted(key for key in self._ended if key[0] == chunk)]
            assert len(ended) == self.lane_groups
            for layer, parts in layers.items():  # one layer at a time, which bounds the memory for copies
                group_states = [group_state.pop(layer) for group_state in ended]
                joined = {name: torch.cat([group_state[name] for group_state in group_states]) for name in parts}
                self.held[layer] = _where(finite_K, {layer: joined})[layer]

    def _noise(self, layers: dict[int, dict[str, StatePart]], lanes: Sequence[int]) -> States | None:
        """Draw initial states for these lanes; None (zero) for fitted noise before the first measurement."""
        states = self.settings
        if states.mode is StateMode.fitted and not self.moments:
            return None
        drawn: States = {}
        for layer, parts in layers.items():
            for name, part in parts.items():
                noise = torch.cat([self._drawn(layer, lane, part) for lane in lanes])
                if states.mode is StateMode.random:
                    noise = noise * states.sigma
                else:
                    mean_H, variance_H = self.moments[layer]
                    heads = noise.unflatten(1, (len(mean_H), -1))
                    shape = (1, -1, *[1] * (heads.dim() - 2))
                    noise = (heads * variance_H.sqrt().view(shape) + mean_H.view(shape)).flatten(1, 2)
                drawn[layer] = {name: noise.float()}
        return drawn

    def _drawn(self, layer: int, lane: int, part: StatePart) -> Tensor:
        """Draw standard normal values for one lane's full state, and return this rank's shard (1, ...)."""
        generator = torch.Generator(self.device).manual_seed(self._key("noise", lane, layer) >> 1)
        shape = [1, *(size for size in part.shape if size is not None)]
        noise = torch.randn(shape, generator=generator, device=self.device)
        return cut(noise, part, self.groups.states, leading=1)

    def _measure(self) -> None:
        """Update mean and variance with the final states of all lanes on all ranks."""
        layers = sorted(self._sums)
        sums_3S = torch.cat([self._sums[layer] for layer in layers], 1)
        dist.all_reduce(sums_3S, group=self.groups.data.group)
        sums = dict(zip(layers, sums_3S.split([self._sums[layer].shape[1] for layer in layers], 1), strict=True))
        parts = {layer: next(iter(p.values())) for chunk in self.chunks for layer, p in chunk.items()}
        # for a state without heads, each tensor rank has summed only its own channels
        if whole := [layer for layer in layers if parts[layer].heads == 1]:
            sums_3W = torch.cat([sums[layer] for layer in whole], 1)
            dist.all_reduce(sums_3W, group=self.groups.tensor.group)
            sums.update(zip(whole, sums_3W.split(1, 1), strict=True))
        beta = self.settings.beta
        for layer, (count_H, total_H, square_H) in sums.items():
            mean_H = total_H / count_H
            moments = torch.stack([mean_H, (square_H / count_H - mean_H**2).clamp(min=0)])  # rounding may go below 0
            self.moments[layer] = (1 - beta) * moments + beta * self.moments.get(layer, torch.zeros_like(moments))

    def _key(self, purpose: str, *numbers: int) -> int:
        """Return a seed of 64 bits, which depends on the run, the phase, the step and these numbers."""
        text = f"{self.seed}/{self._step}/{purpose}/{'/'.join(map(str, numbers))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _alone(tensor: Tensor) -> Tensor:
    """Detach the tensor, and copy it if it is a slice, whose full storage would otherwise stay alive."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    if whole:
        return tensor.detach()
    return tensor.detach().clone()


def _sums(state: Tensor, part: StatePart) -> Tensor:
    """Return count, sum and sum of squares for each head, (3, H) in fp64."""
    by_head = state.double()
    if part.heads == 1:
        by_head = by_head.flatten(1).unsqueeze(1)
    else:
        by_head = by_head.flatten(2)
    count = by_head.new_full((by_head.shape[1],), by_head.shape[0] * by_head.shape[2])
    return torch.stack([count, by_head.sum((0, 2)), by_head.square().sum((0, 2))])


def _where(kept: Tensor, states: States) -> States:
    """Return the states of the rows that keep theirs, zeros for the others."""
    return _each(states, lambda tensor: torch.where(kept.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0))


def _each(states: States, change: Callable[[Tensor], Tensor]) -> States:
    """Apply a function to every tensor of the states."""
    return {layer: {name: change(tensor) for name, tensor in parts.items()} for layer, parts in states.items()}
