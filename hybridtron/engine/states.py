"""What each row's recurrent state starts from in training: noise, or the state that its lane was left in.

    random    N(0, sigma^2) for every value
    fitted    N(mu, var) per layer and head, mu <- (1 - beta) mean(h_T) + beta mu, the same for var; both start at 0
    passing   the state in which the lane's last row ended, another text; zero with probability p
    tbtt      the same, where the row continues the same document, else zero

A state belongs to (layer, lane). It stays on the stage that owns the layer, is never changed in place, and carries no
gradient from step to step. What rows end in is recorded, and committed when the step is accepted, so that a refused
step leaves everything as it was. A lane in whose state one value is not finite restarts from zero, on every layer. All
random numbers are functions of (seed, step, layer, lane), whatever the layout; a rank that holds a share of a state
draws the whole and takes its share. Nothing here knows a mixer.

Letters: B rows of a micro-batch, K lanes of this process, A those of all, H heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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
from hybridtron.planning.layer_use import carried_parts


class Carrier:
    """Hands each micro-batch of each chunk its initial states, and keeps what it ends in.

    The micro-batches of a step are chunk 0 of every group of lanes, then chunk 1 of every group, and so on; or one for
    every group, whose chunks run together. A step calls, in this order:

        begin, then for every micro-batch of every chunk: initial, record_final
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
        """For chunks that hold these layers, on a process that reads these lanes."""
        self.settings, self.groups, self.device = phase.states, groups, device
        self.lanes, self.all_lanes, self.rows = lanes, phase.lanes, phase.settings.micro_batch
        self.together = phase.chunks_together  # chunks of a lane that one forward pass runs
        self.seed = phase_seed(phase.config.run.seed, phase.index)
        parts = carried_parts(phase)
        self.chunks = [  # the chosen parts of each chunk's layers
            {layer: of_layer for layer, of_layer in parts.items() if held is None or layer in held} for held in layers
        ]
        self.lane_groups = len(lanes) // self.rows
        self.held: States = {}  # of every chosen layer, lanes on the first axis
        self.moments: dict[int, Tensor] = {}  # mean and variance of each head of this rank's share, (2, H) by layer
        self.restarts = torch.zeros((), dtype=torch.int64, device=device)  # of all lanes, those restarted from zero
        self._ended: dict[tuple[int, int], States] = {}
        self._sums: dict[int, Tensor] = {}  # of fitted: count, sum and sum of squares of what this step's rows end in
        self._step = 0

    @property
    def holds(self) -> bool:
        """Whether states are carried from row to row, and not drawn."""
        return self.settings.mode not in NOISE

    def begin(self, step: int) -> None:
        """Forget what a refused step left."""
        self._ended, self._sums, self._step = {}, {}, step

    def invalidate(self) -> None:
        """The rows of the next step don't continue where the held states ended: those of tbtt start from zero.

        A row that continues a document, but not where its lane's state was left, looks like any other that continues
        it; and in the skipped tokens the document may have become another.
        """
        if self.settings.mode is StateMode.tbtt:
            self.held = {}

    def initial(self, chunk: int, number: int, batch: Batch) -> States | None:
        """The states that the rows of a micro-batch start from; None for zero."""
        turn, group = divmod(number, self.lane_groups)
        lanes = self.lanes[group * self.rows :][: self.rows]
        if not self.holds:
            return self._noise(self.chunks[chunk], lanes)
        if turn:
            before = self._ended.pop((chunk, number - self.lane_groups))
        elif self.held:
            here = slice(group * self.rows, (group + 1) * self.rows)
            before = _each(self._chosen(chunk, self.held), lambda held: held[here])
        else:
            return None
        return _where(self._keeps_state(batch, lanes), before)

    def handed_over(self, chunk: int, states: States, batch: Batch) -> States:
        """What the next rows of the same lanes start from within a forward pass; gradients flow back through it."""
        assert batch.continues_B is not None
        return _where(batch.continues_B, self._chosen(chunk, states))

    @torch.no_grad()
    def record_final(self, chunk: int, number: int, states: States) -> None:
        """Remember what a micro-batch ended in: the carried parts, and of fitted noise the sums alone."""
        if self.settings.mode is StateMode.random:
            return
        states = _each(self._chosen(chunk, states), self._of_row)
        if self.holds:
            self._ended[chunk, number] = _each(states, _alone)
        elif self.settings.mode is StateMode.fitted:
            for layer, parts in self.chunks[chunk].items():
                ((name, part),) = parts.items()
                sums_3H = _sums(states[layer][name], part)
                self._sums[layer] = self._sums[layer] + sums_3H if layer in self._sums else sums_3H

    @torch.no_grad()
    def commit(self) -> None:
        """Commit what the rows of an accepted step ended in; lanes that are not finite restart from zero."""
        if self.holds:
            self._take_over(self._find_nonfinite())
        elif self._sums:
            self._measure()
        self._ended, self._sums = {}, {}

    def _find_nonfinite(self) -> Tensor:
        """Of all lanes, 1 where every state is finite and 0 elsewhere, the same on every rank."""
        finite_A = torch.ones(self.all_lanes, dtype=torch.int32, device=self.device)
        for (_, number), layers in self._ended.items():
            first = self.lanes.start + number % self.lane_groups * self.rows
            finite_B = finite_A[first : first + self.rows]
            for tensor in (tensor for parts in layers.values() for tensor in parts.values()):
                if tensor.is_floating_point():
                    finite_B *= tensor.flatten(1).sum(1).isfinite()  # far quicker than to look at each value
        dist.all_reduce(finite_A, dist.ReduceOp.MIN)
        return finite_A

    def _keeps_state(self, batch: Batch, lanes: Sequence[int]) -> Tensor:
        if self.settings.mode is StateMode.tbtt:
            assert batch.continues_B is not None
            return batch.continues_B
        share = self.settings.dropout
        drawn = [self._key("dropout", lane) / 2**64 >= share for lane in lanes]
        return torch.tensor(drawn).to(self.device, non_blocking=True)  # the host need not wait for the copy

    def _of_row(self, state: Tensor) -> Tensor:
        """What a row ends in: what its last share does."""
        return of_last_share(state, self.groups.context)

    def _chosen(self, chunk: int, states: States) -> States:
        return {layer: {name: states[layer][name] for name in parts} for layer, parts in self.chunks[chunk].items()}

    def _take_over(self, finite_A: Tensor) -> None:
        """The last states of all lanes, in their order; zeros on every layer of a lane that restarts."""
        finite_K = finite_A[self.lanes.start : self.lanes.stop].bool()
        self.restarts = self.restarts + (1 - finite_A).sum()
        for chunk, layers in enumerate(self.chunks):
            ended = [self._ended.pop(key) for key in sorted(key for key in self._ended if key[0] == chunk)]
            assert len(ended) == self.lane_groups
            for layer, parts in layers.items():  # layer by layer, so that copies of one layer are made at a time
                of_groups = [of_group.pop(layer) for of_group in ended]
                joined = {name: torch.cat([of_group[name] for of_group in of_groups]) for name in parts}
                self.held[layer] = _where(finite_K, {layer: joined})[layer]

    def _noise(self, layers: dict[int, dict[str, StatePart]], lanes: Sequence[int]) -> States | None:
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
        """Standard normal values for one lane's whole state, (1, ...), of which this rank takes its share."""
        generator = torch.Generator(self.device).manual_seed(self._key("noise", lane, layer) >> 1)
        shape = [1, *(size for size in part.shape if size is not None)]
        whole = torch.randn(shape, generator=generator, device=self.device)
        return cut(whole, part, self.groups.mesh, leading=1)

    def _measure(self) -> None:
        """Move mean and variance towards those of the states that all lanes of all ranks ended in."""
        layers = sorted(self._sums)
        sums_3S = torch.cat([self._sums[layer] for layer in layers], 1)
        dist.all_reduce(sums_3S, group=parallel_state.get_data_parallel_group())
        sums = dict(zip(layers, sums_3S.split([self._sums[layer].shape[1] for layer in layers], 1), strict=True))
        parts = {layer: next(iter(p.values())) for chunk in self.chunks for layer, p in chunk.items()}
        # of a state without heads each tensor rank holds some channels
        if whole := [layer for layer in layers if parts[layer].heads == 1]:
            sums_3W = torch.cat([sums[layer] for layer in whole], 1)
            dist.all_reduce(sums_3W, group=parallel_state.get_tensor_model_parallel_group())
            sums.update(zip(whole, sums_3W.split(1, 1), strict=True))
        beta = self.settings.beta
        for layer, (count_H, total_H, square_H) in sums.items():
            mean_H = total_H / count_H
            moments = torch.stack([mean_H, (square_H / count_H - mean_H**2).clamp(min=0)])  # rounding may go below 0
            self.moments[layer] = (1 - beta) * moments + beta * self.moments.get(layer, torch.zeros_like(moments))

    def _key(self, purpose: str, *numbers: int) -> int:
        text = f"{self.seed}/{self._step}/{purpose}/{'/'.join(map(str, numbers))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without its graph, and without the rest of what it was cut from, which would live as long."""
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.detach() if whole else tensor.detach().clone()


def _sums(state: Tensor, part: StatePart) -> Tensor:
    """Count, sum and sum of squares of each head's values, (3, H) in fp64."""
    by_head = state.double()
    by_head = by_head.flatten(1).unsqueeze(1) if part.heads == 1 else by_head.flatten(2)
    count = by_head.new_full((by_head.shape[1],), by_head.shape[0] * by_head.shape[2])
    return torch.stack([count, by_head.sum((0, 2)), by_head.square().sum((0, 2))])


def _where(kept: Tensor, states: States) -> States:
    """The states of the rows that keep theirs, zeros for the others."""
    return _each(states, lambda tensor: torch.where(kept.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0))


def _each(states: States, change: Callable[[Tensor], Tensor]) -> States:
    return {layer: {name: change(tensor) for name, tensor in parts.items()} for layer, parts in states.items()}
