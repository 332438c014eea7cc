"""Checkpoints as models that transformers knows by itself: loaded by it, compared with ours, and planted mistakes."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Mamba2Config, MambaConfig

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint import files
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.interop import export
from hybridtron.interop import verify as verify_module
from hybridtron.interop.export import NATIVES, target_of
from hybridtron.interop.native import NativeMamba
from hybridtron.interop.native_pairs import Llama
from hybridtron.interop.rules import TensorRule
from hybridtron.interop.sample import sampled
from hybridtron.interop.verify import verify
from hybridtron.parallel.groups import Groups
from tests.interop.conftest import Stored
from tests.interop.models import CLASSES, MODELS, checkpoint_of, model_config
from tests.interop.refusals import refusal
from tests.slow import slow_except

DTYPES = dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16) | dict.fromkeys(("fp32", "float32"), torch.float32)
LARGER = {"zamba2": 1e-4}  # differences of logits that verify._allowed explains
CONFIGS = {"mamba": MambaConfig, "mamba2": Mamba2Config}


def export_of(source: Checkpoint, output: Path, *more: str) -> int:
    """The exit code."""
    return main(["export", "--checkpoint", str(source.folder), "--output", str(output), *more])


@pytest.mark.parametrize("name", slow_except(MODELS, *list(CLASSES)[1::2]))
def test_exported_model_gives_the_same_logits_in_transformers(name: str, stored: Stored, tmp_path: Path) -> None:
    source = stored(name)
    output = tmp_path / "out"
    assert export_of(source, output, "--verify", "none") == 0
    assert json.loads((output / "config.json").read_text())["architectures"] == [CLASSES[name.partition("-")[0]]]
    assert verify(output, source).logits < LARGER.get(name.partition("-")[0], 1e-5)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert tokenizer.eos_token == "w3"
    target = target_of(architecture(model_config(name)), Export.auto)
    back = target.model(json.loads((output / "config.json").read_text()))
    assert architecture(back).specs == tuple(
        replace(
            spec,
            **{key: getattr(other, key) for key in ("heads", "kv_heads", "head_dim", "dt_rank") if hasattr(spec, key)},
        )
        for spec, other in zip(architecture(model_config(name)).specs, architecture(back).specs, strict=True)
    )


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "samba"])
def test_precision_of_the_residual_stream_survives_export_and_import(name: str, wide: bool) -> None:
    model = replace(model_config(name), residual_fp32=wide)
    target = target_of(architecture(model), "auto")
    settings = target.config(architecture(model), 64)
    assert settings["residual_in_fp32"] is wide
    assert target.model(json.loads(json.dumps(settings))).residual_fp32 is wide


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_residual_stream_is_in_fp32_if_its_key_is_missing(name: str) -> None:
    target = target_of(architecture(model_config(name)), "auto")
    settings = target.config(architecture(model_config(name)), 64)
    del settings["residual_in_fp32"]
    assert target.model(settings).residual_fp32
    assert CONFIGS[name]().residual_in_fp32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dtype_and_number_of_shards_follow_the_options(precision: str, alone: Groups, tmp_path: Path) -> None:
    checkpoint_of(model_config("mamba"), alone, tmp_path / "run", precision)
    for dtype, shards in ((None, "20KB"), ("bfloat16", "5GB"), ("float32", "20KB")):
        output = tmp_path / str(dtype)
        arguments = ["--checkpoint", str(tmp_path / "run"), "--output", str(output), "--shard-size", shards]
        if dtype is not None:
            arguments += ["--dtype", dtype, "--verify", "none"]
        assert main(["export", *arguments]) == 0
        files = sorted(output.glob("*.safetensors"))
        if shards == "5GB":
            assert len(files) == 1
        else:
            index = json.loads((output / "model.safetensors.index.json").read_text())
            assert {file.name for file in files} == set(index["weight_map"].values())
        tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
        for key, tensor in tensors.items():
            expected = torch.float32
            if not key.endswith(("A_log", ".D", "dt_proj.bias")):
                expected = DTYPES[dtype or precision]
            assert tensor.dtype == expected, key


@pytest.mark.parametrize(
    "name",
    ["granite", *(pytest.param(m, marks=pytest.mark.slow) for m in ("everything", *MODELS) if m != "granite")],
)
def test_sampled_layers_prove_a_deep_model(
    name: str, alone: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a model three times as deep, a mistake in a sampled layer is found."""
    model = model_config(name)
    model = replace(model, pattern=f"({model.pattern})*3")
    checkpoint_of(model, alone, tmp_path / "run")
    arguments = ["export", "--checkpoint", str(tmp_path / "run"), "--verify", "sample", "--output"]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    assert "(--verify sample)" in capsys.readouterr().out
    last = sampled(architecture(model), target_of(architecture(model), Export.auto))[-1]
    to_theirs = TensorRule.to_theirs

    def planted(rule: TensorRule, read) -> torch.Tensor:
        tensor = to_theirs(rule, read)
        if f"layers.{last}.norm.weight" in rule.ours:
            return tensor * 1.01
        return tensor

    monkeypatch.setattr(TensorRule, "to_theirs", planted)
    assert main([*arguments, str(tmp_path / "wrong")]) == 1
    assert "logits of" in capsys.readouterr().err


