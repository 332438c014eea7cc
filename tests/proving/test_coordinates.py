"""The coordinate check: flat with muP, not flat without, and planted mistakes; the command's exit codes and picture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture import mup, table
from hybridtron.architecture.base import Parameter
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.mup import MupConfig
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.cli.main import main
from hybridtron.proving.coordinates import family_member, measure, slopes
from tests.conftest import small_run
from tests.slow import slow_except

BASE = 64
LR = 3e-3
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"kind": "attention", "heads": 4},
    "attention-fixed-heads": {"kind": "attention", "heads": 4, "head_dim": 16},
    "span": {"kind": "span", "heads": 4, "chunk": 16, "block": 4, "blocks": 2, "eval": "span"},
    "swiglu": {"kind": "swiglu", "hidden": 176},
    "squared-relu": {"kind": "squared_relu", "hidden": 256},
    "mamba": {"kind": "mamba"},
    "mamba2": {"kind": "mamba2", "state": 16, "head_dim": 16},
    "gated-deltanet": {"kind": "gated_deltanet", "heads": 2, "expand_k": 0.5, "expand_v": 1.0},
    "experts": {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 88},
    "experts-and-shared": {
        **{"kind": "moe", "experts": 8, "top_k": 2, "hidden": 44, "shared": 44, "shared_gate": True},
        **{"scores": "sigmoid", "balance": "bias", "activation": "squared_relu"},
    },
    "shared-attention": {"kind": "shared_attention", "heads": 4, "head_dim": 32, "hidden": 176, "rank": 4},
}
FAST = [64, 128, 256]
FULL = [64, 128, 256, 512, 1024]


def model(name: str, tied: bool = False, transfer: bool = True) -> ModelConfig:
    layers = {"A": MIXERS[name], "-": {"kind": "swiglu", "hidden": 176}}
    return ModelConfig(BASE, 256, "A-", layers, tied, mup=MupConfig(BASE if transfer else None))


def verdicts(config: ModelConfig, widths: list[int]) -> dict[str, str]:
    points = measure(small_run(config), widths, steps=6, lr=LR, seeds=2)
    return {slope.output: slope.verdict for slope in slopes(points)}


@pytest.mark.parametrize("tied", slow_except([False, True], False))
@pytest.mark.parametrize("name", slow_except(MIXERS, "attention", "swiglu", "mamba", "mamba2", "gated-deltanet"))
def test_changes_are_flat_with_mup_and_grow_without(name: str, tied: bool) -> None:
    assert set(verdicts(model(name, tied), FAST).values()) == {"flat"}
    assert set(verdicts(model(name, tied, transfer=False), FAST).values()) == {"grows"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["attention", "swiglu", "mamba", "mamba2", "gated-deltanet"])
def test_changes_are_flat_up_to_width_1024(name: str) -> None:
    assert set(verdicts(model(name), FULL).values()) == {"flat"}


def test_rates_that_are_not_divided_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def undivided(weights: Mapping[str, Parameter], base: Mapping[str, Parameter]) -> dict[str, Parameter]:
        changed = mup.transferred(weights, base)
        return {
            name: replace(weight, lr_factor=1.0) if weight.is_mixer_projection else weight
            for name, weight in changed.items()
        }

    monkeypatch.setattr(table, "transferred", undivided)
    by_output = verdicts(model("mamba"), FAST)
    assert by_output["A mamba"] == "grows"
    assert by_output["- swiglu"] == "grows"


def test_a_head_that_is_not_scaled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(weights: Mapping[str, Parameter], base: Mapping[str, Parameter]) -> dict[str, Parameter]:
        return mup.transferred(weights, base) | {"head.weight": weights["head.weight"]}

    monkeypatch.setattr(table, "transferred", unscaled)
    assert verdicts(model("attention"), FAST)["logits"] == "grows"


def test_tied_logits_that_are_not_divided_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Architecture, "logits_scaling", 1.0)
    assert verdicts(model("attention", tied=True), FAST)["logits"] == "grows"


def test_family_scales_sizes_and_shortens_the_pattern() -> None:
    layers = {"A": MIXERS["attention-fixed-heads"], "-": {"kind": "swiglu", "hidden": 100}}
    config = ModelConfig(BASE, 512, "(A-)*3-", layers, mup=MupConfig(BASE))
    member = family_member(config, 96)
    assert member.pattern == "A-"
    assert member.layers == {"A": {**layers["A"], "heads": 6}, "-": {"kind": "swiglu", "hidden": 150}}
    assert architecture(member).sizes.width == 96
    assert member.mup == config.mup


def test_family_keeps_a_feeder_and_the_sub_layer_after_it_together() -> None:
    layers = {"A": MIXERS["shared-attention"], "-": MIXERS["swiglu"]}
    config = ModelConfig(BASE, 512, "-A-A-", layers, mup=MupConfig(BASE))
    assert family_member(config, 128).pattern == "-A-"


SHORT = ["model.mup.base_width=64", "--widths", "64,128", "--steps", "2", "--seeds", "1"]


def test_command_prints_tables_and_slopes_and_draws_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "mup", *SHORT, "--output", str(tmp_path / "mup.png")]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "mup.png").read_bytes().startswith(b"\x89PNG")
    for output in ("M mamba", "W attention", "- swiglu", "stream", "logits"):
        assert re.search(rf"^{re.escape(output)}$", said, re.MULTILINE)
        assert re.search(rf"^  {re.escape(output)} +[+-]0\.\d\d +[+-]0\.\d\d  flat$", said, re.MULTILINE)
    assert len(re.findall(r"^  [012] ", said, re.MULTILINE)) == 5 * 3


def test_command_fails_without_mup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mup", "--standard", "--widths", "64,128", "--steps", "3", "--seeds", "1"]) == 1
    assert "grows" in capsys.readouterr().out
    assert main(["check", "mup"]) == 2
    assert "model.mup" in capsys.readouterr().err


def test_command_refuses_widths_without_whole_heads(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["recipe=gdn_laptop", "model.mup.base_width=96"]
    assert main(["check", "mup", *settings, "--widths", "64,96"]) == 2
    assert "model.layers.M.heads" in capsys.readouterr().err


@pytest.mark.parametrize("widths", ["64", "64,64", "64,x", "0,64"])
def test_command_refuses_other_lists_of_widths(widths: str) -> None:
    with pytest.raises(SystemExit):
        main(["check", "mup", *SHORT[:1], "--widths", widths])
