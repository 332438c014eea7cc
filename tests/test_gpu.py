"""What needs a CUDA device: `make test-gpu`. Every mixer and a whole run there, compared with the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridtron.architecture.base import MixerSpec
from hybridtron.config.choices import Precision
from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.ops.dispatch import force
from hybridtron.ops.product.sums import add_product
from hybridtron.ops.registry import OPS
from hybridtron.parallel import transformer_engine
from hybridtron.parallel.fp8 import Fp8, Fp8Linear, Role
from tests.conftest import seq_info
from tests.mixers.test_contract import CASES, SIZES, build, gradients
from tests.train.conftest import VOCAB, Train, counting_folder, train_small  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_device().type == "cpu", reason="no CUDA device"),
]
LENGTH = 256


def on(device: str, spec: MixerSpec, seq: SeqInfo, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output, final state and gradients of a mixer on a device, in fp32 on the CPU."""
    torch.manual_seed(0)
    mixer = build(spec, torch.float32)
    x_LBD, weight = torch.randn(LENGTH, 2, spec.input_width(SIZES)), torch.randn(LENGTH, 2, SIZES.width)
    mixer = mixer.to(device)
    for name, parameter in mixer.named_parameters():
        if not spec.parameters(SIZES)[name].fp32:
            parameter.data = parameter.data.to(dtype)
    x_LBD = x_LBD.to(device, dtype).requires_grad_()
    y_LBD, state, _ = mixer(x_LBD, None, seq.map(lambda tensor: tensor.to(device)))
    made = [y_LBD, *state.values(), *gradients(mixer, [y_LBD], [x_LBD], [weight.to(device, dtype)])]
    return [tensor.detach().float().cpu() for tensor in made]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("documents", [None, [[100, 156], [256]]], ids=["join", "isolate"])
@pytest.mark.parametrize("spec", CASES)
def test_mixers_equal_the_cpu(
    spec: MixerSpec, documents: list[list[int]] | None, dtype: torch.dtype, tolerance: float
) -> None:
    seq = seq_info(2, LENGTH, documents)
    with force("reference"):
        expected = on("cpu", spec, seq, torch.float32)
    for ours, theirs in zip(on("cuda", spec, seq, dtype), expected, strict=True):
        assert (ours - theirs).norm() <= tolerance * theirs.norm() + 1e-6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_learns(train_small: Train, tmp_path: Path, precision: str) -> None:  # noqa: F811
    assert train_small(f"precision={precision}", "phases.0.tokens=8K", "run.eval_every=200") == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < 0.6 * torch.log(torch.tensor(float(VOCAB)))


def test_products_add_gradients_to_the_sums() -> None:
    """In fp32, of bf16 weights: nearer to the exact sum than gradients that are rounded first."""
    torch.manual_seed(0)
    x, dy = (torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = torch.randn(256, 256, device="cuda")
    exact = before.double() + dy.double().mT @ x.double()
    total = add_product(before.clone(), dy.mT, x)
    assert total.dtype == torch.float32
    assert (total - exact).norm() < 0.1 * (before + dy.mT @ x - exact).norm()


@pytest.mark.parametrize("recipe", [Precision.fp8_current, Precision.fp8_block])
def test_emulated_fp8_equals_transformer_engine(recipe: Precision) -> None:
    """Output and both gradients of one projection; delayed scaling differs from current by its scales alone."""
    if (fault := transformer_engine.fp8_fault(recipe)) is not None:
        pytest.skip(fault)
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    made = []
    for layer in (
        Fp8Linear(256, 256, Fp8(recipe, range(1))),
        transformer_engine.local_linear(256, 256, Fp8(recipe, range(1), emulate=False)),
    ):
        projection: Any = layer.to("cuda", torch.bfloat16)
        projection.weight.data.copy_(weight)
        own = x.clone().requires_grad_()
        y = projection(own)
        y.backward(dy)
        made.append((y, own.grad, projection.weight.grad))
    for ours, theirs in zip(*made, strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours.float() - theirs.float()).norm() <= 5e-3 * theirs.float().norm()


def test_delayed_scaling_keeps_the_greatest_values_of_all_micro_batches() -> None:
    """They pass the same projection within one region; the second one's values are the smaller ones."""
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


def test_the_table_names_what_runs() -> None:
    for name, op in OPS.items():
        form, reason = op.choice("cuda")
        assert form, name
        assert reason, name
