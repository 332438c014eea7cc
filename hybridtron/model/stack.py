"""Residual sub-layers in order, one for each letter of the pattern: x + mixer(norm(x)), or x + norm(mixer(x)).

x is the residual stream. The mixer is attention, a recurrence or an MLP. The addend is multiplied by the letter's
`output_multiplier` and the model's `residual_multiplier`.

The addition is deferred: a sub-layer returns the stream and the addend as two tensors, and the addend is called
*pending*. The next sub-layer adds the two tensors in the op that also computes its norm, so that the stream is read and
written once instead of twice. Pending tensors exist only inside this file (`ResidualStream`): the stack takes and
returns one tensor.

Two kinds of sub-layer differ from this scheme:

    feeder             reads the stream concatenated with the token embedding. Its output y is not added to the stream:
                       only the next sub-layer reads it, as norm(x + y)
    parallel branch    (option `beside`) shares the previous sub-layer's norm: x + mixer_1(norm(x)) + mixer_2(norm(x)),
                       where mixer_1 belongs to the previous sub-layer and mixer_2 belongs to the branch. The branch's
                       output is added to the pending tensor

The stream may have a higher precision (fp32) than the inputs and outputs of mixers, because a norm's output has the
dtype of the norm's weight. States are arguments and results, keyed by the sub-layer's index in the model; no state is
changed in place.

Legend: B rows (sequences), L tokens, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.table import Architecture
from hybridtron.config.schema import Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Routed, State, build_mixer
from hybridtron.mixers.norm import RMSNorm
from hybridtron.model.offload import OffloadedPass
from hybridtron.ops.multiply import multiply
from hybridtron.ops.norm import AddRMSNormInputs, add_rms_norm
from hybridtron.parallel.linear import TensorGroup

States = dict[int, State]
"""Sub-layer's index in the full model -> its state, which is {} for sub-layers without a state.

If the states passed to the stack lack an entry for a sub-layer, this sub-layer starts from a zero state.
"""


class ResidualStream(NamedTuple):
    """The stream before the last addition, and the pending tensor that is still to be added to it.

    `pending_LBD` is None before the first sub-layer and after a feeder. `embedded_LBD` is the token embedding, or None
    if no sub-layer reads the embedding. `feeder_LBD` is the previous sub-layer's output if that sub-layer is a feeder,
    else None.
    """

    x_LBD: Tensor
    pending_LBD: Tensor | None = None
    embedded_LBD: Tensor | None = None
    feeder_LBD: Tensor | None = None

    def materialize(self) -> Tensor:
        """Return the stream as one tensor, with the pending tensor added."""
        if self.pending_LBD is None:
            return self.x_LBD
        return self.x_LBD + self.pending_LBD

    def add_pending(self, y_LBD: Tensor) -> ResidualStream:
        """Return the stream with a parallel branch's output added to the pending tensor."""
        assert self.pending_LBD is not None
        return self._replace(pending_LBD=self.pending_LBD + y_LBD)

    @property
    def latest_LBD(self) -> Tensor:
        """The tensor that the last sub-layer computed, or the stream before the first sub-layer."""
        if self.feeder_LBD is not None:
            return self.feeder_LBD
        if self.pending_LBD is not None:
            return self.pending_LBD
        return self.x_LBD


class StreamNorm(RMSNorm):
    """RMSNorm of a residual stream, fused with the pending addition; returns the sum and the normed sum."""

    def forward(self, x_LBD: Tensor, pending_LBD: Tensor | None) -> tuple[Tensor, Tensor]:
        if pending_LBD is None:
            return x_LBD, super().forward(x_LBD)
        return add_rms_norm(AddRMSNormInputs(x_LBD, pending_LBD, self.weight, self.eps))


class SubLayerInputs(NamedTuple):
    """The stream that a sub-layer reads, its mixer's initial state, and the tokens' positions and documents.

    For a parallel branch, `stream.x_LBD` is the previous sub-layer's normed input, and nothing is pending.
    """

    stream: ResidualStream
    state: State | None
    seq: SeqInfo


class ResidualOut(NamedTuple):
    """The stream with the mixer's output pending, the mixer's new state, its auxiliary losses and its router's choices.

    `normed_LBD` is the mixer's input. If the next sub-layer is a parallel branch, it reads this tensor, else the tensor
    may be None.
    """

    stream: ResidualStream
    state: State
    aux: dict[str, Tensor]
    normed_LBD: Tensor | None = None
    routed: Routed | None = None


