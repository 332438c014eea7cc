"""Shared base of linear-attention mixers: keys write values into a state per head, and queries read from the state.

    q, k, v, z = in_proj(u) [q, k, v -> silu(conv(.)) where `conv` is set]
    y = recurrence(q, k, v)                                   defined by each mixer based on this file, such as `gla`
    out_proj(norm(y) * silu(z))                               RMSNorm over a head's values, one weight for all heads

u is the mixer's input. `conv` is the short convolution in Samba's Table 8. A mixer based on this file may have fewer
heads for queries and keys than for values, and another gate than silu(z).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Names, Parameter, StatePart, linear, output_linear
from hybridtron.architecture.inits import Constant, Uniform
from hybridtron.limits import above, at_least, divisors_near
from hybridtron.problems import Problem, choice


@dataclass(frozen=True)
class LinearAttentionSpec(MixerSpec):
    """Options for linear-attention mixers: heads, projections, convolution and norm."""

    width_option: ClassVar[str] = "heads"
    supports_context_parallel: ClassVar[bool] = True
    projects_input: ClassVar[bool] = True
    chunk: ClassVar[int]
    """Tokens per chunk in the recurrence's chunked algorithm; the FLOP count assumes this algorithm."""
    norm_name: ClassVar[str] = "g_norm_swish_gate"
    """Name of the output norm in flash-linear-attention."""

    heads: Annotated[int, at_least(1)] = 4  # number of heads; each has its own state
    expand_k: Annotated[float, above(0)] = 1.0  # key channels of all heads, in multiples of the model's width
    expand_v: Annotated[float, above(0)] = 1.0  # value channels of all heads, in multiples of the model's width
    # taps of a short convolution on queries, keys and values; null: none
    conv: Annotated[int | None, at_least(2, "leave it out for none")] = None
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in each head's norm

    @property
    def num_key_heads(self) -> int:
        """Number of key heads, which is also the number of query heads."""
        return self.heads

    def channels(self, model: ModelSizes) -> tuple[int, int]:
        """Return the key channels and the value channels, each summed over all heads."""
        return round(self.expand_k * model.width), round(self.expand_v * model.width)

    def head_sizes(self, model: ModelSizes) -> tuple[int, int]:
        """Return one head's key channels and value channels."""
        keys, values = self.channels(model)
        return keys // self.num_key_heads, values // self.heads

    def convolved(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        """Return the inputs to the short convolution, as (name, channels)."""
        keys, values = self.channels(model)
        return ("q", keys), ("k", keys), ("v", values)

    def projected(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        """Return the outputs that in_proj concatenates, as (name, channels)."""
        return *self.convolved(model), ("z", self.channels(model)[1])

    @abstractmethod
    def state_shape(self, model: ModelSizes) -> tuple[int, int]:
        """Return the shape of one head's state: key and value channels, in the order that the recurrence's op uses."""

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width, (keys, values), (_, head) = model.width, self.channels(model), self.head_sizes(model)
        projected = self.projected(model)
        heads = tuple(self.num_key_heads if part in ("q", "k") else self.heads for part, _ in projected)
        table = {
            "in_proj.weight": linear(sum(size for _, size in projected), width, parts=projected, heads=heads),
            "norm_weight": Parameter((head,), Constant(1.0), decay=False, partial_gradient=True),
            "out_proj.weight": output_linear(width, values, model.num_sublayers),
        }
        if self.conv:
            shape = (2 * keys + values, self.conv)
            taps = Uniform(self.conv**-0.5)
            table["conv_weight"] = Parameter(shape, taps, cuts=(Cut(0),), parts=self.convolved(model))
        return table

    def exported_names(self, model: ModelSizes) -> Names:
        """Return the weights' names in flash-linear-attention, where fused projections are separate weights."""
        names: Names = {f"{self.norm_name}.weight": ("norm_weight",), "o_proj.weight": ("out_proj.weight",)}
        for part, _ in self.projected(model):
            names[f"{'g' if part == 'z' else part}_proj.weight"] = (f"in_proj.weight.{part}",)
        for part, _ in self.convolved(model) if self.conv else ():
            names[f"{part}_conv1d.weight"] = (f"conv_weight.{part}",)
        return names

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        (keys, values), chunk = self.channels(model), min(self.chunk, seq_len)
        # inside a chunk: q k^T, and the matmul of q k^T with v; between chunks: k v^T, added to the state, and q times
        # the state
        scan = 2 * chunk * (keys + values) + 4 * keys * values // self.num_key_heads
        return super().flops(model, seq_len) | {self.kind: scan}

    def activation_values(self, model: ModelSizes) -> int:
        # q, k, v and z as projected; q, k and v again, divided into heads (after convolution or rotation, if any); the
        # recurrence's output; the normed and gated output
        keys, values = self.channels(model)
        return 4 * keys + 5 * values

    @abstractmethod
    def transition(self, model: ModelSizes) -> int:
        """Return how many elements a state transition has, for context parallelism.

        The transition is the factor by which a sequence shard (consecutive tokens of a row, on one rank) multiplies
        the state before it.
        """

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        shape = (self.heads, *self.state_shape(model))
        transition = self.transition(model)
        parts = {"ssm": StatePart("ssm", shape, "float32", self.heads, cuts=(Cut(0),), transition=transition)}
        if self.conv:
            sizes = tuple(size for _, size in self.convolved(model))
            parts["conv"] = StatePart("conv", (self.conv - 1, sum(sizes)), parts=sizes, cuts=(Cut(1),))
        return parts

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        keys, values = self.channels(model)
        if keys % self.num_key_heads:
            yield self._uneven("key_heads" if self.num_key_heads != self.heads else "heads", "expand_k", keys)
        elif values % self.heads:
            yield self._uneven("heads", "expand_v", values)

    def _uneven(self, option: str, expand: str, channels: int) -> Problem:
        heads = getattr(self, option)
        whole = f"the {channels} channels that {expand}={getattr(self, expand)} makes"
        return Problem(
            option, "not-divisible", f"is {heads}, must divide {whole}: {choice(divisors_near(channels, heads))}"
        )

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterator[Problem]:
        if self.heads % tensor:  # refused even if the number of ranks divides the number of channels
            yield Problem("heads", "not-divisible", f"is {self.heads}, which {tensor} ranks can't share evenly")
