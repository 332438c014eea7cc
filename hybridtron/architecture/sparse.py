"""Sparse attention added to a recurrence: the option `sparse:` of `mamba` and `mamba2`. Zhan, Zhao, Zhu and Tang 2025.

    x      the recurrence's input, after its convolution; q, k as below; v = x
    y_i    = sum over the j <= i that i sees of  softmax(q_i . k_j / sqrt(state)) v_j;   0 where it sees none
    added  gate * y to the recurrence's y + D x, inside the output gate (mamba) or the gated norm (mamba2)

One pattern selects at most `keys` tokens for all channels of a group:

    window          the last tokens
    dilated         the last tokens at multiples of `stride`
    window_dilated  half of the keys for each of these two
    sink_window     half of the keys for the last tokens, half for the first tokens
    lsh             the last tokens whose key falls into the query's bin of a random hash
    ks              the tokens of largest score: a small MLP reads the key and the normed sum of all queries so far
    hax             lsh and ks, half of the keys each

Queries and keys are projections of x (`projected`; `k|q`, without a bias), the paper's choice for mamba. Alternatively
they are the recurrence's C and B, by state-space duality, group by group; this is the default on mamba2.

The hash is drawn for every micro-batch in training, and is fixed outside of it. The MLP learns only by the ranking
loss, which each layer adds to the training loss with the factor `alpha`; q and k get no gradient from it. Its last bias
is left out, because it changes neither an order nor a difference.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple

from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Parameter, StatePart, linear
from hybridtron.architecture.inits import Constant, Projection, Uniform
from hybridtron.limits import at_least, one_of
from hybridtron.problems import Problem

PATTERNS = {
    "window": ("recent",),
    "dilated": ("strided",),
    "window_dilated": ("recent", "strided"),
    "sink_window": ("recent", "first"),
    "lsh": ("bin",),
    "ks": ("best",),
    "hax": ("bin", "best"),
}
"""Selection rules of each pattern, which divide its keys equally."""


class BranchSizes(NamedTuple):
    """Sizes of the sparse branch: channels of a query, inner channels, groups with their own queries and keys, and
    heads.
    """

    state: int
    inner: int
    groups: int
    heads: int


@dataclass(frozen=True)
class SparseOptions:
    """Options of sparse attention added to a recurrence."""

    # hax, its halves lsh and ks, or a fixed pattern: window, dilated, window_dilated, sink_window
    pattern: Annotated[str, one_of(PATTERNS)] = "hax"
    keys: Annotated[int, at_least(1)] = (
        128  # maximum number of tokens that a query sees; the pattern's rules divide them equally
    )
    bins: Annotated[str, one_of(("argmax", "sign"))] = "argmax"  # bins of a hash: `hashes` of them, or 2^hashes
    # columns of the random matrix; null: as many as keys for argmax, 8 for sign
    hashes: Annotated[int | None, at_least(1)] = None
    stride: Annotated[int | None, at_least(1)] = (
        None  # of dilated patterns; in the paper the longest row divided by the keys
    )
    # mean that is subtracted before hashing: the vector's own (features), or the document's (sequence). The latter
    # includes later tokens, so it is not a language model and only reproduces published code
    centre: Annotated[str, one_of(("features", "sequence"))] = "features"
    alpha: Annotated[float, at_least(0)] = 0.1  # weight of the ranking loss
    target: Annotated[str, one_of(("sum", "mean"))] = (
        "sum"  # a key's value in the ranking loss: the sum over its queries, or their mean
    )
    gate: float | None = None  # initial gate of every channel; null: 1, or 0 when loaded weights lack the branch
    projected: bool | None = None  # project queries and keys separately; null: on mamba, not on mamba2

    def __str__(self) -> str:
        return self.pattern

    @property
    def budget(self) -> dict[str, int]:
        """Number of keys for each rule, and the stride."""
        rules = PATTERNS[self.pattern]
        return {**dict.fromkeys(rules, self.keys // len(rules)), "stride": self.stride or 1}

    @property
    def hashed(self) -> bool:
        return "bin" in PATTERNS[self.pattern]

    @property
    def scored(self) -> bool:
        return "best" in PATTERNS[self.pattern]

    @property
    def columns(self) -> int:
        """Number of columns in the hash's matrix."""
        return self.hashes or (self.keys if self.bins == "argmax" else 8)

    @property
    def slots(self) -> int:
        """Maximum number of carried keys: those that later queries may see by any rule."""
        num_keys = self.keys // len(PATTERNS[self.pattern])
        if self.bins == "argmax":
            num_bins = self.columns
        else:
            num_bins = 2**self.columns
        rules = {
            "recent": num_keys - 1,
            "first": num_keys,
            "strided": num_keys,
            "bin": num_bins * num_keys,
            "best": num_keys,
        }
        return sum(rules[rule] for rule in PATTERNS[self.pattern])

    def parameters(self, sizes: BranchSizes, projected: bool, copied: tuple[str, ...]) -> dict[str, Parameter]:
        """Return the branch's parameters by their names in the mixer.

        If weights without the branch are loaded, its projections are copied from the keys in `copied`, if there are
        any.
        """
        state, inner, _, _ = sizes
        from_scratch, grown = (Constant(other if self.gate is None else self.gate) for other in (1.0, 0.0))
        table = {"sparse.gate": Parameter((inner,), from_scratch, decay=False, fp32=True, cuts=(Cut(0),), grown=grown)}
        if projected:
            weight = linear(2 * state, inner, parts=(("k", state), ("q", state)), cut=Cut(1), fp8=False)
            table["sparse_qk.weight"] = replace(weight, grown=copied or weight.init)
        if self.scored:
            start = Projection((2 * state) ** -0.5)
            bias = Uniform((2 * state) ** -0.5)
            # each rank's loss covers its own groups, divided by the number of ranks
            square = Parameter((2 * state, 2 * state), start, fp32=True, partial_gradient=True, grown=start)
            for layer in ("1", "2"):
                table[f"sparse.weight_{layer}"] = square
                table[f"sparse.bias_{layer}"] = replace(square, shape=(2 * state,), init=bias, decay=False, grown=bias)
            table["sparse.weight_3"] = replace(square, shape=(1, 2 * state))
        return table

    def flops(self, sizes: BranchSizes) -> dict[str, float]:
        """Return FLOPs per token in addition to those of the weights, which are counted for one group."""
        state, inner, groups, _ = sizes
        parts: dict[str, float] = {"sparse": 2 * self.keys * (groups * state + inner) + 2 * inner}
        if self.hashed:
            parts["hash"] = 4 * groups * state * self.columns
        if self.scored:
            of_scorer = 2 * (2 * (2 * state) ** 2 + 2 * state)
            parts["scores"] = (groups - 1) * of_scorer + 2 * groups * state * self.budget["best"]  # and the ranking
        return parts

    def activation_values(self, sizes: BranchSizes, projected: bool, wide: int) -> int:
        """Return the values per token kept by the branch: those attended to, the attended ones, and each group's."""
        return 2 * sizes.inner + sizes.groups * self.group_values(sizes.state, projected, wide)

    def group_values(self, state: int, projected: bool, wide: int) -> int:
        """Return those of one group: keys and queries (shared ones are kept already), and in fp32 the scores' MLP."""
        numbers = 4 + (self.keys // len(PATTERNS[self.pattern]) + 64) // 64  # who sees whom, 8 bytes each
        return (4 if projected else 1) * state + 2 * wide * numbers + (6 * wide * state if self.scored else 0)

    def state_parts(self, sizes: BranchSizes) -> dict[str, StatePart]:
        """Return the state parts carried within a document, by group; a rank holds those that its own heads read."""
        state, inner, groups, heads = sizes
        first = Cut(0, readers=heads)
        second = Cut(1, readers=heads)
        parts = {
            "sparse_keys": StatePart("kv", (self.slots, groups, state), cuts=(second,), handed="sets"),
            "sparse_values": StatePart("kv", (self.slots, inner), cuts=(Cut(1),), handed="sets"),
            "sparse_places": StatePart("kv", (self.slots, groups), "int64", cuts=(second,), handed="sets"),
            "sparse_length": StatePart("kv", (), "int64"),
        }
        if self.scored:
            parts["sparse_scores"] = StatePart("kv", (self.slots, groups), "float32", cuts=(second,), handed="sets")
            parts["sparse_queries"] = StatePart("kv", (groups, state), "float32", cuts=(first,), handed="sum")
        return parts

    def problems(self, max_seq_len: int) -> Iterator[Problem]:
        """Yield problems of options that are within their limits but don't fit together; keys are names below
        `sparse`.
        """
        rules = PATTERNS[self.pattern]
        if self.keys % len(rules):
            yield Problem(
                "keys",
                "not-divisible",
                f"is {self.keys}, must be even: the two rules of {self.pattern} share them equally",
            )
        if "strided" in rules and self.stride is None:
            num_keys = self.keys // len(rules)
            what = f"must be set for {self.pattern}: the longest sequence divided by the {num_keys} keys of this rule"
            yield Problem("stride", "missing", f"{what} ({max(1, max_seq_len // max(1, num_keys))})")
        if "strided" not in rules and self.stride is not None:
            yield Problem(
                "stride", "no-effect", f"is {self.stride}, but {self.pattern} has no rule with a stride: leave it out"
            )
        if not self.hashed and (self.hashes is not None or self.centre != "features"):
            key = "centre" if self.hashes is None else "hashes"
            yield Problem(key, "no-effect", f"is {getattr(self, key)}, but {self.pattern} has no hash: leave it out")
        if self.hashed and self.bins == "sign" and self.columns > 16:
            yield Problem(
                "hashes", "out-of-range", f"is {self.columns}, must be at most 16 for bins=sign: 2^hashes bins"
            )

    def surprises(self) -> Iterator[Problem]:
        """Yield warnings about options whose effect is surprising."""
        if self.centre == "sequence":
            leak = "is sequence: every token's bin depends on later tokens, so that losses are not those of a language"
            yield Problem(
                "centre",
                "reads-ahead",
                f"{leak} model, and generation differs from training; it only repeats published code",
            )

    def carry_problems(self) -> Iterator[Problem]:
        """Yield problems that keep rows from continuing the state of others."""
        if self.centre == "sequence":
            yield Problem(
                "centre",
                "reads-ahead",
                "is sequence, for which a row must hold the whole document: use centre=features",
            )


@dataclass(frozen=True)
class RecurrenceSpec(MixerSpec):
    """Shared base of mixers that can have sparse attention added to their recurrence."""

    projects_by_default: ClassVar[bool]
    copied: ClassVar[tuple[str, ...]] = ()  # stored keys of the recurrence's counterparts to k and q, if there are any

    # sparse attention added to the recurrence: {pattern: hax, keys: 128}, with the options below; null: none
    sparse: SparseOptions | None = field(default=None, kw_only=True)

    @property
    def shares_rows(self) -> bool:
        return self.sparse is None or self.sparse.centre == "features"

    def __post_init__(self) -> None:
        if isinstance(self.sparse, Mapping):  # from YAML or config.json
            object.__setattr__(self, "sparse", SparseOptions(**self.sparse))

    @property
    def auxiliary(self) -> tuple[str, ...]:
        if self.sparse is not None and self.sparse.scored:
            return ("ranking",)
        return ()

    @property
    def projects(self) -> bool:
        """True if sparse attention has its own projection for queries and keys."""
        if self.sparse is None:
            chosen = None
        else:
            chosen = self.sparse.projected
        if chosen is None:
            return self.projects_by_default
        return chosen

    @abstractmethod
    def shared_sizes(self, model: ModelSizes) -> BranchSizes:
        """Return the branch's sizes for the case that it shares the recurrence's C and B."""

    def branch_sizes(self, model: ModelSizes) -> BranchSizes:
        shared = self.shared_sizes(model)
        if self.projects:
            return shared._replace(groups=1)
        return shared

    def branch_parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        if self.sparse is None:
            return {}
        return self.sparse.parameters(self.branch_sizes(model), self.projects, self.copied)

    def branch_values(self, model: ModelSizes) -> int:
        """Values per token that the branch keeps for the backward pass."""
        if self.sparse is None:
            return 0
        return self.sparse.activation_values(self.branch_sizes(model), self.projects, model.wide)

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        if self.sparse is None:
            branch = {}
        else:
            branch = self.sparse.flops(self.branch_sizes(model))
        return super().flops(model, seq_len) | branch

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        if self.sparse is None:
            return {}
        return self.sparse.state_parts(self.branch_sizes(model))

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        if self.sparse is not None:
            yield from (problem.below("sparse") for problem in self.sparse.problems(max_seq_len))

    def surprises(self, carried: bool) -> Iterator[Problem]:
        if self.sparse is not None:
            yield from (problem.below("sparse") for problem in self.sparse.surprises())

    def carry_problems(self, seq_len: int) -> Iterator[Problem]:
        if self.sparse is not None:
            yield from (problem.below("sparse") for problem in self.sparse.carry_problems())
