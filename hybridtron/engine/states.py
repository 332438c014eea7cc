"""What each row's recurrent state starts from in training: noise, or the state that its lane was left in.

    random    N(0, sigma^2) for every value
    fitted    N(mu, var) per layer and head, mu <- (1 - beta) mean(h_T) + beta mu, the same for var; both start at 0
    passing   the state in which the lane's last row ended, another text; zero with probability p
    tbtt      the same, where the row reads on in the same document, else zero

A state belongs to (layer, lane). It stays on the stage that owns the layer, is never changed in place, and carries no
gradient from step to step. What rows end in is kept aside and taken over when the step is accepted, so that a refused
step leaves everything as it was. All random numbers are functions of (seed, step, layer, lane), whatever the layout;
a rank that holds a share of a state draws the whole and takes its share. Nothing here knows a mixer.

Letters: B rows of a micro-batch, K lanes of this process, H heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hybridtron.config.architecture import architecture
from hybridtron.config.check_states import NOISE, carried_kinds
from hybridtron.config.schema import Config, StateMode, StatesConfig
from hybridtron.data.batch import Batch
from hybridtron.data.reading import phase_seed
from hybridtron.model.stack import States
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup
from hybridtron.specs.base import StatePart


@dataclass(frozen=True)
class Carried:
    """What of the model's state is carried, and how: the chosen parts of each chunk's layers."""

    states: StatesConfig
    chunks: tuple[dict[int, dict[str, StatePart]], ...]
    lanes: range
    rows: int
    seed: int


def carrier_of(
    config: Config,
    phase_index: int,
    layers: Sequence[range | None],
    lanes: range,
    groups: Groups,
    device: torch.device,
) -> Carrier | None:
    """The carrier of a phase, for chunks that hold these layers; None where every row starts from zero."""
    phase = config.phases[phase_index]
    states = config.states_of(phase)
    if states.mode is StateMode.zero:
        return None
    arch, kinds = architecture(config.model), carried_kinds(states)
    chosen = set(range(len(arch.specs)) if states.layers is None else states.layers)
    chunks = []
    for held in layers:
        parts = {
            layer: {
                name: part for name, part in arch.specs[layer].state_parts(arch.sizes).items() if part.kind in kinds
            }
            for layer in held or range(len(arch.specs))
            if layer in chosen
        }
        chunks.append({layer: of_layer for layer, of_layer in parts.items() if of_layer})
    seed = phase_seed(config.run.seed, phase_index)
    carried = Carried(states, tuple(chunks), lanes, phase.micro_batch, seed)
    return Carrier(carried, groups.tensor, device)


class Carrier:
    """Hands each micro-batch of each chunk its initial states, and keeps what it ends in.

    The micro-batches of a step are chunk 0 of every group of lanes, then chunk 1 of every group, and so on.
    """

    def __init__(self, carried: Carried, tensor: TensorGroup, device: torch.device) -> None:
        self.carried, self.tensor, self.device = carried, tensor, device
        self.groups = len(carried.lanes) // carried.rows
        self.held: States = {}  # of every chosen layer, lanes on the first axis
        self.moments: dict[int, Tensor] = {}  # mean and variance of each head of this rank's share, (2, H) by layer
        self.restarts = torch.zeros((), dtype=torch.int64, device=device)  # lanes whose state was not finite
        self._ended: dict[tuple[int, int], States] = {}
        self._step = 0

    def begin(self, step: int) -> None:
        """Forget what a refused step left."""
        self._ended, self._step = {}, step

    def initial(self, chunk: int, number: int, batch: Batch) -> States | None:
        """The states that the rows of a micro-batch start from; None for zero."""
        turn, group = divmod(number, self.groups)
        lanes = self.carried.lanes[group * self.carried.rows :][: self.carried.rows]
        if self.carried.states.mode in NOISE:
            return self._noise(self.carried.chunks[chunk], lanes)
        if turn:
            before = self._ended[chunk, number - self.groups]
        elif self.held:
            here = slice(group * self.carried.rows, (group + 1) * self.carried.rows)
            before = {
                layer: {name: tensor[here] for name, tensor in self.held[layer].items()}
                for layer in self.carried.chunks[chunk]
            }
        else:
            return None
        return _where(self._goes_on(batch, lanes), before)

    def keep(self, chunk: int, number: int, states: States) -> None:
        """Remember what a micro-batch ended in: the carried parts, and for noise nothing that is not measured."""
        if self.carried.states.mode is StateMode.random:
            return
        self._ended[chunk, number] = {
            layer: {name: states[layer][name].detach() for name in parts}
            for layer, parts in self.carried.chunks[chunk].items()
        }

    @torch.no_grad()
    def commit(self) -> None:
        """Take over what the rows of an accepted step ended in."""
        if self.carried.states.mode is StateMode.fitted:
            self._measure()
        elif self.carried.states.mode is not StateMode.random:
            self.held = self._healthy(self._joined())
        self._ended = {}

    def tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on, by name: this process's share."""
        held = {f"held.{layer}.{name}": t for layer, parts in self.held.items() for name, t in parts.items()}
        moments = {f"moments.{layer}": moments for layer, moments in self.moments.items()}
        return {**held, **moments, "restarts": self.restarts}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        self.held, self.moments = {}, {}
        for key, tensor in tensors.items():
            kind, *names = key.split(".")
            if kind == "held":
                self.held.setdefault(int(names[0]), {})[names[1]] = tensor.to(self.device)
            elif kind == "moments":
                self.moments[int(names[0])] = tensor.to(self.device)
        self.restarts = tensors["restarts"].to(self.device)

    def _goes_on(self, batch: Batch, lanes: Sequence[int]) -> Tensor:
        if self.carried.states.mode is StateMode.tbtt:
            assert batch.continues_B is not None
            return batch.continues_B
        share = self.carried.states.dropout
        drawn = [self._key("dropout", lane) / 2**64 >= share for lane in lanes]
        return torch.tensor(drawn, device=self.device)

    def _joined(self) -> States:
        """The last states of all lanes, in their order."""
        joined: States = {}
        for chunk, layers in enumerate(self.carried.chunks):
            last = max(number for kept, number in self._ended if kept == chunk) + 1
            ended = [self._ended[chunk, number] for number in range(last - self.groups, last)]
            for layer, parts in layers.items():
                joined[layer] = {name: torch.cat([of_group[layer][name] for of_group in ended]) for name in parts}
        return joined

    def _healthy(self, states: States) -> States:
        """The states, with zeros on every layer of a lane in which one is not finite; all stages agree on which."""
        finite_K = torch.ones(len(self.carried.lanes), dtype=torch.int32, device=self.device)
        for tensor in (tensor for parts in states.values() for tensor in parts.values()):
            finite_K *= tensor.isfinite().flatten(1).all(1).int() if tensor.dim() > 1 else 1
        dist.all_reduce(finite_K, dist.ReduceOp.MIN, group=parallel_state.get_model_parallel_group())
        self.restarts += (1 - finite_K).sum()
        return _where(finite_K.bool(), states)

    def _noise(self, layers: dict[int, dict[str, StatePart]], lanes: Sequence[int]) -> States | None:
        states = self.carried.states
        if states.mode is StateMode.fitted and not self.moments:
            return None
        drawn: States = {}
        for layer, parts in layers.items():
            for name, part in parts.items():
                noise = torch.stack([self._drawn(layer, lane, part) for lane in lanes])
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
        """Standard normal values for a lane's whole state, of which this rank takes its share."""
        generator = torch.Generator(self.device).manual_seed(self._key("noise", lane, layer) >> 1)
        shape = [size for size in part.shape if size is not None]
        whole = torch.randn(shape, generator=generator, device=self.device)
        return whole.chunk(self.tensor.size)[self.tensor.rank]

    def _measure(self) -> None:
        """Move mean and variance towards those of the states that all lanes of all ranks ended in."""
        ended: dict[int, list[Tensor]] = {}
        for (chunk, _), states in self._ended.items():
            for layer in self.carried.chunks[chunk]:
                ended.setdefault(layer, []).extend(states[layer].values())
        sums = {layer: self._sums(layer, torch.cat(tensors).double()) for layer, tensors in sorted(ended.items())}
        beta = self.carried.states.beta
        for layer, (count, total_H, square_H) in sums.items():
            mean_H = total_H / count
            moments = torch.stack([mean_H, square_H / count - mean_H**2])
            self.moments[layer] = (1 - beta) * moments + beta * self.moments.get(layer, torch.zeros_like(moments))

    def _sums(self, layer: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count, sum and sum of squares of each head's values, over the ranks that read other lanes or hold a share."""
        (part,) = next(parts for chunk in self.carried.chunks if (parts := chunk.get(layer))).values()
        alone = part.heads == 1
        by_head = states.flatten(1).unsqueeze(1) if alone else states.flatten(2)
        sums_3H = torch.stack([torch.ones_like(by_head), by_head, by_head**2]).sum((1, 3))
        dist.all_reduce(sums_3H, group=parallel_state.get_data_parallel_group())
        if alone:
            dist.all_reduce(sums_3H, group=parallel_state.get_tensor_model_parallel_group())
        count, total_H, square_H = sums_3H
        return count, total_H, square_H

    def _key(self, purpose: str, *numbers: int) -> int:
        text = f"{self.carried.seed}/{self._step}/{purpose}/{'/'.join(map(str, numbers))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _where(kept: Tensor, states: States) -> States:
    """The states of the rows that keep theirs, zeros for the others."""
    return {
        layer: {
            name: torch.where(kept.view(-1, *[1] * (tensor.dim() - 1)), tensor, torch.zeros_like(tensor))
            for name, tensor in parts.items()
        }
        for layer, parts in states.items()
    }
