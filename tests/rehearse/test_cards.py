"""Verification cards: measured lines, rehearsed lines, and lines without a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.load import choices_of, load
from hybridtron.planning.count import count
from hybridtron.problems import Unusable
from hybridtron.rehearse import cards
from hybridtron.resources import shipped

RECORD: dict[str, Any] = {
    "recipe": "llama2_438m", "layout": "DP8", "rank": 0, "tokens_per_second": 158_765.2, "mfu": 0.4, "peak": 27.2e9,
    "step_seconds": 2.0, "waits": 1.0, "code": "0a1b",
}  # fmt: skip


def test_card_without_measurements_marks_every_line() -> None:
    text = cards.card("llama2_438m", {}, [])
    assert text.count(cards.NOT_MEASURED) == len(cards.LINES)
    assert "not rehearsed" in text


def test_card_lists_measurements_and_rehearsals() -> None:
    refused = {"recipe": "llama2_438m", "layout": "PP2", "rank": None, "refused": ["parallel.pipeline  is 2, but"]}
    text = cards.card("llama2_438m", {"losses": {"1": 10.38, "2": 10.2}, "waits": 1}, [RECORD, refused])
    assert "| losses at steps | 1: 10.3800, 2: 10.2000 |" in text
    assert text.count(cards.NOT_MEASURED) == len(cards.LINES) - 2
    assert "| PP2 | refused: `parallel.pipeline` |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| DP8 ")]
    assert row.startswith("| DP8 | 158,765 | 40.0% | 4")
    assert row.endswith("| 27.2 | 1 | `0a1b` |")


def test_flops_follow_the_formula_of_megatron() -> None:
    """For a Llama, our causal attention counts half of the row and the token itself."""
    config = load(["recipe=llama2_438m"])
    length = config.phases[0].seq_len
    model = config.model
    ours = count(architecture(model), length)
    attention = 3 * ours.flops_by_part["attention"]
    expected = ours.flops_per_token + attention * (2 * length / (length + 1) - 1)
    assert cards.megatron_flops(architecture(model), length) == pytest.approx(expected, rel=1e-9)


def test_measurement_with_an_unknown_line_is_refused(tmp_path: Path) -> None:
    path = cards.measured_path("length/zero", tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"loss": 1}))
    with pytest.raises(Unusable) as refused:
        cards.measured_of("length/zero", tmp_path)
    assert refused.value.code == "unknown-name"


@pytest.mark.slow
def test_every_recipe_has_a_card() -> None:
    folder = shipped("benchmarks") / "cards"
    names = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.md")}
    assert names == set(choices_of("recipe")), "`hybridtron check cards` writes those that are missing"


def test_cards_are_written_from_measurements_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cards, "choices_of", lambda _: ("llama2_438m",))
    records = tmp_path / "rehearse.jsonl"
    measured = cards.measured_path("llama2_438m", tmp_path)
    records.write_text(json.dumps(RECORD) + "\n" + json.dumps({**RECORD, "recipe": "samba_421m"}) + "\n")
    measured.parent.mkdir()
    measured.write_text(json.dumps({"resume_difference": 0.0}))
    assert cards.main(["--records", str(records), "--output", str(tmp_path)]) == 0
    assert (tmp_path / "llama2_438m.md").read_text() == cards.card("llama2_438m", {"resume_difference": 0.0}, [RECORD])
    assert str(tmp_path) in capsys.readouterr().out
    with pytest.raises(Unusable) as refused:
        cards.main(["--records", str(tmp_path / "none.jsonl")])
    assert refused.value.code == "no-file"
