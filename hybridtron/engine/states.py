"""Initial states of rows in training, by `states.mode`: random noise, or a previous row's final state.

A state is all that a layer needs from previous tokens, such as a recurrence's matrix. A lane is one row index in the
global batch. The modes for the initial state are:

    random    noise: N(0, sigma^2) for every element
    fitted    noise: N(mu, var) for every layer and head. mu and var start at 0. After each accepted step, whose final
              states are h_T, both are updated: mu <- (1 - beta) * mean(h_T) + beta * mu, and
              var <- (1 - beta) * var(h_T) + beta * var.
    passing   the final state of the lane's previous row, which holds unrelated text; or zero with probability
              `states.dropout`
    tbtt      the final state of the lane's previous row, if this row continues the same document; else zero
              (truncated backpropagation through time)

States carry no gradient from step to step. A step's final states are adopted only when the step is accepted, so that a
refused step changes nothing. If a state in a lane is not finite, the lane restarts from zero in every layer. Random
numbers depend only on (seed, phase, step, layer, lane), so they are equal in every parallel layout. A rank that holds a
shard of a state draws the full state and uses only its shard.

A checkpoint stores these tensors for all lanes and all heads, so that a run can resume in any layout:

    held.LAYER.PART     (lanes, ...)     the final state of each lane's last row; a layer's state can have several parts
    moments.LAYER       (2, heads)       mu and var for mode `fitted`
    restarts            ()               how often lanes restarted from zero since the phase began

Suffixes of tensor names give the axes: B rows in a micro-batch, K lanes on this process, A all lanes, H heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import StatePart
from hybridtron.config.resolve import NOISE, ResolvedPhase
from hybridtron.config.schema import StateMode
from hybridtron.data.batch import Batch
from hybridtron.data.order.phase_order import phase_seed
from hybridtron.model.stack import States
from hybridtron.parallel.blocks import block, lane_blocks
from hybridtron.parallel.context import broadcast_from_last
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.sharding import cut, held_runs
from hybridtron.planning.states import carried_parts
from hybridtron.problems import ConfigError, Problem


class StateCarrier:
    """Provider of initial states for micro-batches, and recorder of their final states.

    In a step each lane reads one or several chunks. A chunk is a range of consecutive tokens. A micro-batch has a chunk
    from each lane in a group of lanes. The micro-batches with the first chunk of all groups precede those with the
    second chunk, and so on. With `states.through_time`, a micro-batch has all chunks of its lanes.

    In each step, `begin` must be called first, then `initial` and `record_final` for every micro-batch and every stage
    of this rank. `commit` must be called if the step is accepted.
    """

    def __init__(
        self,
        phase: ResolvedPhase,
        layers: Sequence[range | None],
        lanes: range,
        groups: Groups,
        device: torch.device,
    ) -> None:
        """Prepare for a phase.

        layers: for each stage on this rank, its layers; None for all layers
        lanes: the lanes that this process reads
        """
        self.settings = phase.states
        self.groups = groups
        self.device = device
        self.lanes = lanes
        self.all_lanes = phase.lanes
        self.rows = phase.settings.micro_batch
        self.chunks_together = phase.chunks_together  # number of a lane's chunks in one forward pass
        self.seed = phase_seed(phase.config.run.seed, phase.index)
        parts = carried_parts(phase)
        self.chunks = [  # for each stage of this rank: layer -> name -> part of the state
            {layer: by_name for layer, by_name in parts.items() if stage_layers is None or layer in stage_layers}
            for stage_layers in layers
        ]
        self.lane_groups = len(lanes) // self.rows
        self.lane_states: States = {}  # layer -> adopted states, with lanes on the first axis
        self.moments: dict[int, Tensor] = {}  # layer -> mean and variance of each head on this rank, (2, H)
        self.restarts = torch.zeros((), dtype=torch.int64, device=device)  # restarts from zero, over all lanes
        self._final_states: dict[tuple[int, int], States] = {}  # (stage, micro-batch) -> this step's states
        self._sums: dict[int, Tensor] = {}  # layer -> count, sum, sum of squares of this step's states, (3, H)
        self._step = 0

    @property
    def carries_states(self) -> bool:
        """True if states are carried from row to row, False if they are drawn at random."""
        return self.settings.mode not in NOISE

    def begin(self, step: int) -> None:
        """Start a step. Discards the final states that a refused step has recorded."""
        self._final_states = {}
        self._sums = {}
        self._step = step

    def invalidate(self) -> None:
        """Discard the carried states in mode `tbtt`, because the run has skipped data.

        After skipped data, a row may continue its document, but not from the token where the carried state ended.
        """
        if self.settings.mode is StateMode.tbtt:
            self.lane_states = {}

    def initial(self, chunk: int, number: int, batch: Batch) -> States | None:
        """Return the initial states for a micro-batch's rows; None for zero.

        chunk: index of the stage on this rank
        number: index of the micro-batch in the step
        """
        turn, group = divmod(number, self.lane_groups)
        lanes = self.lanes[group * self.rows :][: self.rows]
        if not self.carries_states:
            return self._noise(self.chunks[chunk], lanes)
        if turn:
            # the previous chunk's final states; removed here, because they are needed only once
            before = self._final_states.pop((chunk, number - self.lane_groups))
        elif self.lane_states:
            group_rows = slice(group * self.rows, (group + 1) * self.rows)
            before = _map_states(self._carried(chunk, self.lane_states), lambda state: state[group_rows])
        else:
            return None
        return _mask_states(self._keeps_state(batch, lanes), before)

    def next_chunk_states(self, chunk: int, states: States, batch: Batch) -> States:
        """Return the next chunk's initial states in the same forward pass, without detaching them.

        chunk: index of the stage on this rank
        states: the previous chunk's final states
        batch: the next chunk
        """
        assert batch.continues_B is not None
        return _mask_states(batch.continues_B, self._carried(chunk, states))

    @torch.no_grad()
    def record_final(self, chunk: int, number: int, states: States) -> None:
        """Record a micro-batch's final states on a stage; for mode `fitted`, only their sums."""
        if self.settings.mode is StateMode.random:
            return
        states = _map_states(self._carried(chunk, states), self._from_last_shard)
        if self.carries_states:
            self._final_states[chunk, number] = _map_states(states, _detach)
        elif self.settings.mode is StateMode.fitted:
            for layer, parts in self.chunks[chunk].items():
                ((name, part),) = parts.items()
                sums_3H = _head_sums(states[layer][name], part)
                if layer in self._sums:
                    self._sums[layer] = self._sums[layer] + sums_3H
                else:
                    self._sums[layer] = sums_3H

    @torch.no_grad()
    def commit(self) -> None:
        """Adopt an accepted step's final states. Lanes whose states are not finite restart from zero."""
        if self.carries_states:
            self._adopt(self._find_finite())
        elif self._sums:
            self._measure()
        self._final_states = {}
        self._sums = {}

    def _find_finite(self) -> Tensor:
        """Return for every lane 1 if all its states are finite, else 0. The result is equal on all ranks."""
        finite_A = torch.ones(self.all_lanes, dtype=torch.int32, device=self.device)
        for (_, number), layers in self._final_states.items():
            first = self.lanes.start + number % self.lane_groups * self.rows
            finite_B = finite_A[first : first + self.rows]
            for tensor in (tensor for parts in layers.values() for tensor in parts.values()):
                if tensor.is_floating_point():
                    finite_B *= tensor.flatten(1).sum(1).isfinite()  # checking only the sum is far faster
        # over all ranks, because a lane restarts in every layer, and other stages hold other layers
        dist.all_reduce(finite_A, dist.ReduceOp.MIN)
        return finite_A

    def _keeps_state(self, batch: Batch, lanes: Sequence[int]) -> Tensor:
        """Return a bool for each row: True to start from its lane's state, False to start from zero."""
        if self.settings.mode is StateMode.tbtt:
            assert batch.continues_B is not None
            return batch.continues_B
        probability = self.settings.dropout
        drawn = [self._key("dropout", lane) / 2**64 >= probability for lane in lanes]
        return torch.tensor(drawn).to(self.device, non_blocking=True)  # avoids a synchronization

    def _from_last_shard(self, state: Tensor) -> Tensor:
        """Return the full row's final state, which the rank with the row's last sequence shard has."""
        return broadcast_from_last(state, self.groups.context)

    def _carried(self, chunk: int, states: States) -> States:
        return {layer: {name: states[layer][name] for name in parts} for layer, parts in self.chunks[chunk].items()}

    def _adopt(self, finite_A: Tensor) -> None:
        """Adopt all lanes' final states, or zeros for lanes whose entry in `finite_A` is 0."""
        finite_K = finite_A[self.lanes.start : self.lanes.stop].bool()
        self.restarts = self.restarts + (1 - finite_A).sum()
        for chunk, layers in enumerate(self.chunks):
            ended = [
                self._final_states.pop(key) for key in sorted(key for key in self._final_states if key[0] == chunk)
            ]
            assert len(ended) == self.lane_groups
            for layer, parts in layers.items():  # one layer at a time, which bounds the memory for copies
                group_states = [group_state.pop(layer) for group_state in ended]
                joined = {name: torch.cat([group_state[name] for group_state in group_states]) for name in parts}
                self.lane_states[layer] = _mask_states(finite_K, {layer: joined})[layer]

    def _noise(self, layers: dict[int, dict[str, StatePart]], lanes: Sequence[int]) -> States | None:
        """Draw initial states for these lanes; None (zero) in mode `fitted` before the first accepted step."""
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
        """Draw one lane's full state from the standard normal distribution, and return this rank's shard (1, ...)."""
        generator = torch.Generator(self.device).manual_seed(self._key("noise", lane, layer) >> 1)
        shape = [1, *(size for size in part.shape if size is not None)]
        noise = torch.randn(shape, generator=generator, device=self.device)
        return cut(noise, part, self.groups.states, leading=1)

    def _measure(self) -> None:
        """Update mean and variance for mode `fitted` with the final states of all lanes on all ranks."""
        layers = sorted(self._sums)
        sums_3S = torch.cat([self._sums[layer] for layer in layers], 1)
        dist.all_reduce(sums_3S, group=self.groups.data.group)
        sums = dict(zip(layers, sums_3S.split([self._sums[layer].shape[1] for layer in layers], 1), strict=True))
        parts = {layer: next(iter(p.values())) for chunk in self.chunks for layer, p in chunk.items()}
        # A state with one head is divided by channels, so its sums are also reduced over tensor-parallel ranks.
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
        """Return a 64-bit seed that depends on the run's seed, the phase, the step, `purpose` and `numbers`."""
        text = f"{self.seed}/{self._step}/{purpose}/{'/'.join(map(str, numbers))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _detach(tensor: Tensor) -> Tensor:
    """Return the tensor detached, and copied if it is a view of a larger storage, so that the storage can be freed."""
    owns_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
    if owns_storage:
        return tensor.detach()
    return tensor.detach().clone()


