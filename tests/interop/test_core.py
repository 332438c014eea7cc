"""Folders of megatron-core: its GPTModel becomes ours and back, with equal logits and equal bits."""

from __future__ import annotations

import pickle
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.dcp_reader import DcpTensors
from hybridtron.checkpoint.exchange import without_warning
from hybridtron.cli import checkpoint
from hybridtron.data.batch import SeqInfo
from hybridtron.interop.core_arguments import COMMON, stored_arguments
from hybridtron.interop.core_gpt import FIXED, require_fitting
from hybridtron.parallel.groups import Groups
from tests.interop import core_models
from tests.interop.conftest import Stored
from tests.interop.models import checkpoint_of, model_config, own_model
from tests.pickles import Call, state_of_a_class
from tests.refusals import refusal, usage_error

TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
STATED = ["--heads", "4", "--rope-base", "500", "--norm-eps", "1e-5"]  # of core's model `llama`


def export(source: Path, output: Path) -> None:
    assert checkpoint.main(["export", str(source), str(output), "--to", "torch_dist"]) == 0


def take(folder: Path, output: Path, *options: object) -> Checkpoint:
    assert checkpoint.main(["import", str(folder), str(output), *map(str, options)]) == 0
    return Checkpoint.open(output)


def assert_same_logits(ours: Checkpoint, folder: Path) -> None:
    tokens = core_models.tokens()
    with torch.no_grad():
        computed = own_model(ours, torch.float32)(tokens, None, SeqInfo.stream(*tokens.shape)).output.transpose(0, 1)
    expected = core_models.logits(folder)
    assert expected.abs().max() > 1
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def whole(folder: Path) -> dict[str, torch.Tensor]:
    stored = DcpTensors(folder)
    return {key: stored.part(key, (0,) * len(shape), shape) for key, shape in stored.shapes.items()}


def assert_same_tensors(first: Path, second: Path) -> None:
    left = whole(first)
    right = whole(second)
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_folders_of_core_become_ours_and_back(tokenizer: Path, tmp_path: Path) -> None:
    core_models.run("save", tmp_path / "core", 1, "llama", "tied")
    (tmp_path / "back").mkdir()
    for name, options in (("llama", STATED), ("tied", [])):
        core = tmp_path / "core" / name
        ours = take(core, tmp_path / f"ours-{name}", *options, "--tokenizer", tokenizer)
        assert ours.config.model.tie_embeddings is (name == "tied")
        assert_same_logits(ours, core)
        export(ours.folder, tmp_path / "back" / name)
        assert_same_tensors(core, tmp_path / "back" / name)
    core_models.run("load", tmp_path / "back", 1, "llama", "tied")
    for name in ("llama", "tied"):
        first, last = (core_models.logits(tmp_path / folder / name) for folder in ("core", "back"))
        assert torch.equal(first, last)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_two_ranks_of_core_write_what_one_loads(tokenizer: Path, tmp_path: Path) -> None:
    """The two ranks divide heads and channels. Our export of their folder has the logits of ours."""
    core_models.run("save", tmp_path / "both", 2, "llama")
    assert any(path.name.startswith("__1_") for path in (tmp_path / "both/llama").iterdir())
    ours = take(tmp_path / "both/llama", tmp_path / "ours", *STATED, "--tokenizer", tokenizer)
    (tmp_path / "back").mkdir()
    export(ours.folder, tmp_path / "back/llama")
    assert_same_tensors(tmp_path / "both/llama", tmp_path / "back/llama")
    core_models.run("load", tmp_path / "back", 1, "llama")
    assert_same_logits(ours, tmp_path / "back/llama")


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_our_checkpoint_comes_back_unchanged(name: str, stored: Stored, tmp_path: Path) -> None:
    source = stored(name)
    export(source.folder, tmp_path / "core")
    back = take(tmp_path / "core", tmp_path / "back")
    assert back.config.model.norm_eps == source.config.model.norm_eps
    weights = [key for key in back.shapes if key in source.shapes]
    assert len(weights) == len(back.shapes)
    assert all(torch.equal(back.whole(key), source.whole(key)) for key in weights)
    assert back.plan.arch.table == source.plan.arch.table
    assert back.plan.arch.specs[0].exported_options(back.plan.arch.sizes) == source.plan.arch.specs[0].exported_options(
        source.plan.arch.sizes
    )
    assert back.meta.data["eos"] == "3"


