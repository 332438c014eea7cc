"""Rows and prompts whose tokens are divided over ranks are read as one process reads them, and continued alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import ParallelConfig
from hybridtron.evaluate.length import fitting_chunk, token_losses
from hybridtron.evaluate.loaded_model import require_layout
from hybridtron.inference import context_reader
from hybridtron.inference.context_reader import _part
from hybridtron.inference.generate import CHUNK, Prompts, continue_prompts
from hybridtron.inference.reader import Reader, reader
from hybridtron.model.stack import States
from hybridtron.parallel.context import all_gather_shards
from hybridtron.parallel.mesh import RankGroup
from hybridtron.parallel.pool import Seat
from hybridtron.problems import ConfigError
from tests.distributed import run_distributed
from tests.inference.test_parallel_reader import Measured, cut_model, measured, whole_model
from tests.parallel.test_context import MODELS, SPANS
from tests.parallel.test_states import LAYERS, VOCABULARY

STRICT = {letter: {"relevance": "previous_chunk", **options} for letter, options in SPANS.items() if letter != "M"}
READ = {name: MODELS[name] for name in ("recurrences", "sparse", "attention", "window over shares", "window of two")}
READ |= {
    "samba": ModelConfig(32, VOCABULARY, "M-SXWM", LAYERS),  # of which span attention is full outside training
    "span": ModelConfig(32, VOCABULARY, "XYZLMX", {**STRICT, "M": LAYERS["M"]}),
}
LAYOUTS = {
    "cp2": ParallelConfig(context=2),
    "cp4": ParallelConfig(context=4),
    "cp2-tp2": ParallelConfig(context=2, tensor=2),
    "cp2-pp2": ParallelConfig(context=2, pipeline=2),
}
FAST = [("samba", "cp2")]
CASES = [
    pytest.param(name, layout, marks=[pytest.mark.slow] * ((name, layout) not in FAST), id=f"{name}-{layout}")
    for name in READ
    for layout in LAYOUTS
    if (name, layout) != ("window of two", "cp2-tp2")  # its two heads are read by two ranks in another model
]

# of a batch: longer than a share, shorter, a single token; beginning at a cut, where shares end, and inside
PROMPTS = [[(7 * i + 3) % VOCABULARY for i in range(count)] for count in (24, 12, 5, 1, 20, 3, 2)]
PIECES = (None, 8, 5)  # shared out evenly or not; the last of fewer tokens than there are ranks, or of a few more


class Written(NamedTuple):
    """Results for a batch of prompts: the next logits, the states, and the generated tokens."""

    logits_BV: Tensor
    states: States
    tokens: list[list[int]]


def written(read: Reader, pieces: tuple[int | None, ...] = PIECES) -> list[Written]:
    """Read and continue the prompts, in pieces of each length."""
    results = []
    for piece in pieces:
        prompts = Prompts.of(PROMPTS)
        with torch.no_grad():
            logits_BV, states = prompts.read(read.read, piece or len(PROMPTS[0]))
        results.append(Written(logits_BV, real(states), list(islice(continue_prompts(read, prompts, chunk=piece), 6))))
    return results


def real(states: States) -> States:
    """Replace the padding among keys and values by zeros."""

    def of_layer(state: dict[str, Tensor]) -> dict[str, Tensor]:
        if "length" not in state:
            return state
        count = state["keys"].shape[1]
        is_real_BM = torch.arange(count, 0, -1) <= state["length"][:, None]
        kept = {name: torch.where(is_real_BM[..., None, None], state[name], 0) for name in ("keys", "values")}
        return {**state, **kept}

    return {layer: of_layer(state) for layer, state in states.items()}


def both(seat: Seat, model: ModelConfig, parallel: ParallelConfig) -> tuple[list[Written], Measured]:
    with cut_model(seat, model, parallel) as read:
        return written(read), measured(read)


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_rank_reads_the_results_of_one_process(name: str, layout: str) -> None:
    """Prompts of unequal length in pieces of every kind, the states after them, and all that is measured of rows."""
    model = READ[name]
    parallel = LAYOUTS[layout]
    alone = reader(whole_model(model))
    expected = written(alone)
    expected_rows = measured(alone)
    assert len({token for text in expected for step in text.tokens for token in step}) >= 5
    for texts, rows in run_distributed(both, parallel.model_ranks, model, parallel, timeout_s=300):
        same_texts(texts, expected)
        if parallel.tensor == 1:
            same_states(texts, expected)
        same_rows(rows, expected_rows)


def same_texts(actual: list[Written], expected: list[Written]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.logits_BV, theirs.logits_BV, rtol=1e-9, atol=1e-9)
        assert ours.tokens == theirs.tokens


def same_states(actual: list[Written], expected: list[Written]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for layer, state in ours.states.items():
            assert state.keys() == theirs.states[layer].keys()
            for name, part in state.items():
                torch.testing.assert_close(part, theirs.states[layer][name], rtol=1e-9, atol=1e-9)


def same_rows(actual: Measured, expected: Measured) -> None:
    torch.testing.assert_close(actual.losses_LB, expected.losses_LB, rtol=1e-9, atol=1e-9)
    assert torch.equal(actual.likeliest_BL, expected.likeliest_BL)
    for ours, theirs in zip(actual.remembrance, expected.remembrance, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)  # a root of a difference of what is nearly equal
    for ours, theirs in zip(actual.deviations, expected.deviations, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours.deviations == pytest.approx(theirs.deviations, rel=1e-9)
    for ours, theirs in zip(actual.entropies, expected.entropies, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2:] == pytest.approx(theirs[2:], rel=1e-9)


HANDED_OVER = "hybridtron.parallel.context._exchanged"
FAULTS: dict[str, dict[str, Callable]] = {
    "nothing is handed over": {HANDED_OVER: lambda x, share, hop: torch.zeros_like(x)},
    "states of each rank's own share": {"broadcast_row_states": lambda states, before, length, context: states},
    "logits of each rank's own share": {"broadcast_from_last": lambda logits, context: logits},
    "losses in another order": {
        "all_gather_shards": lambda x_LB, context: torch.cat(all_gather_shards(x_LB, context).chunk(context.size)[::-1])
    },
    "the rest of a piece from zeros": {"_part": lambda tokens, seq, here, states: (*_part(tokens, seq, here, None),)},
    "a row that begins with the rest continues": {"reset_rows": lambda states, rows: states},
    "keys of the row before those from before": {
        "_append": lambda before, sent: torch.cat((sent, before), 1),
    },
}


def faulty(seat: Seat, fault: str, model: ModelConfig) -> tuple[list[Written], Measured]:
    with ExitStack() as stack:
        for name, wrong in FAULTS[fault].items():
            target = name
            if name != HANDED_OVER:
                target = f"{context_reader.__name__}.{name}"
            stack.enter_context(patch(target, wrong))
        return both(seat, model, ParallelConfig(context=2))


@functools.cache
def read_by_one_process() -> tuple[list[Written], Measured]:
    alone = reader(whole_model(READ["attention"]))
    return written(alone), measured(alone)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(fault: str) -> None:
    """Some rank notices the fault by the comparisons of the test above."""
    model = READ["attention"]
    expected, expected_rows = read_by_one_process()
    faults = []
    for texts, rows in run_distributed(faulty, 2, fault, model, timeout_s=300):
        try:
            same_texts(texts, expected)
            same_states(texts, expected)
            same_rows(rows, expected_rows)
        except AssertionError as error:
            faults.append(error)
    assert faults


OWN_CHOICE = ModelConfig(32, VOCABULARY, "XM", {"X": SPANS["X"], "M": LAYERS["M"]})  # chunks of 8 choose for themselves


def losses(seat: Seat, parallel: ParallelConfig, rows_BT: Tensor) -> Tensor:
    with cut_model(seat, OWN_CHOICE, parallel) as read:
        return token_losses(read, rows_BT, 16)


@pytest.mark.gloo
def test_span_attention_is_sharded_at_ends_of_chunks() -> None:
    """A row of 43 tokens in pieces of 16: the last 11 of them are 8 by shares and 3 alike."""
    rows_BT = torch.randint(VOCABULARY, (2, 44), generator=torch.Generator().manual_seed(0))
    expected = token_losses(reader(whole_model(OWN_CHOICE)), rows_BT, 16)
    for losses_LB in run_distributed(losses, 2, ParallelConfig(context=2), rows_BT, timeout_s=300):
        torch.testing.assert_close(losses_LB, expected, rtol=1e-9, atol=1e-9)


def sent(seat: Seat, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the keys and values that the last rank sends for full attention, in pieces of 8 tokens."""
    shapes = []
    model = ModelConfig(32, VOCABULARY, "F", {"F": {"kind": "attention", "heads": 2}})
    heard = patch.object(context_reader, "fill_from_last_shard", lambda x, context: shapes.append(tuple(x.shape)))
    with cut_model(seat, model, parallel) as read, heard:
        Prompts(torch.zeros(3, 24, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)).read(read.read, 8)
    return [shape for shape in shapes if len(shape) == 4]


