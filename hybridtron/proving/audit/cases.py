"""Cases of the audit: layouts, small architectures and their combinations, and any recipe shrunk to a small size.

A case is a full configuration and a number of data-parallel ranks. `table` yields a case for every architecture in
every layout that the architecture supports. Further options (tied embeddings, recomputation, few key/value heads,
documents) would multiply the cases. Each case therefore has only one combination of these options, which changes from
case to case.

In the patterns below, a letter stands for one sub-layer. `small_model` defines the letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hybridtron.architecture.adapters import AdaptersConfig, Adapting
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.mup import MupConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.checks.experts import divides_experts, indivisible, moe_letters
from hybridtron.config.checks.parallel import uncuttable
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import (
    Config,
    DataConfig,
    Documents,
    OptimConfig,
    ParallelConfig,
    PhaseConfig,
    Recompute,
    RunConfig,
)

SEQ_LEN = 24
MICRO_BATCH = 2
ADAPTERS = AdaptersConfig(preset=Adapting.hylora, weights=["*"], rank=3, alpha=6.0)
ADAPTED = {
    "adapters": ADAPTERS,
    "adapters-dropout": replace(ADAPTERS, dropout=0.3),
    "adapters-dora": replace(ADAPTERS, dora=True),
}
"""Architecture's name -> adapter settings. Every projection is frozen, and has an adapter."""
MULTIPLIED: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "falcon-h1": {"embedding_multiplier": 3.0, "logits_scaling": 0.5},
    "mup": {"mup": MupConfig(16)},
}
"""Architecture's name -> settings: multipliers for the embedding, sub-layer outputs and logits, or muP."""
VOCABULARY = 96  # divisible by 2, 3, 4, 6 and 8 ranks
LR = 1e-2
OPTIM = OptimConfig(eps=1e-3, clip=0.05, z_loss=1e-3)
"""Options for optimizer and loss: a large eps, a clipping norm that every gradient exceeds, and a z-loss.

The eps is large for the following reason. With a small eps, AdamW's first update is nearly the sign of the gradient,
and rounding can flip the sign of a small gradient.
"""


@dataclass(frozen=True)
class Layout:
    """Sizes of a parallel layout.

    `sequence` turns sequence parallelism on. `virtual` says how many virtual stages each pipeline rank has. All other
    fields are rank counts.
    """

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def world_size(self) -> int:
        """Product of the rank counts. Virtual stages and experts need no further ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def divides_experts(self) -> bool:
        """True if ranks divide experts in another way than other weights."""
        return divides_experts(self.on(ParallelConfig()))

    def on(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return `parallel` with this layout's sizes; its other settings are unchanged."""
        return replace(
            parallel,
            tensor=self.tensor,
            sequence=self.sequence,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )


LAYOUTS = {
    "tp2": Layout(tensor=2),
    "tp2-sp": Layout(tensor=2, sequence=True),
    "pp2": Layout(pipeline=2),
    "pp2-virtual2": Layout(pipeline=2, virtual=2),
    "pp4": Layout(pipeline=4),
    "dp2": Layout(data=2),
    "tp2-pp2": Layout(tensor=2, sequence=True, pipeline=2),
    "tp2-dp2": Layout(tensor=2, data=2),
    "pp2-dp2": Layout(pipeline=2, data=2),
    "cp2": Layout(context=2),
    "cp4": Layout(context=4),
    "cp2-tp2": Layout(context=2, tensor=2, sequence=True),
    "cp2-pp2": Layout(context=2, pipeline=2),
    "cp2-dp2": Layout(context=2, data=2),
    "tp4": Layout(tensor=4),
    "dp2-ep2": Layout(data=2, expert=2),
    "dp4-ep4": Layout(data=4, expert=4),
    "dp4-ep2": Layout(data=4, expert=2),
    "tp2-dp2-ep2": Layout(tensor=2, data=2, expert=2),
    "tp2-ep2-et1": Layout(tensor=2, sequence=True, expert=2, expert_tensor=1),
    "tp2-dp2-ep4-et1": Layout(tensor=2, sequence=True, data=2, expert=4, expert_tensor=1),
    "tp2-et1": Layout(tensor=2, sequence=True, expert_tensor=1),
    "pp2-dp2-ep2": Layout(pipeline=2, data=2, expert=2),
    "cp2-ep2": Layout(context=2, expert=2),
}
"""Layouts by name.

In names, tp is tensor, sp sequence, pp pipeline, dp data, cp context and ep expert parallelism. With et1, every rank
has all inner channels of its experts.
"""

