"""The span-expanded attention mixer (equations and options in `architecture/span.py`).

Outside training it is full attention, with its state, unless `eval: span` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.span import SpanSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.attention import Heads
from hybridtron.mixers.base import State
from hybridtron.ops.attention import AttentionMemory, joined, remember
from hybridtron.ops.dispatch import untraced
from hybridtron.ops.span import (
    CarriedBlocks,
    ChoiceRule,
    SpanCut,
    SpanInputs,
    SpanPast,
    SpanSegment,
    choose_at_random,
    choose_by_relevance,
    span_attention,
)
from hybridtron.parallel.linear import TensorGroup

LANDMARK_SEED = 20_241_217


class SpanAttention(Heads):
    """State: rotated `keys` and `values` of the last tokens (B, M, G, K), of the `length` (B,) ones of their document
    so far; and where relevance decides what is read, of its blocks, as far as they can be read, `summaries` and `sums`
    of queries (B, U, H, K) in fp32, and the `queries` of the block under way (B, S - 1, H, K).

    Training carries as many tokens as `remember` says; outside it all of the document can be read."""

    def __init__(self, spec: SpanSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.spec, self.layer = spec, sizes.layer
        own = tensor.share(spec.heads)
        self.own_heads = slice(tensor.rank * own, (tensor.rank + 1) * own)
        used = tensor.groups_used(spec.heads, spec.groups())
        self.own_groups = list(range(used.start, used.stop)) if isinstance(used, slice) else used

    @untraced  # what is read, and how often, the data and the step decide
    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State]:
        if seq.key is None and self.spec.eval == "full":
            return self.attend_within(None, q_BLHK, k_BLGK, v_BLGK, before, seq)
        chunk, remembered = self._chunk(seq), self.spec.remembered(training=seq.key is not None)
        memory = AttentionMemory(before["keys"], before["values"], before["length"]) if "keys" in before else None
        seen = [0] * len(q_BLHK) if memory is None else memory.length_B.tolist()
        segments = self._segments(seq, [(each, self._kept(each, chunk, remembered)) for each in seen])
        k_BSGK, v_BSGK = joined(memory, k_BLGK, v_BLGK)
        if self.spec.memory == "shifted":
            y_BLHK, new = self._shifted(q_BLHK, k_BSGK, v_BSGK, chunk, segments), State()
        else:
            cut = SpanCut(chunk, self.spec.block, segments)
            chosen, new = self._chosen(cut, q_BLHK, k_BSGK, v_BSGK, before, seq)
            y_BLHK = span_attention(SpanInputs(q_BLHK, k_BSGK, v_BSGK, cut, chosen))
        keep = None if remembered is None else remembered + max(self.spec.chunks())
        kept = remember(memory, k_BLGK, v_BLGK, seq.documents_BL, keep)
        ends = {row: s.end_place for s in segments if s.stop == q_BLHK.shape[1] for row in _numbers(s.rows)}
        length_B = torch.tensor([ends[row] for row in range(len(q_BLHK))])
        length_B = length_B.to(q_BLHK.device, non_blocking=True)  # the host need not wait for so small a copy
        return y_BLHK, {**new, "keys": kept.keys_BMGK, "values": kept.values_BMGK, "length": length_B}

    def _chunk(self, seq: SeqInfo) -> int:
        """The size of this step's chunks: as drawn, the largest one outside training."""
        sizes = self.spec.chunks()
        if seq.key is None:
            return max(sizes)
        return sizes[seq.number(f"chunk/{self.layer}" if self.spec.draw == "layer" else "chunk") % len(sizes)]

    def _segments(self, seq: SeqInfo, before: Sequence[tuple[int, int]]) -> list[SpanSegment]:
        """The documents of all rows, with what is known of them before; rows that are cut alike are taken together."""
        rows = [
            [(start, stop, *(before[row] if start == 0 else (0, 0))) for start, stop in spans]
            for row, spans in enumerate(seq.spans())
        ]
        if all(row == rows[0] for row in rows):
            return [SpanSegment(slice(0, len(rows)), *span) for span in rows[0]]
        return [SpanSegment(slice(number, number + 1), *span) for number, row in enumerate(rows) for span in row]

    def _kept(self, seen: int, chunk: int, remembered: int | None) -> int:
        """How many of the tokens before a row it may read: of the chunk that it begins in, and before that chunk."""
        if remembered is None:
            return seen
        if self.spec.memory == "shifted":
            return min(seen, chunk)
        return seen - max(0, seen // chunk * chunk - remembered)

    def _chosen(
        self, cut: SpanCut, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, before: State, seq: SeqInfo
    ) -> tuple[list[Tensor | None], State]:
        """The blocks that each chunk reads, and what is carried of the choice."""
        if self.spec.memory == "none":
            return [None] * len(cut.segments), {}
        if self.spec.memory == "random":
            key = seq.number(f"blocks/{self.layer}")
            return choose_at_random(cut, self.spec.blocks, key, self.own_groups, q_BLHK.device), {}
        landmarks_HK = self._landmarks(q_BLHK) if self.spec.memory == "landmark" else None
        rule = ChoiceRule(self.spec.blocks, self.spec.relevance == "previous_chunk", landmarks_HK)
        past = SpanPast(before["queries"], before["summaries"], before["sums"]) if "summaries" in before else None
        carried = CarriedBlocks(*self.spec.carried_blocks(self.spec.remembered(training=seq.key is not None)))
        chosen, after = choose_by_relevance(cut, rule, q_BLHK, k_BSGK, v_BSGK, past, carried)
        return chosen, {"queries": after.queries_BNHK, "summaries": after.summaries_BPHK, "sums": after.sums_BPHK}

    def _landmarks(self, q_BLHK: Tensor) -> Tensor:
        """One fixed standard normal vector for each of this rank's heads: a function of the layer and the head."""
        generator = torch.Generator().manual_seed(LANDMARK_SEED + self.layer)
        whole_HK = torch.randn(self.spec.heads, q_BLHK.shape[-1], generator=generator)
        return whole_HK[self.own_heads].to(q_BLHK.device, non_blocking=True)

    def _shifted(
        self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, chunk: int, segments: Sequence[SpanSegment]
    ) -> Tensor:
        """Chunks on their own, half a chunk earlier in the second half of all heads, whichever rank has them."""
        share = q_BLHK.shape[2] // k_BSGK.shape[2]
        k_BSHK, v_BSHK = (x.repeat_interleave(share, dim=2) for x in (k_BSGK, v_BSGK))
        unmoved = min(max(self.spec.heads // 2 - self.own_heads.start, 0), q_BLHK.shape[2])
        halves = ((slice(0, unmoved), 0), (slice(unmoved, None), chunk // 2))
        nothing = [None] * len(segments)
        parts = []
        for heads, shift in halves:
            q, k, v = (x[:, :, heads] for x in (q_BLHK, k_BSHK, v_BSHK))
            if q.shape[2]:
                cut = SpanCut(chunk, self.spec.block, segments, shift)
                parts.append(span_attention(SpanInputs(q, k, v, cut, nothing)))
        return torch.cat(parts, dim=2)


def _numbers(rows: slice) -> range:
    return range(rows.start, rows.stop)