class Residual(nn.Module):
    """A residual sub-layer around any mixer, with a norm before or after the mixer.

    With `shows_norm`, it also returns the mixer's input, for the parallel branch that is the next sub-layer.
    """

    def __init__(
        self,
        spec: MixerSpec,
        sizes: ModelSizes,
        norm_eps: float,
        tensor: TensorGroup,
        multiplier: float,
        shows_norm: bool,
    ) -> None:
        super().__init__()
        self.shows_norm = shows_norm
        self.norm_after = spec.norm_after
        self.multiplier = multiplier * spec.output_multiplier
        self.norm = StreamNorm(sizes.width, norm_eps)
        self.mixer = build_mixer(spec, sizes, tensor)

    def forward(self, inputs: SubLayerInputs) -> ResidualOut:
        if self.norm_after:
            return self._with_norm_after(inputs)
        stream = inputs.stream
        if stream.feeder_LBD is None:
            x_LBD, normed_LBD = self.norm(stream.x_LBD, stream.pending_LBD)
        else:
            x_LBD = stream.x_LBD
            _, normed_LBD = self.norm(x_LBD, stream.feeder_LBD)  # a feeder's output does not enter the stream
        mixed = self.mixer(normed_LBD, inputs.state, inputs.seq)
        out = ResidualStream(x_LBD, multiply(mixed.y_LBD, self.multiplier), stream.embedded_LBD)
        return ResidualOut(out, mixed.state, mixed.aux, normed_LBD if self.shows_norm else None, mixed.routed)

    def _with_norm_after(self, inputs: SubLayerInputs) -> ResidualOut:
        x_LBD = inputs.stream.materialize()
        mixed = self.mixer(x_LBD.to(self.norm.weight.dtype), inputs.state, inputs.seq)
        _, y_LBD = self.norm(mixed.y_LBD, None)
        out = ResidualStream(x_LBD, multiply(y_LBD, self.multiplier), inputs.stream.embedded_LBD)
        return ResidualOut(out, mixed.state, mixed.aux, routed=mixed.routed)


class ParallelBranch(nn.Module):
    """A parallel branch: a sub-layer without a norm, which reads the previous sub-layer's normed input.

    In the stream that it returns, `x_LBD` is this normed input, and `pending_LBD` is the mixer's output. The stack adds
    `pending_LBD` to the pending tensor of the real stream.
    """

    def __init__(self, spec: MixerSpec, sizes: ModelSizes, tensor: TensorGroup, multiplier: float) -> None:
        super().__init__()
        self.multiplier = multiplier * spec.output_multiplier
        self.mixer = build_mixer(spec, sizes, tensor)

    def forward(self, inputs: SubLayerInputs) -> ResidualOut:
        normed_LBD = inputs.stream.x_LBD
        mixed = self.mixer(normed_LBD, inputs.state, inputs.seq)
        stream = ResidualStream(normed_LBD, multiply(mixed.y_LBD, self.multiplier))
        return ResidualOut(stream, mixed.state, mixed.aux, normed_LBD, mixed.routed)


