"""What can be known of a mixer without torch: options, parameters, FLOPs, state shapes, rules.

A mixer is described by one frozen dataclass whose fields are its YAML options. Everything else about it follows
from these options and the model's width, so parameter counts, FLOPs and memory of a 3.8B model are known in
milliseconds, and a wrong option is refused before torch is imported. The module in `mixers/NAME.py` must build
exactly the parameters that `parameters()` lists; a test holds the two together.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hybridtron.problems import Problem


@dataclass(frozen=True)
class Constant:
    """Every value the same."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Gaussian around zero."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Uniform on [-bound, bound]."""

    bound: float


@dataclass(frozen=True)
class Projection(Uniform):
    """A linear layer's, unless `model.init` has another rule for all of them."""


@dataclass(frozen=True)
class OutputProjection(Uniform):
    """The same of the last projection of a residual sub-layer."""


@dataclass(frozen=True)
class LogRange:
    """log 1, log 2, ..., log n along the last axis: S4D-Real's A_log."""


@dataclass(frozen=True)
class LogUniform:
    """log of values that are uniform on [low, high]: A_log of Mamba-2."""

    low: float
    high: float


@dataclass(frozen=True)
class InverseSoftplus:
    """Values whose softplus is log-uniform on [low, high]: the step sizes of Mamba."""

    low: float
    high: float


Init = Constant | Normal | Uniform | LogRange | LogUniform | InverseSoftplus


@dataclass(frozen=True)
class Cut(ABC):
    """How tensor-parallel ranks share a tensor; a base for weights and states.

    `split` is the axis that is cut, None for a tensor that every rank holds whole. `unit` is how many entries along it
    must stay together (a head), and a tensor whose units can't be shared out evenly is held whole where `copies` allows
    that.
    """

    split: int | None = field(default=None, kw_only=True)
    unit: int = field(default=1, kw_only=True)
    copies: bool = field(default=False, kw_only=True)

    @property
    @abstractmethod
    def pieces(self) -> tuple[int, ...]:
        """The sizes of what is fused along the axis, each of which is cut for itself."""

    def cut_axis(self, ranks: int) -> int | None:
        """The axis that is cut over `ranks` ranks, None where each holds the whole."""
        if self.split is None or ranks == 1:
            return None
        if all(size % (self.unit * ranks) == 0 for size in self.pieces):
            return self.split
        assert self.copies, f"pieces of {self.pieces} can't be cut over {ranks} ranks"
        return None


