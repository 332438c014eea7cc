"""The default of `parallel.gradient_accumulation_fusion`."""

from __future__ import annotations

import pytest
import torch

from hybridtron.config.load import load
from hybridtron.engine import stage


@pytest.mark.parametrize(
    ("device", "is_wider", "settings", "expected"),
    [
        ("cuda", True, [], True),
        ("cuda", False, [], False),
        ("cuda", True, ["run.compile=true"], False),
        ("cpu", True, [], False),
        ("cpu", False, ["parallel.gradient_accumulation_fusion=true"], True),
        ("cuda", True, ["parallel.gradient_accumulation_fusion=false"], False),
    ],
)
def test_products_add_gradients_by_default_on_a_gpu(
    device: str, is_wider: bool, settings: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "compute_device", lambda: torch.device(device))
    monkeypatch.setattr(stage, "SUMS_WIDER", is_wider)
    assert stage.fuses_accumulation(load(settings)) is expected
