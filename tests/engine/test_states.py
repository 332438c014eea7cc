"""Carried states on one process: the initial states in each mode, which a refused step does not change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hybridtron.config.check import check
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, PhaseConfig, Precision, PrecisionConfig, StateKind, StateMode, StatesConfig
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.engine.engine import Engine
from hybridtron.engine.states import StateCarrier
from hybridtron.parallel.groups import Groups
from hybridtron.planning.memory import plan
from tests.conftest import random_batch, small_config, small_model, small_run

PATTERN = "M-WS"
LANES = 4
ROWS = 2
LENGTH = 12


def run_of(**states: object) -> Config:
    phase = PhaseConfig(tokens="1M", seq_len=LENGTH, global_batch=LANES, micro_batch=ROWS, lr=1e-3)
    states["mode"] = StateMode(states["mode"])
    carried = StatesConfig(**states)  # type: ignore[arg-type]
    return dataclasses.replace(small_run(small_config(PATTERN)), states=carried, phases=[phase])


def engine_of(alone: Groups, **states: object) -> Engine:
    config = run_of(**states)
    assert not check(RunPlan.of(config))
    engine = Engine(resolve(config)[0], alone)
    engine.start_phase(engine.phase, range(LANES))
    return engine


def carrier_of(engine: Engine) -> StateCarrier:
    assert engine.carrier is not None
    return engine.carrier


def step_of(engine: Engine, number: int, batches: list[Batch], lr: float = 0.0) -> float:
    loss = engine.forward_backward(batches, number).mean.item()
    engine.step(lr)
    return loss


def lanes_of(length: int, steps: int) -> Batch:
    """Return one long stream for each lane."""
    return random_batch(rows=LANES, length=length * steps)


def chunk_of(stream: Batch, step: int, length: int) -> list[Batch]:
    """Return each lane's chunk in a step, two lanes per micro-batch. Every token but the lane's first continues."""
    here = slice(step * length, (step + 1) * length)
    tokens_BL, labels_BL, mask_BL = (t[:, here] for t in (stream.tokens_BL, stream.labels_BL, stream.mask_BL))
    seq = SeqInfo.stream(LANES, length, start=step * length)
    return Batch(tokens_BL, labels_BL, mask_BL, seq, torch.full((LANES,), step > 0)).split(ROWS)


def test_losses_of_tbtt_chunks_equal_those_of_the_whole_stream(alone: Groups) -> None:
    """The losses of consecutive chunks with carried states add up to the loss of the full stream."""
    engine = engine_of(alone, mode="tbtt")
    stream = lanes_of(LENGTH, 5)
    plain = small_model(PATTERN)
    plain.load_state_dict(dict(engine.weights()))
    logits = plain(stream.tokens_BL, None, stream.seq).output.transpose(0, 1)
    for step in range(5):
        here = slice(step * LENGTH, (step + 1) * LENGTH)
        mask = stream.mask_BL[:, here]
        expected = torch.nn.functional.cross_entropy(logits[:, here][mask], stream.labels_BL[:, here][mask])
        loss = step_of(engine, step, chunk_of(stream, step, LENGTH))
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_row_that_begins_a_document_starts_from_zero_states(alone: Groups) -> None:
    engine = engine_of(alone, mode="tbtt")
    stream = lanes_of(LENGTH, 2)
    step_of(engine, 0, chunk_of(stream, 0, LENGTH))
    batches = chunk_of(stream, 1, LENGTH)
    fresh = [dataclasses.replace(batch, continues_B=torch.tensor([False, False])) for batch in batches]
    from_zero = engine_of(alone, mode="tbtt")
    assert engine.forward_backward(fresh, 1).mean == from_zero.forward_backward(fresh, 0).mean
    assert engine.forward_backward(batches, 1).mean != from_zero.forward_backward(batches, 0).mean


def test_chunks_within_a_step_equal_separate_steps(alone: Groups) -> None:
    stream = lanes_of(LENGTH, 4)
    by_steps = engine_of(alone, mode="tbtt")
    phase = dataclasses.replace(by_steps.config.phases[0], global_batch=2 * LANES)
    by_chunks = Engine(resolve(dataclasses.replace(run_of(mode="tbtt", chunks=2), phases=[phase]))[0], alone)
    by_chunks.start_phase(by_chunks.phase, range(LANES))
    single = [step_of(by_steps, step, chunk_of(stream, step, LENGTH)) for step in range(4)]
    double = [
        by_chunks.forward_backward([*chunk_of(stream, 2 * s, LENGTH), *chunk_of(stream, 2 * s + 1, LENGTH)], s)
        for s in range(1)
    ]
    tokens = [stream.mask_BL[:, s * LENGTH : (s + 1) * LENGTH].sum().item() for s in range(2)]
    expected = sum(loss * count for loss, count in zip(single[:2], tokens, strict=True)) / sum(tokens)
    assert double[0].mean.item() == pytest.approx(expected, rel=1e-5)
    by_chunks.step(0.0)
    held = carrier_of(by_chunks).lane_states
    after_two = engine_of(alone, mode="tbtt")
    for step in range(2):
        step_of(after_two, step, chunk_of(stream, step, LENGTH))
    for layer, parts in carrier_of(after_two).lane_states.items():
        for name, tensor in parts.items():
            torch.testing.assert_close(held[layer][name], tensor)


def test_passing_mode_hands_on_recurrent_states_of_the_same_lane_alone(alone: Groups) -> None:
    engine = engine_of(alone, mode="passing", dropout=0.0)
    first, second = (random_batch(rows=LANES, length=LENGTH).split(ROWS) for _ in range(2))
    step_of(engine, 0, first)
    carrier = carrier_of(engine)
    assert {layer: set(parts) for layer, parts in carrier.lane_states.items()} == {0: {"ssm"}, 3: {"ssm"}}
    plain = small_model(PATTERN)
    plain.load_state_dict(dict(engine.weights()))
    ended = [plain(batch.tokens_BL, None, batch.seq).states for batch in first]
    for layer in (0, 3):
        torch.testing.assert_close(
            carrier.lane_states[layer]["ssm"], torch.cat([states[layer]["ssm"] for states in ended])
        )
    passed = [{layer: {"ssm": states[layer]["ssm"]} for layer in (0, 3)} for states in ended]
    logits = [plain(batch.tokens_BL, state, batch.seq).output for batch, state in zip(second, passed, strict=True)]
    losses = [
        torch.nn.functional.cross_entropy(of_rows.transpose(0, 1)[b.mask_BL], b.labels_BL[b.mask_BL], reduction="sum")
        for of_rows, b in zip(logits, second, strict=True)
    ]
    expected = (sum(losses) / sum(b.mask_BL.sum() for b in second)).item()
    assert step_of(engine, 1, second) == pytest.approx(expected, rel=1e-5)


def test_state_dropout_drops_a_lane_on_all_layers(alone: Groups) -> None:
    engine = engine_of(alone, mode="passing", dropout=0.5)
    carrier = carrier_of(engine)
    step_of(engine, 0, random_batch(rows=LANES, length=LENGTH).split(ROWS))
    kept = []
    for step in range(1, 60):
        carrier.begin(step)
        for number in range(2):
            states = carrier.initial(0, number, random_batch(rows=ROWS, length=LENGTH))
            assert states is not None
            first, last = (states[layer]["ssm"].flatten(1).any(1) for layer in (0, 3))
            assert torch.equal(first, last)  # a lane is dropped on every layer or on none
            kept += first.tolist()
    assert 0.35 < sum(kept) / len(kept) < 0.65


def test_random_noise_has_its_deviation_and_is_drawn_by_step(alone: Groups) -> None:
    def drawn(step: int) -> torch.Tensor:
        carrier.begin(step)
        states = [carrier.initial(0, number, random_batch(rows=ROWS, length=LENGTH)) for number in range(2)]
        return torch.cat([state[0]["ssm"] for state in states if state is not None])

    carrier = carrier_of(engine_of(alone, mode="random", sigma=3.0))
    assert torch.equal(drawn(5), drawn(5))
    noise = torch.stack([drawn(step) for step in range(40)])
    assert noise.std().item() == pytest.approx(3, rel=0.05)
    assert noise.mean().item() == pytest.approx(0, abs=0.1)
    assert len(noise[:, :, 0, 0].unique()) == 40 * LANES


def test_fitted_noise_has_the_moments_of_final_states(alone: Groups) -> None:
    engine = engine_of(alone, mode="fitted", beta=0.1)
    batches = random_batch(rows=LANES, length=LENGTH).split(ROWS)
    assert carrier_of(engine).initial(0, 0, batches[0]) is None  # the first step starts from zero
    plain = small_model(PATTERN)
    plain.load_state_dict(dict(engine.weights()))
    ended = [plain(batch.tokens_BL, None, batch.seq).states for batch in batches]
    step_of(engine, 0, batches)
    of_layer = torch.cat([states[0]["ssm"] for states in ended]).double()
    of_heads = torch.cat([states[3]["ssm"] for states in ended]).double().transpose(0, 1).flatten(1)
    moments = carrier_of(engine).moments
    torch.testing.assert_close(
        moments[0], 0.9 * torch.stack([of_layer.mean(), of_layer.var(correction=0)])[:, None], rtol=1e-5, atol=1e-9
    )
    expected = 0.9 * torch.stack([of_heads.mean(1), of_heads.var(1, correction=0)])
    torch.testing.assert_close(moments[3], expected, rtol=1e-5, atol=1e-9)
    noise = []
    for step in range(1, 200):
        carrier_of(engine).begin(step)
        states = carrier_of(engine).initial(0, 0, batches[0])
        assert states is not None
        noise.append(states[3]["ssm"].transpose(0, 1).flatten(1))
    drawn = torch.cat(noise, dim=1).double()
    torch.testing.assert_close(drawn.var(1), expected[1], rtol=0.2, atol=0)
    torch.testing.assert_close(drawn.mean(1), expected[0], rtol=0.5, atol=0.1 * expected[1].sqrt().max().item())


def test_variance_of_fitted_noise_is_never_negative(alone: Groups) -> None:
    """Use three equal values. Their mean square is rounded down, and their mean is rounded up."""
    carrier = engine_of(alone, mode="fitted").carrier
    assert carrier is not None
    sums_31 = torch.tensor([[3.0], [0.1 + 0.1 + 0.1], [3 * 0.1**2]], dtype=torch.float64)
    assert sums_31[2] / 3 < (sums_31[1] / 3) ** 2
    carrier._sums = {layer: sums_31 for layers in carrier.chunks for layer in layers}
    carrier._measure()
    assert carrier.moments
    assert all((variance_H >= 0).all() for _, variance_H in carrier.moments.values())


@pytest.mark.parametrize("mode", ["passing", "tbtt", "fitted"])
def test_refused_step_keeps_states_and_moments(alone: Groups, mode: str) -> None:
    engine = engine_of(alone, mode=mode)
    stream = lanes_of(LENGTH, 3)
    step_of(engine, 0, chunk_of(stream, 0, LENGTH))
    carrier = carrier_of(engine)
    before = {layer: dict(parts) for layer, parts in carrier.lane_states.items()}, dict(carrier.moments)
    engine.forward_backward(chunk_of(stream, 1, LENGTH), 1)
    engine.stages[0].model.get_parameter("layers.0.mixer.D").main_grad.fill_(torch.nan)  # type: ignore[attr-defined]
    assert engine.step(1e-3)[1] is False
    for layer, parts in before[0].items():
        assert all(carrier.lane_states[layer][name] is tensor for name, tensor in parts.items())
    assert all(carrier.moments[layer] is moments for layer, moments in before[1].items())


def test_lane_whose_state_is_not_finite_restarts_alone(alone: Groups) -> None:
    engine = engine_of(alone, mode="tbtt")
    stream = lanes_of(LENGTH, 2)
    engine.forward_backward(chunk_of(stream, 0, LENGTH), 0)
    carrier = carrier_of(engine)
    carrier._final_states[0, 1][3]["ssm"][0, 0, 0, 0] = torch.inf  # lane 2
    engine.step(0.0)
    assert carrier.restarts == engine.restarted_lanes == 1
    for parts in carrier.lane_states.values():
        for tensor in parts.values():
            assert not tensor[2].any()
            assert tensor[[0, 1, 3]].any()


def test_restarts_are_counted_for_accepted_steps_alone(alone: Groups) -> None:
    engine = engine_of(alone, mode="passing")
    stream = lanes_of(LENGTH, 3)
    carrier = carrier_of(engine)
    carrier.restarts = torch.tensor(5)  # as a checkpoint brings it
    for step, (broken, restarts) in enumerate([(True, 5), (True, 5), (False, 6)]):
        engine.forward_backward(chunk_of(stream, step, LENGTH), step)
        carrier._final_states[0, 0][0]["ssm"][1, 0, 0] = torch.nan
        if broken:
            engine.stages[0].model.get_parameter("layers.0.mixer.D").main_grad.fill_(torch.nan)  # type: ignore[attr-defined]
        engine.step(0.0)
        assert engine.restarted_lanes == restarts
    for mode in ("zero", "fitted"):
        assert engine_of(alone, mode=mode).restarted_lanes is None


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.fp8_block])  # too small for it
def test_bytes_of_carried_states_equal_the_plan(alone: Groups, precision: Precision) -> None:
    """Only states are kept, not the tensors that they were cut from, such as the row's keys."""
    config = run_of(mode="tbtt")
    config.precision = PrecisionConfig(precision, emulate=True)
    engine = Engine(resolve(config)[0], alone)
    engine.start_phase(engine.phase, range(LANES))
    stream = lanes_of(LENGTH, 2)
    step_of(engine, 0, chunk_of(stream, 0, LENGTH))
    engine.forward_backward(chunk_of(stream, 1, LENGTH), 1)
    carrier = carrier_of(engine)
    parts = [part for states in (carrier.lane_states, *carrier._final_states.values()) for part in states.values()]
    kept = sum(tensor.untyped_storage().nbytes() for part in parts for tensor in part.values())
    (rank,) = plan(resolve(config)[0], 1).ranks
    assert kept == rank.memory.states > 0


