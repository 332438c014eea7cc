"""A phase without rotary positions after one that has them (DroPE); reading with another attention than in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.folder import folder_of
from hybridtron.cli import evaluate
from hybridtron.config.load import load_saved
from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate.loaded_model import open_checkpoint, whole_model
from hybridtron.problems import Unusable
from tests.refusals import raises_code
from tests.train.conftest import VOCAB, Refused, Train

PHASE = "{name: %s, tokens: 256, seq_len: 16, global_batch: 4, micro_batch: 2, lr: 1e-3%s}"


@pytest.mark.slow
def test_a_phase_drops_rotary_positions(train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without positions every token has the angles of position 0."""
    dropped = PHASE % ("long", ", layers: {W: {rope: none}}")
    assert train_small(f"phases=[{PHASE % ('short', '')},{dropped}]") == 0
    run = tmp_path / "run"
    saved = [load_saved(folder_of(run, step) / "config.yaml").model.layers["W"] for step in (4, 8)]
    assert [options.get("rope") for options in saved] == [None, "none"]
    checkpoint = open_checkpoint(folder_of(run, 8))
    dropped = checkpoint.plan.arch.model
    model = whole_model(checkpoint, checkpoint.plan.arch)
    with_positions = {**dropped.layers, "W": {**dropped.layers["W"], "rope": {"base": 10000.0}}}
    rotated = whole_model(checkpoint, architecture(replace(dropped, layers=with_positions)))
    tokens_BL = torch.randint(VOCAB, (2, 12))
    nowhere = torch.zeros(2, 12, dtype=torch.int64)
    with torch.no_grad():
        without_positions = model(tokens_BL, None, SeqInfo.stream(2, 12)).output
        torch.testing.assert_close(without_positions, rotated(tokens_BL, None, SeqInfo(nowhere)).output)
        assert not torch.allclose(without_positions, rotated(tokens_BL, None, SeqInfo.stream(2, 12)).output, atol=1e-4)


def test_an_evaluation_reads_with_self_extend(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses near the start are unchanged; later ones differ. The page names the way of reading."""
    assert train_small("model.layers.W.window=null", "phases.0.tokens=640") == 0
    run = str(tmp_path / "run")
    losses = {}
    for name, options in {"plain": [], "extended": ["--self-extend", "2,8"]}.items():
        common = ["--length", "2x", "--rows", "4", "--instruments", "positions", "--output", str(tmp_path / name)]
        assert evaluate.main([run, *common, *options]) == 0
        lines = (tmp_path / name / "positions.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
    assert "full, self-extended by 2 beyond 8 (W)" in capsys.readouterr().out
    assert losses["plain"][:8] == pytest.approx(losses["extended"][:8], abs=1e-5)
    assert losses["plain"][16:] != pytest.approx(losses["extended"][16:], abs=1e-5)


def test_self_extend_is_for_full_attention_with_rotary_positions(
    train_small: Train, refused: Refused, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "model.layers.W.self_extend" in refused("model.layers.W.self_extend={group: 2, neighbours: 8}")
    assert train_small("phases.0.tokens=64") == 0
    with raises_code(Unusable, "no-effect"):
        evaluate.main([str(tmp_path / "run"), "--self-extend", "2,8"])
    for wrong in ("4", "1,8"):
        with pytest.raises(SystemExit):
            evaluate.main([str(tmp_path / "run"), "--self-extend", wrong])
        assert "--self-extend" in capsys.readouterr().err


SPAN = "{kind: span, heads: 4, chunk: 8, block: 4, blocks: 1}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("letter", "trained", "same"),
    [("{kind: attention, heads: 4, window: 8}", "window 8 (W)", 8), (SPAN, "span 8 (W)", 8)],
)
def test_evaluations_read_with_full_or_trained_attention(
    letter: str, trained: str, same: int, train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ways agree as far as a window or a chunk reaches, and not beyond."""
    assert train_small(f"model.layers.W={letter}", "phases.0.tokens=640") == 0
    capsys.readouterr()
    losses = {}
    for how, said in {"full": "full (W)", "trained": trained}.items():
        common = ["--length", "2x", "--rows", "4", "--instruments", "positions", "--output", str(tmp_path / how)]
        assert evaluate.main([str(tmp_path / "run"), "--attention", how, *common]) == 0
        assert f"attention: {said}" in capsys.readouterr().out
        lines = (tmp_path / how / "positions.jsonl").read_text().splitlines()
        losses[how] = [json.loads(line)["loss"] for line in lines]
    assert losses["full"][:same] == pytest.approx(losses["trained"][:same], abs=1e-5)
    assert losses["full"][16:] != pytest.approx(losses["trained"][16:], abs=1e-5)


def test_attention_full_needs_a_model_with_attention(train_small: Train, tmp_path: Path) -> None:
    assert train_small("model.pattern=M*2", "phases.0.tokens=64") == 0
    with raises_code(Unusable, "no-effect"):
        evaluate.main([str(tmp_path / "run"), "--attention", "full"])