def test_rows_are_in_the_order_of_core(stored: Stored, tmp_path: Path) -> None:
    """A group has its two query heads, its key head and its value head; the gate comes before `up`."""
    source = stored("llama")
    export(source.folder, tmp_path / "core")
    core = whole(tmp_path / "core")
    q, k, v = (source.whole(f"layers.2.mixer.{key}") for key in ("q.weight", "kv.weight.k", "kv.weight.v"))
    rows = [q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]]
    assert torch.equal(core["decoder.layers.self_attention.linear_qkv.weight"][1], torch.cat(rows))
    halves = [source.whole(f"layers.3.mixer.gate_up.weight.{part}") for part in ("gate", "up")]
    assert torch.equal(core["decoder.layers.mlp.linear_fc1.weight"][1], torch.cat(halves))


def test_weights_keep_their_dtype(alone: Groups, tmp_path: Path) -> None:
    source = checkpoint_of(model_config("llama"), alone, tmp_path / "run", "bf16")
    export(source.folder, tmp_path / "core")
    assert DcpTensors(tmp_path / "core").dtypes["decoder.layers.mlp.linear_fc2.weight"] is torch.bfloat16
    back = take(tmp_path / "core", tmp_path / "back")
    assert all(torch.equal(back.whole(key), source.whole(key)) for key in back.shapes)
    assert back.config.precision.name == "bf16"


def test_layers_can_have_tensors_of_their_own(stored: Stored, tmp_path: Path) -> None:
    """core writes such names if layers differ, and does not write the arguments at all."""
    source = stored("llama")
    export(source.folder, tmp_path / "core")
    tensors = whole(tmp_path / "core")
    split = {}
    for key, tensor in tensors.items():
        if not key.startswith("decoder.layers."):
            split[key] = tensor
            continue
        rest = key.removeprefix("decoder.layers.")
        split |= {f"decoder.layers.{layer}.{rest}": part.clone() for layer, part in enumerate(tensor)}
    rewrite(tmp_path / "core", split)
    back = take(tmp_path / "core", tmp_path / "back")
    assert all(torch.equal(back.whole(key), source.whole(key)) for key in back.shapes)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a folder."""
    for path in [*folder.glob("*.distcp"), folder / ".metadata"]:
        path.unlink()
    with without_warning():
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)


def restate(folder: Path, **changed: Any) -> None:
    """Change arguments in a folder."""
    arguments = {**stored_arguments(folder), **changed}
    torch.save({"args": Namespace(**arguments)}, folder / COMMON)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mistral", "window"), ("mamba2", "swiglu"), ("granite", "attention"), ("llama-llama3", "rope.scale")],
)
def test_models_that_core_does_not_compute_are_not_exported(
    name: str, reason: str, stored: Stored, tmp_path: Path
) -> None:
    refused = refusal(checkpoint.main, ["export", stored(name).folder, tmp_path / "core", "--to", "torch_dist"])
    assert refused.code == "unsupported"
    assert reason in str(refused)
    assert not (tmp_path / "core").exists()


def test_multipliers_are_not_exported(stored: Stored, tmp_path: Path) -> None:
    model = replace(stored("llama").config.model, residual_multiplier=0.5)
    with pytest.raises(ValueError, match="residual_multiplier"):
        require_fitting(architecture(model))


@pytest.mark.parametrize(
    "changed",
    [
        {"softmax_type": "learnable"},
        {"window_size": (128, 0)},
        {"hybrid_layer_pattern": "M*-M*-"},
        {"rotary_percent": 0.5},
        {"num_query_groups": 4},
        {"hidden_size": 64},
    ],
)
def test_arguments_of_other_models_are_refused(changed: dict[str, Any], stored: Stored, tmp_path: Path) -> None:
    export(stored("llama").folder, tmp_path / "core")
    restate(tmp_path / "core", **changed)
    refused = refusal(checkpoint.main, ["import", tmp_path / "core", tmp_path / "back"])
    assert refused.code == "unsupported"
    assert next(iter(changed)) in str(refused)
    assert not (tmp_path / "back").exists()


def test_every_missing_value_is_named(stored: Stored, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    torch.save({"iteration": 7}, folder / COMMON)
    (folder / "tokenizer.json").unlink()
    refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back"])
    assert refused.code == "missing"
    assert all(option in str(refused) for option in ("--heads", "--rope-base", "--norm-eps", "--tokenizer"))
    refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back", "--heads", "4", "--norm-eps", "1e-5"])
    assert "--heads" not in str(refused)
    options = ["--rope-base", "5000", "--norm-eps", "1e-5", "--tokenizer", tokenizer]
    refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back", "--heads", "3", *options])
    assert refused.code == "mismatch"
    refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back", "--heads", "-4", *options])
    assert refused.code == "out-of-range"
    assert str(refused).startswith("--heads is -4, must be an integer from 1")
    take(folder, tmp_path / "back", "--heads", 4, *options)


def test_options_must_not_contradict_the_arguments(stored: Stored, tmp_path: Path) -> None:
    export(stored("llama").folder, tmp_path / "core")
    command = ["import", tmp_path / "core", tmp_path / "back"]
    assert refusal(checkpoint.main, [*command, "--heads", "2"]).code == "conflict"
    (tmp_path / "core/metadata.json").unlink()
    assert refusal(checkpoint.main, [*command, "--heads", "4"]).code == "no-effect"
    assert usage_error(checkpoint.main, [*command, "--heads", "four"]) == ("--heads", "malformed")


def test_arguments_out_of_range_are_refused_in_the_name_of_the_folder(stored: Stored, tmp_path: Path) -> None:
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    restate(folder, rotary_base=0.5)
    refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back"])
    assert refused.code == "out-of-range"
    assert f"{folder} has rotary_base, which is 0.5, must be a number above 1" in str(refused)
    restate(folder, rotary_base=500, softmax_type=torch.float32)
    refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back"])
    assert "softmax_type is an object of another program" in str(refused)


def test_another_tokenizer_than_the_folders_is_refused(stored: Stored, tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    command = ["import", folder, tmp_path / "back", "--tokenizer", tokenizer]
    assert refusal(checkpoint.main, command).code == "conflict"
    stored_tokenizer = (folder / "tokenizer.json").read_bytes()
    (tokenizer / "tokenizer.json").write_bytes(stored_tokenizer)
    take(folder, tmp_path / "back", "--tokenizer", tokenizer)


def test_tensors_of_other_models_are_refused(stored: Stored, tmp_path: Path) -> None:
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    tensors = whole(folder)

    def code(changed: dict[str, torch.Tensor]) -> str:
        rewrite(folder, changed)
        refused = refusal(checkpoint.main, ["import", folder, tmp_path / "back"])
        assert all(key.rpartition(".")[2] in str(refused) for key in changed.keys() - tensors.keys())
        return refused.code

    sinks = "decoder.layers.self_attention.core_attention.softmax_offset"
    assert code(tensors | {sinks: torch.zeros(2, 4)}) == "mismatch"
    assert code(tensors | {"decoder.layers.1.mixer.in_proj.weight": torch.zeros(8, 32)}) == "unsupported"
    ungated = "decoder.layers.mlp.linear_fc1.weight"
    assert code(tensors | {ungated: tensors[ungated][:, :56].clone()}) == "mismatch"
    assert code(tensors | {"output_layer.weight": tensors["output_layer.weight"].long()}) == "unsupported"
    assert code({key: tensor for key, tensor in tensors.items() if "linear_qkv" not in key}) == "mismatch"
    rewrite(folder, tensors | {"optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.zeros(32)})
    take(folder, tmp_path / "back")


def test_the_arguments_run_no_code(stored: Stored, tmp_path: Path) -> None:
    """Objects of unknown classes become inert, as Megatron-LM's arguments have many; a damaged file is refused."""
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    arguments = Namespace(**stored_arguments(folder), call=Call(tmp_path / "made"), dtype=torch.bfloat16)
    torch.save({"args": arguments, "tensor": torch.zeros(2), "more": [Call(tmp_path / "made")]}, folder / COMMON)
    take(folder, tmp_path / "back")
    assert not (tmp_path / "made").exists()
    with zipfile.ZipFile(folder / COMMON, "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": arguments})[:40])
    assert refusal(checkpoint.main, ["import", folder, tmp_path / "again"]).code == "unreadable"


