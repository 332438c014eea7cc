"""Backward passes of norms fill an H100 at every recipe's width, by their launch grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.load import choices_of, load
from hybridtron.ops.gated_norm import GatedNormInputs, gated_norm
from hybridtron.ops.norm import AddRMSNormInputs, RMSNormInputs, add_rms_norm, rms_norm

PROCESSORS = 132  # of an H100
VALUES = 32768 * 1024  # of what is normed: a micro-batch of recipes of 400 million parameters
WIDTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2304, 2560, 2816, 3072, 4096, 4608, 5120, 8192)
# and groups
GATED = ((1024, 1), (1536, 1), (2048, 1), (3072, 1), (4096, 1), (5120, 1), (8192, 1), (4096, 8), (8192, 8))


@pytest.mark.slow
def test_widths_of_all_recipes_are_tested() -> None:
    """WIDTHS and GATED cover every recipe for GPUs; key heads, whose norms have no weights, are 64 to 256 wide."""
    for name in choices_of("recipe"):
        if "/" in name or "laptop" in name:
            continue
        model = load([f"recipe={name}"]).model
        weights = architecture(model).table.items()
        assert {weight.shape[-1] for key, weight in weights if key.endswith(("norm.weight", "norm_weight"))} <= {
            *WIDTHS
        }
        mamba2 = [spec for spec in architecture(model).by_letter.values() if spec.kind == "mamba2" and spec.norm]
        assert {(spec.expand * model.width, spec.groups) for spec in mamba2} <= {*GATED}


def launches_of(backward: str, call: Any) -> list[tuple[int, int, dict[str, Any]]]:
    """Return programs, warps and arguments for every launch of a kernel that `call` would make."""
    pytest.importorskip("triton")
    from hybridtron.ops.kernel_launch import recorded_launches

    launches = []

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if kernel.__name__ == backward:
            named = dict(zip(kernel.arg_names, arguments, strict=False))
            launches.append((torch.Size(grid).numel(), options["num_warps"], named | {"grid": grid}))

    with recorded_launches(note), torch.device("meta"):
        call()
    return launches


def test_backward_passes_of_norms_fill_an_h100_at_every_width() -> None:
    for width in WIDTHS:

        def call(width: int = width) -> None:
            x = torch.empty(VALUES // width, width, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.empty(width, requires_grad=True)
            rms_norm.named("triton").function(RMSNormInputs(x, weight, 1e-5)).sum().backward()
            summed, y = add_rms_norm.named("triton").function(AddRMSNormInputs(x, x.detach(), weight, 1e-5))
            (summed + y).sum().backward()

        launches = launches_of("_backward", call)
        assert len(launches) == 2
        for programs, warps, named in launches:
            assert programs * warps / PROCESSORS >= 16, width
            assert named["rows"] / (programs * named["ROWS"]) <= 64, width


def test_narrow_grids_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """264 programs at every width, as the backward pass once had, are too few where a program has one or two warps."""
    pytest.importorskip("triton")
    from hybridtron.ops.norm import kernels

    monkeypatch.setattr(kernels, "programs_at_once", lambda *_: 264)
    with pytest.raises(AssertionError, match="64"):
        test_backward_passes_of_norms_fill_an_h100_at_every_width()


def test_backward_passes_of_gated_norms_fill_an_h100_at_every_width() -> None:
    for width, groups in GATED:

        def call(width: int = width, groups: int = groups) -> None:
            y = torch.empty(4, VALUES // width // 4, width, dtype=torch.bfloat16, requires_grad=True)
            z = torch.empty_like(y, requires_grad=True)
            weight = torch.empty(width, requires_grad=True)
            gated_norm.named("triton").function(GatedNormInputs(y, z, weight, groups, 1e-5)).sum().backward()

        ((programs, warps, named),) = launches_of("_norm_backward", call)
        assert programs * warps / PROCESSORS >= 16, (width, groups)
        assert named["rows"] * named["length"] / named["grid"][0] <= 128, (width, groups)
