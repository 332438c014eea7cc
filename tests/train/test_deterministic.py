"""run.deterministic: the same layout gives the same bits again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hybridtron import determinism
from hybridtron.determinism import deterministic
from hybridtron.device import Package
from hybridtron.ops import dispatch
from hybridtron.ops.attention import table
from hybridtron.ops.registry import OPS
from tests.train.conftest import Train, small_run_arguments
from tests.train.faults import train_ranks, trained

SETTINGS = ["model.pattern=M-W-S-", "model.layers.S={kind: mamba2, state: 4, head_dim: 8}", "run.max_steps=10"]


def stored(run: Path) -> dict[str, bytes]:
    """Return all tensors of the newest checkpoint, as its files hold them."""
    folder = max((run / "checkpoints").glob("step-*"))
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def test_two_runs_give_the_same_bits(train_small: Train, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        assert train_small(f"run.dir={run}", "run.deterministic=true", *SETTINGS) == 0
        assert not torch.are_deterministic_algorithms_enabled()
    assert trained(runs[0]) == trained(runs[1])
    assert stored(runs[0])
    assert stored(runs[0]) == stored(runs[1])


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("layout", ["parallel.tensor=2", pytest.param("parallel.pipeline=2", marks=pytest.mark.slow)])
def test_two_runs_on_two_ranks_give_the_same_bits(layout: str, counting_folder: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b")]
    for run in runs:
        assert train_ranks(
            [*small_run_arguments(counting_folder, run), layout, "run.deterministic=true", "run.max_steps=10"]
        ) == [0, 0]
    assert trained(runs[0]) == trained(runs[1])
    assert stored(runs[0]) == stored(runs[1])


def test_deterministic_settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in determinism.FIXED_ORDER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert determinism.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert determinism.os.environ["NCCL_ALGO"] == "Tree"
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("op", "form", "installed", "runs"),
    [
        ("selective_scan", "mamba-ssm", {"mamba_ssm.ops.selective_scan_interface"}, False),
        ("ssd_scan", "mamba-ssm", {"mamba_ssm.ops.triton.ssd_combined"}, False),
        ("ssd_scan", "mamba-ssm", {"mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.utils.determinism"}, True),
        ("causal_conv", "causal-conv1d", {"causal_conv1d"}, False),
        ("attention", "flash-attn", {"flash_attn.flash_attn_interface"}, True),
    ],
)
def test_kernels_without_a_fixed_order_are_skipped(
    op: str, form: str, installed: set[str], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> Package:
        return Package(name, ModuleType(name) if name in installed else None, "as the test says")

    monkeypatch.setattr(table, "compute_capability", lambda: (8, 0))
    for module in (dispatch, sys.modules[OPS[op].named(form).function.__module__]):
        monkeypatch.setattr(module, "optional_package", found)
    assert OPS[op].choice("cuda")[0] == form
    with deterministic(True):
        chosen, why = OPS[op].choice("cuda")
    assert (chosen == form) is runs
    assert runs or (why.startswith(form) and "adds up in no fixed order" in why)