@dataclass(frozen=True)
class Parameter(Cut):
    """One weight: its shape, how it starts, and how optimizer, precision, layout and checkpoint must treat it.

    `parts` names the pieces of a fused projection along axis 0, as (name, rows); a checkpoint stores each piece
    under its own name, and a layout cuts each piece for itself. `partial` says that a whole weight gets only a part of
    its gradient on each rank, because it works on a rank's share of the channels: the parts are summed. `fp8` marks
    the large projections, which multiply in FP8 where the run's precision is one of FP8's.
    """

    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    fp32: bool = False
    parts: tuple[tuple[str, int], ...] = ()
    partial: bool = False
    fp8: bool = False

    @property
    def pieces(self) -> tuple[int, ...]:
        assert self.split is not None
        fused = self.split == 0 and self.parts
        return tuple(rows for _, rows in self.parts) if fused else (self.shape[self.split],)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stored(self, name: str) -> dict[str, tuple[int, ...]]:
        """The keys under which a checkpoint stores a weight of this name, and the shapes: its parts', or its own."""
        if not self.parts:
            return {name: self.shape}
        return {f"{name}.{part}": (rows, *self.shape[1:]) for part, rows in self.parts}

    def share_shape(self, ranks: int) -> tuple[int, ...]:
        """What each of `ranks` tensor-parallel ranks holds."""
        axis = self.cut_axis(ranks)
        return tuple(size // ranks if i == axis else size for i, size in enumerate(self.shape))


def linear(
    out_features: int, in_features: int, parts: tuple[tuple[str, int], ...] = (), split: int = 0, fp8: bool = True
) -> Parameter:
    """Weight of a linear layer, Kaiming-uniform with a = sqrt 5, which is U(+-1/sqrt(in_features)).

    It is cut by its outputs (column-parallel) unless `split` says by its inputs (row-parallel).
    """
    return Parameter((out_features, in_features), Projection(in_features**-0.5), parts=parts, split=split, fp8=fp8)


def output_linear(out_features: int, in_features: int, num_sublayers: int) -> Parameter:
    """The last projection of a residual sub-layer, divided by sqrt(number of sub-layers in the model)."""
    start = OutputProjection((in_features * num_sublayers) ** -0.5)
    return Parameter((out_features, in_features), start, split=1, fp8=True)


@dataclass(frozen=True)
class StatePart(Cut):
    """One tensor of a carried state, per lane. `kind` is what recipes choose by; `dtype` None means the stream's.

    The first axis of the real tensor is the lane; `shape` holds the rest, and `split` counts without the lane. None in
    a shape is an axis that grows with the tokens seen (the keys of full attention). `parts` are the sizes of what is
    fused along the cut axis. Where `users` heads use those along it, a rank holds the ones that its own heads use,
    so that some of them lie on several ranks.
    """

    kind: Literal["ssm", "conv", "kv"]
    shape: tuple[int | None, ...]
    dtype: Literal["float32", "int64"] | None = None
    heads: int = 1  # runs of the first axis whose values have statistics of their own
    parts: tuple[int, ...] = ()
    users: int | None = None

    @property
    def pieces(self) -> tuple[int, ...]:
        assert self.split is not None
        size = self.shape[self.split]
        assert size is not None
        return self.parts or (size,)

    def cut_axis(self, ranks: int) -> int | None:
        return self.split if self.users is not None and ranks > 1 else super().cut_axis(ranks)


Names = dict[str, tuple[str, ...]]
"""Name in an exported model -> our keys, whose rows stand one below the other there; both inside a sub-layer."""


@dataclass(frozen=True)
class ModelSizes:
    """What a mixer may know of the model around it, and of its place there."""

    width: int
    num_sublayers: int
    layer: int = 0


@dataclass(frozen=True)
class MixerSpec(ABC):
    """The options of one letter of the pattern. Subclasses add their options as fields.

    `module` is where the mixer's module stands, "package.file:Class": named, not imported, since a spec needs no torch.
    """

    kind: ClassVar[str]
    module: ClassVar[str]
    width_option: ClassVar[str | None] = None  # what sets the widths of the projections beside the model's, if anything

    @abstractmethod
    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        """Every parameter of the module, by its name inside the module."""

    @abstractmethod
    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token at this sequence length, by part; a multiply-add counts 2."""

    @abstractmethod
    def activation_values(self, model: ModelSizes) -> int:
        """Values per token that the forward pass keeps for the backward pass (estimate; window-free)."""

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """The parts of the state that this mixer carries from chunk to chunk; none by default."""
        return {}

    def exported_names(self, model: ModelSizes) -> Names:
        """The weights as an exported model has them: under our names, unless a mixer is known by others.

        A name that ends in conv1d.weight is a convolution's there: (channels, 1, taps), where ours has no middle axis.
        """
        return {name: tuple(weight.stored(name)) for name, weight in self.parameters(model).items()}

    def exported_options(self, model: ModelSizes) -> dict[str, Any]:
        """All options as an exported model states them, also those that are left to a default."""
        return dataclasses.asdict(self)

    def problems(self, model: ModelSizes, max_seq_len: int) -> list[Problem]:
        """What is wrong with these options; keys are option names."""
        return []

    @property
    def attention_at_eval(self) -> str | None:
        """Which attention runs outside training, and how far it sees by itself; None without any."""
        return None

    @property
    def reads_in(self) -> int:
        """Outside training, pieces of a text give what its whole would where they begin at multiples of this."""
        return 1

    def carry_problems(self, seq_len: int) -> list[Problem]:
        """What keeps rows of this length from continuing where the row before them ended; keys are option names."""
        return []

    def surprises(self, carried: bool) -> list[Problem]:
        """What works otherwise than it looks; `carried` is whether a phase carries keys and values in training."""
        return []

    def layout_problems(self, model: ModelSizes, tensor: int) -> list[Problem]:
        """What keeps this mixer from being cut over this number of tensor-parallel ranks; keys are option names."""
        return []

    def describe(self) -> str:
        """The options that differ from their defaults, for tables: `window=2048 kv_heads=4`."""
        chosen = (
            f"{f.name}={value}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default and value is not None
        )
        return " ".join(chosen)