class Feeder(nn.Module):
    """A sub-layer that reads the stream concatenated with the embedding; only the next sub-layer reads its output."""

    def __init__(self, spec: MixerSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.mixer = build_mixer(spec, sizes, tensor)

    def forward(self, inputs: SubLayerInputs) -> ResidualOut:
        x_LBD = inputs.stream.materialize()
        embedded_LBD = inputs.stream.embedded_LBD
        assert embedded_LBD is not None
        mixed = self.mixer(torch.cat((x_LBD, embedded_LBD), dim=-1), inputs.state, inputs.seq)
        out = ResidualStream(x_LBD, None, embedded_LBD, mixed.y_LBD)
        return ResidualOut(out, mixed.state, mixed.aux)


def sub_layer(arch: Architecture, index: int, norm_eps: float, tensor: TensorGroup, multiplier: float) -> nn.Module:
    """Build the sub-layer at this index in the model; `multiplier` is the model's `residual_multiplier`."""
    spec = arch.specs[index]
    sizes = arch.sizes_at(index)
    if spec.feeds_next:
        return Feeder(spec, sizes, tensor)
    if spec.beside:
        return ParallelBranch(spec, sizes, tensor, multiplier)
    return Residual(spec, sizes, norm_eps, tensor, multiplier, arch.next_is_beside(index))


def recompute_in_backward(layer: nn.Module, inputs: SubLayerInputs) -> ResidualOut:
    """Run a sub-layer whose activations are recomputed in the backward pass.

    The pending tensor is added to the stream first, so that one tensor is saved instead of two. The tensors in `stream`
    are passed to `checkpoint` as separate arguments, because `checkpoint` does not save tensors inside a tuple.
    """

    def run(
        x_LBD: Tensor, embedded_LBD: Tensor | None, feeder_LBD: Tensor | None, state: State | None, seq: SeqInfo
    ) -> ResidualOut:
        return layer(SubLayerInputs(ResidualStream(x_LBD, None, embedded_LBD, feeder_LBD), state, seq))

    stream = inputs.stream
    return checkpoint(
        run,
        stream.materialize(),
        stream.embedded_LBD,
        stream.feeder_LBD,
        inputs.state,
        inputs.seq,
        use_reentrant=False,
        preserve_rng_state=False,  # random draws depend on the batch's key alone, not on torch's generators
    )


class StackOut(NamedTuple):
    """The stream after the last sub-layer, every layer's new state, and the auxiliary losses summed by name.

    `routed` has the choices of each router by its sub-layer's index in the model.
    """

    x_LBD: Tensor
    states: States
    aux: dict[str, Tensor]
    routed: dict[int, Routed]


class Stack(nn.ModuleDict):
    """The sub-layers of one stage, by their index in the full model.

    With `recompute=layer`, every sub-layer saves only its input and runs again in the backward pass, from the same
    initial state. With `recompute=selective`, only sub-layers with a state, such as attention, are recomputed. MLPs
    save their activations. The activations of the first `offload` sub-layers wait in host memory for the backward pass
    (`model/offload.py`).
    """

    def __init__(
        self,
        arch: Architecture,
        indices: range,
        norm_eps: float,
        tensor: TensorGroup,
        recompute: Recompute = Recompute.none,
        offload: int = 0,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        for i in indices:
            self[str(i)] = sub_layer(arch, i, norm_eps, tensor.of_layer(i), multiplier)
        along_sequence = {str(i) for i in indices if arch.specs[i].state_parts(arch.sizes)}
        choices = {Recompute.none: set(), Recompute.selective: along_sequence, Recompute.layer: set(self)}
        self.recomputed: set[str] = choices[recompute]
        self.offloaded = set(list(self)[:offload])

    def forward(
        self, x_LBD: Tensor, states: States | None, seq: SeqInfo, embedded_LBD: Tensor | None = None
    ) -> StackOut:
        """Run the sub-layers in order. `embedded_LBD` is the token embedding, if a sub-layer reads the embedding."""
        stream = ResidualStream(x_LBD, None, embedded_LBD)
        new_states: States = {}
        total_aux: dict[str, Tensor] = {}
        routed: dict[int, Routed] = {}
        offloaded = OffloadedPass()
        normed_LBD = None
        for name, layer in self.items():
            index = int(name)
            state = None if states is None else states.get(index)
            if isinstance(layer, ParallelBranch):
                assert normed_LBD is not None
                out = self._run(name, SubLayerInputs(ResidualStream(normed_LBD), state, seq), offloaded)
                stream = stream.add_pending(out.stream.latest_LBD)
            else:
                out = self._run(name, SubLayerInputs(stream, state, seq), offloaded)
                stream = out.stream
            new_states[index] = out.state
            normed_LBD = out.normed_LBD
            if out.routed is not None:
                routed[index] = out.routed
            for key, loss in out.aux.items():
                if key in total_aux:
                    total_aux[key] = total_aux[key] + loss
                else:
                    total_aux[key] = loss
        offloaded.close()
        return StackOut(stream.materialize(), new_states, total_aux, routed)

    def _run(self, name: str, inputs: SubLayerInputs, offloaded: OffloadedPass) -> ResidualOut:
        """Run one sub-layer, with its activations kept, offloaded or recomputed."""
        layer = self[name]
        if name in self.recomputed and torch.is_grad_enabled():  # config/checks forbids offload with recompute
            return recompute_in_backward(layer, inputs)
        if name in self.offloaded and torch.is_grad_enabled():
            saved = offloaded.begin(layer, inputs.stream.x_LBD)
            with saved.forward_pass():
                out = layer(inputs)
        else:
            saved = None
            out = layer(inputs)
        offloaded.end(out.stream.latest_LBD, saved)
        return out
