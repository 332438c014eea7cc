"""The rules of `precision`: every FP8 product has sides that fit, on each rank, and the device can multiply in FP8."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.config.check import check, require, warnings
from hybridtron.config.layout import fp8_layers
from hybridtron.config.load import load
from hybridtron.planning.fit import fit

EMULATED = ("precision=fp8_delayed", "precision.emulate=true")
BLOCK = ("precision=fp8_block", "precision.emulate=true", "model.width=256")
MAMBA2 = ("model.pattern=SS", "model.layers.S={kind: mamba2, state: 16}")


def reported(*arguments: str) -> dict[str, str]:
    return {problem.key: problem.message for problem in check(load(arguments))}


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_current", "fp8_block"])
def test_is_refused_without_the_package_unless_it_is_emulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda wanted: None if wanted == "transformer_engine" else found(wanted)
    )
    (key, message), *others = reported(f"precision={name}", "model.width=256").items()
    assert (key, others) == ("precision.name", [])
    assert message.startswith(f"is {name}, which needs transformer_engine (not installed: pip install")
    assert "Hopper" in message
    assert "precision.emulate=true" in message
    require(load([f"precision={name}", "precision.emulate=true", "model.width=256"]))


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (("model.layers.-.hidden=516",), "model.layers.-.hidden", "multiples of 16 on each rank: use 512 or 528"),
        (("model.width=200",), "model.width", "is 200, but fp8_delayed needs a multiple of 16: use 192 or 208"),
        (("model.layers.W={kind: attention, heads: 4, head_dim: 50}",), "model.layers.W.heads", "q.weight 200 x 192"),
        (
            ("model.layers.W={kind: attention, heads: 4, kv_heads: 1, head_dim: 20}",),
            "model.layers.W.heads",
            "40 x 192",
        ),
        ((*MAMBA2, "model.layers.S.head_dim=64"), "model.layers.S.head_dim", "in_proj.weight 774 x 192"),
        (("phases.0.seq_len=250",), "phases.0.seq_len", "250"),
        (("precision.bf16_first=4", "precision.bf16_last=4"), "precision.name", "use less than 8 together"),
        (("precision.bf16_first=-1",), "precision.bf16_first", "at least 0"),
        (("precision.history=0",), "precision.history", "at least 1"),
        (("run.compile=true",), "run.compile", "use false"),
    ],
)
def test_is_reported_with_what_would_work(arguments: tuple[str, ...], key: str, says: str) -> None:
    if key == "phases.0.seq_len":
        arguments = (*arguments, "phases.0.micro_batch=1", "model.layers.W.window=64")
    found = reported(*EMULATED, *arguments)
    assert list(found) == [key]
    assert says in found[key]


def test_sides_count_on_each_rank() -> None:
    """512 / 4 fits 128, and 512 / 8 does not; a fused projection is one matrix."""
    assert reported(*BLOCK) == {}
    found = reported(
        *BLOCK, "parallel.tensor=4", "model.layers.-.hidden=1024", "model.layers.M.expand=4", "model.width=512"
    )
    assert found == {}
    found = reported(*BLOCK, "parallel.tensor=4")
    assert "is 512" not in found["model.layers.W.heads"]
    assert "kv.weight 128 x 256" not in found["model.layers.W.heads"]
    assert "q.weight 64 x 256 on each of 4 tensor-parallel ranks" in found["model.layers.W.heads"]
    hidden = reported(*BLOCK, "parallel.tensor=2", "model.pattern=(M-)*2", "model.layers.-.hidden=640")
    assert "down.weight 256 x 320" in hidden["model.layers.-.hidden"]
    assert "use 512 or 768" in hidden["model.layers.-.hidden"]


def test_a_mixer_that_names_no_option_is_reported_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwiGLUSpec, "width_option", None)
    found = reported(*EMULATED, "model.layers.-.hidden=516", "parallel.tensor=2")
    assert found["model.layers.-"].startswith("makes gate_up.weight 516 x 192 on each of 2 tensor-parallel ranks")


def test_layers_in_bf16_need_not_fit() -> None:
    odd = ("model.pattern=-MWMM", "model.layers.-.hidden=516")
    assert reported(*EMULATED, *odd) != {}
    assert reported(*EMULATED, *odd, "precision.bf16_first=1") == {}
    assert fp8_layers(load([*EMULATED, *odd, "precision.bf16_first=1", "precision.bf16_last=2"])) == range(1, 3)


def test_evaluations_at_other_lengths_fit_too() -> None:
    short = ("phases.0.seq_len=24", "phases.0.micro_batch=2", "model.layers.W.window=16")
    found = reported(*EMULATED, *short)
    assert "72 tokens of 1 rows at 3 times the length" in found["phases.0.seq_len"]
    assert reported(*EMULATED, *short, "run.eval_lengths=[1,2,4]") == {}


@pytest.mark.parametrize("setting", ["emulate=true", "bf16_first=2", "bf16_last=1", "history=16"])
def test_what_has_no_effect_is_warned_of(setting: str) -> None:
    (warning,) = warnings(load(["precision=bf16", f"precision.{setting}"]))
    assert f"precision.{setting}" in warning
    if setting != "emulate=true":
        assert bool(warnings(load(["precision=fp8_current", f"precision.{setting}"]))) == setting.startswith("history")


@pytest.mark.parametrize("recipe", ["samba_1.7b", "mamba_swa_mlp_1.6b", "mistral_1.6b", "llama3_1.6b"])
def test_phi2_sizes_need_their_padded_variant(recipe: str, tmp_path: Path) -> None:
    data = f"data.path={tmp_path}"
    for name in ("fp8_delayed", "fp8_block"):
        settings = (f"precision={name}", "precision.emulate=true", data)
        found = reported(f"recipe={recipe}", *settings)
        assert list(found) == ["model.layers.-.hidden"]
        assert "is 8196" in found["model.layers.-.hidden"]
        assert "use 8192 or" in found["model.layers.-.hidden"]
        for tensor in (1, 2, 4):
            assert reported(f"recipe={recipe}_padded", *settings, f"parallel.tensor={tensor}") == {}


def test_proposed_layouts_fit_fp8() -> None:
    config = load(["recipe=samba_421m", "precision=fp8_block", "precision.emulate=true"])
    found = fit(config, 8, 80e9)
    assert found
    assert {one.parallel.tensor for one in found} <= {1, 2, 4}
