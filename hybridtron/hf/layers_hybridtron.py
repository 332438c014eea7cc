"""A residual sub-layer: its norm, and a mixer from `mixers_hybridtron.py` that computes with this model's weights.

A mixer is attention, a state-space recurrence or an MLP. Its *spec*, a dataclass, lists the weights that the mixer
computes with. This model stores the weights under other names, often the names in a known Hugging Face model, and may
fuse or split them. The spec's `exported_names` maps each stored weight's name to the names of the mixer's weights that
the stored weight concatenates. A stored weight may hold rows from several mixer weights, and a mixer weight may consist
of rows from several stored weights.

The mixer's projections call this model's layers, so that adapters such as LoRA can wrap these layers. All other weights
are passed to the mixer at each call.

In the code, `theirs` is a stored weight's name, and `ours` are names of weights in the mixer.

Legend: B sequences in the batch, L tokens, D model width, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .linear_hybridtron import SINGLE_RANK, Declared
from .mixers_hybridtron import (
    MIXERS,
    AttentionInputs,
    ModelSizes,
    RMSNorm,
    SeqInfo,
    State,
    attention,
    attention_reference,
    document_starts,
    multiply,
    starting_value,
)

ATTENTION = "attention"  # attribute of a mixer: the function that computes its attention
# Attribute of a module, a mapping: name of a stored weight -> [(rule of initialization, shape)], with an entry for each
# mixer weight that the stored weight concatenates. Projections are not listed.
STARTS = "starts"


class WeightRows(NamedTuple):
    """Rows `start` to `stop` - 1 of the stored weight `theirs`, which has `total` rows."""

    theirs: str
    start: int
    stop: int
    total: int


class SeqOnDevices:
    """The tokens' positions and documents, copied once to each device that has layers of the model."""

    def __init__(self, seq: SeqInfo) -> None:
        self._on = {seq.positions_BL.device: seq}

    def on(self, device: torch.device) -> SeqInfo:
        if device not in self._on:
            self._on[device] = next(iter(self._on.values())).map(lambda tensor: tensor.to(device))
        return self._on[device]


