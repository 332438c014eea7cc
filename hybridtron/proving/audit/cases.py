"""What the audit runs: layouts, small architectures, and their combinations; and any recipe made small.

A case is a whole configuration and a number of data-parallel ranks. The table takes every architecture to every
layout; the options that multiply with all else (tied embeddings, recomputation, few key/value heads, documents) go
around, so that each layout and each architecture is combined with each of their values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hybridtron.architecture.adapters import AdaptersConfig, Adapting
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import resolve
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
"""Beside every projection of the architecture of this name; the projections themselves are frozen."""
MULTIPLIED: dict[str, dict[str, Any]] = {
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "falcon-h1": {"embedding_multiplier": 3.0, "logits_scaling": 0.5},
}
"""Numbers by which parts of the architecture of this name are multiplied."""
VOCABULARY = 96  # what many numbers of ranks can share
LR = 1e-2
OPTIM = OptimConfig(eps=1e-3, clip=0.05, z_loss=1e-3)
"""A coarse eps, as AdamW's first step is otherwise the sign of the gradient, which rounding may turn; clipping that
cuts in; a z-loss."""


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis."""

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    data: int = 1

    def on(self, parallel: ParallelConfig) -> ParallelConfig:
        """The other settings of `parallel`, in this layout."""
        return replace(
            parallel,
            tensor=self.tensor,
            sequence=self.sequence,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual,
            context=self.context,
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
}

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
}
"""An odd number of layers each, so that no number of stages divides them.

Options go around from row to row, and bugs are tried where the ones that show them are: another row comes last.
"""
BLOCKS = {
    "s": {"kind": "shared_attention", "heads": 4, "hidden": 48, "rank": 3, "adapt_attention": True},
    "t": {"kind": "shared_span", "heads": 4, "hidden": 48, "rank": 3, "chunk": [4, 8], "block": 2, "blocks": 2},
}
"""Of one set of weights for all places."""
PARALLEL = {
    "k": {
        **{"kind": "mamba2", "state": 4, "head_dim": 4, "norm": False, "output_multiplier": 0.5},
        "multipliers": {"z": 0.5, "x": 0.75, "B": 1.5, "C": 0.25, "dt": 2.0},
    },
    "j": {"kind": "swiglu", "hidden": 48, "gate_multiplier": 0.75, "output_multiplier": 1.5},
    "p": {"kind": "swiglu", "hidden": 48, "beside": True},
}
"""Multiplied parts of Falcon-H1, and an MLP beside another; attention beside a mixer is "v"."""


@dataclass(frozen=True)
class Case:
    """One comparison: a small configuration, and how many ranks share its data."""

    name: str
    layout: str
    config: Config
    data: int

    @property
    def world_size(self) -> int:
        return self.config.parallel.model_ranks * self.data

    def options(self) -> str:
        """The options that go around, for the table."""
        model, parallel = self.config.model, self.config.parallel
        letters = set(model.pattern)
        attention = [o for letter, o in model.layers.items() if o["kind"] == "attention" and letter in letters]
        words = [
            "tied" if model.tie_embeddings else "untied",
            str(resolve(self.config)[0].documents),
            "" if parallel.recompute == Recompute.none else f"recompute={parallel.recompute}",
            *(f"kv_heads={o.get('kv_heads')}{' conv' if o.get('conv') else ''}" for o in attention),
        ]
        return " ".join(word for word in words if word)


def table() -> Iterator[Case]:
    """Every architecture in every layout."""
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
            documents = Documents.join if turn % 3 == 0 else Documents.isolate
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


def shares_out(pattern: str, ranks: Layout) -> bool:
    """Whether all mixers can be cut so."""
    arch = architecture(small_model(pattern, False, {}))
    if ranks.context > 1 and not all(spec.shares_rows for spec in arch.specs):
        return False
    if ranks.virtual > 1 and arch.carries_embedding:
        return False
    return not any(list(spec.layout_problems(arch.sizes, ranks.tensor)) for spec in arch.specs)


def small_model(pattern: str, tied: bool, heads: dict[str, Any]) -> ModelConfig:
    """One of the table's models, with these options of its attention."""
    attention = {"kind": "attention", "heads": 4, **heads}
    mamba2 = {"kind": "mamba2", "state": 4, "head_dim": 4}
    # a query at nearly right angles to its keys reads next to nothing, which the norm would enlarge with its rounding
    linear = {"norm_eps": 0.01}
    layers = {
        "M": {"kind": "mamba", "state": 4},
        "S": mamba2,
        "G": {**mamba2, "groups": 2},
        "Q": {"kind": "mamba", "state": 4, "sparse": {"keys": 8, "hashes": 3}},
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
    }
    used = {letter: options for letter, options in (layers | BLOCKS | PARALLEL).items() if letter in pattern}
    return ModelConfig(32, VOCABULARY, pattern, used, tied)


def small(model: ModelConfig, parallel: ParallelConfig, documents: Documents, data: int) -> Config:
    """A step over a few micro-batches of short rows, at least two for each data-parallel rank."""
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
}
"""Sizes that cost time and change no way through the code, by kind; where a recipe sets one it gets this."""


def shrunk(config: Config, data: int) -> Config:
    """A recipe made small: pattern, heads, options, tying and layout stay; widths, states, windows and text shrink."""
    letters: dict[str, dict[str, Any]] = {}
    for letter, options in config.model.layers.items():
        smaller = SHRUNK.get(options["kind"], {})
        letters[letter] = {k: smaller.get(k, v) if v is not None else None for k, v in options.items()}
    heads = [options["heads"] for options in letters.values() if "heads" in options]
    # four channels a head at least: an even number for rotary positions, and a whole one of three quarters of them
    width = 4 * math.lcm(1, *heads)
    model = replace(config.model, width=width * math.ceil(32 / width), vocab_size=VOCABULARY, layers=letters)
    return small(model, config.parallel, resolve(config)[0].documents, data)
