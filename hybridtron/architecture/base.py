"""What can be known of a mixer without torch: options, parameters, FLOPs, state shapes, rules.

A mixer is described by one frozen dataclass whose fields are its YAML options. All else follows from these and the
model's width, so parameters, FLOPs and memory of a 3.8B model are known in milliseconds, and a wrong option is refused
without torch. The module in `mixers/NAME.py` must build the parameters that `parameters()` lists; a test compares them.
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
    """How one axis of a tensor is shared out over the ranks of one dimension of the layout.

    `unit` is how many entries along the axis must stay together (a head). Where the ranks can't share the units evenly,
    each holds the whole, if `replicate` allows that. Where `readers` (the heads of the queries) read the entries
    (the heads of the keys), a rank holds those that its own readers need, so that some entries lie on several ranks.
    """

    axis: int
    over: str = "tensor"
    unit: int = 1
    replicate: bool = False
    readers: int | None = None


@dataclass(frozen=True)
class Sharded(ABC):
    """A tensor that ranks share: at most one cut for each dimension of the layout, each along an axis of its own.

    What a rank holds is the product of its entries along the axes. Ranks of a dimension without a cut hold the same.
    """

    cuts: tuple[Cut, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        """The sizes of what is fused along an axis, each of which is cut for itself."""

    def cut_over(self, dimension: str, ranks: int) -> Cut | None:
        """The cut over this number of ranks of a dimension; None where each holds the whole."""
        cut = next((cut for cut in self.cuts if cut.over == dimension), None)
        if cut is None or ranks == 1:
            return None
        sizes = self.fused_sizes(cut.axis)
        if cut.readers is not None or all(size % (cut.unit * ranks) == 0 for size in sizes):
            return cut
        assert cut.replicate, f"{sizes} can't be cut over {ranks} ranks"
        return None

    def active_cuts(self, layout: Mapping[str, int]) -> list[Cut]:
        """The cuts of a layout, given as the number of ranks in each dimension."""
        found = (self.cut_over(dimension, ranks) for dimension, ranks in layout.items())
        return [cut for cut in found if cut is not None]


@dataclass(frozen=True)
class Parameter(Sharded):
    """One weight: its shape, how it starts, and how optimizer, precision, layout and checkpoint must treat it.

    `parts` names what is fused in a projection along axis 0, as (name, rows); a checkpoint stores each part under its
    own name, and a layout cuts each for itself. `partial_gradient` says that a weight held whole gets only a part of
    its gradient on each rank, because it works on a rank's share of the channels: the parts are summed. `fp8` marks the
    large projections, which multiply in FP8 where a run does. A `shared` weight is one for all places of its letter.
    `grown` is how it starts beside given weights of a model without it: by a rule, or as a copy of stored keys of its
    sub-layer, one below the other; None where no model can be without it.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    fp32: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    partial_gradient: bool = False
    fp8: bool = False
    shared: bool = False
    grown: Init | tuple[str, ...] | None = None

    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        return tuple(rows for _, rows in self.parts) if self.parts and axis == 0 else (self.shape[axis],)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stored(self, name: str) -> dict[str, tuple[int, ...]]:
        """The keys under which a checkpoint stores a weight of this name, and the shapes: its parts', or its own."""
        if not self.parts:
            return {name: self.shape}
        return {f"{name}.{part}": (rows, *self.shape[1:]) for part, rows in self.parts}

    def share_shape(self, layout: Mapping[str, int]) -> tuple[int, ...]:
        """What each rank holds, by the number of ranks in each dimension of the layout."""
        shape = list(self.shape)
        for cut in self.active_cuts(layout):
            shape[cut.axis] //= layout[cut.over]
        return tuple(shape)


def linear(
    out_features: int, in_features: int, parts: tuple[tuple[str, int], ...] = (), cut: Cut = Cut(0), fp8: bool = True
) -> Parameter:
    """Kaiming-uniform, a = sqrt 5: U(+-1/sqrt(in_features)); cut by its outputs, unless `cut` says by its inputs."""
    return Parameter((out_features, in_features), Projection(in_features**-0.5), parts=parts, cuts=(cut,), fp8=fp8)


def output_linear(out_features: int, in_features: int, num_sublayers: int) -> Parameter:
    """The last projection of a residual sub-layer, divided by sqrt(number of sub-layers in the model)."""
    start = OutputProjection((in_features * num_sublayers) ** -0.5)
    return Parameter((out_features, in_features), start, cuts=(Cut(1),), fp8=True)


@dataclass(frozen=True)
class StatePart(Sharded):
    """One tensor of a carried state, per lane. `kind` is what recipes choose by; `dtype` None means the stream's.

    The first axis of the real tensor is the lane; `shape` and the cuts' axes count without it. None in a shape grows
    with the tokens seen (the keys of full attention). `parts` are the sizes of what is fused along the last axis.
    `handed` says what later shares of a row (`parallel/context.py`) get of keys and what stands beside them, if it is
    not a window: the whole row before them, the sets that all shares before them would carry, a running sum, the last
    tokens, or a table that all ranks add up.
    """

    kind: Literal["ssm", "conv", "kv"]
    shape: tuple[int | None, ...]
    dtype: Literal["float32", "int64"] | None = None
    heads: int = 1  # runs of the first axis whose values have statistics of their own
    parts: tuple[int, ...] = ()
    handed: Literal["row", "sets", "sum", "tail", "table"] | None = None

    def fused_sizes(self, axis: int) -> tuple[int, ...]:
        size = self.shape[axis]
        assert size is not None
        return self.parts if self.parts and axis == len(self.shape) - 1 else (size,)


