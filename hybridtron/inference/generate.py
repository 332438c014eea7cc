"""Generate tokens: prompts are read in chunks, then each row continues token by token from its states.

A row is one sequence of the batch. Prompts of unequal length are padded on the left, and the padding is treated as
another document. If a chunk ends before a row's prompt begins, the row's states are reset to zero. So padding affects
no states, convolutions or attention. A row has the same logits in any batch and alone, except for rounding: matmuls
with other sizes sum in another order.

Memory is needed for one chunk's activations and for the states. States have a fixed size, except for the keys and
values in full and span attention.

Legend: B rows, L tokens in the padded prompts, C tokens in a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.inference.reader import Read, Reader, reader, reset_rows
from hybridtron.inference.sampling import GREEDY, Sampling, choose
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import States

CHUNK = 2048
"""Number of prompt tokens that a rank reads at a time, over all rows; it limits the memory for activations."""


@dataclass(frozen=True)
class Prompts:
    """Prompts padded on the left to one length; the tokens of row b begin at starts_B[b]."""

    tokens_BL: Tensor
    starts_B: Tensor

    @staticmethod
    def of(prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Prompts:
        """Pad prompts to one length. Raises ValueError if there are no prompts, or if a prompt has no tokens."""
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("prompts are empty: give at least one prompt, and at least one token in each prompt")
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        starts_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        return Prompts(torch.tensor(padded, device=device), starts_B)

    def seq(self, first: int, last: int) -> SeqInfo:
        """Return the positions and documents of tokens `first` to `last` - 1.

        In a row whose prompt begins after `first`, the padding before the prompt is an earlier document.
        """
        places_C = torch.arange(first, last, device=self.starts_B.device)
        starts_B1 = self.starts_B[:, None]
        positions_BC = (places_C - starts_B1).clamp(min=0)
        begun_BC = (places_C >= starts_B1) & (starts_B1 > first)
        return SeqInfo(positions_BC, begun_BC.long() if begun_BC.any() else None)

    def read(self, read: Read, chunk: int) -> tuple[Tensor, States]:
        """Read the prompts in chunks of `chunk` tokens; return the next token's logits and the states."""
        length = self.tokens_BL.shape[1]
        states = None
        logits_BV = None
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            logits_BV, states = read(self.tokens_BL[:, first:last], states, self.seq(first, last))
            if (waiting_B := self.starts_B >= last).any():
                states = reset_rows(states, waiting_B)
        assert logits_BV is not None
        assert states is not None
        return logits_BV, states


@torch.no_grad()
def continue_prompts(
    model: Reader,
    prompts: Prompts,
    sampling: Sampling = GREEDY,
    rows: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Iterator[list[int]]:
    """Yield, without end, a list with every row's next token.

    `rows` has an integer for each row, which seeds the row's random draws; by default 0, 1, 2, ... `chunk` says how
    many prompt tokens per row are read at a time. By default each rank reads about CHUNK tokens at a time, over all
    rows.
    """
    batch, length = prompts.tokens_BL.shape
    rows = range(batch) if rows is None else rows
    logits_BV, states = prompts.read(model.read, chunk or max(1, CHUNK // batch) * model.context.size)
    following = model.steps(states, length - prompts.starts_B)
    for index in count():
        tokens_B = choose(logits_BV, sampling, rows, index)
        yield tokens_B.tolist()
        logits_BV = following(tokens_B)


def generate(
    model: LanguageModel,
    prompt_BL: Tensor,
    new_tokens: int,
    temperature: float,
    seed: int,
    chunk: int | None = None,
) -> Tensor:
    """Continue each row, and return the new tokens (B, new_tokens); temperature 0 takes the likeliest token."""
    prompts = Prompts(prompt_BL, torch.zeros(len(prompt_BL), dtype=torch.int64, device=prompt_BL.device))
    sampling = Sampling(temperature=temperature, seed=seed)
    steps = list(islice(continue_prompts(reader(model), prompts, sampling, chunk=chunk), new_tokens))
    return torch.tensor(steps, device=prompt_BL.device).T
