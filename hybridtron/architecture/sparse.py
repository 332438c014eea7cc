"""Sparse attention added to a recurrence: the option `sparse:` of `mamba` and `mamba2`. Zhan, Zhao, Zhu and Tang 2025.

    s_i = sum over the tokens j <= i that token i sees:  softmax_j(q_i . k_j / sqrt(state)) x_j
    y_i = (the recurrence's output) + D x_i + gate * s_i

x is the recurrence's input after the convolution, and serves as the values. D is the weight on the recurrence's skip
connection. `state` says how many channels a query or key has. s_i is 0 if token i sees no token. `gate` is a learned
vector with one entry per channel. y is then multiplied by the output gate (mamba), or enters the gated norm (mamba2).
The option `pattern` selects the tokens that a query sees, at most `keys` of them:

    window          the last tokens
    dilated         the last tokens whose position in the document is a multiple of `stride`
    window_dilated  half the keys by window, half by dilated
    sink_window     half the keys for the last tokens, half for the document's first tokens
    lsh             the last tokens whose key a random hash puts into the query's bin
    ks              the tokens with the largest scores. A small MLP computes a token's score from the token's key and
                    from the normed sum of the queries up to the token
    hax             half the keys by lsh, half by ks

With `projected`, q and k are projections of x without a bias, as in the paper for Mamba; this is the default on mamba.
Without `projected`, q and k are the recurrence's C and B, as state-space duality suggests; this is the default on
mamba2. The channels are then divided into mamba2's groups, each with its own queries and keys. In all other cases there
is one group.

In training, a new hash is drawn for every micro-batch; outside training the hash is fixed. The MLP that scores keys is
trained only by the ranking loss, which each layer adds to the training loss with the factor `alpha`. The ranking loss
gives no gradient to q and k. The MLP's last layer has no bias, because a constant added to all scores changes neither
their order nor their differences.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, NamedTuple, Self

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
"""Selection rules of each pattern; a pattern's rules share the number of keys equally.

    recent     the last tokens
    strided    the last tokens whose position in the document is a multiple of the stride
    first      the document's first tokens
    bin        the last tokens in the query's hash bin
    best       the tokens with the largest scores
