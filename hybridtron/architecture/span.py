"""Span-expanded attention (SE-Attn): attention inside chunks, and to the most relevant blocks of the past.

    q, k, v  computed as in `attention.py`, with rotary positions and short convolutions
    y_i = out(sum over the tokens j that token i sees:  softmax_j(q_i . k_j / sqrt(head_dim)) v_j)

Token i sees itself, the tokens before it in its chunk, and the tokens in selected blocks. A block consists of `block`
consecutive tokens in the document. A chunk selects `blocks` blocks that end before the chunk begins. Chunks are counted
from the document's start and have `chunk` tokens. If `chunk` is a list, training draws a size from the list for each
micro-batch (`draw: batch`), or for each layer and micro-batch (`draw: layer`). `memory` selects the blocks:

    span      the blocks with the largest relevance. Relevance is the dot product of the chunk's summed queries with the
              block's summary. For the summary, the block's tokens attend to the block without a causal mask, and the
              outputs are averaged. Each key/value head selects its own blocks, by its query heads' queries
    landmark  like span, with another summary: each head has a fixed random vector, which attends to the block, and the
              output is the summary (SE-Attn-LM)
    random    random blocks
    none      no blocks: chunks are independent (SE-Attn-NoMem)
    shifted   no blocks; for the second half of the heads, chunks begin half a chunk earlier (S2-Attn)

With `relevance: chunk`, as in the paper, the queries from all tokens in a chunk select the chunk's blocks. Through the
selection, early tokens in a chunk then depend on later tokens in the chunk, so attention is causal only between chunks.
With `relevance: previous_chunk`, the previous chunk's queries select the blocks, and no token depends on a later token.

With `eval: full`, as in the paper, evaluation and generation use full attention. With `eval: span` they read selected
blocks as in training, with the largest chunk size. Weights have the same names and shapes as in `attention.py`.

If training carries a state from row to row (sequence to sequence), the state holds the keys and values for the current
chunk and for the `remember` tokens before the chunk. A row may select blocks only from these tokens, and the state's
size is fixed. Outside training, with `eval: span`, a state holds the keys and values for the full document, and every
block can be selected.

With `relevance: previous_chunk`, or if `memory` selects without relevance, a text may be split into rows anywhere, even
into single tokens for generation: the result is the same as with one row. With `relevance: chunk`, a text may be split
only at multiples of the chunk size. If only the first tokens in a chunk are known, only their queries select blocks,
and the selection may differ from the full chunk's selection. This also happens in generation, and at the end of a
document whose length is not a multiple of the chunk size.
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
    """Options for span-expanded attention, in addition to the options for all attention mixers in `HeadsSpec`."""

    kind: ClassVar[str] = "span"
    module: ClassVar[str] = "hybridtron.mixers.span:SpanAttention"
    supports_context_parallel: ClassVar[bool] = True
    reading: ClassVar[Mapping[ReadingAttention, Mapping[str, Any]]] = {
        ReadingAttention.full: {"eval": "full"},
        ReadingAttention.trained: {"eval": "span"},
    }

    # number of tokens that select blocks together, or a list of numbers to draw from
    chunk: Annotated[int | list[int], at_least(2)] = 2048
    # draw the size for each micro-batch, or for every layer separately
    draw: Annotated[str, one_of(("batch", "layer"))] = "batch"
    block: Annotated[int, at_least(2)] = 32  # tokens of a block
    blocks: Annotated[int, at_least(1, "memory: none reads none")] = 8  # blocks of the past that a chunk reads
    # queries that select a chunk's blocks: the chunk's own, as in the paper, or the previous chunk's (strictly causal)
    relevance: Annotated[str, one_of(("chunk", "previous_chunk"))] = "chunk"
    # which blocks of the past are read. span: the most relevant; landmark: the most relevant, with block summaries by a
    # random vector; random: random blocks; none: no blocks; shifted: no blocks, with shifted chunks for half the heads
    memory: Annotated[str, one_of(("span", "none", "random", "landmark", "shifted"))] = "span"
    # attention outside training. full: full attention; span: selected blocks, as in training
    eval: Annotated[str, one_of(("full", "span"))] = "full"
    # if training carries states: number of tokens before the current chunk that can still be read
    remember: Annotated[int, at_least(0)] = 0

    def chunks(self) -> tuple[int, ...]:
        """Return the possible chunk sizes."""
        if isinstance(self.chunk, int):
            return (self.chunk,)
        return tuple(self.chunk)

    @property
    def asks(self) -> bool:
        """True if relevance selects the blocks that are read."""
        return self.memory in ("span", "landmark")

    @property
    def retrieves(self) -> bool:
        """True if chunks read blocks from the past."""
        return self.asks or self.memory == "random"

    @property
    def attention_at_eval(self) -> str:
        if self.eval == "full":
            return "full"
        return f"span {max(self.chunks())}"

    @property
    def chunk_multiple(self) -> int:
        if self.eval == "span" and self.asks and self.relevance == "chunk":
            return max(self.chunks())
        return 1

    def remembered(self, training: bool) -> int | None:
        """Return how many tokens before the current chunk are available to select blocks from; None for all tokens."""
        if training or not self.retrieves:
            return self.remember
        return None

    def carried_blocks(self, remembered: int | None) -> tuple[int | None, int]:
        """Return how many block summaries and how many query sums a state has.

        Each block has one summary and one query sum. `remembered` is the result of the method `remembered`. The number
        of summaries is None if the state holds the summaries for the full document.
        """
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
            # summaries: the tokens of a block, or the landmark, attend to the block; relevance: every chunk scores all
            # blocks before the chunk
            table["summaries"] = queries * (2 * self.block + 2 if self.memory == "span" else 4)
            pairs = sum((seq_len / chunk - 1) / 2 for chunk in sizes if chunk < seq_len) / len(sizes)
            table["relevance"] = 2 * queries * pairs / self.block
        return table

    def _visible(self, seq_len: int, chunk: int) -> float:
        """Return the mean number of tokens that a token sees with this chunk size, itself included."""
        in_chunk = visible_tokens(min(seq_len, chunk), None)
        if self.memory in ("none", "shifted"):
            max_chosen = 0
        else:
            max_chosen = self.blocks * self.block
        begins = range(0, seq_len, chunk)
        return in_chunk + sum(min(max_chosen, begin) * min(chunk, seq_len - begin) for begin in begins) / seq_len

    def state_parts(self, model: ModelSizes) -> dict[str, StatePart]:
        """Return the state parts that training carries from row to row."""
        largest = max(self.chunks())
        head = self.head(model)
        parts = self.carried_heads(model, self.remember + largest)
        if self.retrieves:
            parts |= {name: replace(parts[name], exchange="row") for name in ("keys", "values")}
        if self.asks:
            blocks, num_sums = self.carried_blocks(self.remember)
            assert blocks is not None
            parts["queries"] = StatePart("kv", (self.block - 1, self.heads, head), cuts=(Cut(1),), exchange="tail")
            parts["summaries"] = StatePart(
                "kv", (blocks, self.heads, head), "float32", cuts=(Cut(1),), exchange="table"
            )
            parts["sums"] = StatePart("kv", (num_sums, self.heads, head), "float32", cuts=(Cut(1),), exchange="table")
        return parts

    def carry_problems(self, seq_len: int) -> Iterator[Problem]:
        uneven = [chunk for chunk in self.chunks() if seq_len % chunk]
        if uneven and self.asks and self.relevance == "chunk":
            cure = "use relevance=previous_chunk, for which rows may end anywhere, or chunks that divide the rows"
            ends = f"but rows of {seq_len} tokens end inside chunks of {uneven}"
            yield Problem("chunk", "not-divisible", f"is {self.chunk}, {ends}: {cure}")

    def warnings(self, carried: bool) -> Iterator[Problem]:
        if self.chunk_multiple > 1:
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