Names = dict[str, tuple[str, ...]]
"""Name in an exported model -> our keys, whose rows stand one below the other there; both inside a sub-layer."""


@dataclass(frozen=True)
class ModelSizes:
    """What a mixer may know of the model around it, and of its place there: of all layers, and of those of its kind."""

    width: int
    num_sublayers: int
    layer: int = 0
    nth_of_kind: int = 0
    layers_of_kind: int = 1
    wide: int = 2  # values of the type that is computed in that an fp32 number takes the place of

    def at(self, layer: int, kinds: Sequence[str]) -> ModelSizes:
        """Those of one layer of a model that has layers of these kinds."""
        kind = kinds[layer]
        return replace(self, layer=layer, nth_of_kind=kinds[:layer].count(kind), layers_of_kind=kinds.count(kind))


@dataclass(frozen=True)
class MixerSpec(PlaceSpec, ABC):
    """The options of one letter of the pattern. Subclasses add their options as fields."""

    kind: ClassVar[str]
    module: ClassVar[str]  # the mixer's, "package.file:Class": named, not imported, since a spec needs no torch
    width_option: ClassVar[str | None] = None  # what sets the widths of the projections beside the model's, if anything
    projects_input: ClassVar[bool] = False  # by the projections of `projected` (parallel/linear) alone
    hands_over: ClassVar[bool] = False  # what it reads of earlier tokens: rows can be shared out (parallel/context)

    @classmethod
    def renamed(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as they are called now, from those of recipes and checkpoints that may have former names."""
        return dict(options)

    def input_width(self, model: ModelSizes) -> int:
        return 2 * model.width if self.feeds_next else model.width

    @abstractmethod
    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        """Every parameter of the module, by its name inside the module."""

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token at this sequence length, by part (here, of weights); a multiply-add counts 2."""
        parts: Counter[str] = Counter()
        for weight in self.parameters(model).values():
            is_projection = isinstance(weight.init, Projection | OutputProjection | Orthogonal)
            if is_projection or (len(weight.shape) == 2 and weight.decay):  # the taps; A_log is not decayed
                parts["projections" if is_projection else "conv"] += 2 * weight.size
        return {**parts}

    @property
    def keeps_output(self) -> bool:
        """Whether an op keeps what the last projection reads for its own backward pass too."""
        return False

    @abstractmethod
    def activation_values(self, model: ModelSizes) -> int:
        """Values per token that the forward pass keeps for the backward pass (estimate; window-free)."""

    def whole_values(self, model: ModelSizes, tensor: int) -> int:
        """Of these, how many each of several tensor-parallel ranks keeps whole."""
        return 0

    def backward_values(self, model: ModelSizes) -> int:
        """Values per token that the backward pass has made, at its most, less what it needs no more (estimate)."""
        return 0

    def read_values(self, model: ModelSizes) -> int:
        """Values per token that a recurrence reads. A share of a row runs it twice: the gradients of one run wait."""
        return 0

    def run_values(self, model: ModelSizes) -> int:
        """Values per token that a run of the recurrence keeps besides; a share of a row has two runs."""
        return 0

    def given_up_values(self, model: ModelSizes) -> int:
        """Values per token that are not kept where a share's keys and values are put behind those before it."""
        return 0

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """The parts of the state that this mixer carries from chunk to chunk; none by default."""
        return {}

    def transition_values(self, model: ModelSizes) -> int:
        """Values for a row that say what it does to a recurrence's state, besides what it adds."""
        return 0

    def exported_names(self, model: ModelSizes) -> Names:
        """The weights as an exported model has them: under our names, unless a mixer is known by others.

        A name that ends in conv1d.weight is a convolution's there: (channels, 1, taps), where ours has no middle axis.
        """
        return {name: tuple(weight.stored(name)) for name, weight in self.parameters(model).items()}

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        """All options as an exported model states them, also those that are left to a default."""
        return asdict(self)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """Names of the losses that the mixer adds to that of training."""
        return ()

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterable[Problem]:
        """What is wrong with options that keep their limits; keys are option names."""
        return ()

    @property
    def attention_at_eval(self) -> str | None:
        """Which attention runs outside training, and how far it sees by itself; None without any."""
        return None

    @property
    def shares_rows(self) -> bool:
        """Whether the tokens of a row can be shared out over ranks."""
        return self.hands_over

    @property
    def reads_in(self) -> int:
        """Outside training, pieces of a text give what its whole would where they begin at multiples of this."""
        return 1

    def carry_problems(self, seq_len: int) -> Iterable[Problem]:
        """What keeps rows of this length from continuing where the row before them ended; keys are option names."""
        return ()

    def surprises(self, carried: bool) -> Iterable[Problem]:
        """What works otherwise than it looks; `carried` is whether a phase carries keys and values in training."""
        return ()

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterable[Problem]:
        """What keeps this mixer from being cut over this number of tensor-parallel ranks; keys are option names."""
        uneven = [
            f"{size // cut.unit} in {name}"
            for name, weight in self.parameters(model).items()
            for cut in weight.cuts
            if cut.over == "tensor" and not cut.replicate
            for size in weight.fused_sizes(cut.axis)
            if size % (cut.unit * tensor)
        ]
        if uneven:  # those of the other weights follow from the same option
            option = self.width_option or "kind"
            yield Problem(option, f"is {getattr(self, option)} ({uneven[0]}), which {tensor} ranks can't share evenly")

    def describe(self) -> str:
        """The options that differ from their defaults, for tables: `window=2048 kv_heads=4`."""
        chosen = ((f.name, f.default, getattr(self, f.name)) for f in fields(self))
        return " ".join(f"{name}={value}" for name, default, value in chosen if value not in (default, None))