def _head_sums(state: Tensor, part: StatePart) -> Tensor:
    """Return three numbers for each head, (3, H) in fp64: its elements' count, sum, and sum of squares."""
    by_head = state.double()  # fp64, because the variance is a small difference between large sums
    if part.heads == 1:
        by_head = by_head.flatten(1).unsqueeze(1)
    else:
        by_head = by_head.flatten(2)
    count = by_head.new_full((by_head.shape[1],), by_head.shape[0] * by_head.shape[2])
    return torch.stack([count, by_head.sum((0, 2)), by_head.square().sum((0, 2))])


def _mask_states(kept: Tensor, states: States) -> States:
    """Return the states, with zeros in rows where `kept` is False."""
    return _map_states(states, lambda tensor: torch.where(kept.view(-1, *[1] * (tensor.dim() - 1)), tensor, 0))


def _map_states(states: States, change: Callable[[Tensor], Tensor]) -> States:
    """Return the states with a function applied to every tensor."""
    return {layer: {name: change(tensor) for name, tensor in parts.items()} for layer, parts in states.items()}


class StoredTensors(Protocol):
    """Interface to a checkpoint: the shape and dtype of each tensor, and a method that loads tensors into blocks."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def dtype(self, key: str, /) -> torch.dtype: ...
    def fill(self, blocks: Sequence[Any], /) -> None: ...


def state_blocks(carrier: StateCarrier, groups: Groups) -> list[Any]:
    """Return this rank's shards of the carried states, as views with their offsets in the full tensors."""
    blocks = []
    for layer, name, part in _parts(carrier):
        if layer in carrier.lane_states:
            state = carrier.lane_states[layer][name]
            key = f"held.{layer}.{name}"
            blocks += lane_blocks(key, state, part, carrier.lanes, carrier.all_lanes, groups.states)
        if layer in carrier.moments:
            moments = carrier.moments[layer]
            first = groups.dense.copies.rank == 0
            tensor = groups.tensor.rank
            if part.heads == 1:
                offset = (0, 0)
                main = first and tensor == 0
            else:
                offset = (0, tensor * moments.shape[1])
                main = first
            blocks.append(block(f"moments.{layer}", (2, part.heads), offset, moments, main))
    return [*blocks, block("restarts", (), (), carrier.restarts, groups.is_first)]