def test_states_of_chosen_layers_and_kinds_are_carried(alone: Groups) -> None:
    engine = engine_of(alone, mode="tbtt", carry=[StateKind.conv, StateKind.ssm], layers=[2, 3])
    step_of(engine, 0, chunk_of(lanes_of(LENGTH, 1), 0, LENGTH))
    assert {layer: set(parts) for layer, parts in carrier_of(engine).lane_states.items()} == {
        3: {"ssm", "x_conv", "bc_conv"}
    }


@pytest.mark.parametrize(
    ("states", "key", "code"),
    [
        ({"mode": "passing", "carry": ["ssm", "kv"]}, "states.carry", "conflict"),
        ({"mode": "random", "carry": ["ssm", "conv"]}, "states.carry", "conflict"),
        ({"mode": "passing", "dropout": 1.0}, "states.dropout", "out-of-range"),
        ({"mode": "fitted", "beta": -0.1}, "states.beta", "out-of-range"),
        ({"mode": "random", "sigma": -1.0}, "states.sigma", "out-of-range"),
        ({"mode": "tbtt", "chunks": 3}, "states.chunks", "not-divisible"),
        ({"mode": "tbtt", "chunks": 4}, "states.chunks", "not-divisible"),
        ({"mode": "passing", "chunks": 2}, "states.chunks", "needs-other-key"),
        ({"mode": "passing", "layers": [1]}, "states.mode", "no-effect"),
        ({"mode": "passing", "layers": [9]}, "states.layers", "out-of-range"),
    ],
)
def test_states_that_can_not_be_carried_are_reported(states: dict[str, object], key: str, code: str) -> None:
    assert (key, code) in [(problem.key, problem.code) for problem in check(RunPlan.of(run_of(**states)))]


def test_keys_of_full_attention_can_not_be_carried(alone: Groups) -> None:
    config = dataclasses.replace(run_of(mode=StateMode.tbtt), model=small_config("MF"))
    assert ("states.carry", "unsupported") in [(problem.key, problem.code) for problem in check(RunPlan.of(config))]
