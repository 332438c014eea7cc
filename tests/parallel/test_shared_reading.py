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
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.schema import ParallelConfig
from hybridtron.engine import shared_reading
from hybridtron.engine.shared_reading import _part
from hybridtron.evaluate.length import fitting_chunk, token_losses
from hybridtron.evaluate.served import require_layout
from hybridtron.model.generate import CHUNK, Prompts, Reader, continued, reader
from hybridtron.model.stack import States
from hybridtron.parallel.context import ContextGroup, of_all_shares
from hybridtron.parallel.pool import Seat
from hybridtron.problems import ConfigError
from tests.distributed import run_distributed
from tests.parallel.test_context import MODELS, SPANS
from tests.parallel.test_serving import Measured, cut_model, measured, whole_model
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
FAST = [
    ("samba", "cp2"),
    ("attention", "cp2"),
    ("span", "cp2"),
    ("attention", "cp2-tp2"),
]
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in FAST else pytest.mark.slow, id=f"{name}-{layout}")
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
    found = []
    for piece in pieces:
        prompts = Prompts.of(PROMPTS)
        with torch.no_grad():
            logits_BV, states = prompts.read(read.read, piece or len(PROMPTS[0]))
        found.append(Written(logits_BV, real(states), list(islice(continued(read, prompts, chunk=piece), 6))))
    return found


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
def test_every_rank_reads_what_one_process_reads(name: str, layout: str) -> None:
    """Prompts of unequal length in pieces of every kind, the states after them, and all that is measured of rows."""
    model = READ[name]
    parallel = LAYOUTS[layout]
    alone = reader(whole_model(model))
    expected = written(alone)
    expected_rows = measured(alone)
    assert len({token for one in expected for step in one.tokens for token in step}) >= 5
    for found, found_rows in run_distributed(both, parallel.model_ranks, model, parallel, timeout_s=300):
        same_texts(found, expected, states=parallel.tensor == 1)
        same_rows(found_rows, expected_rows)


def same_texts(found: list[Written], expected: list[Written], states: bool = True) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logits_BV, other.logits_BV, rtol=1e-9, atol=1e-9)
        assert one.tokens == other.tokens
        for layer, state in one.states.items() if states else ():
            assert state.keys() == other.states[layer].keys()
            for name, part in state.items():
                torch.testing.assert_close(part, other.states[layer][name], rtol=1e-9, atol=1e-9)


def same_rows(found: Measured, expected: Measured) -> None:
    torch.testing.assert_close(found.losses_LB, expected.losses_LB, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.likeliest_BL, expected.likeliest_BL)
    for one, other in zip(found.remembrance, expected.remembrance, strict=True):
        assert one == pytest.approx(other, abs=1e-6)  # a root of a difference of what is nearly equal
    for one, other in zip(found.deviations, expected.deviations, strict=True):
        assert one[:2] == other[:2]
        assert one.deviations == pytest.approx(other.deviations, rel=1e-9)
    assert [one[:2] for one in found.entropies] == [one[:2] for one in expected.entropies]
    for one, other in zip(found.entropies, expected.entropies, strict=True):
        assert one[2:] == pytest.approx(other[2:], rel=1e-9)


HANDED_OVER = "hybridtron.parallel.context._exchanged"
FAULTS: dict[str, dict[str, Callable]] = {
    "nothing is handed over": {HANDED_OVER: lambda x, share, hop: torch.zeros_like(x)},
    "states of each rank's own share": {"states_of_row": lambda own, before, length, context: own},
    "logits of each rank's own share": {"of_last_share": lambda made, context: made},
    "losses in another order": {
        "of_all_shares": lambda made_LB, context: torch.cat(of_all_shares(made_LB, context).chunk(context.size)[::-1])
    },
    "the rest of a piece from zeros": {"_part": lambda tokens, seq, here, states: (*_part(tokens, seq, here, None),)},
    "a row that begins with the rest continues": {"from_zero": lambda states, rows: states},
    "keys of the row before those from before": {
        "_behind": lambda before, sent: torch.cat((sent, before), 1),
    },
}


