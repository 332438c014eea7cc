"""Generate tokens: prompts are read in chunks, then each row continues token by token from its states.

Prompts of unequal length are padded on the left. Padding is a document of its own, and rows with nothing but padding at
the end of a chunk start from zero states, so it leaves no trace in states, convolutions or attention. A row's logits
equal those it would have alone, except for rounding: a product over more rows adds in another order.

Memory is that for one chunk and for the states, which have a fixed size except for the keys of full and span attention.

Legend: B rows, L tokens of the padded prompts, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel
from hybridtron.model.sampling import GREEDY, Sampling, choose
from hybridtron.model.stack import States
from hybridtron.model.steps import CompiledSteps, NextLogits, unsupported_reason
from hybridtron.parallel.context import WHOLE_ROWS, ContextGroup

CHUNK = 2048
"""Prompt tokens that are read at a time, over all rows; it limits the memory for activations."""

Read = Callable[[Tensor, States | None, SeqInfo], tuple[Tensor, States]]
"""Function that reads tokens (B, L) from states and returns the next token's full logits (B, V) and the new states."""


class Finish(NamedTuple):
    """Function that computes a result from the last stage's output (L, B, D), with the result's shape and dtype.

    Every rank gets the result. `of_tokens` returns a Finish for a slice of the tokens, if the result's first axis is
    tokens. If it is None, the result depends only on the last token.
    """

    make: Callable[[LanguageModel, Tensor], Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_tokens: Callable[[slice], Finish] | None = None


NOTHING = Finish(lambda stage, x_LBD: x_LBD.new_zeros(1, dtype=torch.float32), (1,), torch.float32)
"""Finish that discards the outputs, for callers that need only the states."""


Forward = Callable[[Tensor, States | None, SeqInfo, Finish], tuple[Tensor, States]]
"""Function that reads tokens (B, L) from states and returns a Finish's result and this rank's new states."""


def as_they_are(of_layers: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the layers' results unchanged, since one process has all of them."""
    return of_layers


@dataclass(frozen=True)
class Reader:
    """A model for inference: a full one on this process (`reader`), or one rank's part (`engine/serving.py`).

    `parts` are the stages that this process computes, `context` the ranks that divide the tokens. `of_all` gathers all
    layers' results on every rank, from this rank's layers, with heads or channels first; all of the model's ranks must
    call it together.
    """

    forward: Forward
    parts: Sequence[LanguageModel]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    of_all: Callable[[dict[int, Tensor]], dict[int, Tensor]] = as_they_are
    model: LanguageModel | None = None  # the full model, if this process has it
    context: ContextGroup = WHOLE_ROWS

    def read(self, tokens_BL: Tensor, states: States | None, seq: SeqInfo) -> tuple[Tensor, States]:
        """Read tokens and return the next token's logits and the new states; a `Read`."""
        logits_BV = Finish(LanguageModel.next_logits, (len(tokens_BL), self.vocab_size), self.dtype)
        return self.forward(tokens_BL, states, seq, logits_BV)

    def steps(self, states: States, positions_B: Tensor) -> NextLogits:
        """Return a function that continues rows from states by one token per call; `positions_B` tokens came before.

        Small models on a CPU get a compiled one.
        """
        if self.model is not None and unsupported_reason(self.model) is None:
            return CompiledSteps(self.model, states, positions_B)
        generated = 0

        def following(tokens_B: Tensor) -> Tensor:
            nonlocal states, generated
            logits_BV, states = self.read(tokens_B[:, None], states, SeqInfo((positions_B + generated)[:, None]))
            generated += 1
            return logits_BV

        return following


@dataclass(frozen=True)
class Prompts:
    """Prompts padded on the left to one length; the tokens of row b begin at starts_B[b]."""

    tokens_BL: Tensor
    starts_B: Tensor

    @staticmethod
    def of(prompts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Prompts:
        """Pad prompts. Raises ValueError if there is none or one is empty."""
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt without tokens can't be continued")
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        starts_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        return Prompts(torch.tensor(padded, device=device), starts_B)

    def seq(self, first: int, last: int) -> SeqInfo:
        """Return the positions and documents of these tokens.

        In rows that begin among them, padding is an earlier document.
        """
        places_C = torch.arange(first, last, device=self.starts_B.device)
        starts_B1 = self.starts_B[:, None]
        positions_BC = (places_C - starts_B1).clamp(min=0)
        begun_BC = (places_C >= starts_B1) & (starts_B1 > first)
        return SeqInfo(positions_BC, begun_BC.long() if begun_BC.any() else None)

    def read(self, read: Read, chunk: int) -> tuple[Tensor, States]:
        """Read the prompts chunk by chunk; return the logits after them and the states."""
        length = self.tokens_BL.shape[1]
        states = None
        logits_BV = None
        for first in range(0, length, chunk):
            last = min(first + chunk, length)
            logits_BV, states = read(self.tokens_BL[:, first:last], states, self.seq(first, last))
            if (waiting_B := self.starts_B >= last).any():
                states = from_zero(states, waiting_B)
        assert logits_BV is not None
        assert states is not None
        return logits_BV, states


def from_zero(states: States, rows_B: Tensor) -> States:
    """Set the states of these rows to zero, as at a document's start."""
    return {
        layer: {name: part.masked_fill(rows_B.view(-1, *[1] * (part.dim() - 1)), 0) for name, part in state.items()}
        for layer, state in states.items()
    }


def state_bytes(states: States) -> int:
    """Return the memory of all layers' states in bytes."""
    return sum(part.numel() * part.element_size() for state in states.values() for part in state.values())


def reader(model: LanguageModel) -> Reader:
    """Return a reader for a full model on this process."""

    def forward(tokens_BL: Tensor, states: States | None, seq: SeqInfo, wanted: Finish) -> tuple[Tensor, States]:
        x_LBD, states, _ = model(tokens_BL, states, seq, logits=False)
        return wanted.make(model, x_LBD), states

    weight_VD = model.output_weight()
    return Reader(forward, [model], len(weight_VD), weight_VD.dtype, weight_VD.device, model=model)


@torch.no_grad()
def continued(
    model: Reader,
    prompts: Prompts,
    sampling: Sampling = GREEDY,
    rows: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Iterator[list[int]]:
    """Yield one new token for every row at a time, without an end.

    `rows` are the numbers of the rows, which seed their draws. `chunk` is the number of prompt tokens per row in a
    chunk; by default a chunk has CHUNK tokens over all rows, on each rank that divides them.
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
    """Continue each row by `new_tokens` tokens and return these; temperature 0 takes the likeliest token."""
    prompts = Prompts(prompt_BL, torch.zeros(len(prompt_BL), dtype=torch.int64, device=prompt_BL.device))
    sampling = Sampling(temperature=temperature, seed=seed)
    steps = list(islice(continued(reader(model), prompts, sampling, chunk=chunk), new_tokens))
    return torch.tensor(steps, device=prompt_BL.device).T
