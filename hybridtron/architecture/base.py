"""Torch-free description of a mixer: options, parameters, FLOPs, state shapes, and rules for layouts.

A mixer is described by one frozen dataclass whose fields are its YAML options. Everything else follows from these and
the model's width, so a 3.8B model's parameters, FLOPs and memory take milliseconds, and a wrong option is refused
without torch. The module in `mixers/NAME.py` must build the parameters that `parameters()` lists; a test compares
them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from hybridtron.architecture.inits import Init, Orthogonal, OutputProjection, Projection
from hybridtron.architecture.place import PlaceSpec
from hybridtron.problems import Problem


@dataclass(frozen=True)
class Cut:
    """Sharding of one tensor axis over one dimension of the layout.

    `unit` is the number of entries that must stay together (a head). If the ranks can't divide the units evenly, each
    rank holds the full axis, provided `replicate` allows it. If the entries (key heads) are read by `readers` (query
    heads), a rank holds those that its own readers need, so that several ranks may hold the same entry.
    """

    axis: int
    over: str = "tensor"
    unit: int = 1
    replicate: bool = False
    readers: int | None = None


DENSE = "dense"
"""Family of the weights that each tensor-parallel rank uses for every token of its rows."""


@dataclass(frozen=True)
class Sharded(ABC):
    """A tensor that may be sharded: at most one cut for each dimension of the layout, each along its own axis.

    A rank holds the product of its entries along the axes. Along a dimension without a cut all ranks hold the same.
    """

    cuts: tuple[Cut, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        """Return the sizes of the parts fused along an axis; each part is cut separately."""

    def cut_over(self, dimension: str, ranks: int) -> Cut | None:
        """Return the cut over a dimension with this many ranks, or None if each rank holds the full axis."""
        cut = next((cut for cut in self.cuts if cut.over == dimension), None)
        if cut is None or ranks == 1:
            return None
        sizes = self.fused_sizes(cut.axis)
        if cut.readers is not None or all(size % (cut.unit * ranks) == 0 for size in sizes):
            return cut
        assert cut.replicate, f"{sizes} can't be cut over {ranks} ranks"
        return None

    def active_cuts(self, layout: Mapping[str, int]) -> list[Cut]:
        """Return the cuts that apply in a layout, given as the number of ranks in each dimension."""
        cuts = (self.cut_over(dimension, ranks) for dimension, ranks in layout.items())
        return [cut for cut in cuts if cut is not None]


def groups_of_heads(used: range, heads: int, groups: int) -> slice | list[int]:
    """Return the indices of the groups that some of `heads` heads use, if these share `groups` groups evenly.

    If each group serves equally many of the heads, this is a slice with one entry per group, so that indexing makes no
    copy. Otherwise it is a list with one entry per head.
    """
    group_of_head = [head * groups // heads for head in used]
    distinct = range(group_of_head[0], group_of_head[-1] + 1)
    if all(group_of_head.count(group) * len(distinct) == len(used) for group in distinct):
        return slice(distinct.start, distinct.stop)
    return group_of_head


@dataclass(frozen=True)
class LayerOwner:
    """One sub-layer, by its index in the model."""

    index: int

    @property
    def path(self) -> str:
        """Beginning of the names of its weights."""
        return f"layers.{self.index}"


@dataclass(frozen=True)
class LetterOwner:
    """All sub-layers of a letter, which share the weight."""

    letter: str

    @property
    def path(self) -> str:
        """Beginning of the names of its weights."""
        return f"shared.{self.letter}"


@dataclass(frozen=True)
class ModelOwner:
    """The model outside its sub-layers: `embedding`, `norm` or `head`."""

    path: str


Owner = LayerOwner | LetterOwner | ModelOwner


@dataclass(frozen=True)
class Parameter(Sharded):
    """One weight: its shape, its initialisation, and its treatment by optimizer, precision, layout and checkpoint.

    `parts` names the parts fused along `parts_axis`, as (name, size); a checkpoint stores each under its own name, and
    a layout cuts each separately. The ranks of the weight's `family` cut it and hold copies of it. `fp8` marks large
    projections, which multiply in FP8 where a run does. `grown` initialises the weight if loaded weights lack it: by a
    rule, or from concatenated rows of stored keys in its sub-layer. None: it may not be missing. `projection` marks the
    weight of a linear layer, which can have an adapter.

    A replicated weight's gradient is summed over tensor-parallel ranks if each rank's is partial: with
    `partial_gradient` because the weight works on that rank's channels, with `sequence_partial` because it reads the
    residual stream, of which a rank has its own tokens under sequence parallelism. A weight that computes the same on
    every rank has neither mark.

    A spec marks a weight as `shared` by all sub-layers of its letter. The table then sets the `owner`.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    fp32: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    parts_axis: int = 0
    family: str = DENSE
    partial_gradient: bool = False
    sequence_partial: bool = False
    fp8: bool = False
    projection: bool = False
    shared: bool = False
    grown: Init | tuple[str, ...] | None = None
    owner: Owner | None = None

    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        if self.parts and axis == self.parts_axis:
            return tuple(size for _, size in self.parts)
        return (self.shape[axis],)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stored(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return the keys and shapes under which a checkpoint stores this weight: those of its parts, or its own."""
        if not self.parts:
            return {name: self.shape}
        before = self.shape[: self.parts_axis]
        behind = self.shape[self.parts_axis + 1 :]
        return {f"{name}.{part}": (*before, size, *behind) for part, size in self.parts}

    def share_shape(self, layout: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a rank's shard in a layout, given as the number of ranks in each dimension."""
        shape = list(self.shape)
        for cut in self.active_cuts(layout):
            shape[cut.axis] //= layout[cut.over]
        return tuple(shape)


def linear(
    out_features: int, in_features: int, parts: tuple[tuple[str, int], ...] = (), cut: Cut = Cut(0), fp8: bool = True
) -> Parameter:
    """Return a projection initialised Kaiming-uniform, a = sqrt 5: U(+-1/sqrt(in_features))."""
    start = Projection(in_features**-0.5)
    return Parameter((out_features, in_features), start, parts=parts, cuts=(cut,), fp8=fp8, projection=True)


def output_linear(out_features: int, in_features: int, num_sublayers: int) -> Parameter:
    """Return a sub-layer's output projection, with its initialisation divided by sqrt(sub-layers of the model)."""
    start = OutputProjection((in_features * num_sublayers) ** -0.5)
    return Parameter((out_features, in_features), start, cuts=(Cut(1),), fp8=True, projection=True)


@dataclass(frozen=True)
class StatePart(Sharded):
    """One tensor of a carried state, per lane. Recipes select parts by `kind`; `dtype` None means the stream's type.

    The real tensor's first axis is the lane; `shape` and the cuts' axes do not count it. None in a shape grows with
    the tokens seen (keys of full attention). `parts` are sizes fused along the last axis. `handed` says which `kv`
    data later sequence shards (`parallel/context.py`) receive, if it is not a window: the full row before them, the
    sets that all earlier shards would carry, a running sum, the last tokens, or an all-reduced table. `transition` is
    the number of values by which a shard multiplies the recurrent state before it, sent beside its own state.
    """

    kind: Literal["ssm", "conv", "kv"]
    shape: tuple[int | None, ...]
    dtype: Literal["float32", "int64"] | None = None
    heads: int = 1  # equal runs of the first axis with separate statistics (for states drawn as noise)
    parts: tuple[int, ...] = ()
    handed: Literal["row", "sets", "sum", "tail", "table"] | None = None
    transition: int = 0

    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        size = self.shape[axis]
        assert size is not None
        if self.parts and axis == len(self.shape) - 1:
            return self.parts
        return (size,)


Names = dict[str, tuple[str, ...]]
"""Name in an exported model -> our keys, whose rows are concatenated there; both inside a sub-layer."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model around a mixer, and its index among all layers and among those of its kind."""

    width: int
    num_sublayers: int
    layer: int = 0
    nth_of_kind: int = 0
    layers_of_kind: int = 1
    wide: int = 2  # size of an fp32 value, in units of the compute type
    tensor: int = 1  # tensor-parallel ranks that keep a mixer's activations together, for counting these

    def at(self, layer: int, kinds: Sequence[str]) -> ModelSizes:
        """Return the sizes for one layer of a model with layers of these kinds."""
        kind = kinds[layer]
        return replace(self, layer=layer, nth_of_kind=kinds[:layer].count(kind), layers_of_kind=kinds.count(kind))


@dataclass(frozen=True)
class MixerSpec(PlaceSpec, ABC):
    """Options of one pattern letter. Subclasses add their options as fields."""

    kind: ClassVar[str]
    module: ClassVar[str]  # the mixer, "package.file:Class"; a name, because importing it would need torch
    width_option: ClassVar[str | None] = None  # option that sets the projections' widths, with the model's width
    projects_input: ClassVar[bool] = False  # only `projected` (parallel/linear) reads its input
    hands_over: ClassVar[bool] = False  # supports context parallelism (parallel/context)

    @classmethod
    def renamed(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with their current names; recipes and checkpoints may have former ones."""
        return dict(options)

    def input_width(self, model: ModelSizes) -> int:
        if self.feeds_next:
            return 2 * model.width
        return model.width

    @abstractmethod
    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        """Return every parameter of the module, by its name inside the module."""

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        """Return forward FLOPs per token by part (here: of weights); a multiply-add counts 2."""
        parts: Counter[str] = Counter()
        for weight in self.parameters(model).values():
            is_projection = isinstance(weight.init, Projection | OutputProjection | Orthogonal)
            if is_projection or (len(weight.shape) == 2 and weight.decay):  # convolution taps; not A_log, not decayed
                parts["projections" if is_projection else "conv"] += 2 * weight.size
        return {**parts}

    @abstractmethod
    def activation_values(self, model: ModelSizes) -> int:
        """Return the values per token kept from the forward to the backward pass: an estimate, over all tensor ranks.

        fp32 values count `model.wide`, values that every tensor-parallel rank keeps whole `model.tensor` times. The
        mixer's input is counted by the planner.
        """

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """Return the state parts that this mixer carries from chunk to chunk; none by default."""
        return {}

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the names of the weights in an exported model; by default our own.

        A name that ends in conv1d.weight is exported with the shape (channels, 1, taps); ours has no middle axis.
        """
        return {name: tuple(weight.stored(name)) for name, weight in self.parameters(model).items()}

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        """Return all options for an exported model, including those with default values."""
        return asdict(self)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of the losses that the mixer adds to the training loss."""
        return ()

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterable[Problem]:
        """Yield problems of options that are within their limits but don't fit together; keys are option names."""
        return ()

    @property
    def attention_at_eval(self) -> str | None:
        """Attention that runs outside training and its reach, for tables; None for mixers without attention."""
        return None

    @property
    def shares_rows(self) -> bool:
        """True if the tokens of a row can be divided over ranks (context parallelism)."""
        return self.hands_over

    @property
    def reads_in(self) -> int:
        """Multiple at which a text can be split outside training with the same result as reading it at once."""
        return 1

    def carry_problems(self, seq_len: int) -> Iterable[Problem]:
        """Yield problems that keep rows of this length from continuing the previous row; keys are option names."""
        return ()

    def surprises(self, carried: bool) -> Iterable[Problem]:
        """Yield warnings about surprising options; `carried`: a phase carries keys and values in training."""
        return ()

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterable[Problem]:
        """Yield problems that keep this mixer from being cut over `tensor` ranks; keys are option names."""
        uneven = [
            f"{size // cut.unit} in {name}"
            for name, weight in self.parameters(model).items()
            for cut in weight.cuts
            if cut.over == "tensor" and not cut.replicate
            for size in weight.fused_sizes(cut.axis)
            if size % (cut.unit * tensor)
        ]
        if uneven:  # report one weight: the same option fixes the others
            option = self.width_option or "kind"
            yield Problem(
                option,
                "not-divisible",
                f"is {getattr(self, option)} ({uneven[0]}), which {tensor} ranks can't share evenly",
            )

    def describe(self) -> str:
        """Return the options that differ from their defaults, for tables: `window=2048 kv_heads=4`."""
        chosen = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value}" for name, default, value in chosen if value not in (default, None))
