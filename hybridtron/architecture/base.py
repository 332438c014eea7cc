"""Torch-free description of a mixer: options, parameters, FLOPs, state shapes, and rules for layouts.

A mixer is the computation in one residual sub-layer: attention, a state-space recurrence or an MLP. A mixer's *spec* is
a frozen dataclass whose fields are the mixer's YAML options. A mixer's parameters, FLOPs and state shapes follow from
the mixer's spec and the model's sizes. Computing them needs no torch: it takes milliseconds even for a 3.8B model, and
a wrong option is refused before torch is imported.

A mixer's torch module is in `mixers/`, in a file with the same name. The module must build exactly the parameters that
the spec's `parameters()` lists; a test compares the two.

A *layout* says how many ranks there are in each dimension of parallelism: tensor, pipeline and others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

from hybridtron.architecture.inits import EachExpert, Init, Orthogonal, OutputProjection, Projection
from hybridtron.architecture.placement import Placement
from hybridtron.problems import Problem


@dataclass(frozen=True)
class Cut:
    """Sharding of one tensor axis over one layout dimension.

    axis         index of the tensor axis
    over         the dimension: "tensor", or for routed experts "expert" or "expert_tensor"
    unit         how many consecutive entries must stay on one rank, such as a head's channels
    replicate    each rank may hold the full axis if the rank count does not divide the unit count
    readers      set only if the axis counts key heads: the model's number of query heads. Equally many query heads read
                 each key head. A rank holds the key heads that its own query heads read, so several ranks may hold the
                 same key head
    """

    axis: int
    over: str = "tensor"
    unit: int = 1
    replicate: bool = False
    readers: int | None = None


DENSE = "dense"
"""Name of the family of weights that are applied to every token.

All weights of a family are sharded and replicated over the same ranks.
"""

EXPERTS = "experts"
"""Name of the family of routed experts' weights, each of which is applied to the tokens that chose the expert."""