def restore_states(carrier: StateCarrier, groups: Groups, stored: StoredTensors) -> None:
    """Load the carried states from a checkpoint that was written in any layout.

    Raises ConfigError if the checkpoint has no carried states, lacks a part of them, or has another number of lanes.
    """
    shapes = stored.shapes
    if "restarts" not in shapes:
        raise ConfigError([_unlike("carries states, but the checkpoint was written without them")])
    has_states = any(key.startswith("held.") for key in shapes)  # False if the run had not yet accepted a step
    for layer, name, part in _parts(carrier):
        key = f"held.{layer}.{name}"
        if carrier.carries_states and has_states:
            if key not in shapes:
                raise ConfigError([_unlike(f"carries {name} of sub-layer {layer}, of which the checkpoint has none")])
            if shapes[key][0] != carrier.all_lanes:
                lanes = f"has {carrier.all_lanes} lanes, but the checkpoint holds the states of {shapes[key][0]}"
                raise ConfigError([_unlike(lanes)])
            shape = [len(carrier.lanes), *shapes[key][1:]]
            for axis_cut in part.active_cuts(groups.states.sizes):
                runs = held_runs(part, axis_cut, groups.states.dimensions[axis_cut.over])
                shape[1 + axis_cut.axis] = sum(map(len, runs))
            state = torch.empty(shape, dtype=stored.dtype(key), device=carrier.device)
            carrier.lane_states.setdefault(layer, {})[name] = state
        elif f"moments.{layer}" in shapes:
            if part.heads > 1:
                heads = part.heads // groups.tensor.size
            else:
                heads = 1
            carrier.moments[layer] = torch.empty(2, heads, dtype=torch.float64, device=carrier.device)
    carrier.restarts = torch.empty((), dtype=torch.int64, device=carrier.device)
    stored.fill(state_blocks(carrier, groups))


def _parts(carrier: StateCarrier) -> list[tuple[int, str, StatePart]]:
    """Return (layer, name, part) for each state part that is carried on this rank."""
    return [
        (layer, name, part)
        for layers in carrier.chunks
        for layer, parts in layers.items()
        for name, part in parts.items()
    ]


def _unlike(what: str) -> Problem:
    return Problem(
        "states.mode",
        "changed",
        f"{what}; set states.* and global_batch of this phase as in the checkpoint's run, or start from scratch with "
        "run.resume=never",
    )
