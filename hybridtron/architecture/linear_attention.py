"""Shared base of linear attention's kinds: keys write values into a state per head, and queries read from it.

    q, k, v, z = in_proj(u) [q, k, v -> silu(conv(.)) where `conv` is set]
    y = the kind's recurrence over q, k and v
    out_proj(norm(y) * silu(z))                               RMSNorm over a head's values, one weight for all heads

`conv` is the short convolution of Samba's Table 8. A kind may have fewer heads of queries and keys than of values, and
another gate than silu(z).
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
    """Options of linear attention's kinds: heads, projections, convolution and norm."""

    width_option: ClassVar[str] = "heads"
    hands_over: ClassVar[bool] = True
    chunk: ClassVar[int]
    """Chunk length of the chunked form, for the FLOP count."""
    norm_name: ClassVar[str] = "g_norm_swish_gate"
    """Name of the norm in flash-linear-attention."""

    heads: Annotated[int, at_least(1)] = 4  # number of heads; each has its own state
    expand_k: Annotated[float, above(0)] = 1.0  # key channels of all heads, in multiples of the model's width
    expand_v: Annotated[float, above(0)] = 1.0  # value channels of all heads, in multiples of the model's width
    # taps of a short convolution on queries, keys and values; null: none
    conv: Annotated[int | None, at_least(2, "leave it out for none")] = None
    norm_eps: Annotated[float, above(0)] = 1e-5  # added to the mean square in each head's norm

    @property
    def num_key_heads(self) -> int:
        """Number of query and key heads."""
        return self.heads

    def channels(self, model: ModelSizes) -> tuple[int, int]:
        """Return the key and value channels of all heads."""
        return round(self.expand_k * model.width), round(self.expand_v * model.width)

    def head_sizes(self, model: ModelSizes) -> tuple[int, int]:
        """Return the key and value channels of one head."""
        keys, values = self.channels(model)
        return keys // self.num_key_heads, values // self.heads

    def convolved(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        """Return the inputs of the short convolution, as (name, channels)."""
        keys, values = self.channels(model)
        return ("q", keys), ("k", keys), ("v", values)

    def projected(self, model: ModelSizes) -> tuple[tuple[str, int], ...]:
        """Return the outputs of in_proj, as (name, channels)."""
        return *self.convolved(model), ("z", self.channels(model)[1])

    @abstractmethod
    def state_shape(self, model: ModelSizes) -> tuple[int, int]:
        """Return the shape of one head's state, in the order of its op."""

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width, (keys, values), (_, head) = model.width, self.channels(model), self.head_sizes(model)
        projected = self.projected(model)
        table = {
            "in_proj.weight": linear(sum(size for _, size in projected), width, parts=projected),
            "norm_weight": Parameter((head,), Constant(1.0), decay=False, partial_gradient=True),
            "out_proj.weight": output_linear(width, values, model.num_sublayers),
        }
        if self.conv:
            shape = (2 * keys + values, self.conv)
            taps = Uniform(self.conv**-0.5)
            table["conv_weight"] = Parameter(shape, taps, cuts=(Cut(0),), parts=self.convolved(model))
        return table

    def exported_names(self, model: ModelSizes) -> Names:
        """Return flash-linear-attention's names; each of our fused projections is several there."""
        names: Names = {f"{self.norm_name}.weight": ("norm_weight",), "o_proj.weight": ("out_proj.weight",)}
        for part, _ in self.projected(model):
            names[f"{'g' if part == 'z' else part}_proj.weight"] = (f"in_proj.weight.{part}",)
        for part, _ in self.convolved(model) if self.conv else ():
            names[f"{part}_conv1d.weight"] = (f"conv_weight.{part}",)
        return names

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        (keys, values), chunk = self.channels(model), min(self.chunk, seq_len)
        # scores and their product with v inside a chunk; k v^T into the state, and q out of it
        scan = 2 * chunk * (keys + values) + 4 * keys * values // self.num_key_heads
        return super().flops(model, seq_len) | {self.kind: scan}

    def activation_values(self, model: ModelSizes) -> int:
        # q, k, v, z, the first three once more in rows of heads, convolved or rotated or as they are; the scan's output
        # and the normed one, the gate and its product with that
        keys, values = self.channels(model)
        return 4 * keys + 7 * values

    @abstractmethod
    def transition(self, model: ModelSizes) -> int:
        """Return the number of values that multiply a row's first state."""

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
        if self.heads % tensor:  # even if the channels could be divided
            yield Problem("heads", "not-divisible", f"is {self.heads}, which {tensor} ranks can't share evenly")
