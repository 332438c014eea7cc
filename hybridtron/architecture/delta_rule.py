"""Shared base of the delta rule's kinds: linear attention that replaces a key's value instead of adding to it.

    q, k, v -> silu(conv(.));   q, k -> q / |q|, k / |k|, head by head
    beta = sigmoid(b), or 2 sigmoid(b);   g = -exp(A_log) softplus(a + dt_bias)              A_log: one number per head
    s_t = exp(g_t) h_{t-1};   h_t = s_t + beta_t k_t (v_t - s_t^T k_t)^T
    y_t = h_t^T q_t / sqrt(key channels of a head)

Kinds differ in how a is computed from u, and in whether it has one number per head or one per key channel. Everything
else is as in `linear_attention`.

With a key of length 1, a step's matrix exp(g) (I - beta k k^T) has the eigenvalue exp(g) (1 - beta) in the direction
of k: between 0 and 1 for steps below 1, down to -1 for those below 2 (`negative_eigenvalues`), which can count modulo
two (Grazzi et al. 2024). Its absolute value never exceeds 1.

A and dt_bias start as in Mamba-2. With dt_bias = 1, as in some published code, a head forgets within a token or two.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hybridtron.architecture.base import Cut, ModelSizes, Names, Parameter
from hybridtron.architecture.inits import InverseSoftplus, LogUniform
from hybridtron.architecture.linear_attention import LinearAttentionSpec
from hybridtron.limits import above, at_least, disordered
from hybridtron.problems import Problem


@dataclass(frozen=True)
class DeltaRuleSpec(LinearAttentionSpec):
    """Options of the delta rule's kinds: convolution, steps and decays."""

    chunk: ClassVar[int] = 64
    norm_name: ClassVar[str] = "o_norm"

    conv: Annotated[int, at_least(2)] = 4  # taps of the short convolution on queries, keys and values
    negative_eigenvalues: bool = False  # steps up to 2 instead of 1: eigenvalues of the state's update down to -1
    dt_min: Annotated[float, above(0)] = 0.001  # smallest initial step of the decays
    dt_max: Annotated[float, above(0)] = 0.1  # largest initial step of the decays
    a_min: Annotated[float, above(0)] = 1.0  # smallest initial -A, the factor of the decays' steps
    a_max: Annotated[float, above(0)] = 16.0  # largest initial -A

    def transition(self, model: ModelSizes) -> int:
        return self.heads * self.head_sizes(model)[0] ** 2

    @abstractmethod
    def decays(self, model: ModelSizes) -> int:
        """Return the number of log decays, over all heads."""

    def state_shape(self, model: ModelSizes) -> tuple[int, int]:
        return self.head_sizes(model)

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        steps = InverseSoftplus(self.dt_min, self.dt_max)
        size = LogUniform(self.a_min, self.a_max)
        return super().parameters(model) | {
            "dt_bias": Parameter((self.decays(model),), steps, decay=False, fp32=True, cuts=(Cut(0),)),
            "A_log": Parameter((self.heads,), size, decay=False, fp32=True, cuts=(Cut(0),)),
        }

    def exported_names(self, model: ModelSizes) -> Names:
        return super().exported_names(model) | {"dt_bias": ("dt_bias",), "A_log": ("A_log",)}

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        (key, value), chunk = self.head_sizes(model), min(self.chunk, seq_len)
        # Inside a chunk: k k^T and q k^T, a triangular system for the value that every key writes, solved for v and for
        # k, and the scores' product with it. Between chunks: k to and from the state, and q out of it.
        one_head = 2 * chunk * (3 * key + 2 * value) + 2 * chunk**2 / 3 + 6 * key * value
        return super().flops(model, seq_len) | {self.kind: self.heads * one_head}

    def activation_values(self, model: ModelSizes) -> int:
        # q and k of length 1 for every head; steps; in fp32 the decays' input, softplus of it, and their logarithms
        of_length_1 = 2 * self.heads * self.head_sizes(model)[0]
        return super().activation_values(model) + of_length_1 + 3 * self.heads + 3 * model.wide * self.decays(model)

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        yield from disordered(self, "dt_min", "dt_max")
        yield from disordered(self, "a_min", "a_max")
