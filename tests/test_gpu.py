"""Tests that need a CUDA device (`make test-gpu`): every mixer and a full run there, compared with the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtron.architecture.base import MixerSpec
from hybridtron.config.choices import Precision
from hybridtron.device import compute_device
from hybridtron.ops.product.sums import SUMS_WIDER, add_product
from hybridtron.ops.registry import OPS
from hybridtron.parallel import transformer_engine
from hybridtron.parallel.fp8 import Fp8, Fp8Linear, Role
from hybridtron.parallel.small_gradients import add_together
from hybridtron.proving.gpu.correct import TOLERANCES, mixer_error
from tests.mixers.test_contract import CASES, SIZES
from tests.train.conftest import VOCAB, Train, counting_folder, train_small  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device"),
]
LENGTH = 256


def chooses_by_content(spec: Any) -> bool:
    """Return True if a mixer's choice of keys depends on their scores; rounded scores choose other keys."""
    sparse = getattr(spec, "sparse", None)
    return hasattr(spec, "relevance") or (sparse is not None and (sparse.hashed or sparse.scored))


@pytest.mark.parametrize("spec", CASES)
def test_mixers_equal_the_cpu(spec: MixerSpec) -> None:
    assert mixer_error(spec, SIZES, LENGTH, torch.float32, compute_device(), []) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("spec", [case for case in CASES if not chooses_by_content(case.values[0])])
def test_mixers_equal_the_cpu_in_bf16(spec: MixerSpec) -> None:
    """With few channels each rounding is a large share: the bf16 references are up to 0.04 off."""
    assert mixer_error(spec, SIZES, LENGTH, torch.bfloat16, compute_device(), []) <= 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_laptop_run_learns_on_a_gpu(train_small: Train, tmp_path: Path, precision: str) -> None:  # noqa: F811
    assert train_small(f"precision={precision}", "phases.0.tokens=8K", "run.eval_every=200") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.6 * torch.log(torch.tensor(float(VOCAB)))


def test_fused_products_add_gradients_in_fp32() -> None:
    """Sums in fp32 over bf16 weights are nearer to the exact sum than gradients rounded first."""
    if not SUMS_WIDER:
        pytest.skip("this torch rounds products first")
    torch.manual_seed(0)
    x, dy = (torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = torch.randn(256, 256, device="cuda")
    exact = before.double() + dy.double().mT @ x.double()
    total = add_product(before.clone(), dy.mT, x)
    assert total.dtype == torch.float32
    assert (total - exact).norm() < 0.1 * (before + dy.mT @ x - exact).norm()


def test_small_gradients_that_are_added_together_have_the_bits_of_single_sums() -> None:
    torch.manual_seed(0)
    gradients = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((), (512,), (7, 33)))
    totals = tuple(torch.randn(gradient.shape, device="cuda") for gradient in gradients)
    expected = [total.clone().add_(gradient) for total, gradient in zip(totals, gradients, strict=True)]
    add_together(totals, gradients)
    for total, alone in zip(totals, expected, strict=True):
        assert torch.equal(total, alone)


@pytest.mark.parametrize("recipe", [Precision.fp8_current, Precision.fp8_block])
def test_emulated_fp8_equals_transformer_engine(recipe: Precision) -> None:
    """Output and both gradients of one projection; delayed scaling differs from current by its scales alone."""
    if (fault := transformer_engine.fp8_fault(recipe)) is not None:
        pytest.skip(fault)
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    results = []
    for layer in (
        Fp8Linear(256, 256, Fp8(recipe, range(1))),
        transformer_engine.local_linear(256, 256, Fp8(recipe, range(1), emulate=False)),
    ):
        projection: Any = layer.to("cuda", torch.bfloat16)
        projection.weight.data.copy_(weight)
        leaf = x.clone().requires_grad_()
        y = projection(leaf)
        y.backward(dy)
        results.append((y, leaf.grad, projection.weight.grad))
    for ours, theirs in zip(results[0], results[1], strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours.float() - theirs.float()).norm() <= 5e-3 * theirs.float().norm()


def test_delayed_scaling_keeps_the_largest_values_of_all_micro_batches() -> None:
    """Micro-batches pass the same projection in one region; the second one's values are smaller."""
    if (fault := transformer_engine.fp8_fault(Precision.fp8_delayed)) is not None:
        pytest.skip(fault)
    torch.manual_seed(0)
    fp8 = Fp8(Precision.fp8_delayed, range(1), history=4, emulate=False)
    projection: Any = transformer_engine.local_linear(256, 256, fp8).to("cuda", torch.bfloat16)
    torch.nn.init.normal_(projection.weight)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    with transformer_engine.region(fp8):
        for micro_batch in (x, x / 8):
            projection(micro_batch).sum().backward()
    history_HR = projection.fp8_meta[transformer_engine.FORWARD].amax_history
    assert history_HR[:, Role.x].amax() == x.abs().amax()
    assert history_HR[:, Role.weight].amax() == projection.weight.abs().amax()


def test_table_names_a_form_and_a_reason_for_every_op() -> None:
    for name, op in OPS.items():
        form, reason = op.choice("cuda")
        assert form, name
        assert reason, name