@pytest.mark.gloo
def test_keys_held_by_all_ranks_are_not_sent_again() -> None:
    for shapes in run_distributed(sent, 2, ParallelConfig(context=2)):
        assert shapes == [(3, 8, 2, 16)] * 2 * 3


def test_prompts_are_read_by_a_chunk_of_every_rank() -> None:
    read_at_once = []
    context = RankGroup(4, 0)

    def forward(tokens_BL: Tensor, *_: object) -> tuple[Tensor, States]:
        read_at_once.append(tokens_BL.shape[1])
        return torch.zeros(len(tokens_BL), VOCABULARY), {}

    read = Reader(forward, [], VOCABULARY, torch.float32, torch.device("cpu"), context=context)
    prompts = Prompts(torch.zeros(2, 5 * CHUNK, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    next(continue_prompts(read, prompts))
    assert read_at_once == [2 * CHUNK, 2 * CHUNK, CHUNK]  # 4 ranks, 2 rows
    model = READ["samba"]
    assert fitting_chunk(architecture(model), 3, 4) == 4 * fitting_chunk(architecture(model), 3)


def test_model_that_can_not_be_sharded_by_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load(["recipe=hax_mamba_130m"])
    require_layout(architecture(config.model), ParallelConfig(context=2))
    config = load(["recipe=hax_mamba_130m", "model.layers.M.sparse.centre=sequence"])
    with pytest.raises(ConfigError) as refused:
        require_layout(architecture(config.model), ParallelConfig(context=2))
    assert [(p.key, p.code) for p in refused.value.problems] == [("parallel.context", "unsupported")]


def test_evaluation_under_context_parallelism_is_allowed() -> None:
    assert check(RunPlan.of(load(["recipe=laptop", "run.evaluate=samba", "parallel.context=2"])), 2) == []
