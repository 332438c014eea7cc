"""An export's tokenizer: a pad token of its own if there is room, and the messages of an old transformers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.data.same_vocabulary import difference
from hybridtron.interop.card import SHARED_PAD, card
from hybridtron.interop.consumers import oldest_transformers
from hybridtron.interop.custom import Custom
from hybridtron.interop.native_pairs import Llama
from hybridtron.interop.shipped_code import WRITTEN
from hybridtron.interop.tokenizer import PAD, SpecialTokens, write_tokenizer

LLAMA = {"architectures": [Llama.name], "rope_parameters": {}}
CUSTOM = {"architectures": [Custom.name]}
CONFIGURATION = next(path for path in WRITTEN if path.name == "configuration_hybridtron.py")


def tokenizer(*more: str) -> bytes:
    words = [*(f"w{number}" for number in range(8)), *more]
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "w0"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


def written(folder: Path, stored: bytes, vocab_size: int) -> tuple[SpecialTokens, dict]:
    special = write_tokenizer(folder, stored, 3, vocab_size, 64)
    return special, json.loads((folder / "tokenizer_config.json").read_text())


def test_a_free_id_becomes_the_pad_token(tmp_path: Path) -> None:
    special, config = written(tmp_path, tokenizer(), 9)
    stored = (tmp_path / "tokenizer.json").read_bytes()
    assert (special.pad, special.shared, config["pad_token"], config["eos_token"]) == (8, False, PAD, "w3")
    assert Tokenizer.from_str(stored.decode()).token_to_id(PAD) == 8
    assert difference(tokenizer(), stored) is None
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    assert config["padding_side"] == "left"
    text = card(RunPlan.of(load([])), Llama(), special, LLAMA)
    assert "padded on the left" in text
    assert "bos_token_id is 3" in text
    assert "bos" not in card(RunPlan.of(load([])), Llama(), SpecialTokens(None, None), LLAMA)


def test_existing_pad_token_is_kept(tmp_path: Path) -> None:
    special, config = written(tmp_path, tokenizer("<|padding|>"), 16)
    assert (special.pad, config["pad_token"]) == (8, "<|padding|>")
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer("<|padding|>")


def test_padding_is_eos_if_the_vocabulary_is_full(tmp_path: Path) -> None:
    special, config = written(tmp_path, tokenizer(), 8)
    assert (special.pad, special.shared, config["pad_token"]) == (3, True, "w3")
    assert SHARED_PAD in card(RunPlan.of(load([])), Llama(), special, LLAMA)
    assert SHARED_PAD not in card(RunPlan.of(load([])), Llama(), SpecialTokens(3, 8), LLAMA)


def test_unreadable_tokenizer_is_copied_unchanged(tmp_path: Path) -> None:
    special, config = written(tmp_path, b"{}", 8)
    assert (special.pad, "pad_token" in config) == (3, False)
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}"


def test_model_card_has_no_duplicate_or_unknown_claims() -> None:
    text = card(RunPlan.of(load(["recipe=laptop_phases"])), Custom(), SpecialTokens(0, 1), CUSTOM)
    assert "\n- recipe: `laptop_phases`\n- trained with" in text
    head, body = text.split("---")[1:3]
    tags = [line for line in head.splitlines() if line.startswith("- ")]
    assert len(tags) == len(set(tags))
    assert "license:" not in head
    assert "needs transformers 5.16 or newer" in body
    assert "not by SGLang" in body
    assert body.count("trained with hybridtron") == 4
    imported = load([])
    imported.phases = []
    assert "trained with" not in card(RunPlan.of(imported), Custom(), SpecialTokens(0, 1), CUSTOM)


@pytest.mark.parametrize("version", ["4.57.6", "5.15.1"])
def test_old_transformers_is_refused_at_import(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("transformers")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match=version):
        runpy.run_path(str(CONFIGURATION))


def test_shipped_code_refuses_the_versions_that_the_page_does_not_have() -> None:
    needed = runpy.run_path(str(CONFIGURATION))["NEEDED"]
    assert ".".join(map(str, needed)) == oldest_transformers(CUSTOM)