ARCHITECTURES = {
    "samba": "M-W-M",
    "mamba-swa-mlp": "MW-MW",
    "mamba-mlp": "M-M-M",
    "mamba": "MMMMM",
    "mamba2": "SGSGS",
    "mamba2-attention": "S-FqG",
    "mamba-hax": "Q-IiQ",
    "mamba3-swa": "T-WUT",
    "sliding-gla": "A-WAC",
    "sliding-retnet": "R-WRB",
    "gated-deltanet": "D-FDE",
    "kda": "K-WKJ",
    "rwkv6": "NVNVN",
    "mistral": "W-y-W",
    "attention": "F-OPH",
    "samba-span": "M-X-M",
    "span-variants": "X-YZL",
    "adapters": "M-WSF",
    "adapters-dropout": "S-FMW",
    "adapters-dora": "F-SMW",
    "zamba2": "SsGtSsG",
    "granite": "S-g-G",
    "falcon-h1": "kvjGvWjpk",
    "mup": "M-SFDq-",
    "experts": "MeWxM",
    "jamba": "n-gea",
    "capacity": "McWhM",
}
"""Architecture's name -> pattern. The number of sub-layers is odd, so that stages have different sizes.

Append new architectures at the end: the options of a case depend on the architecture's index, and the audit finds some
planted bugs only with certain options.
"""
BLOCKS = {
    "s": {"kind": "shared_attention", "heads": 4, "hidden": 48, "rank": 3, "adapt_attention": True},
    "t": {"kind": "shared_span", "heads": 4, "hidden": 48, "rank": 3, "chunk": [4, 8], "block": 2, "blocks": 2},
}
"""Letter -> options, for letters whose sub-layers all share the same weights."""
PARALLEL = {
    "k": {
        **{"kind": "mamba2", "state": 4, "head_dim": 4, "norm": False, "output_multiplier": 0.5},
        "multipliers": {"z": 0.5, "x": 0.75, "B": 1.5, "C": 0.25, "dt": 2.0},
    },
    "j": {"kind": "swiglu", "hidden": 48, "gate_multiplier": 0.75, "output_multiplier": 1.5},
    "p": {"kind": "swiglu", "hidden": 48, "beside": True},
}
"""Letter -> options, for Falcon-H1: sub-layers with multipliers, and an MLP as a parallel branch.

`beside` makes a sub-layer a parallel branch of the previous sub-layer.
"""


@dataclass(frozen=True)
class Case:
    """One comparison: a small configuration, and how many data-parallel ranks it has."""

    name: str
    layout: str
    config: Config
    data: int

    @cached_property
    def plan(self) -> RunPlan:
        """Run plan for the configuration."""
        return RunPlan.of(self.config)

    @property
    def world_size(self) -> int:
        return self.config.parallel.model_ranks * self.data

    def options(self) -> str:
        """Return the options that change from case to case, as text for the table."""
        model = self.config.model
        parallel = self.config.parallel
        letters = set(model.pattern)
        attention = [
            options for letter, options in model.layers.items() if options["kind"] == "attention" and letter in letters
        ]
        words = [
            "tied" if model.tie_embeddings else "untied",
            str(self.plan.phases[0].documents),
            "" if parallel.recompute == Recompute.none else f"recompute={parallel.recompute}",
            *(f"kv_heads={options.get('kv_heads')}{' conv' if options.get('conv') else ''}" for options in attention),
        ]
        return " ".join(word for word in words if word)


