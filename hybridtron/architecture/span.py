"""Span-expanded attention (SE-Attn): attention inside chunks, and to the most relevant blocks of the past.

    q, k, v  as in attention, rotary positions and short convolutions included
    y_i = out(softmax over the tokens that i sees of (q_i . k_j / sqrt(head_dim)) v_j)

Token i sees its chunk up to itself, and `blocks` blocks of `block` tokens that end before its chunk begins. Chunks are
counted from the document's start. Each has `chunk` tokens, or a size drawn from a list in every step, for each
micro-batch (`draw: batch`) or for every layer separately (`layer`). `memory` selects the blocks:

    span      largest relevance: the chunk's summed queries, times the mean output of the block's tokens in non-causal
              attention to the block. Each key/value head selects by its own query heads
    landmark  as span, but a fixed random vector per head attends to the block instead of its tokens (SE-Attn-LM)
    random    random blocks
    none      no blocks: chunks are independent (SE-Attn-NoMem)
    shifted   no blocks either, but for half of the heads chunks begin half a chunk earlier (S2-Attn)

With `relevance: chunk`, as in the paper, all queries in a chunk select, so that early tokens depend on later ones in
their chunk through the selection. It is causal from chunk to chunk, and inside a chunk only for given selections. With
`relevance: previous_chunk` the previous chunk's queries select, and no token ever depends on a later one.

`eval: full` is the paper's evaluation: full attention, in generation too; `span` keeps to the blocks, with the largest
chunk. The weights are those of attention.

A state that training carries holds the current chunk and the `remember` tokens before it; a row may select blocks from
these alone, and the state's size never changes. Outside training, with `eval: span`, a state holds the keys and values
of the full document, as in full attention, and every block can be selected.

Where the previous chunk selects, or relevance decides nothing, rows may be cut anywhere: generation token by token
equals reading the full row. Under `relevance: chunk` rows may be cut only at multiples of the chunks: a partial chunk
lacks the remaining queries and selects by those it has, and so does a generated token. A document that begins in
mid-row may end its row in mid-chunk, with the same effect.
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
    """Options of span-expanded attention; `HeadsSpec` has those of every attention."""

    kind: ClassVar[str] = "span"
    module: ClassVar[str] = "hybridtron.mixers.span:SpanAttention"
    hands_over: ClassVar[bool] = True
    reading: ClassVar[Mapping[ReadingAttention, Mapping[str, Any]]] = {
        ReadingAttention.full: {"eval": "full"},
        ReadingAttention.trained: {"eval": "span"},
    }

    # tokens that select blocks together, or a list of sizes to draw from
    chunk: Annotated[int | list[int], at_least(2)] = 2048
    # draw the size for each micro-batch, or for every layer separately
    draw: Annotated[str, one_of(("batch", "layer"))] = "batch"
    block: Annotated[int, at_least(2)] = 32  # tokens of a block
    blocks: Annotated[int, at_least(1, "memory: none reads none")] = 8  # blocks of the past that a chunk reads
    # queries that select blocks: the chunk's (the paper's), or the previous chunk's (strictly causal)
    relevance: Annotated[str, one_of(("chunk", "previous_chunk"))] = "chunk"
    # which blocks of the past are read: the most relevant (span), none, random, those selected by a landmark, or none
    # with shifted chunks
    memory: Annotated[str, one_of(("span", "none", "random", "landmark", "shifted"))] = "span"
    # outside training: full attention, or span as in training
    eval: Annotated[str, one_of(("full", "span"))] = "full"
    # with carried states: tokens before the current chunk that can still be read
    remember: Annotated[int, at_least(0)] = 0

    def chunks(self) -> tuple[int, ...]:
        """Return the sizes that a chunk can have."""
        if isinstance(self.chunk, int):
            return (self.chunk,)
        return tuple(self.chunk)

    @property
    def asks(self) -> bool:
        """True if relevance decides which blocks are read."""
        return self.memory in ("span", "landmark")

    @property
    def retrieves(self) -> bool:
        """True if chunks read blocks of the past."""
        return self.asks or self.memory == "random"

    @property
    def attention_at_eval(self) -> str:
        if self.eval == "full":
            return "full"
        return f"span {max(self.chunks())}"

    @property
    def reads_in(self) -> int:
        if self.eval == "span" and self.asks and self.relevance == "chunk":
            return max(self.chunks())
        return 1

    def remembered(self, training: bool) -> int | None:
        """Return how many tokens before the current chunk a row may select from; None for the full document."""
        if training or not self.retrieves:
            return self.remember
        return None

    def carried_blocks(self, remembered: int | None) -> tuple[int | None, int]:
        """Return how many block summaries and query sums a state holds; None for all of the document's summaries."""
        largest = max(self.chunks())
        if remembered is None:
            return None, 2 * largest // self.block
        return (remembered + largest) // self.block, (max(remembered, largest) + largest) // self.block

    def flops(self, model: ModelSizes, seq_len: int) -> dict[str, float]:
        queries = self.channels(model)[0]
        sizes = self.chunks()
        num_visible = sum(self._visible(seq_len, chunk) for chunk in sizes) / len(sizes)
        table = super().flops(model, seq_len) | {"attention": 4 * queries * num_visible}
        if self.asks:
            # each block's tokens, or its landmark alone, attend to the block; every chunk scores the blocks before it
            table["summaries"] = queries * (2 * self.block + 2 if self.memory == "span" else 4)
            pairs = sum((seq_len / chunk - 1) / 2 for chunk in sizes if chunk < seq_len) / len(sizes)
            table["relevance"] = 2 * queries * pairs / self.block
        return table

    def _visible(self, seq_len: int, chunk: int) -> float:
        """Return the mean number of positions that a token sees, itself included."""
        in_chunk = visible_tokens(min(seq_len, chunk), None)
        if self.memory in ("none", "shifted"):
            max_chosen = 0
        else:
            max_chosen = self.blocks * self.block
        begins = range(0, seq_len, chunk)
        return in_chunk + sum(min(max_chosen, begin) * min(chunk, seq_len - begin) for begin in begins) / seq_len

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """Return the state parts that training carries."""
        largest = max(self.chunks())
        head = self.head(model)
        parts = self.carried_heads(model, self.remember + largest)
        if self.retrieves:
            parts |= {name: replace(parts[name], handed="row") for name in ("keys", "values")}
        if self.asks:
            blocks, num_sums = self.carried_blocks(self.remember)
            assert blocks is not None
            parts["queries"] = StatePart("kv", (self.block - 1, self.heads, head), cuts=(Cut(1),), handed="tail")
            parts["summaries"] = StatePart("kv", (blocks, self.heads, head), "float32", cuts=(Cut(1),), handed="table")
            parts["sums"] = StatePart("kv", (num_sums, self.heads, head), "float32", cuts=(Cut(1),), handed="table")
        return parts

    def carry_problems(self, seq_len: int) -> Iterator[Problem]:
        uneven = [chunk for chunk in self.chunks() if seq_len % chunk]
        if uneven and self.asks and self.relevance == "chunk":
            cure = "use relevance=previous_chunk, for which rows may end anywhere, or chunks that divide the rows"
            ends = f"but rows of {seq_len} tokens end inside chunks of {uneven}"
            yield Problem("chunk", "not-divisible", f"is {self.chunk}, {ends}: {cure}")

    def surprises(self, carried: bool) -> Iterator[Problem]:
        if self.reads_in > 1:
            leak = "is span, but under relevance=chunk held-out losses depend on later tokens through the chosen blocks"
            cure = "which generation can't choose by: use relevance=previous_chunk, or eval=full"
            yield Problem("eval", "reads-ahead", f"{leak}, {cure}")
        if self.remember and not carried:
            why = "no phase carries keys and values (states.mode=tbtt), and outside training all of a document is kept"
            yield Problem("remember", "no-effect", f"is {self.remember} and has no effect: {why}")

    def layout_problems(self, model: ModelSizes, tensor: int) -> Iterator[Problem]:
        yield from super().layout_problems(model, tensor)
        if self.asks and self.groups() % tensor and self.heads % tensor == 0:
            why = f"which {tensor} ranks can't share evenly, though the heads of each choose blocks together"
            yield Problem("kv_heads", "not-divisible", f"is {self.groups()}, {why}")

    def problems(self, model: ModelSizes, max_seq_len: int) -> Iterator[Problem]:
        yield from super().problems(model, max_seq_len)
        sizes = self.chunks()
        if not sizes:
            yield Problem("chunk", "missing", "is empty, must be at least 2, or a list of such numbers")
        elif max(sizes) > max_seq_len:
            cure = f"longer than the longest sequence of any phase ({max_seq_len}): use at most that"
            yield Problem("chunk", "out-of-range", f"is {self.chunk}, {cure}")
        elif math.gcd(*sizes) % self.block:
            fitting = choice(divisors_near(math.gcd(*sizes), self.block))
            yield Problem("block", "not-divisible", f"is {self.block}, must divide chunk={self.chunk}: {fitting}")
        if self.remember and self.memory in ("none", "shifted"):
            yield Problem(
                "remember", "no-effect", f"is {self.remember}, but memory={self.memory} reads no blocks: use 0"
            )
        elif self.remember % self.block:
            cure = f"must be a multiple of block={self.block} (0: nothing before the chunk under way)"
            yield Problem("remember", "not-divisible", f"is {self.remember}, {cure}")
        if self.memory == "shifted" and self.heads % 2:
            yield Problem(
                "heads", "not-divisible", f"is {self.heads}, must be even for memory=shifted, which shifts half of them"
            )
        if self.memory == "shifted" and any(size % 2 for size in sizes):
            yield Problem(
                "chunk",
                "not-divisible",
                f"is {self.chunk}, must be even for memory=shifted, which shifts by half of it",
            )