@dataclass(frozen=True)
class Sharded(ABC):
    """A tensor that may be sharded: at most one cut for each layout dimension, each along its own axis.

    A rank holds one range of entries along every cut axis. Ranks that differ only in a dimension without a cut hold the
    same entries.
    """

    cuts: tuple[Cut, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        """Return the sizes of the parts that are fused along an axis; without fused parts, the axis's full size."""

    def cut_over(self, dimension: str, ranks: int) -> Cut | None:
        """Return the cut over one layout dimension, or None if this dimension does not divide the tensor.

        `ranks` counts the dimension's ranks.
        """
        cut = next((cut for cut in self.cuts if cut.over == dimension), None)
        if cut is None or ranks == 1:
            return None
        sizes = self.fused_sizes(cut.axis)
        if cut.readers is not None or all(size % (cut.unit * ranks) == 0 for size in sizes):
            return cut
        assert cut.replicate, f"{sizes} can't be cut over {ranks} ranks"
        return None

    def active_cuts(self, layout: Mapping[str, int]) -> list[Cut]:
        """Return the cuts that apply in a layout; `layout` maps each dimension to its rank count."""
        cuts = (self.cut_over(dimension, ranks) for dimension, ranks in layout.items())
        return [cut for cut in cuts if cut is not None]


def groups_of_heads(used: range, heads: int, groups: int) -> slice | list[int]:
    """Return an index for an axis of groups: it selects the groups that the heads in `used` read.

    The model has `heads` heads and `groups` groups; head h reads group h * groups // heads. If each selected group is
    read by equally many heads in `used`, the index is a slice over these groups, so that indexing makes no copy.
    Otherwise the index lists the group for each head in `used`.
    """
    group_of_head = [head * groups // heads for head in used]
    distinct = range(group_of_head[0], group_of_head[-1] + 1)
    if all(group_of_head.count(group) * len(distinct) == len(used) for group in distinct):
        return slice(distinct.start, distinct.stop)
    return group_of_head


@dataclass(frozen=True)
class LayerOwner:
    """Owner of a weight in one sub-layer; `index` is the sub-layer's index in the model."""

    index: int

    @property
    def path(self) -> str:
        """Prefix for the sub-layer's weight names."""
        return f"layers.{self.index}"


@dataclass(frozen=True)
class LetterOwner:
    """Owner of a weight that all sub-layers with one pattern letter share.

    The layer pattern is a string such as `(M-W-)*6`, in which each letter is a sub-layer.
    """

    letter: str

    @property
    def path(self) -> str:
        """Prefix for the letter's weight names."""
        return f"shared.{self.letter}"


@dataclass(frozen=True)
class ModelOwner:
    """Owner of a weight outside the sub-layers; `path` is `embedding`, `norm` or `head`."""

    path: str


Owner = LayerOwner | LetterOwner | ModelOwner


@dataclass(frozen=True)
class Parameter(Sharded):
    """One weight: its shape, its initialisation, and its treatment by optimizer, precision, layout and checkpoint.

    `parts` lists the matrices that are fused along `parts_axis`, each with its name and its size along this axis. A
    checkpoint stores each part under its own name, and a layout cuts each part separately. `heads` has for each part
    the number of heads among which the part's rows are divided: 1 for a part without heads. If no part has heads,
    `heads` is empty. `family` selects the ranks that shard or replicate the weight. `active` is the fraction of the
    elements with which a token is computed: less than 1 for the weights of experts. Nine fields are flags:

        decay         weight decay applies to the weight
        trained       gradients change the weight; False for values that a training step sets by a rule of its own
        fp32          the weight stays in fp32 in a bf16 model
        fp8           a large projection, whose matmuls are in FP8 if the run uses FP8
        projection    a linear layer's weight, which can have an adapter
        inner         a projection that reads another projection's output, and not the mixer's input
        stacked       projections of several experts: each index of the first axis is the matrix of one expert
        scoring       a linear layer's weight whose outputs are scores, such as a router's: AdamW updates it
        shared        all sub-layers with the same pattern letter share the weight

    `lr_factor` multiplies the learning rate of every step. It does not change weight decay: for any factor, a step
    decays the weight by the step's learning rate times the weight decay.

    `grown` says how to initialise the weight if a loaded checkpoint lacks it. It is a rule, or the names of weights in
    the same sub-layer to concatenate. None means that a checkpoint without the weight is refused.

    Two more flags say why the gradient on each rank is incomplete if tensor-parallel ranks hold replicas of the weight.
    The ranks must then all-reduce the gradient:

        partial_gradient    each rank uses the weight's output only for its own heads or channels
        sequence_partial    the weight is applied to the residual stream, and under sequence parallelism each rank holds
                            only some tokens of the stream

    A spec leaves `owner` None; `architecture/table.py` sets it.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    trained: bool = True
    fp32: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    parts_axis: int = 0
    heads: tuple[int, ...] = ()
    family: str = DENSE
    active: Fraction = Fraction(1)
    partial_gradient: bool = False
    sequence_partial: bool = False
    fp8: bool = False
    projection: bool = False
    inner: bool = False
    stacked: bool = False
    scoring: bool = False
    shared: bool = False
    lr_factor: float = 1.0
    grown: Init | tuple[str, ...] | None = None
    owner: Owner | None = None

    @property
    def is_mixer_projection(self) -> bool:
        """True for a linear layer's weight in a mixer: not for embedding, head, convolutions or A_log."""
        return self.projection and not isinstance(self.owner, ModelOwner)

    @property
    def is_matrix(self) -> bool:
        """True for mixers' projections, and for stacked projections of experts, each of which is a matrix."""
        return self.is_mixer_projection or self.stacked

    @property
    def is_linear(self) -> bool:
        """True if the last axis counts the inputs of a linear layer, also for the head and for routers."""
        return self.projection or self.stacked or self.scoring

    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        if self.parts and axis == self.parts_axis:
            return tuple(size for _, size in self.parts)
        return (self.shape[axis],)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def active_size(self) -> int:
        """Number of elements with which a token is computed."""
        return int(self.size * self.active)

    def stored(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return key in a checkpoint -> shape, for this weight or for each of its parts."""
        if not self.parts:
            return {name: self.shape}
        before = self.shape[: self.parts_axis]
        behind = self.shape[self.parts_axis + 1 :]
        return {f"{name}.{part}": (*before, size, *behind) for part, size in self.parts}

    def stored_heads(self, name: str) -> dict[str, int]:
        """Return key in a checkpoint -> number of heads, for this weight or for each of its parts."""
        keys = list(self.stored(name))
        return dict(zip(keys, self.heads or [1] * len(keys), strict=True))

    def shard_shape(self, layout: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of one rank's shard; `layout` maps each dimension to its rank count."""
        shape = list(self.shape)
        for cut in self.active_cuts(layout):
            shape[cut.axis] //= layout[cut.over]
        return tuple(shape)


def linear(
    out_features: int,
    in_features: int,
    parts: tuple[tuple[str, int], ...] = (),
    cut: Cut = Cut(0),
    fp8: bool = True,
    heads: tuple[int, ...] = (),
    inner: bool = False,
) -> Parameter:
    """Return a projection's weight, initialised uniformly on +-1/sqrt(in_features), like torch's nn.Linear.

    By default the projection is column-parallel: tensor-parallel ranks divide its outputs.
    """
    start = Projection(in_features**-0.5)
    return Parameter(
        (out_features, in_features), start, parts=parts, cuts=(cut,), fp8=fp8, projection=True, inner=inner, heads=heads
    )


def output_linear(out_features: int, in_features: int, num_sublayers: int, fp8: bool = True) -> Parameter:
    """Return a sub-layer's output projection, initialised uniformly on +-1/sqrt(in_features * num_sublayers).

    The projection is row-parallel: tensor-parallel ranks divide its inputs.
    """
    start = OutputProjection((in_features * num_sublayers) ** -0.5)
    return Parameter((out_features, in_features), start, cuts=(Cut(1),), fp8=fp8, projection=True)


@dataclass(frozen=True)
class StatePart(Sharded):
    """One tensor in a mixer's state.

    With the state after a row (a sequence in the batch), the next row can continue the same text. The tensor's first
    axis is the row's index in the batch. `shape` and the cuts' axes leave this axis out. An axis with size None grows
    with the tokens seen, such as the token axis of full attention's keys. With `dtype` None the tensor has the residual
    stream's dtype. `parts` are the sizes of tensors that are fused along the last axis. `kind` is a recurrent state
    (`ssm`), a convolution's last inputs (`conv`), or attention's keys and values (`kv`).

    The last two fields are for context parallelism (`parallel/context.py`), where each rank holds a sequence shard:
    consecutive tokens from every row. `exchange` says which `kv` data a shard receives from the shards before it:

        None     a window of tokens, or all earlier tokens if the window is unlimited
        row      all earlier tokens in the row
        sets     from each earlier shard, the keys that the shard keeps for later tokens
        sum      a running sum
        tail     the last tokens
        table    a table with entries from every shard, all-reduced

    For a recurrent state, `transition` counts the elements in the factor by which a shard multiplies the state before
    it. The shard sends this factor with its own state.
    """

    kind: Literal["ssm", "conv", "kv"]
    shape: tuple[int | None, ...]
    dtype: Literal["float32", "int64"] | None = None
    # number of equal groups along axis 0 of `shape`; if the state is drawn as noise, each group has its own statistics
    heads: int = 1
    parts: tuple[int, ...] = ()
    exchange: Literal["row", "sets", "sum", "tail", "table"] | None = None
    transition: int = 0

    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        size = self.shape[axis]
        assert size is not None
        if self.parts and axis == len(self.shape) - 1:
            return self.parts
        return (size,)


Names = dict[str, tuple[str, ...]]
"""Name of a weight in an exported model -> names of weights in this package.

The exported weight is the concatenation of these weights along axis 0. All names are relative to the sub-layer.
"""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model that contains a mixer, and the position of the mixer's sub-layer in the model."""

    width: int
    num_sublayers: int
    layer: int = 0  # index among all sub-layers
    nth_of_kind: int = 0  # index among the sub-layers with this kind of mixer
    layers_of_kind: int = 1
    wide: int = 2  # bytes of an fp32 value divided by bytes of a value in the compute type
    tensor: int = 1  # number of tensor-parallel ranks, over which `activation_values` sums

    def at(self, layer: int, kinds: Sequence[str]) -> ModelSizes:
        """Return the sizes for the sub-layer with index `layer`; `kinds` has every sub-layer's kind."""
        kind = kinds[layer]
        return replace(self, layer=layer, nth_of_kind=kinds[:layer].count(kind), layers_of_kind=kinds.count(kind))


@dataclass(frozen=True)
class MixerSpec(Placement, ABC):
    """Base class for specs: the options of one pattern letter. Subclasses add their options as fields."""

    kind: ClassVar[str]
    module: ClassVar[str]  # the mixer's class as "package.file:Class", because importing it would need torch
    width_option: ClassVar[str | None] = None  # option to name in errors about sizes that don't divide evenly
    projects_input: ClassVar[bool] = False  # the mixer reads its input only through `project_all` (parallel/linear.py)
    supports_context_parallel: ClassVar[bool] = False  # ranks may divide a row's tokens (parallel/context.py)
    supports_mup: ClassVar[bool] = False  # muP can transfer the mixer between widths (mup.py)

    @classmethod
    def renamed(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options under their current names; recipes and checkpoints may use former names."""
        return dict(options)

    def input_width(self, model: ModelSizes) -> int:
        if self.feeds_next:
            return 2 * model.width
        return model.width

    @abstractmethod
    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        """Return name -> parameter, for the mixer's torch module. The names are relative to the module."""

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        """Return part of the mixer -> forward FLOPs per token; a multiply-add counts 2.

        This base method counts matmuls and convolutions with weights. Subclasses add the rest, such as attention.
        """
        parts: Counter[str] = Counter()
        for weight in self.parameters(model).values():
            is_projection = isinstance(weight.init, Projection | OutputProjection | Orthogonal | EachExpert)
            # convolution taps have two axes and weight decay; Mamba's A_log has two axes, but no weight decay
            if is_projection or (len(weight.shape) == 2 and weight.decay):
                parts["projections" if is_projection else "conv"] += 2 * weight.active_size
        return {**parts}

    @abstractmethod
    def activation_values(self, model: ModelSizes) -> int:
        """Estimate how many elements are saved for the backward pass per token, summed over tensor-parallel ranks.

        The unit is an element of the compute type, so an fp32 element counts as `model.wide`. An element that every
        tensor-parallel rank saves counts `model.tensor` times. The mixer's input is not included: the planner adds it.
        """

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """Return name -> tensor of the mixer's state; by default there are none."""
        return {}

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in an exported model; by default the names in this package.

        A weight whose exported name ends in conv1d.weight is exported with the shape (channels, 1, taps); in this
        package its shape is (channels, taps).
        """
        return {name: tuple(weight.stored(name)) for name, weight in self.parameters(model).items()}

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        """Return all options for an exported model, including options with default values."""
        return asdict(self)

    @property
    def growing_sizes(self) -> tuple[str, ...]:
        """Names of options with values that muP grows in proportion to the model's width, and then rounds."""
        return ()

    @property
    def growing_heads(self) -> tuple[str, ...]:
        """Names of options with numbers of heads that muP grows in proportion to the model's width."""
        return ()

    def mup_problems(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Iterable[Problem]:
        """Yield problems with options that do not fit muP; `base` is the same mixer in the base model."""
        return ()

    def with_mup(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Self:
        """Return the spec with the options that muP changes; `base` is the same mixer in the base model."""
        return self

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Names for the losses that the mixer adds to the training loss."""
        return ()

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterable[Problem]:
        """Yield problems with options that do not fit together; limits of single options are checked elsewhere.

        Each problem's key is an option's name.
        """
        return ()

    @property
    def attention_at_eval(self) -> str | None:
        """Name of the attention outside training: `full` or `window 2048`; None for a mixer without attention."""
        return None

    @property
    def shares_rows(self) -> bool:
        """True if ranks may divide a row's tokens (context parallelism) with this spec's options."""
        return self.supports_context_parallel

    @property
    def chunk_multiple(self) -> int:
        """Granularity, in tokens, for splitting a text outside training.

        A text that is split at multiples of this number gives the same result as the unsplit text.
        """
        return 1

    def carry_problems(self, seq_len: int) -> Iterable[Problem]:
        """Yield a problem for each reason why a row of `seq_len` tokens can't continue the previous row's state.

        Each problem's key is an option's name.
        """
        return ()

    def warnings(self, carried: bool) -> Iterable[Problem]:
        """Yield warnings about options with surprising effects.

        `carried` is True if some phase carries keys and values from row to row in training.
        """
        return ()

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterable[Problem]:
        """Yield a problem if `tensor` tensor-parallel ranks can't divide this mixer.

        The problem's key is an option's name.
        """
        uneven = [
            f"{size // cut.unit} in {name}"
            for name, weight in self.parameters(model).items()
            for cut in weight.cuts
            if cut.over == "tensor" and not cut.replicate
            for size in weight.fused_sizes(cut.axis)
            if size % (cut.unit * tensor)
        ]
        if uneven:  # report the first weight only: the same option fixes all weights
            option = self.width_option or "kind"
            yield Problem(
                option,
                "not-divisible",
                f"is {getattr(self, option)} ({uneven[0]}), which {tensor} ranks can't share evenly",
            )

    def describe(self) -> str:
        """Return the options that differ from their defaults, for printed tables: `window=2048 kv_heads=4`."""
        chosen = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value}" for name, default, value in chosen if value not in (default, None))
