"""The order of the weight's gradient, by the version of the causal-conv1d package."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridtron.ops.conv import causal_conv1d


@pytest.mark.parametrize(
    ("version", "repeats"),
    [
        ("1.5.4", False),
        ("1.6rc1", False),
        ("1.6", True),
        ("1.6.0.post2", True),
        ("1.6.1+cu128", True),
        ("1.10", True),
        ("2.0.0a1", True),
        ("unknown", False),
        (None, False),
    ],
)
def test_causal_conv1d_repeats_bits_from_version_1_6_on(
    version: str | None, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace()
    if version is not None:
        module.__version__ = version
    monkeypatch.setattr(causal_conv1d, "optional_package", lambda _: SimpleNamespace(module=module))
    assert causal_conv1d._repeats_bits() == repeats
