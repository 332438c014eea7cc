"""Exports of models with muP: its factors become settings of the exported model, or the weights hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.mup import MupConfig
from hybridtron.architecture.table import architecture
from hybridtron.cli.convert import main
from hybridtron.config.choices import Export
from hybridtron.config.export_class import SHIPPED, CannotExport, export_class
from hybridtron.interop.verify import verify
from hybridtron.parallel.groups import Groups
from tests.interop.models import ATTENTION, MLP, checkpoint_of, model_config
from tests.slow import slow_except


def with_mup(name: str) -> ModelConfig:
    """Return a model of twice the base width."""
    model = model_config(name)
    return replace(model, mup=MupConfig(model.width // 2))


@pytest.mark.parametrize(
    ("name", "target"),
    slow_except(
        [("samba", SHIPPED), ("granite", "GraniteMoeHybridForCausalLM"), ("dense_granite", "GraniteForCausalLM")],
        ("granite", "GraniteMoeHybridForCausalLM"),
    ),
)
def test_export_gives_the_same_logits(name: str, target: str, alone: Groups, tmp_path: Path) -> None:
    model = with_mup(name)
    assert export_class(architecture(model), Export.auto) == target
    source = checkpoint_of(model, alone, tmp_path / "run")
    output = tmp_path / "out"
    assert main(["export", "--checkpoint", str(source.folder), "--output", str(output), "--verify", "none"]) == 0
    assert verify(output, source).logits < 1e-5
    settings = json.loads((output / "config.json").read_text())
    if model.tie_embeddings:
        assert settings["logits_scaling"] == 2 * model.logits_scaling
    assert "mup" not in settings


def test_untied_model_with_heads_of_a_fixed_size_stays_a_llama() -> None:
    attention = {**ATTENTION, "heads": 4, "kv_heads": 2, "head_dim": 12}
    model = replace(model_config("dense_granite"), layers={"A": attention, "-": MLP}, mup=MupConfig(16))
    model = replace(model, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0)
    assert export_class(architecture(model), Export.native) == "LlamaForCausalLM"


def test_classes_without_a_scale_are_refused() -> None:
    model = with_mup("bamba")
    assert export_class(architecture(replace(model, mup=MupConfig())), Export.native) == "BambaForCausalLM"
    assert export_class(architecture(model), Export.auto) == SHIPPED
    with pytest.raises(CannotExport) as refused:
        export_class(architecture(model), Export.native)
    assert refused.value.code == "unsupported"


def test_scale_is_an_option_of_the_exported_layers() -> None:
    model = with_mup("samba")
    (attention, *_) = (spec for spec in architecture(model).specs if isinstance(spec, AttentionSpec))
    head = attention.head(architecture(model).sizes)
    assert attention.exported_options(architecture(model).sizes)["scale"] == (head // 2) ** 0.5 / head
