"""Adapters for peft: it loads them on an exported base, and computes the same as we do, unmerged and merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridtron.architecture.adapters import AdaptersConfig, Adapting
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import Meta
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.checkpoint.rewrite import write_whole
from hybridtron.cli.convert import main
from hybridtron.config.load import to_yaml
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.verify import whole_model
from hybridtron.parallel.groups import Groups
from tests.interop.models import VOCAB, checkpoint_of, model_config
from tests.interop.refusals import refusal
from tests.slow import slow_except

BESIDE = {Adapting.lora: (), Adapting.lora_plus: ("embedding", "norm"), Adapting.hylora: ("embedding", "norm", "conv")}


def tuned(base: Checkpoint, preset: Adapting, folder: Path, **options: Any) -> Checkpoint:
    """The base as it could be after a phase with adapters: frozen weights are its own, the others are not."""
    adapters = AdaptersConfig(preset, rank=3, alpha=6.0, **options)
    config = replace(base.config, model=replace(base.config.model, adapters=adapters))
    weights = {}
    generator = torch.Generator().manual_seed(1)
    for name, weight in architecture(config.model).table.items():
        for key, shape in weight.stored(name).items():
            learned = ".adapter." in key or any(part in key for part in BESIDE[preset])
            if learned:
                weights[key] = torch.randn(shape, generator=generator) * 0.1
            else:
                weights[key] = base.whole(key)
    folder.mkdir()
    small = {"config.yaml": to_yaml(config).encode(), "tokenizer.json": base.verified("tokenizer.json")}
    write_whole(
        folder, Meta(2, 2, {"eos": "3"}, "a test", torch.__version__), small, [("model-0.safetensors", weights)]
    )
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "preset", "dora"),
    slow_except(
        [
            ("llama", Adapting.lora, False),
            ("llama-tied", Adapting.hylora, False),
            ("granite", Adapting.hylora, False),
            ("granite", Adapting.hylora, True),
            ("granite-scaled", Adapting.lora, False),
            ("nemotron_h", Adapting.hylora, False),
            ("falcon_h1", Adapting.hylora, False),
        ],
        ("llama", Adapting.lora, False),
        ("nemotron_h", Adapting.hylora, False),
    ),
)
def test_exported_adapter_gives_the_same_logits_in_peft(
    name: str, preset: Adapting, dora: bool, alone: Groups, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = checkpoint_of(model_config(name), alone, tmp_path / "base")
    checkpoint = tuned(base, preset, tmp_path / "tuned", dora=dora)
    base_hf, adapter, whole_hf = (str(tmp_path / part) for part in ("base-hf", "adapter", "whole-hf"))
    assert main(["export", str(tmp_path / "base"), "--output", base_hf]) == 0
    assert main(["export", str(checkpoint.folder), "--base", base_hf, "--output", adapter]) == 0
    assert main(["export", str(checkpoint.folder), "--output", whole_hf]) == 0
    stored = load_file(Path(adapter) / "adapter_model.safetensors")
    for module, key in (("q_proj", "q.adapter.A"), ("v_proj", "kv.adapter.A.v")):
        (theirs,) = [tensor for name, tensor in stored.items() if f"{module}.lora_A" in name][:1]
        (ours,) = [checkpoint.whole(name) for name in checkpoint.shapes if name.endswith(key)][:1]
        assert torch.equal(theirs, ours)
    assert bool(json.loads((Path(adapter) / "adapter_config.json").read_text())["modules_to_save"]) == bool(
        BESIDE[preset]
    )
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base_hf), adapter)
    expected = whole_model(checkpoint)(tokens, None, SeqInfo.stream(2, 12)).output.transpose(0, 1)
    limit = 1e-5 * float(expected.abs().max())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens).logits, expected, rtol=0, atol=limit)
        combined = whole_model(merge_adapters(checkpoint))(tokens, None, SeqInfo.stream(2, 12)).output.transpose(0, 1)
        torch.testing.assert_close(combined, expected, rtol=0, atol=limit)
        fused = transformers.AutoModelForCausalLM.from_pretrained(whole_hf).eval()
        torch.testing.assert_close(fused(tokens).logits, expected, rtol=0, atol=limit)


def test_wrong_base_for_an_adapter_is_refused(alone: Groups, tmp_path: Path) -> None:
    base = checkpoint_of(model_config("llama"), alone, tmp_path / "base")
    checkpoint = tuned(base, Adapting.lora, tmp_path / "tuned")
    other = ["--output", tmp_path / "out", "--base", tmp_path / "other"]
    assert main(["export", str(checkpoint.folder), "--output", str(tmp_path / "other"), "--verify", "none"]) == 0
    assert refusal(["export", checkpoint.folder, *other]).code == "mismatch"
    assert refusal(["export", tmp_path / "base", *other]).code == "conflict"
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_shared_block_are_refused(alone: Groups, tmp_path: Path) -> None:
    """peft would adapt the block at one of them; merged they are exported."""
    base = checkpoint_of(model_config("zamba2-floor"), alone, tmp_path / "base")
    checkpoint = tuned(base, Adapting.lora, tmp_path / "tuned", weights=["shared.*.mixer.q.weight"])
    base_hf = str(tmp_path / "base-hf")
    out = str(tmp_path / "out")
    assert main(["export", str(base.folder), "--output", base_hf, "--verify", "none"]) == 0
    assert refusal(["export", checkpoint.folder, "--base", base_hf, "--output", out]).code == "unsupported"
    assert not Path(out).exists()
    assert main(["export", str(checkpoint.folder), "--output", out, "--verify", "none"]) == 0
