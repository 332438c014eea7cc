"""Which programs serve an export: verdicts on config.json as each class's export has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.cli.main import main
from hybridtron.config.choices import Export
from hybridtron.interop.consumers import (
    GGUF,
    LLAMA_CPP,
    NOT_READ,
    SERVERS,
    TRANSFORMERS,
    judgements,
    oldest_transformers,
    summary,
)
from hybridtron.interop.export import TARGETS, target_of
from hybridtron.interop.gguf_families import FAMILIES
from tests.interop.conftest import Stored
from tests.interop.models import CLASSES, CUSTOM, MODELS, model_config

HEADS = "`num_attention_heads` x `head_dim`"
NO_CLASS = "it has no such class"
# by model: the oldest transformers, and the beginning of each server's reason (None: it serves the export)
EXPECTED: dict[str, tuple[str, str | None, str | None, str | None]] = {
    "mamba": ("5.16", None, None, None),
    "mamba2": ("5.23", None, None, None),
    "llama": ("5.16", None, None, None),
    "llama-llama3": ("5.16", None, None, "only if RoPE scale `llama3`"),
    "mistral": ("5.16", None, "only if `sliding_window` is not below", "only if `sliding_window` is not below"),
    "dense_granite": ("5.16", None, None, f"only if {HEADS}"),
    "granite": ("5.23", None, None, None),
    "granite-yarn": ("5.23", None, "only if RoPE is not scaled", "only if attention has no positions"),
    "granite-nope": ("5.23", None, None, None),
    "granite-experts": ("5.23", None, None, None),
    "bamba": ("5.23", "removed in 0.23", NO_CLASS, "its converter pairs channels"),
    "olmo_hybrid": ("5.16", None, NO_CLASS, "its converter has no such class"),
    "olmo_hybrid-rope": ("5.16", f"only if {HEADS}", NO_CLASS, "its converter has no such class"),
    "qwen3_5": ("5.24", NOT_READ, NOT_READ, "only if every fourth layer"),
    "qwen3_next": ("5.16", None, "only if every layer has experts", "only if every layer has experts"),
    "nemotron_h": ("5.16", None, None, None),
    "nemotron_h-experts": ("5.16", None, None, None),
    "nemotron_h-groups": ("5.16", None, None, "only if `num_experts_per_tok`"),
    "zamba2": ("5.17", None, NO_CLASS, "its converter has no such class"),
    "zamba2-floor": ("5.16", None, NO_CLASS, "its converter has no such class"),
    "falcon_h1": ("5.16", None, None, None),
    "falcon_h1-normed": ("5.23", None, None, None),
    "falcon_mamba": ("5.16", None, None, "only if `mixer_rms_eps`"),
    "jamba": ("5.16", None, NO_CLASS, None),
    "jamba-dense": ("5.16", None, NO_CLASS, None),
    "samba": ("5.16", None, NO_CLASS, "its converter has no such class"),
}
# by model: entries of config.json whose change makes a server refuse the export (its place in SERVERS)
CHANGES: list[tuple[str, dict[str, Any], int]] = [
    ("mamba", {"expand": 1}, 2),
    ("granite-nope", {"mamba_expand": 4, "head_dim": 16}, 2),
    ("granite-nope", {"head_dim": 16}, 0),
    ("nemotron_h", {"layers_block_type": ["linear_attention"]}, 1),
    ("nemotron_h", {"mamba_n_groups": 8}, 1),
    ("nemotron_h", {"hybrid_override_pattern": None}, 2),
    ("nemotron_h", {"num_experts_per_tok": 2}, 2),
    ("nemotron_h-experts", {"hybrid_override_pattern": "ME*-M"}, 2),
    ("nemotron_h-experts", {"n_group": 2}, 2),
    ("qwen3_next", {"num_experts": 0}, 0),
    ("falcon_h1", {"rope_parameters": {"rope_type": "yarn"}}, 2),
]


def config_of(name: str) -> dict[str, Any]:
    arch = architecture(model_config(name))
    return json.loads(json.dumps(target_of(arch, Export.auto).config(arch, 64)))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_class_is_judged_by_its_config(name: str) -> None:
    config = config_of(name)
    oldest, *reasons = EXPECTED[name]
    assert oldest_transformers(config) == oldest
    for judgement, reason in zip(judgements(config)[1:], reasons, strict=True):
        if reason is None:
            assert judgement.reason is None, judgement
        else:
            assert judgement.reason is not None
            assert judgement.reason.startswith(reason), judgement


@pytest.mark.parametrize(("name", "change", "server"), CHANGES)
def test_a_changed_entry_is_refused(name: str, change: dict[str, Any], server: int) -> None:
    config = config_of(name)
    assert SERVERS[server].judge(config).reason is None
    assert SERVERS[server].judge(config | change).reason is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [("granite", {}), ("mamba2", {"expand": 4}), ("falcon_h1-normed", {"lm_head_multiplier": 0.5})],
)
def test_a_file_of_ours_serves_what_the_converter_refuses(name: str, change: dict[str, Any]) -> None:
    config = config_of(name) | change
    assert LLAMA_CPP.judge(config).reason is not None
    assert GGUF.judge(config).reason is None
    assert f", {GGUF.name} {GGUF.version}" in summary(config)
    assert f"{GGUF.name} {GGUF.version} (untried)" not in summary(config)


def test_the_line_names_what_was_tried_and_what_needs_our_plugin() -> None:
    assert "vLLM 0.32.0 with hybridtron installed; not by" in summary(config_of("samba"))
    assert "vLLM 0.32.0 with hybridtron installed (untried)" in summary(config_of("conv"))
    assert "vLLM 0.32.0," in summary(config_of("granite"))
    assert "vLLM 0.32.0 (untried)" in summary(config_of("nemotron_h-experts"))
    assert "vLLM 0.32.0 (untried)" in summary(config_of("zamba2"))


def test_every_class_has_a_row_and_a_verdict() -> None:
    assert list(TRANSFORMERS) == [target.name for target in TARGETS]
    assert set(CLASSES) | {"samba"} <= EXPECTED.keys() <= MODELS.keys() | CUSTOM.keys()
    assert GGUF.serves.keys() == FAMILIES.keys()
    for server in (*SERVERS, GGUF):
        assert not server.serves.keys() & server.refusals.keys()
        assert server.tried.keys() | server.by_plugin <= server.serves.keys()
        assert (server.serves.keys() | server.refusals.keys()) - {""} <= TRANSFORMERS.keys()


def test_an_export_ends_with_the_line_and_its_card_has_it(
    stored: Stored, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    arguments = ["export", str(stored("nemotron_h").folder), "--output", str(output), "--verify", "none"]
    assert main(arguments) == 0
    line = summary(json.loads((output / "config.json").read_text()))
    assert "vLLM" in line.partition("; not by ")[0]
    assert capsys.readouterr().out.splitlines()[-1] == f"{output}: {line}"
    assert f"\n- {line}\n" in (output / "README.md").read_text()