def test_the_arguments_change_no_class(stored: Stored, tmp_path: Path) -> None:
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    for name in ("argparse.Namespace", "pathlib.PosixPath"):
        with zipfile.ZipFile(folder / COMMON, "w") as archive:
            archive.writestr("common/data.pkl", state_of_a_class(name, "name", "../x"))
        assert refusal(checkpoint.main, ["import", folder, tmp_path / "back"]).code == "unreadable"
    assert not hasattr(Namespace, "name")
    assert Path("../x").name == "x"


def test_damaged_files_are_refused(stored: Stored, tmp_path: Path) -> None:
    folder = tmp_path / "core"
    export(stored("llama").folder, folder)
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:5000])
    assert refusal(checkpoint.main, ["import", folder, tmp_path / "back"]).code == "unreadable"
    (folder / ".metadata").write_bytes(pickle.dumps(Call(tmp_path / "made")))
    assert refusal(checkpoint.main, ["import", folder, tmp_path / "back"]).code == "unreadable"
    assert not (tmp_path / "made").exists()


def test_exports_write_every_fixed_argument(stored: Stored, tmp_path: Path) -> None:
    export(stored("llama").folder, tmp_path / "core")
    arguments = stored_arguments(tmp_path / "core")
    assert FIXED.items() <= arguments.items()
    assert (arguments["num_attention_heads"], arguments["num_query_groups"], arguments["kv_channels"]) == (4, 2, 8)
