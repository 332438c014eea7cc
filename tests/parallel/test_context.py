"""Rows cut over ranks: the results of one rank with full rows, for all documents and states."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config, ParallelConfig, StateMode
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.context import local_shard
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed
from tests.parallel.test_states import LAYERS, MODES, ROW_LAYOUTS, STOPPED, VOCABULARY, config_of, losses, resumed
from tests.parallel.test_states_of_recurrences import recurrences
from tests.slow import slow_except

LENGTH = 16
SPAN = {"kind": "span", "heads": 4, "kv_heads": 2, "chunk": [4, 8], "block": 2, "blocks": 1, "eval": "span"}
SPANS = {
    "X": {**SPAN, "conv": 3},
    "Y": {**SPAN, "memory": "shifted"},
    "Z": {**SPAN, "memory": "random", "chunk": 6, "block": 3},
    "L": {**SPAN, "memory": "landmark", "relevance": "previous_chunk"},
    "M": LAYERS["M"],
}
MAMBA2 = {"kind": "mamba2", "state": 4, "head_dim": 8}
SPARSE = {
    "Q": {"kind": "mamba", "state": 4, "sparse": {"keys": 4, "hashes": 3}},
    "I": {**MAMBA2, "groups": 2, "sparse": {"keys": 6, "bins": "sign", "hashes": 2, "target": "mean"}},
    "i": {**MAMBA2, "sparse": {"pattern": "window_dilated", "keys": 4, "stride": 3, "projected": True}},
    "J": {**MAMBA2, "sparse": {"pattern": "sink_window", "keys": 6}},
}
ATTENTION = {"kind": "attention", "heads": 2, "conv": 3}
MODELS = {
    "recurrences": recurrences(StateMode.passing, ParallelConfig()).model,
    "samba": ModelConfig(32, VOCABULARY, "M-SWM", {letter: LAYERS[letter] for letter in "MSW-"}),
    "window of two": ModelConfig(32, VOCABULARY, "WM", {"W": {**ATTENTION, "window": 2}, "M": LAYERS["M"]}),
    "window over shares": ModelConfig(32, VOCABULARY, "WMW", {"W": {**ATTENTION, "window": 11}, "M": LAYERS["M"]}),
    "sparse": ModelConfig(32, VOCABULARY, "QIiJ", SPARSE),
    "span": ModelConfig(32, VOCABULARY, "XYZLMX", SPANS),
    "attention": ModelConfig(32, VOCABULARY, "FSF", {"F": ATTENTION, "S": LAYERS["S"]}),
}
BORDERS = {  # of two rows
    "one document": ([], []),
    "at a cut": ([4], [8]),
    "at every cut": ([4, 8, 12], [12]),
    "beside cuts": ([3, 5], [7, 9]),
    "single tokens": ([4, 5, 6, 8], [1, 2, 15]),
    "across all": ([1], [15]),
}


def rows_with(borders: tuple[list[int], ...] | None) -> Batch:
    """Documents that begin at these places; None: rows are streams."""
    tokens_BT = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    positions_BL = torch.arange(LENGTH).expand(2, -1)
    documents_BL = None
    if borders is not None:
        documents_BL = torch.stack(
            [sum((torch.arange(LENGTH) >= b for b in row), torch.zeros(LENGTH)).int() for row in borders]
        )
    mask_BL = torch.ones(2, LENGTH, dtype=torch.bool)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], mask_BL, SeqInfo(positions_BL, documents_BL))


def outputs_and_gradients(
    seat: Seat, model: ModelConfig, parallel: ParallelConfig, batches: list[Batch]
) -> list[tuple[Tensor, list[Tensor]]]:
    """Return, for each batch, this rank's outputs and its part of every weight's gradient."""
    results = []
    with seat.groups(parallel) as groups:
        built = LanguageModel(architecture(model)).cast(torch.float64)
        initialise(built, 1)
        for batch in batches:
            share = local_shard(batch, groups.context)
            out = built(share.tokens_BL, None, share.seq).output
            weights = [weight for _, weight in built.named_parameters()]
            # a weighting that makes every output count in a way of its own
            places_LB = share.seq.positions_BL.T.unsqueeze(2) + 1.0
            weighed = (out * torch.sin(places_LB * torch.arange(VOCABULARY))).sum()
            gradients = torch.autograd.grad(weighed, weights, materialize_grads=True)
            results.append((out.detach(), [gradient.detach() for gradient in gradients]))
    return results


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_except(MODELS, "recurrences"))
def test_sequence_shards_have_the_outputs_and_gradients_of_one_process(name: str, ranks: int) -> None:
    """Compare in float64, for rows as streams and for rows with documents that begin everywhere."""
    batches = [rows_with(borders) for borders in [None, *BORDERS.values()]]
    (whole,) = run_distributed(outputs_and_gradients, 1, MODELS[name], ParallelConfig(), batches)
    shares = run_distributed(outputs_and_gradients, ranks, MODELS[name], ParallelConfig(context=ranks), batches)
    for index, (out_LBV, gradients) in enumerate(whole):
        together = torch.cat([share[index][0] for share in shares])
        torch.testing.assert_close(together, out_LBV, rtol=1e-9, atol=1e-9)
        for number, gradient in enumerate(gradients):
            total = sum(share[index][1][number] for share in shares)
            torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-9 * float(gradient.norm()))


def span(mode: StateMode, parallel: ParallelConfig) -> Config:
    return config_of(mode, parallel)


def samba(mode: StateMode, parallel: ParallelConfig) -> Config:
    return replace(config_of(mode, parallel), model=MODELS["samba"])


CONFIGS = {"samba": samba, "span": span, "recurrences": recurrences}
CASES = [
    pytest.param(
        name,
        layout,
        mode,
        id=f"{name}-{layout}-{mode}",
    )
    for name in CONFIGS
    for layout in ROW_LAYOUTS
    for mode in MODES
]


@functools.cache
def of_one_process(name: str, mode: StateMode) -> list[float]:
    (losses_of_run,) = run_distributed(losses, 1, CONFIGS[name](mode, ParallelConfig()))
    return losses_of_run


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("name", "layout", "mode"), CASES)
def test_losses_with_carried_states_equal_one_process(name: str, layout: str, mode: StateMode) -> None:
    parallel, ranks = ROW_LAYOUTS[layout]
    for of_rank in run_distributed(losses, ranks, CONFIGS[name](mode, parallel)):
        assert of_rank == pytest.approx(of_one_process(name, mode), rel=1e-4)


PAIRS = [("cp2", "serial"), ("serial", "cp2"), ("cp2", "tp2"), ("dp2", "cp2-dp2"), ("cp2-tp2", "cp2-pp2")]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_run_resumes_with_other_sequence_shards(before: str, after: str, mode: StateMode, tmp_path: Path) -> None:
    continued, _ = resumed(before, after, functools.partial(samba, mode), tmp_path)
    assert continued == pytest.approx(of_one_process("samba", mode)[STOPPED:], rel=1e-4)


def losses_alone(seat: Seat, config: Config) -> list[float]:
    """The losses where nothing is handed over."""
    with patch("hybridtron.parallel.context._exchanged", lambda x, share, hop: torch.zeros_like(x)):
        return losses(seat, config)


@pytest.mark.slow
@pytest.mark.gloo
def test_losses_change_without_the_exchange_between_shares() -> None:
    expected = of_one_process("samba", StateMode.passing)
    actual = run_distributed(losses_alone, 2, samba(StateMode.passing, ParallelConfig(context=2)))[0]
    apart = max(abs(ours - theirs) / theirs for ours, theirs in zip(actual, expected, strict=True))
    assert apart > 100 * 1e-4


@pytest.mark.parametrize(
    ("settings", "key", "code"),
    [
        (["recipe=hax_mamba_130m", "model.layers.M.sparse.centre=sequence"], "parallel.context", "unsupported"),
        (["recipe=laptop", "phases.0.seq_len=255"], "phases.0.seq_len", "not-divisible"),
        (["recipe=laptop", "run.compile=true"], "parallel.context", "unsupported"),
        (["recipe=llama2_438m", "states.mode=tbtt"], "states.carry", "unsupported"),
    ],
)
def test_unsupported_context_parallelism_is_refused(settings: list[str], key: str, code: str) -> None:
    problems = check(RunPlan.of(load([*settings, "parallel.context=2"])), 2)
    assert (key, code) in [(problem.key, problem.code) for problem in problems]
