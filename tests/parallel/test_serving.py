"""Generation over tensor- and pipeline-parallel ranks writes what one process writes."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.schema import ParallelConfig
from hybridtron.engine.serving import slices, staged_reader
from hybridtron.model.generate import Prompts, continued, reader
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.model.sampling import Sampling
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.parallel.test_states import LAYERS

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


def written(seat: Seat, model: ModelConfig, parallel: ParallelConfig) -> list[list[int]]:
    with seat.groups(parallel) as groups:
        parts = slices(model, parallel, groups, torch.float64)
        for part in parts:
            initialise(part, seed=1)
        read = staged_reader(parts, model, groups, torch.float64)
        return list(islice(continued(read, Prompts.of(PROMPTS), SAMPLING, chunk=5), 10))


@pytest.mark.gloo
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_writes_what_one_process_writes(layout: str, tied: bool) -> None:
    model, parallel = model_config(tied), LAYOUTS[layout]
    whole = LanguageModel(model).double().eval()
    initialise(whole, seed=1)
    expected = list(islice(continued(reader(whole), Prompts.of(PROMPTS), SAMPLING), 10))
    assert len({token for step in expected for token in step}) > 5
    found = run_distributed(written, parallel.tensor * parallel.pipeline, model, parallel)
    assert found == [expected] * len(found)
