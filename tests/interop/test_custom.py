"""Checkpoints as models that no class of transformers is: shipped with their code, loaded where hybridtron is not."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from hybridtron.architecture.attention import HeadsSpec
from hybridtron.architecture.span import SpanSpec
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.data.batch import SeqInfo
from hybridtron.interop import verify as verify_module
from hybridtron.interop.custom import Custom
from hybridtron.interop.export import CUSTOM as TARGET
from hybridtron.interop.export import target_of
from hybridtron.interop.verify import NotTheSame, lengths_of, verify
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.native import library as native_library
from hybridtron.ops.native.library import NativeLibrary
from hybridtron.parallel.groups import Groups
from tests.interop.conftest import Stored
from tests.interop.models import CUSTOM, MODELS, VOCAB, checkpoint_of, model_config, own_model
from tests.slow import slow_except

OUTSIDE = Path(__file__).with_name("outside.py")
LARGER = {"shared": 1e-4}  # differences of logits that verify._allowed explains


def export_of(source: Checkpoint, output: Path, *more: str) -> int:
    """The exit code."""
    return main(["export", "--checkpoint", str(source.folder), "--output", str(output), *more])


@pytest.mark.parametrize("name", slow_except(CUSTOM, "samba", "shared-span", "everything"))
def test_custom_class_gives_the_same_logits(name: str, stored: Stored, tmp_path: Path) -> None:
    model = model_config(name)
    assert target_of(architecture(model), Export.auto) is TARGET
    source = stored(name)
    output = tmp_path / "out"
    assert export_of(source, output, "--verify", "none") == 0
    assert verify(output, source).logits < LARGER.get(name.partition("-")[0], 1e-5)
    back = TARGET.model(json.loads((output / "config.json").read_text()))
    assert architecture(back).specs == tuple(
        replace(spec, **{key: getattr(other, key) for key in ("kv_heads", "head_dim", "dt_rank") if hasattr(spec, key)})
        for spec, other in zip(architecture(model).specs, architecture(back).specs, strict=True)
    )


def test_custom_class_keeps_the_residual_stream_in_fp32(
    alone: Groups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare in bf16, where it shows: results are nearer to our own model than to the folder with a stream in bf16.

    Compiled forms round to bf16 at other places than the shipped ones in torch, so that they would blur it.
    """
    monkeypatch.setattr(native_library, "library", lambda: NativeLibrary(None, "of torch alone"))
    source = checkpoint_of(replace(model_config("samba"), residual_fp32=True), alone, tmp_path / "run")
    output = tmp_path / "out"
    assert export_of(source, output, "--dtype", "bfloat16", "--verify", "none") == 0
    tokens_BL = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    ours = own_model(source, torch.bfloat16).cast(torch.bfloat16).requires_grad_(False)
    expected = ours(tokens_BL, None, SeqInfo.stream(2, 40)).output
    apart = {}
    streams = {}
    for wide in (True, False):
        settings = json.loads((output / "config.json").read_text()) | {"residual_in_fp32": wide}
        (output / "config.json").write_text(json.dumps(settings))
        theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16, trust_remote_code=True).eval()
        with torch.no_grad():
            out = theirs(tokens_BL, output_hidden_states=True)
        streams[wide] = {stream.dtype for stream in out.hidden_states[:-1]}
        apart[wide] = (out.logits.transpose(0, 1).float() - expected.float()).norm()
        assert out.logits.dtype == torch.bfloat16
    assert streams == {True: {torch.float32}, False: {torch.bfloat16}}
    assert apart[True] < 0.5 * apart[False]


@pytest.mark.slow
def test_exported_code_runs_without_hybridtron(stored: Stored, tmp_path: Path) -> None:
    source = stored("everything")
    output = tmp_path / "out"
    assert export_of(source, output, "--verify", "none") == 0
    tokens_BL = torch.randint(VOCAB, (2, 70), generator=torch.Generator().manual_seed(0))
    torch.save(tokens_BL, output / "tokens.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HF_HOME"] = str(tmp_path / "home")
    command = [sys.executable, "-I", str(OUTSIDE), str(output)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "custom code" not in done.stdout  # no question was asked
    with torch.no_grad():
        ours = own_model(source, torch.float32)(tokens_BL, None, SeqInfo.stream(2, 70)).output.transpose(0, 1)
    assert (torch.load(output / "logits.pt") - ours).abs().max() < 1e-5 * ours.abs().max()
    assert {path.name for path in (output / "again").glob("*.py")} == set(Custom().files())


def test_tokenizer_as_the_card_loads_it_asks_no_question_and_runs_no_code(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    assert export_of(stored("samba"), output, "--verify", "none") == 0
    line = next(line for line in (output / "README.md").read_text().splitlines() if line.startswith("tokenizer = "))
    call = ast.parse(line.removeprefix("tokenizer = "), mode="eval").body
    assert isinstance(call, ast.Call)
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    questions: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda question="": questions.append(question) or "")
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, Custom.model_type, raising=False)  # as without hybridtron.hf
    tokenizer = AutoTokenizer.from_pretrained(output, **arguments)
    assert (tokenizer("w1 w2")["input_ids"], tokenizer.padding_side) == ([1, 2], "left")
    assert not questions
    assert not [name for name in sys.modules if name.startswith("transformers_modules.out")]
    AutoTokenizer.from_pretrained(output)
    assert questions