MISTAKES = {
    "gate and up are swapped": ("llama", "layers.1.mlp.gate_proj", "agree before the last layer"),
    "the same with multipliers": ("dense_granite", "layers.1.mlp.gate_proj", "agree before the last layer"),
    "keys and values are swapped": ("llama", "self_attn.k_proj", "differ first after layer 0"),
    "the window is off by one": ("mistral", "sliding_window", "differ first after layer 0"),
    "z and x are swapped": ("mamba", "in_proj", "differ first after layer 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_proof_detects_planted_mistakes_and_leaves_no_output(
    mistake: str, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, where, parting = MISTAKES[mistake]
    target = type(target_of(architecture(model_config(name)), Export.auto))
    if where == "sliding_window":
        settings = target.settings

        def off_by_one(*arguments):
            written = settings(*arguments)
            return {**written, where: written[where] + 1}

        monkeypatch.setattr(target, "settings", off_by_one)
    else:
        rules = target.rules

        def planted(self, model):
            by_name = {rule.theirs: rule for rule in rules(self, model)}
            for theirs, rule in by_name.items():
                if where in theirs and len(rule.ours) == 2:
                    by_name[theirs] = replace(rule, ours=rule.ours[::-1])
                elif where in theirs:
                    other = by_name[theirs.replace("gate", "up").replace("k_proj", "v_proj")]
                    by_name[theirs] = replace(rule, ours=other.ours)
                    by_name[other.theirs] = replace(other, ours=rule.ours)
            return list(by_name.values())

        monkeypatch.setattr(target, "rules", planted)
    assert export_of(stored(name), tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "logits of" in said
    assert f"the residual streams {parting}" in said
    assert not list(tmp_path.iterdir())


def test_proof_detects_rows_in_the_order_of_ranks(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Concatenate two ranks' rows of a fused projection: x and z of the first rank, then x and z of the second."""
    to_theirs = TensorRule.to_theirs

    def by_ranks(rule: TensorRule, read) -> torch.Tensor:
        tensor = to_theirs(rule, read)
        if "in_proj" in rule.theirs:
            return torch.cat(tensor.chunk(4)[::2] + tensor.chunk(4)[1::2])
        return tensor

    monkeypatch.setattr(TensorRule, "to_theirs", by_ranks)
    assert export_of(stored("mamba"), tmp_path / "out") == 1
    assert "the residual streams differ first after layer 0" in capsys.readouterr().err


def test_proof_detects_decays_in_bf16(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = NativeMamba.rules
    monkeypatch.setattr(
        NativeMamba, "rules", lambda *a: [replace(r, fp32=r.fp32 and "A_log" not in r.theirs) for r in rules(*a)]
    )
    assert export_of(stored("mamba"), tmp_path / "out", "--dtype", "bfloat16") == 1
    assert "logits of" in capsys.readouterr().err


@pytest.mark.parametrize(("tie", "said"), [(True, "tie_word_embeddings=True"), (False, "lm_head.weight")])
def test_proof_detects_a_missing_head(
    tie: bool, said: str, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The configuration may say that embeddings are tied, or not."""
    rules = Llama.rules
    settings = Llama.settings
    monkeypatch.setattr(Llama, "rules", lambda *a: [rule for rule in rules(*a) if rule.theirs != "lm_head.weight"])
    monkeypatch.setattr(Llama, "settings", lambda *a: {**settings(*a), "tie_word_embeddings": tie})
    assert export_of(stored("llama"), tmp_path / "out") == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_model_that_fits_no_class_is_refused_with_all_reasons(alone: Groups, tmp_path: Path) -> None:
    model = replace(model_config("mistral"), pattern="W-M-")
    model.layers = {**model.layers, "M": {"kind": "mamba", "state": 4}}
    checkpoint_of(model, alone, tmp_path / "run")
    arguments = ["--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--target", "native"]
    error = refusal(["export", *arguments])
    assert error.code == "unsupported"
    assert all(target.name in str(error) for target in NATIVES)
    assert not (tmp_path / "out").exists()


def test_unusable_arguments_and_damaged_checkpoints_are_refused(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stored("mamba").folder, tmp_path / "run")
    run = str(tmp_path / "run")
    output = str(tmp_path / "out")
    assert refusal(["export", "--checkpoint", tmp_path / "nothing", "--output", output]).code == "no-file"
    assert refusal(["export", "--checkpoint", run, "--output", run]).code == "exists"
    assert refusal(["export", "--checkpoint", run, "--output", output, "--shard-size", "much"]).code == "malformed"
    file = tmp_path / "run/model-00000.safetensors"
    stored = bytearray(file.read_bytes())
    stored[-5] ^= 1
    file.write_bytes(stored)
    assert main(["export", "--checkpoint", run, "--output", output]) == 1
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_failed_or_killed_export_leaves_no_folder(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = stored("mamba")
    output = tmp_path / "out"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", full)
        assert export_of(source, output) == 2
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    if (child := os.fork()) == 0:
        gc.freeze()  # what is garbage is not torn down here, where its threads are not
        torch.set_num_threads(torch.get_num_threads())  # the first use after a fork replaces torch's thread pool
        export.card = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        export_of(source, output)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(tmp_path.iterdir())  # it had begun
    assert not output.exists()
    assert export_of(source, output, "--verify", "none") == 0
    assert list(tmp_path.iterdir()) == [output]


def test_every_weight_is_exported_once() -> None:
    for name in MODELS:
        arch = architecture(model_config(name))
        rules = target_of(arch, Export.auto).rules(arch)
        assert len({rule.theirs for rule in rules}) == len(rules)
    assert verify_module.lengths_of(architecture(model_config("mistral"))) == (1, 2, 3, 5, 8, 9, 10, 21, 300)
