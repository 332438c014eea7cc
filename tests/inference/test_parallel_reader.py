"""Generation and losses over tensor- and pipeline-parallel ranks are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import ParallelConfig
from hybridtron.evaluate.entropy import Entropy, entropies
from hybridtron.evaluate.length import (
    Deviation,
    Remembrance,
    effective_remembrance,
    likeliest_tokens,
    state_deviation,
    token_losses,
)
from hybridtron.inference.generate import Prompts, continue_prompts
from hybridtron.inference.parallel_reader import build_parts, staged_reader
from hybridtron.inference.reader import Reader, reader
from hybridtron.inference.sampling import Sampling
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.parallel.test_states import LAYERS
from tests.slow import slow_except

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1]]
SAMPLING = Sampling(temperature=0.8, top_k=20, seed=5)
LAYOUTS = {
    "tp2": ParallelConfig(tensor=2),
    "pp2": ParallelConfig(pipeline=2),
    "tp2-pp2": ParallelConfig(tensor=2, pipeline=2),
    "pp2-virtual2": ParallelConfig(pipeline=2, virtual_pipeline=2),
}


def model_config(tied: bool) -> ModelConfig:
    return ModelConfig(width=32, vocab_size=32, pattern="M-SXWM", layers=LAYERS, tie_embeddings=tied)


class Measured(NamedTuple):
    """A reader's results for rows, with at most 5 tokens at a time."""

    losses_LB: Tensor
    likeliest_BL: Tensor
    remembrance: list[Remembrance]
    deviations: list[Deviation]
    entropies: list[Entropy]


def measured(read: Reader) -> Measured:
    tokens_BT = torch.randint(32, (3, 24), generator=torch.Generator().manual_seed(0))
    return Measured(
        losses_LB=token_losses(read, tokens_BT, 5),
        likeliest_BL=likeliest_tokens(read, tokens_BT, 5),
        remembrance=effective_remembrance(read, tokens_BT, [0, 3, 20], 5),
        deviations=state_deviation(read, tokens_BT, 8, 5),
        entropies=entropies(read, tokens_BT, 5, queries=9),
    )


def measured_among(seat: Seat, model: ModelConfig, parallel: ParallelConfig) -> Measured:
    with cut_model(seat, model, parallel) as read:
        return measured(read)


@contextmanager
def cut_model(seat: Seat, model: ModelConfig, parallel: ParallelConfig) -> Iterator[Reader]:
    with seat.groups(parallel) as groups:
        parts = build_parts(architecture(model), parallel, groups, torch.float64)
        for part in parts:
            initialise(part, seed=1)
        yield staged_reader(parts, groups, torch.float64)


def written(seat: Seat, model: ModelConfig, parallel: ParallelConfig) -> list[list[int]]:
    with cut_model(seat, model, parallel) as read:
        return list(islice(continue_prompts(read, Prompts.of(PROMPTS), SAMPLING, chunk=5), 10))


def whole_model(config: ModelConfig) -> LanguageModel:
    whole = LanguageModel(architecture(config)).double().eval()
    initialise(whole, seed=1)
    return whole


@pytest.mark.gloo
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "tp2-pp2"))
def test_every_rank_generates_the_tokens_of_one_process(layout: str, tied: bool) -> None:
    model = model_config(tied)
    parallel = LAYOUTS[layout]
    expected = list(islice(continue_prompts(reader(whole_model(model)), Prompts.of(PROMPTS), SAMPLING), 10))
    assert len({token for step in expected for token in step}) > 5
    tokens = run_distributed(written, parallel.tensor * parallel.pipeline, model, parallel)
    assert tokens == [expected] * len(tokens)


@pytest.mark.gloo
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "tp2-pp2"))
def test_every_rank_measures_the_results_of_one_process(layout: str, tied: bool) -> None:
    """Results agree up to the rounding of float64, because products and sums are added in another order."""
    model = model_config(tied)
    parallel = LAYOUTS[layout]
    expected = measured(reader(whole_model(model)))
    assert len(expected.deviations) == 3 * 3  # layers with a recurrent state, and positions
    for actual in run_distributed(measured_among, parallel.tensor * parallel.pipeline, model, parallel):
        torch.testing.assert_close(actual.losses_LB, expected.losses_LB, rtol=1e-11, atol=1e-11)
        assert torch.equal(actual.likeliest_BL, expected.likeliest_BL)
        for ours, theirs in zip(actual.remembrance, expected.remembrance, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-7)  # a root of a difference of what is nearly equal
        for ours, theirs in zip(actual.deviations, expected.deviations, strict=True):
            assert ours[:2] == theirs[:2]
            assert ours.deviations == pytest.approx(theirs.deviations, rel=1e-9)
        for ours, theirs in zip(actual.entropies, expected.entropies, strict=True):
            assert ours[:2] == theirs[:2]
            assert ours[2:] == pytest.approx(theirs[2:], rel=1e-9)
