"""Shared base of the mixers with the delta rule: linear attention that overwrites a key's value in the state.

    q, k, v -> silu(conv(.));   q, k -> q / |q|, k / |k|, head by head
    beta = sigmoid(b), or 2 sigmoid(b);   g = -exp(A_log) softplus(a + dt_bias)              A_log: one number per head
    s_t = exp(g_t) h_{t-1};   h_t = s_t + beta_t k_t (v_t - s_t^T k_t)^T
    y_t = h_t^T q_t / sqrt(key channels of a head)
    out_proj(norm(y) * gate)                                               RMSNorm per head; gate: silu(z) or sigmoid(z)

q, k, v, a, b and z are projections of the mixer's input u. h is a head's state, a matrix with one row per key channel;
s is the state after the decay. beta is the step size, and g is the log decay. The two mixers are `gated_deltanet`,
where a has one number per head, and `kda`, where a has one number per key channel. `linear_attention.py` has the
options and parameters that these mixers share with other linear attention.

In a step, the old state is multiplied by the matrix (I - beta k k^T) exp(g). If g is one number per head, this matrix
has the eigenvalue exp(g) (1 - beta) along k, because |k| = 1. The eigenvalue is between 0 and 1 if beta is below 1, and
goes down to -1 if beta goes up to 2 (`negative_eigenvalues`). Negative eigenvalues let the state count modulo two
(Grazzi et al. 2024). In both mixers the matrix's spectral norm is at most 1, so a step never enlarges the old state.

A_log and dt_bias are initialised as in Mamba-2. If dt_bias started at 1, as in some published code, a head would forget
within a token or two.
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
    """Options of mixers with the delta rule: convolution, step sizes and decays."""

    chunk: ClassVar[int] = 64
    norm_name: ClassVar[str] = "o_norm"

    conv: Annotated[int, at_least(2)] = 4  # taps of the short convolution on queries, keys and values
    # allow beta up to 2 instead of 1, so that the state's update can have negative eigenvalues, down to -1
    negative_eigenvalues: bool = False
    dt_min: Annotated[float, above(0)] = 0.001  # smallest initial softplus(dt_bias), a factor of the log decays
    dt_max: Annotated[float, above(0)] = 0.1  # largest initial softplus(dt_bias)
    a_min: Annotated[float, above(0)] = 1.0  # smallest initial exp(A_log), a factor of the log decays
    a_max: Annotated[float, above(0)] = 16.0  # largest initial exp(A_log)

    def transition(self, model: ModelSizes) -> int:
        return self.heads * self.head_sizes(model)[0] ** 2

    @abstractmethod
    def decays(self, model: ModelSizes) -> int:
        """Return the number of log decays per token, summed over all heads."""

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
        # Inside a chunk: k k^T; q k^T; a triangular system with right-hand sides v and k, whose solution gives the
        # value that each key writes; the matmul of q k^T with these values. Between chunks: k reads the old value from
        # the state and writes the new value to the state, and q reads from the state.
        one_head = 2 * chunk * (3 * key + 2 * value) + 2 * chunk**2 / 3 + 6 * key * value
        return super().flops(model, seq_len) | {self.kind: self.heads * one_head}

    def activation_values(self, model: ModelSizes) -> int:
        # normalized q and k for every head; the logits of step sizes and decays; step sizes and log decays in fp32
        of_length_1 = 2 * self.heads * self.head_sizes(model)[0]
        return super().activation_values(model) + of_length_1 + (1 + model.wide) * (self.heads + self.decays(model))

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        yield from disordered(self, "dt_min", "dt_max")
        yield from disordered(self, "a_min", "a_max")