class HybridtronLinear(nn.Linear):
    """The matrix of a projection. If the projection has a bias, the mixer adds it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class HybridtronMixer(nn.Module):
    """One sub-layer's stored weights, and the mixer that computes with them.

    If sub-layers with the same letter in the pattern share weights, the first sub-layer with this letter holds them.
    `first` is the HybridtronMixer of the first sub-layer with this letter; it is None if this sub-layer is the first.
    """

    def __init__(self, config: PreTrainedConfig, layer_idx: int, first: HybridtronMixer | None = None) -> None:
        super().__init__()
        letter = config.pattern[layer_idx]
        options = dict(config.layers.get(letter, {}))
        if (kind := options.pop("kind", None)) not in MIXERS:
            raise ValueError(f"config.json: letter {letter!r} is of kind {kind!r}; have: {', '.join(MIXERS)}")
        make_spec, make_mixer = MIXERS[kind]
        kinds = [config.layers.get(each, {}).get("kind") for each in config.pattern]
        spec = make_spec(**make_spec.renamed(options))
        sizes = ModelSizes(config.hidden_size, len(kinds)).at(layer_idx, kinds)
        # transformers' attention functions read these attributes
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = True
        self.place, self.in_fp32 = spec, list[str]()
        # stored weight -> (input, output) of its layer, for layers that have already run in this forward pass
        self._once: dict[str, tuple[Tensor, Tensor]] = {}
        with torch.device("meta"):
            mixer = make_mixer(spec, sizes, SINGLE_RANK)
        self._mixer = (mixer,)  # in a tuple, so that its weights are not registered as this module's
        self._first = (first or self,)  # in a tuple for the same reason
        table = spec.parameters(sizes)
        names = spec.exported_names(sizes)
        # name of a weight's part -> name of the weight, both in the mixer
        of_key = {key: name for name, weight in table.items() for key in weight.stored(name)}
        # stored weights that the first sub-layer holds for this one
        self._elsewhere = {theirs for theirs, ours in names.items() if first and table[of_key[ours[0]]].shared}
        self._add_weights(table, {theirs: ours for theirs, ours in names.items() if theirs not in self._elsewhere})
        self._rows = dict(_rows_of(table, names))
        self._axes = {name: weight.parts_axis for name, weight in table.items()}
        for name in self._projections():
            setattr(mixer, name, partial(self._project, name))
        if hasattr(mixer, ATTENTION):
            setattr(mixer, ATTENTION, partial(configured_attention, self))

    def forward(self, x_BLD: Tensor, state: State | None, seq: SeqInfo) -> tuple[Tensor, State]:
        (mixer,) = self._mixer
        weights = {name: self._weight(self._rows[name], self._axes[name]) for name, _ in mixer.named_parameters()}
        try:
            out = functional_call(mixer, weights, (x_BLD.transpose(0, 1), state or None, seq))
        finally:
            self._once.clear()
        return out.y_LBD.transpose(0, 1), out.state

    def _add_weights(self, table: dict[str, Any], names: dict[str, tuple[str, ...]]) -> None:
        of_key = {key: name for name, weight in table.items() for key in weight.stored(name)}
        shapes = {key: shape for name, weight in table.items() for key, shape in weight.stored(name).items()}
        for theirs, ours in names.items():
            layer, _, leaf = theirs.rpartition(".")
            weight = table[of_key[ours[0]]]
            shape = shapes[ours[0]]
            shape = (sum(shapes[key][0] for key in ours), *shape[1:])
            if self._is_projection(of_key[ours[0]]):
                outer, _, name = layer.rpartition(".")
                setattr(self._holder(outer), name, HybridtronLinear(shape[1], shape[0]))
                continue
            if theirs.endswith("conv1d.weight"):
                shape = (shape[0], 1, *shape[1:])
            holder = self._holder(layer)
            setattr(holder, leaf, nn.Parameter(torch.empty(shape)))
            starts = {**getattr(holder, STARTS, {}), leaf: [(table[of_key[key]].init, shapes[key]) for key in ours]}
            setattr(holder, STARTS, starts)
            self.in_fp32 += [theirs] * weight.fp32

    def _holder(self, path: str) -> nn.Module:
        """Return the module with this dotted name; modules that do not exist yet are created."""
        holder: nn.Module = self
        for name in filter(None, path.split(".")):
            if not hasattr(holder, name):
                setattr(holder, name, nn.Module())
            holder = getattr(holder, name)
        return holder

    def _is_projection(self, ours: str) -> bool:
        return ours.endswith(".weight") and isinstance(getattr(self._mixer[0], ours[:-7], None), Declared)

    def _projections(self) -> list[str]:
        return [name for name, value in vars(self._mixer[0]).items() if isinstance(value, Declared)]

    def _layer(self, theirs: str) -> nn.Module:
        """Return the module that holds `theirs`: in this sub-layer, or in the first sub-layer with the same letter."""
        if theirs in self._elsewhere:
            holder = self._first[0]
        else:
            holder = self
        return holder.get_submodule(theirs.rpartition(".")[0])

    def _weight(self, rows: list[WeightRows], axis: int) -> Tensor:
        """Return a weight as the mixer expects it, assembled from rows of stored weights.

        axis: the axis of the weight's parts. If it is not the axis of rows, each part is a stored weight of its own.
        """
        parts = []
        for part in rows:
            weight = getattr(self._layer(part.theirs), part.theirs.rpartition(".")[2])
            if part.theirs.endswith("conv1d.weight"):
                weight = weight.squeeze(1)
            parts.append(weight if part.stop - part.start == part.total else weight[part.start : part.stop])
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=axis)

    def _project(self, name: str, x: Tensor) -> Tensor:
        """Apply a projection of the mixer to x with this model's layers; return outputs in the mixer's order.

        Several projections may need the same layer. The layer's output for x is kept until the end of the forward pass,
        so the layer runs once.
        """
        parts = []
        for part in self._rows[f"{name}.weight"]:
            output = self._once.get(part.theirs)
            if output is None or output[0] is not x:
                output = self._once[part.theirs] = x, self._layer(part.theirs)(x)
            parts.append(output[1] if part.stop - part.start == part.total else output[1][..., part.start : part.stop])
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim=-1)


def _rows_of(table: dict[str, Any], names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, list[WeightRows]]]:
    """Yield each mixer weight's name, with the rows of stored weights that form the weight, in order.

    Consecutive parts of the mixer's weight that are also consecutive in one stored weight are merged into one entry.
    """
    sizes = {key: shape[0] for name, weight in table.items() for key, shape in weight.stored(name).items()}
    lies: dict[str, WeightRows] = {}
    for theirs, ours in names.items():
        start = 0
        total = sum(sizes[key] for key in ours)
        for key in ours:
            lies[key] = WeightRows(theirs, start, start := start + sizes[key], total)
    for name, weight in table.items():
        rows: list[WeightRows] = []
        for key in weight.stored(name):
            last = rows[-1] if rows else None
            here = lies[key]
            if last is not None and last.theirs == here.theirs and last.stop == here.start:
                rows[-1] = last._replace(stop=here.stop)
            else:
                rows.append(here)
        yield name, rows


def start_weights(module: nn.Module) -> None:
    """Initialize a module's weights other than projections, by the rules that the mixers' specs give.

    Weights that were loaded from a file stay unchanged, because transformers' `init` skips them.
    """
    for leaf, starts in getattr(module, STARTS, {}).items():
        weight = getattr(module, leaf)
        values = [starting_value(each, shape, int(torch.randint(2**62, ())), leaf) for each, shape in starts]
        init.copy_(weight, torch.cat(values).reshape(weight.shape).to(weight.device))


def configured_attention(layer: HybridtronMixer, inputs: AttentionInputs) -> Tensor:
    """Compute attention by the implementation that `attn_implementation` names.

    `flash...` names one of transformers' flash kernels. These can't skip padding among the keys from a cache, so with
    keys from a cache this model's own attention is used instead. `eager` names the reference implementation. All other
    names select this model's own attention.
    """
    chosen = layer.config._attn_implementation or "sdpa"
    if not chosen.startswith("flash") or inputs.memory is not None:
        return (attention_reference if chosen == "eager" else attention)(inputs)
    borders = {}
    if (starts_BL := document_starts(inputs.documents_BL)) is not None:
        # The kernels treat the batch as one concatenated sequence. `starts` has each document's first index in this
        # sequence, and then the number of all tokens.
        starts_BL = torch.cat((torch.ones_like(starts_BL[:, :1]), starts_BL[:, 1:]), dim=1)
        starts = F.pad(starts_BL.flatten().nonzero().flatten(), (0, 1), value=starts_BL.numel()).int()
        length = starts_BL.shape[1]
        borders = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": length, "max_length_k": length}
    q, k, v = (x.transpose(1, 2) for x in (inputs.q_BLHK, inputs.k_BLGK, inputs.v_BLGK))
    options = {"scaling": q.shape[-1] ** -0.5, "sliding_window": inputs.window, **borders}
    return ALL_ATTENTION_FUNCTIONS[chosen](layer, q, k, v, None, **options)[0]


class HybridtronLayer(GradientCheckpointingLayer):
    """A residual sub-layer of one of three kinds.

    ordinary           has a norm on the mixer's input or output
    parallel branch    has no norm: it reads the same normed input as the previous sub-layer
    feeder             reads the residual stream concatenated with the embedding. Its output is not added to the stream:
                       only the next sub-layer reads it
    """

    mixer_class: ClassVar[type[HybridtronMixer]] = HybridtronMixer

    def __init__(self, config: PreTrainedConfig, layer_idx: int, first: HybridtronMixer | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.mixer = self.mixer_class(config, layer_idx, first)
        self.place = self.mixer.place
        self.multiplier = config.residual_multiplier * self.place.output_multiplier
        if self.place.has_norm:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.norm = None

    def forward(
        self,
        x_BLD: Tensor,
        places: SeqOnDevices,
        embedded_BLD: Tensor,
        fed_BLD: Tensor | None = None,
        normed_BLD: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return three values for the next sub-layer: the residual stream, a feeder's output, and the mixer's input.

        x_BLD, fed_BLD, normed_BLD  the three values that the previous sub-layer returned
        places                      the tokens' positions and documents, on each device
        embedded_BLD                the token embedding, which a feeder reads
        cache                       the HybridtronCache whose state for this sub-layer is replaced; None for no cache

        The second value is None unless this sub-layer is a feeder. The third value, which a parallel branch reads, is
        None after a feeder.
        """
        if cache is None:
            state = None
        else:
            state = cache.states[self.layer_idx]
        if self.place.feeds_next:
            normed_BLD = torch.cat((x_BLD, embedded_BLD), dim=-1)
        elif self.norm is not None:
            read_BLD = x_BLD if fed_BLD is None else x_BLD + fed_BLD
            if self.place.norm_after:
                normed_BLD = x_BLD.to(self.norm.weight.dtype)
            else:
                normed_BLD = self.norm(read_BLD)
        y_BLD, state = self.mixer(normed_BLD, state, places.on(x_BLD.device))
        if cache is not None:
            cache.states[self.layer_idx] = state
        if self.place.feeds_next:
            return x_BLD, y_BLD, None
        if self.norm is not None and self.place.norm_after:
            y_BLD = self.norm(y_BLD)
        return x_BLD + multiply(y_BLD, self.multiplier), None, normed_BLD


def sublayers(config: PreTrainedConfig, layer_class: type[HybridtronLayer]) -> list[HybridtronLayer]:
    """Return all sub-layers; each gets the mixer of its letter's first sub-layer, whose weights it may share."""
    layers: list[HybridtronLayer] = []
    for index in range(config.num_hidden_layers):
        first = config.pattern.index(config.pattern[index])
        layers.append(layer_class(config, index, layers[first].mixer if first < index else None))
    return layers
