"""Adapters of peft as checkpoints: those that we wrote, those that peft writes, and those that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridtron.architecture.adapters import AdaptersConfig, Adapting, is_adapter
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.merged import merge_adapters
from hybridtron.cli.convert import main
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.verify import whole_model
from hybridtron.parallel.groups import Groups
from hybridtron.problems import Code, Unusable
from tests.interop.models import VOCAB, checkpoint_of, model_config
from tests.interop.refusals import refusal
from tests.interop.test_peft_adapter import tuned
from tests.slow import slow_except

TENSORS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
TOKENS = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


def answers(checkpoint: Checkpoint) -> torch.Tensor:
    with torch.no_grad():
        return whole_model(checkpoint)(TOKENS, None, SeqInfo.stream(2, 12)).output.transpose(0, 1)


def imported(adapter: Path, base: Path, output: Path) -> Checkpoint:
    assert main(["import", str(adapter), "--base", str(base), "--output", str(output)]) == 0
    checkpoint = Checkpoint.open(output)
    assert not list(checkpoint.faults())
    return checkpoint


def exported(source: Path, output: Path, *more: str) -> Path:
    assert main(["export", str(source), "--output", str(output), *more]) == 0
    return output


@pytest.mark.parametrize(
    ("name", "preset", "dora"),
    slow_except(
        [
            ("llama", Adapting.lora, False),
            ("llama", Adapting.lora_plus, True),
            ("llama-tied", Adapting.lora_plus, False),
            ("granite", Adapting.hylora, True),
            ("nemotron_h", Adapting.hylora, False),
            ("falcon_h1", Adapting.lora, True),
        ],
        ("llama", Adapting.lora, False),
        ("granite", Adapting.hylora, True),
    ),
)
def test_exported_adapter_is_imported_bit_for_bit(
    name: str, preset: Adapting, dora: bool, alone: Groups, tmp_path: Path
) -> None:
    base = checkpoint_of(model_config(name), alone, tmp_path / "base")
    source = tuned(base, preset, tmp_path / "tuned", dora=dora)
    base_hf = exported(tmp_path / "base", tmp_path / "base-hf", "--verify", "none")
    adapter = exported(source.folder, tmp_path / "adapter", "--base", str(base_hf))
    back = imported(adapter, base_hf, tmp_path / "back")
    assert back.shapes == source.shapes
    lengths = {key for key in source.shapes if ".adapter.M" in key}
    assert bool(lengths) == dora
    assert all(torch.equal(source.whole(key), back.whole(key)) for key in source.shapes.keys() - lengths)
    for key in lengths:  # the length is stored, and not what it has changed by
        torch.testing.assert_close(back.whole(key), source.whole(key), rtol=0, atol=1e-6)
    assert back.config.model.adapters == AdaptersConfig(preset, rank=3, alpha=6.0, dora=dora, weights=PLACES)
    tolerance = 0.0
    if dora:
        tolerance = 1e-5
    torch.testing.assert_close(answers(back), answers(source), rtol=0, atol=tolerance)
    again = exported(tmp_path / "back", tmp_path / "again", "--base", str(base_hf))
    first = load_file(adapter / TENSORS)
    second = load_file(again / TENSORS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert (again / CONFIG).read_text() == (adapter / CONFIG).read_text()


PLACES = [f"layers.*.mixer.{name}" for name in ("kv.weight.k", "kv.weight.v", "out.weight", "q.weight")]
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
LAYER = "model.layers.0.self_attn.q_proj"
PEFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": "all-linear", "r": 4}),
    "of-some-layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1], "lora_dropout": 0.1}),
    "rslora": ("mistral", {"target_modules": ["v_proj", "down_proj"], "r": 5, "use_rslora": True}),
    "dora": ("llama-tied", {"target_modules": ["o_proj", "up_proj"], "use_dora": True, "modules_to_save": ["norm"]}),
    "fused": ("granite", {"target_modules": ["in_proj", "input_linear", "k_proj"], "modules_to_save": ["conv1d"]}),
    "tied": (
        "granite",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "names-in-memory": ("nemotron_h", {"target_modules": ["in_proj", "up_proj"], "modules_to_save": ["embeddings"]}),
}


@pytest.mark.parametrize("name", slow_except(PEFTS, "plain", "head"))
def test_adapter_of_peft_survives_import_and_export(name: str, alone: Groups, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model_name, settings = PEFTS[name]
    checkpoint_of(model_config(model_name), alone, tmp_path / "base")
    base = exported(tmp_path / "base", tmp_path / "base-hf", "--verify", "none")
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=7, **settings)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (weight for weight in model.parameters() if weight.requires_grad):
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        expected = model.eval()(TOKENS).logits
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    checkpoint = imported(tmp_path / "adapter", base, tmp_path / "imported")
    limit = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(answers(checkpoint), expected, rtol=0, atol=limit)
    torch.testing.assert_close(answers(merge_adapters(checkpoint)), expected, rtol=0, atol=limit)
    whole = exported(tmp_path / "imported", tmp_path / "whole")
    with torch.no_grad():
        fused = transformers.AutoModelForCausalLM.from_pretrained(whole).eval()(TOKENS).logits
    torch.testing.assert_close(fused, expected, rtol=0, atol=limit)
    again = load_file(exported(tmp_path / "imported", tmp_path / "again", "--base", str(base)) / TENSORS)
    written = load_file(tmp_path / "adapter" / TENSORS)
    assert written.keys() <= again.keys()
    assert all(torch.equal(written[key], again[key]) for key in written)
    assert not [key for key in again.keys() - written.keys() if ".lora_" in key]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Groups], tuple[Path, Path]]:
    """An adapter and its base, written once: a test that changes one copies it."""
    folder = tmp_path_factory.mktemp("pair")

    def written(alone: Groups) -> tuple[Path, Path]:
        if not (folder / "adapter").exists():
            base = checkpoint_of(model_config("llama-tied"), alone, folder / "base")
            source = tuned(base, Adapting.lora_plus, folder / "tuned")
            base_hf = exported(folder / "base", folder / "base-hf", "--verify", "none")
            exported(source.folder, folder / "adapter", "--base", str(base_hf))
        return folder / "adapter", folder / "base-hf"

    return written


def refused(output: Path, adapter: Path, base: Path | None = None) -> Unusable:
    options: list[object] = []
    if base is not None:
        options = ["--base", base]
    error = refusal(["import", adapter, *options, "--output", output])
    assert not output.exists()
    return error


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"peft_type": "IA3"}, "unsupported", "peft_type 'IA3'"),
        ({"r": "8"}, "unsupported", "r '8'"),
        ({"r": 4}, "mismatch", "(4, 32)"),
        ({"lora_alpha": None}, "unsupported", "lora_alpha None"),
        ({"lora_dropout": 1}, "unsupported", "lora_dropout 1"),
        ({"rank_pattern": {"q_proj": 2}}, "unsupported", "rank_pattern {'q_proj': 2}"),
        ({"alpha_pattern": {"q_proj": 2}}, "unsupported", "alpha_pattern {'q_proj': 2}"),
        ({"bias": "all"}, "unsupported", "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "unsupported", "init_lora_weights 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "unsupported", "layer_replication"),
        ({"fan_in_fan_out": True}, "unsupported", "fan_in_fan_out True"),
        ({"use_dora": True}, "mismatch", "q_proj.lora_magnitude_vector"),
        ({"modules_to_save": ["score"]}, "mismatch", "modules_to_save"),
    ],
)
def test_unsupported_settings_are_refused(
    change: dict[str, Any],
    code: Code,
    named: str,
    pair: Callable[[Groups], tuple[Path, Path]],
    alone: Groups,
    tmp_path: Path,
) -> None:
    written, base = pair(alone)
    adapter = Path(shutil.copytree(written, tmp_path / "adapter"))
    settings = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(settings | change))
    error = refused(tmp_path / "out", adapter, base)
    assert error.code == code
    assert named in str(error)


EMBEDDING = "base_model.model.model.embed_tokens.weight"
HEAD = "base_model.model.lm_head.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{Q_PROJ}.lora_A.weight": None}, f"{LAYER}.lora_A.weight"),
        ({f"{Q_PROJ}.lora_B.weight": torch.zeros(2, 3)}, "q_proj.lora_B.weight has shape (2, 3)"),
        ({f"{Q_PROJ}.lora_C.weight": torch.zeros(2)}, "lora_C.weight"),
        ({"model.norm.weight": torch.zeros(32)}, "base_model.model."),
        ({EMBEDDING: torch.zeros(2, 32)}, "model.embed_tokens.weight has shape (2, 32)"),
        ({HEAD: torch.zeros(VOCAB, 32)}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({f"{Q_PROJ}.weight": torch.zeros(48, 32)}, f"{LAYER} has an adapter"),
    ],
)
def test_mismatched_tensors_are_refused(
    change: dict[str, torch.Tensor | None],
    named: str,
    pair: Callable[[Groups], tuple[Path, Path]],
    alone: Groups,
    tmp_path: Path,
) -> None:
    written, base = pair(alone)
    adapter = Path(shutil.copytree(written, tmp_path / "adapter"))
    changed = load_file(adapter / TENSORS) | change
    save_file({key: tensor for key, tensor in changed.items() if tensor is not None}, adapter / TENSORS)
    error = refused(tmp_path / "out", adapter, base)
    assert error.code == "mismatch"
    assert named in str(error)


def test_all_faults_of_saved_modules_are_reported(
    pair: Callable[[Groups], tuple[Path, Path]], alone: Groups, tmp_path: Path
) -> None:
    written, base = pair(alone)
    adapter = Path(shutil.copytree(written, tmp_path / "adapter"))
    wrong = {EMBEDDING: torch.zeros(2, 32), "base_model.model.model.norm.weight": torch.zeros(3)}
    save_file(load_file(adapter / TENSORS) | wrong, adapter / TENSORS)
    settings = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**settings, "modules_to_save": ["score"]}))
    error = refused(tmp_path / "out", adapter, base)
    assert error.code == "mismatch"
    for fault in ("model.embed_tokens.weight has shape (2, 32)", "model.norm.weight has shape (3,)", "score is in"):
        assert fault in str(error)


def test_base_is_the_option_s_or_the_one_that_the_adapter_names(
    pair: Callable[[Groups], tuple[Path, Path]], alone: Groups, tmp_path: Path
) -> None:
    written, base = pair(alone)
    assert main(["import", str(written), "--output", str(tmp_path / "named"), "--verify", "none"]) == 0
    assert any(map(is_adapter, Checkpoint.open(tmp_path / "named").shapes))
    adapter = Path(shutil.copytree(written, tmp_path / "adapter"))
    settings = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps(settings | {"base_model_name_or_path": "some/where"}))
    error = refused(tmp_path / "out", adapter)
    assert error.code == "no-file"
    assert "'some/where'" in str(error)
    error = refused(tmp_path / "out", base, base)
    assert error.code == "no-file"
    assert CONFIG in str(error)
    untied = load_file(adapter / TENSORS)
    del untied[HEAD]
    save_file(untied, adapter / TENSORS)
    (adapter / CONFIG).write_text(json.dumps(settings | {"ensure_weight_tying": False}))
    error = refused(tmp_path / "out", adapter, base)
    assert error.code == "mismatch"
    assert "tied" in str(error)


def test_tokenizer_and_template_of_an_adapter_take_precedence(
    pair: Callable[[Groups], tuple[Path, Path]], alone: Groups, tmp_path: Path
) -> None:
    written, base = pair(alone)
    adapter = Path(shutil.copytree(written, tmp_path / "adapter"))
    shutil.copy(base / "tokenizer.json", adapter)
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} {% endfor %}")
    assert "chat" not in imported(written, base, tmp_path / "plain").meta.data
    assert "w1 {{ m.content }}" in imported(adapter, base, tmp_path / "chat").meta.data["chat"]