def table() -> Iterator[Case]:
    """Yield a case for every architecture in every layout that the architecture supports."""
    for row, (name, pattern) in enumerate(ARCHITECTURES.items()):
        for column, (layout, ranks) in enumerate(LAYOUTS.items()):
            if not shares_out(pattern, ranks):
                continue
            turn = row + column
            heads: dict[str, Any] = (
                {"kv_heads": 1, "conv": 4, "conv_bias": True} if (row + column // 2) % 2 else {"kv_heads": 2}
            )
            model = small_model(pattern, tied=turn % 2 == 0, heads=heads)
            model = replace(model, adapters=ADAPTED.get(name), **MULTIPLIED.get(name, {}))
            recompute = list(Recompute)[(row + 2 * column) % 3]
            parallel = ranks.on(ParallelConfig(recompute=recompute, regather=ranks.sequence and turn % 2 == 0))
            if turn % 3 == 0 or name == "capacity":  # isolated documents may not share a capacity
                documents = Documents.join
            else:
                documents = Documents.isolate
            yield Case(name, layout, small(model, parallel, documents, ranks.data), ranks.data)


SPAN = {"kind": "span", "heads": 4, "kv_heads": 2, "chunk": [4, 8], "block": 2, "blocks": 2}
SPANS: dict[str, dict[str, Any]] = {
    "X": {**SPAN, "draw": "layer"},
    "Y": {**SPAN, "memory": "shifted", "kv_heads": 1},
    "Z": {**SPAN, "memory": "random", "eval": "span"},
    "L": {**SPAN, "memory": "landmark", "relevance": "previous_chunk", "eval": "span"},
}
MLPS: dict[str, dict[str, Any]] = {
    "-": {"kind": "swiglu", "hidden": 48},
    "P": {"kind": "swiglu", "hidden": 48, "norm_after": True},
    "q": {"kind": "squared_relu", "hidden": 48},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "e": {
        **{"kind": "moe", "experts": 8, "top_k": 2, "hidden": 8, "shared": 12, "shared_gate": True},
        **{"coefficient": 0.5, "z_loss": 0.1},
    },
    "x": {
        **{
            "kind": "moe",
            "experts": 8,
            "top_k": 3,
            "hidden": 12,
            "activation": "squared_relu",
            "shared": 8,
            "latent": 8,
        },
        **{"scores": "sigmoid", "scale": 2.5, "groups": 4, "group_limit": 2, "balance": "bias", "speed": 0.05},
    },
}
"""Options by letter: both routers, both rules that balance loads. Coefficients are large, so that errors show."""
CAPACITY: dict[str, dict[str, Any]] = {
    "c": {**EXPERTS["e"], "capacity": 1.25},
    "h": {**EXPERTS["x"], "capacity": 0.75},
}
"""Options by letter: experts that drop choices beyond a capacity."""


def shares_out(pattern: str, ranks: Layout) -> bool:
    """Return whether a pattern's model supports this layout."""
    arch = architecture(small_model(pattern, False, {}))
    if ranks.context > 1 and not all(spec.shares_rows for spec in arch.specs):
        return False
    if ranks.virtual > 1 and arch.carries_embedding:
        return False
    parallel = ranks.on(ParallelConfig())
    if ranks.divides_experts and (not moe_letters(arch) or any(indivisible(arch, parallel))):
        return False
    return not uncuttable(arch, ranks.tensor, parallel.expert_tensor_ranks < ranks.tensor)


def small_model(pattern: str, tied: bool, heads: dict[str, Any]) -> ModelConfig:
    """Return a small model with this pattern. `heads` has options for attention layers, and `tied` ties embeddings."""
    attention = {"kind": "attention", "heads": 4, **heads}
    mamba2 = {"kind": "mamba2", "state": 4, "head_dim": 4}
    # The output of linear attention is near 0 if a query is nearly orthogonal to its keys. With a small eps, the norm
    # after linear attention would enlarge this output together with its rounding error.
    linear = {"norm_eps": 0.01}
    layers = {
        "M": {"kind": "mamba", "state": 4},
        "S": mamba2,
        "G": {**mamba2, "groups": 2},
        "Q": {"kind": "mamba", "state": 4, "sparse": {"keys": 8, "hashes": 3}},
        "n": {"kind": "mamba", "state": 4, "inner_norm": "learned", **linear},
        "a": {"kind": "mamba", "state": 4, "inner_norm": "plain", **linear},
        "I": {**mamba2, "state": 8, "groups": 2, "sparse": {"keys": 6, "bins": "sign", "hashes": 2}},
        "i": {**mamba2, "sparse": {"pattern": "ks", "keys": 5, "projected": True}},
        "T": {"kind": "mamba3", "state": 4, "head_dim": 4},
        "U": {"kind": "mamba3", "state": 4, "head_dim": 4, "groups": 2, "turned": 1.0, "norm": True, **linear},
        "A": {"kind": "gla", "heads": 4, **linear},
        "R": {"kind": "retnet", "heads": 4, **linear},
        "B": {"kind": "retnet", "heads": 2, "expand_v": 1.0, "conv": 4, **linear},
        "C": {"kind": "gla", "heads": 2, "expand_k": 1.0, "expand_v": 2.0, "conv": 4, **linear},
        "D": {"kind": "gated_deltanet", "heads": 8, "key_heads": 4, "expand_k": 0.5, **linear},
        "E": {"kind": "gated_deltanet", "heads": 4, "negative_eigenvalues": True, "conv": 3, **linear},
        "K": {"kind": "kda", "heads": 4, **linear},
        "J": {"kind": "kda", "heads": 2, "expand_k": 0.5, "negative_eigenvalues": True, **linear},
        "N": {"kind": "rwkv6", "head_dim": 4, "mix_rank": 3, "decay_rank": 5, "norm_eps": 0.01},
        "V": {"kind": "rwkv6_channel_mix"},
        "W": {**attention, "window": 7},
        "F": attention,
        "g": {**attention, "rope": "none", "scale": 0.2},
        "v": {**attention, "beside": True, "scale": 0.3, "output_multiplier": 0.75},
        "y": {**attention, "rope": {"scale": "yarn", "factor": 4.0, "original": 8}},
        "O": {**attention, "qk_norm": "all", "norm_after": True},
        "H": {**attention, "qk_norm": "head", "gate": True, "rotary_dim": 4},
        **SPANS,
        **MLPS,
        **EXPERTS,
        **CAPACITY,
    }
    used = {letter: options for letter, options in (layers | BLOCKS | PARALLEL).items() if letter in pattern}
    return ModelConfig(32, VOCABULARY, pattern, used, tied)


def small(model: ModelConfig, parallel: ParallelConfig, documents: Documents, data: int) -> Config:
    """Return a configuration with short sequences, and a few micro-batches for each data-parallel rank.

    Each data-parallel rank has at least two micro-batches, and their count is a multiple of the pipeline rank count.
    """
    per_rank = math.ceil(max(2, 4 // data) / parallel.pipeline) * parallel.pipeline
    return Config(
        model=model,
        data=DataConfig(path="none", documents=documents),
        optim=OPTIM,
        parallel=parallel,
        run=RunConfig(name="audit", dir="none"),
        phases=[PhaseConfig("audit", "1M", SEQ_LEN, MICRO_BATCH * data * per_rank, MICRO_BATCH, lr=LR)],
    )


SHRUNK: dict[str, dict[str, int]] = {
    "mamba": {"state": 4, "dt_rank": 4},
    "mamba2": {"state": 4, "head_dim": 4},
    "mamba3": {"state": 4, "head_dim": 4},
    "gla": {"gate_rank": 4},
    "rwkv6": {"head_dim": 4, "mix_rank": 4, "decay_rank": 4},
    "rwkv6_channel_mix": {"hidden": VOCABULARY},
    "attention": {"window": 7, "head_dim": 8, "rotary_dim": 4},
    "span": {"chunk": 8, "block": 2, "remember": 8, "head_dim": 8, "rotary_dim": 4},
    "shared_attention": {"hidden": VOCABULARY, "rank": 4},
    "shared_span": {"hidden": VOCABULARY, "rank": 4, "chunk": 8, "block": 2, "remember": 8},
    "swiglu": {"hidden": VOCABULARY},
    "squared_relu": {"hidden": VOCABULARY},
    "moe": {"hidden": VOCABULARY, "shared": VOCABULARY, "latent": 8},
}
"""Mixer's kind -> small option values. They replace a recipe's values to save time; the same code runs."""


def _expanded(options: dict[str, Any], width: int) -> dict[str, Any]:
    """Return a letter's options; `expand_k` and `expand_v` are 1 where the heads would not divide the channels.

    Qwen3.5 4B expands keys by 0.8, which only some widths allow.
    """
    if options["kind"] == "attention":
        return options
    heads = {"expand_k": options.get("key_heads") or options.get("heads", 1), "expand_v": options.get("heads", 1)}
    uneven = [name for name, count in heads.items() if width * options.get(name, 1) % count]
    return {**options, **dict.fromkeys(uneven, 1.0)}


def shrunk(config: Config, data: int) -> Config:
    """Return a recipe with a small width, small states, windows and vocabulary, and short sequences.

    The pattern, the head counts, tied embeddings, the layout and all other layer options are kept.
    """
    letters: dict[str, dict[str, Any]] = {}
    for letter, options in config.model.layers.items():
        smaller = SHRUNK.get(options["kind"], {})
        letters[letter] = {k: smaller.get(k, v) if v is not None else None for k, v in options.items()}
    heads = [
        options["heads"]
        for options in letters.values()
        if "heads" in options and not (options["kind"] == "attention" and options.get("head_dim"))
    ]
    # The width gives each head a multiple of four channels, but not attention's with `head_dim`. Rotary positions need
    # an even number of channels, and with expand_k=0.75, three quarters of the channels must be an integer.
    width = 4 * math.lcm(1, *heads)
    width *= math.ceil(32 / width)
    letters = {letter: _expanded(options, width) for letter, options in letters.items()}
    model = replace(config.model, width=width, vocab_size=VOCABULARY, layers=letters)
    return small(model, config.parallel, RunPlan.of(config).phases[0].documents, data)
