"""What needs a CUDA device: `make test-gpu`. Every mixer and a whole run there, held against the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.ops.dispatch import OPS, force
from hybridtron.specs.base import MixerSpec
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
    x_LBD, weight = torch.randn(LENGTH, 2, SIZES.width), torch.randn(LENGTH, 2, SIZES.width)
    mixer = mixer.to(device)
    for name, parameter in mixer.named_parameters():
        if not spec.parameters(SIZES)[name].fp32:
            parameter.data = parameter.data.to(dtype)
    x_LBD = x_LBD.to(device, dtype).requires_grad_()
    y_LBD, state, _ = mixer(x_LBD, None, seq.to(torch.device(device)))
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


def test_the_table_names_what_runs() -> None:
    for name, op in OPS.items():
        form, reason = op.choice("cuda")
        assert form, name
        assert reason, name