def test_model_of_a_native_class_can_be_exported_as_the_custom_class(stored: Stored, tmp_path: Path) -> None:
    """A model of a native class exports to the custom class, and is imported from there as a checkpoint."""
    output = tmp_path / "out"
    assert export_of(stored("granite"), output, "--target", "custom", "--dtype", "bfloat16") == 0
    assert json.loads((output / "config.json").read_text())["architectures"] == ["HybridtronForCausalLM"]
    assert main(["import", "--input", str(output), "--output", str(tmp_path / "back")]) == 0


WRONG_OPTIONS = {"the window is off by one": {"window": 10}, "positions turn more": {"rotary_dim": 6}}


@pytest.mark.parametrize("mistake", ["keys and values are swapped", *WRONG_OPTIONS])
def test_proof_detects_planted_mistakes_and_leaves_no_output(
    mistake: str, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = HeadsSpec.exported_options
    names = HeadsSpec.exported_names
    if mistake == "keys and values are swapped":
        swapped = {"k_conv1d.weight": ("kv_conv.v",), "v_conv1d.weight": ("kv_conv.k",)}
        monkeypatch.setattr(
            HeadsSpec, "exported_names", lambda *a: {k: swapped.get(k, v) for k, v in names(*a).items()}
        )
    else:
        wrong = WRONG_OPTIONS[mistake]
        monkeypatch.setattr(
            HeadsSpec,
            "exported_options",
            lambda *a: {key: value and wrong.get(key, value) for key, value in options(*a).items()},
        )
    assert export_of(stored("everything"), tmp_path / "out") == 1
    assert "logits of" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {"modules"}


def test_proof_detects_blocks_that_only_one_model_reads_in_generation(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = stored("samba-span")
    output = tmp_path / "out"
    assert export_of(source, output, "--verify", "none") == 0
    monkeypatch.setattr(SpanSpec, "remembered", lambda spec, training: spec.remember)
    with pytest.raises(NotTheSame, match="continues with"):
        verify(output, source)


@pytest.mark.parametrize(("name", "proven"), [("span-landmark", True), ("mamba-mlp", False)])
def test_selection_that_rounding_may_change_is_proven_in_float64(
    name: str, proven: bool, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof is in float64 if rounding may choose blocks; otherwise a difference in fp32 is a fault."""
    source = stored(name)
    same_logits = verify_module._same_logits

    def apart_in_fp32(folder: Path, theirs: Any, ours: LanguageModel, *rest: Any) -> float:
        if next(theirs.parameters()).dtype == torch.float32:
            raise NotTheSame
        return same_logits(folder, theirs, ours, *rest)

    monkeypatch.setattr(verify_module, "_same_logits", apart_in_fp32)
    output = tmp_path / "out"
    if proven:
        assert export_of(source, output, "--verify", "none") == 0
        assert verify(output, source).logits < 1e-12
    else:
        assert export_of(source, output) == 1


def test_proof_reads_more_tokens_than_a_span_chunk() -> None:
    spans = model_config("samba-span")
    long = replace(spans, layers={**spans.layers, "X": {**spans.layers["X"], "chunk": [512, 1024]}})
    assert 1027 in lengths_of(architecture(long))
    assert 1027 not in lengths_of(
        architecture(replace(long, layers={**long.layers, "X": {**long.layers["X"], "eval": "full"}}))
    )


@pytest.mark.parametrize("change", ["a file of it", "a file beside it", "a generate", "an adapter", "what it names"])
def test_foreign_code_in_an_export_is_not_run(
    change: str, stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = stored("mamba-mlp")
    assert export_of(source, tmp_path / "out", "--verify", "none") == 0
    planted = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    files = {
        "a file of it": "modeling_hybridtron.py",
        "a file beside it": "more.py",
        "a generate": "custom_generate/generate.py",
        "an adapter": "adapter_config.json",
    }
    if change in files:
        file = tmp_path / "out" / files[change]
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as code:
            code.write(planted)
    else:
        (tmp_path / "other.py").write_text(planted)
        settings = json.loads((tmp_path / "out/config.json").read_text())
        settings["auto_map"]["AutoConfig"] = "../other.HybridtronConfig"
        (tmp_path / "out/config.json").write_text(json.dumps(settings))
    assert main(["verify", "--checkpoint", str(source.folder), "--output", str(tmp_path / "out")]) == 1
    assert "not" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_every_weight_is_exported_once_with_six_files_of_code() -> None:
    for name in MODELS | CUSTOM:
        rules = TARGET.rules(architecture(model_config(name)))
        assert len({rule.theirs for rule in rules}) == len(rules)
    assert set(Custom().files()) == {
        f"{name}_hybridtron.py" for name in ("configuration", "modeling", "layers", "linear", "context", "mixers")
    }