def faulty(seat: Seat, fault: str, model: ModelConfig) -> tuple[list[Written], Measured]:
    with ExitStack() as stack:
        for name, wrong in FAULTS[fault].items():
            stack.enter_context(patch(name if name == HANDED_OVER else f"{shared_reading.__name__}.{name}", wrong))
        return both(seat, model, ParallelConfig(context=2))


@functools.cache
def read_by_one_process() -> tuple[list[Written], Measured]:
    alone = reader(whole_model(READ["attention"]))
    return written(alone), measured(alone)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.slow if turn % 2 else []) for turn, name in enumerate(FAULTS)]
)
def test_a_planted_fault_is_seen(fault: str) -> None:
    """Some rank notices the fault by the comparisons of the test above."""
    model = READ["attention"]
    expected, rows = read_by_one_process()
    seen = 0
    for found, found_rows in run_distributed(faulty, 2, fault, model, timeout_s=300):
        for compare, given in ((same_texts, (found, expected)), (same_rows, (found_rows, rows))):
            try:
                compare(*given)
            except AssertionError:
                seen += 1
    assert seen


OWN_CHOICE = ModelConfig(32, VOCABULARY, "XM", {"X": SPANS["X"], "M": LAYERS["M"]})  # chunks of 8 choose for themselves


def losses(seat: Seat, parallel: ParallelConfig, rows_BT: Tensor) -> Tensor:
    with cut_model(seat, OWN_CHOICE, parallel) as read:
        return token_losses(read, rows_BT, 16)


@pytest.mark.gloo
def test_spans_are_cut_where_their_chunks_end() -> None:
    """A row of 43 tokens in pieces of 16: the last 11 of them are 8 by shares and 3 alike."""
    rows_BT = torch.randint(VOCABULARY, (2, 44), generator=torch.Generator().manual_seed(0))
    expected = token_losses(reader(whole_model(OWN_CHOICE)), rows_BT, 16)
    for found in run_distributed(losses, 2, ParallelConfig(context=2), rows_BT, timeout_s=300):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def sent(seat: Seat, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Return the shapes of the keys and values that the last rank sends for full attention, in pieces of 8 tokens."""
    found = []
    model = ModelConfig(32, VOCABULARY, "F", {"F": {"kind": "attention", "heads": 2}})
    heard = patch.object(shared_reading, "fill_from_last_share", lambda x, context: found.append(tuple(x.shape)))
    with cut_model(seat, model, parallel) as read, heard:
        Prompts(torch.zeros(3, 24, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)).read(read.read, 8)
    return [shape for shape in found if len(shape) == 4]


@pytest.mark.gloo
def test_keys_that_all_ranks_have_are_not_sent_again() -> None:
    for found in run_distributed(sent, 2, ParallelConfig(context=2)):
        assert found == [(3, 8, 2, 16)] * 2 * 3


def test_every_rank_reads_a_chunk_at_a_time() -> None:
    read_at_once = []
    context = ContextGroup(4, 0)

    def forward(tokens_BL: Tensor, *_: object) -> tuple[Tensor, States]:
        read_at_once.append(tokens_BL.shape[1])
        return torch.zeros(len(tokens_BL), VOCABULARY), {}

    read = Reader(forward, [], VOCABULARY, torch.float32, torch.device("cpu"), context=context)
    prompts = Prompts(torch.zeros(2, 5 * CHUNK, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    next(continued(read, prompts))
    assert read_at_once == [2 * CHUNK, 2 * CHUNK, CHUNK]  # 4 ranks, 2 rows
    model = READ["samba"]
    assert fitting_chunk(model, 3, 4) == 4 * fitting_chunk(model, 3)


def test_a_model_that_can_not_share_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load(["recipe=hax_mamba_130m"])
    require_layout(config, ParallelConfig(context=2))
    config = load(["recipe=hax_mamba_130m", "model.layers.M.sparse.centre=sequence"])
    with pytest.raises(ConfigError) as refused:
        require_layout(config, ParallelConfig(context=2))
    assert [(p.key, p.code) for p in refused.value.problems] == [("parallel.context", "unsupported")]


def test_a_run_whose_rows_are_shared_out_may_evaluate() -> None:
    assert check(load(["recipe=laptop", "run.evaluate=samba", "parallel.context=2"]), 2) == []
