"""The rules of `precision`: every FP8 product has sides that fit, on each rank, and the device can multiply in FP8."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import architecture
from hybridtron.config.check import check, require, warnings
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import fp8_layers
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.fit import fit
from hybridtron.problems import Code
from tests.settings import Setting, flat

EMULATED = ("precision=fp8_delayed", "precision.emulate=true")
BLOCK = ("precision=fp8_block", "precision.emulate=true", "model.width=256")
MAMBA2 = ("model.pattern=SS", "model.layers.S={kind: mamba2, state: 16}")


def reported(*settings: Setting) -> dict[str, Code]:
    """Return the codes of all problems by key."""
    return {problem.key: problem.code for problem in check(RunPlan.of(load(flat(settings))))}


def message(*settings: Setting) -> str:
    """Return the message of the only problem, for the sizes and values in it."""
    (problem,) = check(RunPlan.of(load(flat(settings))))
    return problem.message


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_block"])
def test_fp8_is_refused_without_the_package_unless_emulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == "transformer_engine" else find_spec(wanted)
    )
    assert reported(f"precision={name}", "model.width=256") == {"precision.name": "unavailable"}
    require(RunPlan.of(load([f"precision={name}", "precision.emulate=true", "model.width=256"])))


@pytest.mark.parametrize(
    ("arguments", "key", "code"),
    [
        (("model.layers.-.hidden=516",), "model.layers.-.hidden", "not-divisible"),
        (("model.width=200",), "model.width", "not-divisible"),
        (("model.layers.W={kind: attention, heads: 4, head_dim: 50}",), "model.layers.W.heads", "not-divisible"),
        (
            ("model.layers.W={kind: attention, heads: 4, kv_heads: 1, head_dim: 20}",),
            "model.layers.W.heads",
            "not-divisible",
        ),
        ((*MAMBA2, "model.layers.S.head_dim=64"), "model.layers.S.head_dim", "not-divisible"),
        (("phases.0.seq_len=250",), "phases.0.seq_len", "not-divisible"),
        (("precision.bf16_first=4", "precision.bf16_last=4"), "precision.name", "no-effect"),
        (("precision.bf16_first=-1",), "precision.bf16_first", "out-of-range"),
        (("precision.history=0",), "precision.history", "out-of-range"),
        (("run.compile=true",), "run.compile", "unsupported"),
    ],
)
def test_rules_of_fp8_are_reported(arguments: tuple[str, ...], key: str, code: str) -> None:
    if key == "phases.0.seq_len":
        arguments = (*arguments, "phases.0.micro_batch=1", "model.layers.W.window=64")
    assert reported(EMULATED, arguments) == {key: code}


def test_fp8_sizes_count_on_each_rank() -> None:
    """512 / 4 fits 128, and 512 / 8 does not; a fused projection is one matrix."""
    assert reported(*BLOCK) == {}
    problems = reported(
        *BLOCK, "parallel.tensor=4", "model.layers.-.hidden=1024", "model.layers.M.expand=4", "model.width=512"
    )
    assert problems == {}
    heads = {problem.key: problem.message for problem in check(RunPlan.of(load([*BLOCK, "parallel.tensor=4"])))}
    assert "q.weight 64 x 256" in heads["model.layers.W.heads"]
    assert "kv.weight" not in heads["model.layers.W.heads"]
    hidden = message(*BLOCK, "parallel.tensor=2", "model.pattern=(M-)*2", "model.layers.-.hidden=640")
    assert "down.weight 256 x 320" in hidden
    assert "use 512 or 768" in hidden


def test_a_misfit_without_a_width_option_is_reported_by_its_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwiGLUSpec, "width_option", None)
    problems = reported(EMULATED, "model.layers.-.hidden=516", "parallel.tensor=2")
    assert problems == {"model.layers.-": "not-divisible"}


def test_bf16_layers_need_not_fit_fp8() -> None:
    odd = ("model.pattern=-MWMM", "model.layers.-.hidden=516")
    assert reported(EMULATED, odd) != {}
    assert reported(EMULATED, odd, "precision.bf16_first=1") == {}
    config = load([*EMULATED, *odd, "precision.bf16_first=1", "precision.bf16_last=2"])
    assert fp8_layers(architecture(config.model), config.precision) == range(1, 3)


def test_fp8_sizes_also_count_in_evaluations() -> None:
    short = ("phases.0.seq_len=24", "phases.0.micro_batch=2", "model.layers.W.window=16")
    assert reported(EMULATED, short) == {"phases.0.seq_len": "not-divisible"}
    assert "72 tokens" in message(EMULATED, short)
    assert reported(EMULATED, short, "run.eval_lengths=[1,2,4]") == {}


@pytest.mark.parametrize("setting", ["emulate=true", "bf16_first=2", "bf16_last=1", "history=16"])
def test_settings_without_effect_are_warned_of(setting: str) -> None:
    (warning,) = warnings(RunPlan.of(load(["precision=bf16", f"precision.{setting}"])))
    assert f"precision.{setting}" in warning
    if setting != "emulate=true":
        plan = RunPlan.of(load(["precision=fp8_current", f"precision.{setting}"]))
        assert bool(warnings(plan)) == setting.startswith("history")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["samba_1.7b", "mamba_swa_mlp_1.6b", "mistral_1.6b", "llama3_1.6b"])
def test_phi2_sizes_need_their_padded_variant(recipe: str, tmp_path: Path) -> None:
    data = f"data.path={tmp_path}"
    for name in ("fp8_delayed", "fp8_block"):
        settings = (f"precision={name}", "precision.emulate=true", data)
        assert reported(f"recipe={recipe}", settings) == {"model.layers.-.hidden": "not-divisible"}
        assert "use 8192 or" in message(f"recipe={recipe}", settings)
        for tensor in (1, 2, 4):
            assert reported(f"recipe={recipe}_padded", settings, f"parallel.tensor={tensor}") == {}


@pytest.mark.slow
def test_proposed_layouts_fit_fp8() -> None:
    config = load(["recipe=samba_421m", "precision=fp8_block", "precision.emulate=true"])
    fitting = fit(RunPlan.of(config), 8, 80e9)
    assert fitting
    assert {candidate.parallel.tensor for candidate in fitting} <= {1, 2, 4}
