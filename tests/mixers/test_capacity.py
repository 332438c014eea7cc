"""Experts with a capacity: which choices of a row are dropped, by a loop over its tokens, and what that depends on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.mixers.base import Mixer, MixerOutput
from hybridtron.mixers.moe import MoE
from hybridtron.ops.dispatch import force
from hybridtron.problems import ConfigError
from tests.mixers.test_contract import LENGTH, SIZES, build, evaluated, seq_info
from tests.ops.experts import brute

ROWS = 3
DROPLESS = MoESpec(experts=4, top_k=2, hidden=8, z_loss=0.01)
SPECS = {
    "softmax": dataclasses.replace(DROPLESS, capacity=0.75),
    "sigmoid": MoESpec(
        experts=8,
        top_k=3,
        hidden=6,
        activation="squared_relu",
        scores="sigmoid",
        scale=2.5,
        groups=4,
        group_limit=2,
        balance="bias",
        capacity=1.0,
    ),
}
BOTH = pytest.mark.parametrize("name", SPECS)


def moe(spec: MoESpec) -> MoE:
    mixer = build(spec)
    assert isinstance(mixer, MoE)
    return mixer


def tokens() -> Tensor:
    return torch.randn(LENGTH, ROWS, SIZES.width, dtype=torch.float64)


def trained(mixer: Mixer, x_LBD: Tensor) -> MixerOutput:
    return mixer(x_LBD, None, seq_info(ROWS, LENGTH))


def by_hand(mixer: MoE, x_LBD: Tensor) -> tuple[Tensor, int]:
    """Return the output, and the number of dropped choices, by a loop over each row's tokens."""
    spec = mixer.spec
    most = spec.most_of_row(LENGTH)
    correction = mixer.correction.detach() if spec.corrected else None
    rows = []
    dropped = 0
    for x_LD in x_LBD.unbind(1):
        chosen, weights = brute.routed(x_LD @ mixer.router.T, correction, mixer.options)
        taken = [0] * spec.experts
        for experts, factors in zip(chosen, weights, strict=True):
            for k, expert in enumerate(experts):
                if taken[expert] == most:
                    factors[k] = 0.0
                    dropped += 1
                else:
                    taken[expert] += 1
        rows.append(brute.mixed(x_LD, chosen, weights, mixer.gate_up, mixer.down, spec.activation))
    return torch.stack(rows, 1), dropped


@pytest.mark.parametrize(("tokens", "most"), [(720, 198), (721, 199)])
def test_the_largest_load_is_exact(tokens: int, most: int) -> None:
    """Floats give 199 for 1.1 * 720 / 4, but 198 for the same row in three parts, 1.1 * 240 * 3 / 4."""
    assert MoESpec(experts=4, top_k=1, hidden=8, normalise=False, capacity=1.1).most_of_row(tokens) == most


@BOTH
@pytest.mark.parametrize("form", ["reference", None])
def test_choices_beyond_the_capacity_are_dropped_and_counted(name: str, form: str | None) -> None:
    mixer = moe(SPECS[name])
    x_LBD = tokens()
    with force(form):
        out = trained(mixer, x_LBD)
    y_LBD, dropped = by_hand(mixer, x_LBD)
    assert out.routed is not None
    assert out.routed.dropped.item() == dropped > 0
    assert out.routed.loads_E.sum() == LENGTH * ROWS * mixer.spec.top_k
    torch.testing.assert_close(out.y_LBD, y_LBD, rtol=1e-10, atol=1e-10)


@BOTH
def test_forms_have_equal_gradients(name: str) -> None:
    mixer = moe(SPECS[name])
    x_LBD = tokens().requires_grad_()
    slopes_LBD = torch.randn(LENGTH, ROWS, SIZES.width, dtype=torch.float64)
    results = []
    for form in ("reference", None):
        with force(form):
            y_LBD = trained(mixer, x_LBD).y_LBD
        results.append(torch.autograd.grad(y_LBD, (x_LBD, mixer.router, mixer.gate_up, mixer.down), slopes_LBD))
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-10)


@BOTH
def test_evaluation_and_generation_drop_nothing(name: str) -> None:
    mixer = moe(SPECS[name])
    dropless = moe(dataclasses.replace(SPECS[name], capacity=None))
    dropless.load_state_dict(mixer.state_dict())
    x_LBD = tokens()
    seq = evaluated(ROWS, LENGTH)
    assert torch.equal(mixer(x_LBD, None, seq).y_LBD, dropless(x_LBD, None, seq).y_LBD)
    assert not torch.equal(trained(mixer, x_LBD).y_LBD, trained(dropless, x_LBD).y_LBD)


@BOTH
def test_neither_later_tokens_nor_other_rows_decide(name: str) -> None:
    mixer = moe(SPECS[name])
    x_LBD = tokens()
    other_LBD = x_LBD.clone()
    other_LBD[LENGTH - 5 :] = tokens()[:5]
    other_LBD[:, 1:] = tokens()[:, 1:]
    ours = trained(mixer, x_LBD).y_LBD[: LENGTH - 5, 0]
    theirs = trained(mixer, other_LBD).y_LBD[: LENGTH - 5, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_earlier_tokens_decide() -> None:
    mixer = moe(SPECS["softmax"])
    x_LBD = tokens()
    other_LBD = x_LBD.flip(0)
    assert not torch.allclose(trained(mixer, x_LBD).y_LBD, trained(mixer, other_LBD).y_LBD.flip(0))


@pytest.mark.parametrize(("capacity", "code"), [(2.0, "no-effect"), (0.0, "out-of-range"), (1.9, None)])
def test_capacities_that_drop_nothing_are_refused(capacity: float, code: str | None) -> None:
    model = load(["recipe=moe_laptop"]).model
    options = {"experts": 4, "top_k": 2, "capacity": capacity}
    model.layers["-"] = {**model.layers["-"], **options}
    if code is None:
        assert architecture(model).table
        return
    with pytest.raises(ConfigError) as refused:
        architecture(model)
    assert [(problem.key, problem.code) for problem in refused.value.problems] == [("model.layers.-.capacity", code)]


@pytest.mark.parametrize(("documents", "refused"), [("isolate", True), ("join", False)])
def test_isolated_documents_may_not_share_a_capacity(documents: str, refused: bool) -> None:
    settings = ["recipe=moe_laptop", "model.layers.-.capacity=1.25", f"data.documents={documents}"]
    problems = {problem.key: problem.code for problem in check(RunPlan.of(load(settings)), 1)}
    assert (problems == {"model.layers.-.capacity": "needs-other-key"}) == refused
