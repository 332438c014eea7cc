"""Span-expanded attention (SE-Attn): attention inside chunks, and to the blocks of the past that matter most to them.

    q, k, v  as attention's, rotary positions and short convolutions included
    y_i = out(softmax over the tokens that i sees of (q_i . k_j / sqrt(head_dim)) v_j)

Token i sees the tokens of its chunk up to itself, and `blocks` blocks of `block` tokens that end before its chunk
begins. Chunks are counted from the start of the document; `chunk` tokens each, or as many as are drawn from a list in
every step for each micro-batch (`draw: batch`), or for each and every layer (`layer`). Which blocks, `memory` says:

    span      those of largest relevance: the chunk's queries, summed, times the mean of what the block's tokens read in
              non-causal attention to the block. Each key/value head chooses for itself, by its own query heads
    landmark  the same, but a fixed random vector of each head reads the block, and not its tokens (SE-Attn-LM)
    random    any
    none      none: chunks are on their own (SE-Attn-NoMem)
    shifted   none either, but in the second half of the heads chunks begin half a chunk earlier (S2-Attn)

`relevance: chunk` is the paper's: all queries of a chunk choose, so that early tokens of a chunk depend on later ones
through the choice. It is causal from chunk to chunk, and inside a chunk only for choices that are given. With
`relevance: previous_chunk` the queries of the chunk before choose, and no token ever depends on a later one.

`eval: full` is the paper's evaluation: full attention, in generation too; `span` keeps to the blocks, with the largest
chunk. The weights are those of attention.

A state that training carries holds the chunk under way and the `remember` tokens before it, which are all that a row
may choose from of what came before; its size never changes. Outside training, with `eval: span`, a state holds the keys
and values of the whole document, as full attention's does, and every block can be chosen.

Where the chunk before chooses, or relevance decides nothing, rows may be cut anywhere: generation token by token is the
whole row. Under `relevance: chunk` they may only at multiples of the chunks, as part of a chunk can't ask for the rest
of it: a row's part of a chunk chooses by the queries it has, and so does a token that is generated. A document that
begins in mid-row may end its row in mid-chunk, and then the same holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from hybridtron.architecture.attention import HeadsSpec, ReadingAttention, visible_tokens
from hybridtron.architecture.base import Cut, ModelSizes, StatePart
from hybridtron.limits import at_least, divisors_near, one_of
from hybridtron.problems import Problem, choice


@dataclass(frozen=True)
class SpanSpec(HeadsSpec):
    """Options of span-expanded attention, beside those of every attention."""

    kind: ClassVar[str] = "span"
    module: ClassVar[str] = "hybridtron.mixers.span:SpanAttention"
    hands_over: ClassVar[bool] = True
    reading: ClassVar[Mapping[ReadingAttention, Mapping[str, Any]]] = {
        ReadingAttention.full: {"eval": "full"},
        ReadingAttention.trained: {"eval": "span"},
    }

    # tokens that select blocks together, or a list of sizes to draw from
    chunk: Annotated[int | list[int], at_least(2)] = 2048
    # a list is drawn from for each micro-batch, or for each layer too
    draw: Annotated[str, one_of(("batch", "layer"))] = "batch"
    block: Annotated[int, at_least(2)] = 32  # tokens of a block
    blocks: Annotated[int, at_least(1, "memory: none reads none")] = 8  # blocks of the past that a chunk reads
    # whose queries choose: those of the chunk (the paper's), or of the chunk before (strictly causal)
    relevance: Annotated[str, one_of(("chunk", "previous_chunk"))] = "chunk"
    # what is read of the past: chosen blocks (span), nothing (none), random blocks, blocks chosen by a landmark, or
    # shifted groups
    memory: Annotated[str, one_of(("span", "none", "random", "landmark", "shifted"))] = "span"
    # outside training: full attention, or span as in training
    eval: Annotated[str, one_of(("full", "span"))] = "full"
    # where states are carried: tokens before the current chunk that can still be read
    remember: Annotated[int, at_least(0)] = 0

    def chunks(self) -> tuple[int, ...]:
        """The sizes that a chunk can have."""
        return (self.chunk,) if isinstance(self.chunk, int) else tuple(self.chunk)

    @property
    def asks(self) -> bool:
        """Whether relevance decides which blocks are read."""
        return self.memory in ("span", "landmark")

    @property
    def retrieves(self) -> bool:
        """Whether chunks read blocks of the past."""
        return self.asks or self.memory == "random"

    @property
    def attention_at_eval(self) -> str:
        return "full" if self.eval == "full" else f"span {max(self.chunks())}"

    @property
    def reads_in(self) -> int:
        return max(self.chunks()) if self.eval == "span" and self.asks and self.relevance == "chunk" else 1

    def remembered(self, training: bool) -> int | None:
        """How many tokens before the chunk under way a row may choose from; None: all of the document."""
        return self.remember if training or not self.retrieves else None

    def carried_blocks(self, remembered: int | None) -> tuple[int | None, int]:
        """Of how many of the last blocks a state holds summaries (None: of the document's all), and query sums."""
        largest = max(self.chunks())
        if remembered is None:
            return None, 2 * largest // self.block
        return (remembered + largest) // self.block, (max(remembered, largest) + largest) // self.block

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        queries, sizes = self.channels(model)[0], self.chunks()
        seen = sum(self._visible(seq_len, chunk) for chunk in sizes) / len(sizes)
        table = super().flops(model, seq_len) | {"attention": 4 * queries * seen}
        if self.asks:
            # each block's tokens, or its landmark alone, read the block; every chunk asks the blocks before it
            table["summaries"] = queries * (2 * self.block + 2 if self.memory == "span" else 4)
            pairs = sum((seq_len / chunk - 1) / 2 for chunk in sizes if chunk < seq_len) / len(sizes)
            table["relevance"] = 2 * queries * pairs / self.block
        return table

    def _visible(self, seq_len: int, chunk: int) -> float:
        """Mean number of positions that a token sees, itself included."""
        own = visible_tokens(min(seq_len, chunk), None)
        most = 0 if self.memory in ("none", "shifted") else self.blocks * self.block
        begins = range(0, seq_len, chunk)
        return own + sum(min(most, begin) * min(chunk, seq_len - begin) for begin in begins) / seq_len

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """What training carries."""
        largest, head = max(self.chunks()), self.head(model)
        parts = self.carried_heads(model, self.remember + largest)
        if self.retrieves:
            parts |= {name: replace(parts[name], handed="row") for name in ("keys", "values")}
        if self.asks:
            blocks, asked = self.carried_blocks(self.remember)
            assert blocks is not None
            parts["queries"] = StatePart("kv", (self.block - 1, self.heads, head), cuts=(Cut(1),), handed="tail")
            parts["summaries"] = StatePart("kv", (blocks, self.heads, head), "float32", cuts=(Cut(1),), handed="table")
            parts["sums"] = StatePart("kv", (asked, self.heads, head), "float32", cuts=(Cut(1),), handed="table")
        return parts

    def carry_problems(self, seq_len: int) -> Iterator[Problem]:
        uneven = [chunk for chunk in self.chunks() if seq_len % chunk]
        if uneven and self.asks and self.relevance == "chunk":
            cure = "use relevance=previous_chunk, for which rows may end anywhere, or chunks that divide the rows"
            ends = f"but rows of {seq_len} tokens end inside chunks of {uneven}"
            yield Problem("chunk", f"is {self.chunk}, {ends}: {cure}")

    def surprises(self, carried: bool) -> Iterator[Problem]:
        if self.reads_in > 1:
            leak = "is span, but under relevance=chunk held-out losses depend on later tokens through the chosen blocks"
            cure = "which generation can't choose by: use relevance=previous_chunk, or eval=full"
            yield Problem("eval", f"{leak}, {cure}")
        if self.remember and not carried:
            why = "no phase carries keys and values (states.mode=tbtt), and outside training all of a document is kept"
            yield Problem("remember", f"is {self.remember} and has no effect: {why}")

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterator[Problem]:
        yield from super().layout_problems(model, tensor)
        if self.asks and self.groups() % tensor and self.heads % tensor == 0:
            why = f"which {tensor} ranks can't share evenly, though the heads of each choose blocks together"
            yield Problem("kv_heads", f"is {self.groups()}, {why}")

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        sizes = self.chunks()
        if not sizes:
            yield Problem("chunk", "is empty, must be at least 2, or a list of such numbers")
        elif max(sizes) > max_seq_len:
            cure = f"longer than the longest sequence of any phase ({max_seq_len}): use at most that"
            yield Problem("chunk", f"is {self.chunk}, {cure}")
        elif math.gcd(*sizes) % self.block:
            fitting = choice(divisors_near(math.gcd(*sizes), self.block))
            yield Problem("block", f"is {self.block}, must divide chunk={self.chunk}: {fitting}")
        if self.remember and self.memory in ("none", "shifted"):
            yield Problem("remember", f"is {self.remember}, but memory={self.memory} reads no blocks: use 0")
        elif self.remember % self.block:
            cure = f"must be a multiple of block={self.block} (0: nothing before the chunk under way)"
            yield Problem("remember", f"is {self.remember}, {cure}")
        if self.memory == "shifted" and self.heads % 2:
            yield Problem("heads", f"is {self.heads}, must be even for memory=shifted, which shifts half of them")
        if self.memory == "shifted" and any(size % 2 for size in sizes):
            yield Problem("chunk", f"is {self.chunk}, must be even for memory=shifted, which shifts by half of it")