"""


class BranchSizes(NamedTuple):
    """Sizes of the sparse attention in one mixer."""

    state: int  # channels of a query or key
    inner: int  # channels of the values, over all groups
    groups: int  # groups of channels, each with its own queries and keys
    heads: int  # heads of the recurrence


@dataclass(frozen=True)
class SparseOptions:
    """Options for the sparse attention that is added to a recurrence."""

    # which tokens a query sees. hax: half the keys by lsh, half by ks; or lsh, ks, or a fixed pattern alone: window,
    # dilated, window_dilated, sink_window
    pattern: Annotated[str, one_of(PATTERNS)] = "hax"
    keys: Annotated[int, at_least(1)] = (
        128  # maximum number of tokens that a query sees; the pattern's rules divide them equally
    )
    bins: Annotated[str, one_of(("argmax", "sign"))] = "argmax"  # hash bins. argmax: `hashes` bins; sign: 2^hashes bins
    # columns of the hash's random matrix; null: `keys` for bins=argmax, 8 for bins=sign
    hashes: Annotated[int | None, at_least(1)] = None
    stride: Annotated[int | None, at_least(1)] = (
        None  # stride of dilated patterns, in tokens; in the paper: the longest row divided by the number of keys
    )
    # mean that is subtracted from a query or key before hashing. features: over its entries; sequence: over all tokens
    # of the document, later tokens included, so that the model is not causal; for reproducing published code only
    centre: Annotated[str, one_of(("features", "sequence"))] = "features"
    alpha: Annotated[float, at_least(0)] = 0.1  # weight of the ranking loss
    target: Annotated[str, one_of(("sum", "mean"))] = (
        "sum"  # worth of a key in the ranking loss: sum, or mean, of sigmoid(q . k) over the queries that may see it
    )
    # initial gate of every channel; null: 1, or 0 if the loaded weights lack the sparse attention
    gate: float | None = None
    # project x to queries and keys instead of using C and B; null: true on mamba, false on mamba2
    projected: bool | None = None

    def __str__(self) -> str:
        return self.pattern

    @property
    def budget(self) -> dict[str, int]:
        """Rule -> maximum number of keys that it selects; also "stride" -> the stride in tokens."""
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
        """Number of columns in the hash's random matrix."""
        return self.hashes or (self.keys if self.bins == "argmax" else 8)

    @property
    def slots(self) -> int:
        """Maximum number of keys in a state: all keys that later queries may see by some rule."""
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
        """Return name in the mixer -> parameter, for the sparse attention.

        A loaded checkpoint may lack these parameters. The projection to queries and keys is then initialised from the
        weights named in `copied`, or drawn at random if `copied` is empty.
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
            # the gradient is partial: each rank's ranking loss covers the rank's own groups
            square = Parameter((2 * state, 2 * state), start, fp32=True, partial_gradient=True, grown=start)
            for layer in ("1", "2"):
                table[f"sparse.weight_{layer}"] = square
                table[f"sparse.bias_{layer}"] = replace(square, shape=(2 * state,), init=bias, decay=False, grown=bias)
            table["sparse.weight_3"] = replace(square, shape=(1, 2 * state))
        return table

    def flops(self, sizes: BranchSizes) -> dict[str, float]:
        """Return part -> FLOPs per token, in addition to the FLOPs that the base class counts.

        The base class counts each weight once, as if there were one group.
        """
        state, inner, groups, _ = sizes
        parts: dict[str, float] = {"sparse": 2 * self.keys * (groups * state + inner) + 2 * inner}
        if self.hashed:
            parts["hash"] = 4 * groups * state * self.columns
        if self.scored:
            of_scorer = 2 * (2 * (2 * state) ** 2 + 2 * state)
            # the scoring MLP for all groups but the first, which the base class has counted; then the ranking loss
            parts["scores"] = (groups - 1) * of_scorer + 2 * groups * state * self.budget["best"]
        return parts

    def activation_values(self, sizes: BranchSizes, projected: bool, wide: int) -> int:
        """Return how many elements are saved for the backward pass per token, over all groups.

        `wide` is an fp32 element's size, in elements of the compute type.
        """
        return 2 * sizes.inner + sizes.groups * self.group_values(sizes.state, projected, wide)

    def group_values(self, state: int, projected: bool, wide: int) -> int:
        """Return how many elements are saved per token for one group.

        These are keys, queries, indices of the visible keys, and in fp32 the scoring MLP's activations. If keys and
        queries are the recurrence's B and C, which the recurrence saves anyway, only one scaled copy counts.
        """
        # number of int64 elements that say for the backward pass which keys a query sees; each is as large as two fp32
        # elements
        numbers = 4 + (self.keys // len(PATTERNS[self.pattern]) + 64) // 64
        return (4 if projected else 1) * state + 2 * wide * numbers + (6 * wide * state if self.scored else 0)

    def state_parts(self, sizes: BranchSizes) -> dict[str, StatePart]:
        """Return name -> tensor of the state. A rank holds the groups that its heads of the recurrence read."""
        state, inner, groups, heads = sizes
        first = Cut(0, readers=heads)
        second = Cut(1, readers=heads)
        parts = {
            "sparse_keys": StatePart("kv", (self.slots, groups, state), cuts=(second,), exchange="sets"),
            "sparse_values": StatePart("kv", (self.slots, inner), cuts=(Cut(1),), exchange="sets"),
            "sparse_places": StatePart("kv", (self.slots, groups), "int64", cuts=(second,), exchange="sets"),
            "sparse_length": StatePart("kv", (), "int64"),
        }
        if self.scored:
            parts["sparse_scores"] = StatePart("kv", (self.slots, groups), "float32", cuts=(second,), exchange="sets")
            parts["sparse_queries"] = StatePart("kv", (groups, state), "float32", cuts=(first,), exchange="sum")
        return parts

    def problems(self, max_seq_len: int) -> Iterator[Problem]:
        """Yield problems with options that do not fit together; each problem's key is an option name below `sparse`."""
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

    def warnings(self) -> Iterator[Problem]:
        """Yield warnings about options whose effect is surprising."""
        if self.centre == "sequence":
            leak = "is sequence: every token's bin depends on later tokens, so that losses are not those of a language"
            yield Problem(
                "centre",
                "reads-ahead",
                f"{leak} model, and generation differs from training; it only repeats published code",
            )

    def carry_problems(self) -> Iterator[Problem]:
        """Yield a problem for each reason why a row can't continue an earlier row's state."""
        if self.centre == "sequence":
            yield Problem(
                "centre",
                "reads-ahead",
                "is sequence, for which a row must hold the full document: use centre=features",
            )


@dataclass(frozen=True)
class RecurrenceSpec(MixerSpec):
    """Shared base for mixers that can have sparse attention added to their recurrence."""

    projects_by_default: ClassVar[bool]  # the default of `sparse.projected`
    # the recurrence's weights that initialise the projections to k and q if a loaded checkpoint lacks the projections
    copied: ClassVar[tuple[str, ...]] = ()

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
        """Return the sizes of sparse attention that uses the recurrence's C and B as queries and keys."""

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
        """Return the elements that sparse attention saves for the backward pass per token."""
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

    def mup_problems(self, model: ModelSizes, base: Self, base_model: ModelSizes) -> Iterator[Problem]:
        if self.sparse is not None:
            yield Problem("sparse", "unsupported", "is set, but model.mup has no rules for it: leave one of them out")

    def warnings(self, carried: bool) -> Iterator[Problem]:
        if self.sparse is not None:
            yield from (problem.below("sparse") for problem in self.sparse.warnings())

    def carry_problems(self, seq_len: int) -> Iterator[Problem]:
        if self.sparse is not None:
            yield from (problem.below("sparse") for problem in self.sparse.carry_problems())
