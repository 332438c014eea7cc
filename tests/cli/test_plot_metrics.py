"""The picture of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridtron.cli import plot
from hybridtron.cli.main import main
from hybridtron.cli.sweep import set_ticks
from hybridtron.problems import Code
from tests.refusals import refusal


def test_plot_writes_a_picture_of_a_run(tmp_path: Path) -> None:
    lines = [{"tokens": 10, "loss": 7.0}, {"tokens": 20, "loss": 6.0, "validation": {"1x": 6.5, "2x": 6.6}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_picture_has_a_title_axes_and_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture has a title, tokens in thousands and the start of each phase, and keeps curves apart that coincide."""
    kept = []

    @contextmanager
    def picture(output: Path) -> Iterator[Axes]:
        axes = Figure().subplots()
        yield axes
        kept.append(axes)

    monkeypatch.setattr(plot, "picture", picture)
    validation = {"1x": 6.0, "2x": 6.0, "4x": 6.0}
    lines: list[dict[str, Any]] = [
        {"phase": phase, "tokens": 1000 * step, "loss": 7.0}
        for step, phase in enumerate(["short", "short", "long", "long", "chat"], 1)
    ]
    for line in lines[::2]:
        line["validation"] = validation
    plot.draw("my run", lines, tmp_path / "loss.png")
    (axes,) = kept
    assert axes.get_title() == "my run"
    assert [(text.get_text().strip(), text.get_position()[0]) for text in axes.texts] == [
        ("short", 0),
        ("long", 2000),
        ("chat", 4000),
    ]
    axes.figure.canvas.draw()
    assert "2K" in [label.get_text() for label in axes.get_xticklabels()]
    held_out = [line for line in axes.lines if str(line.get_label()).startswith("held out")]
    assert len({(line.get_linestyle(), line.get_marker(), line.get_markersize()) for line in held_out}) == 3
    assert all(line.get_markerfacecolor() == "none" for line in held_out)
    plot.draw("one phase", lines[:2], tmp_path / "loss.png")
    assert not kept[1].texts


@pytest.mark.parametrize(("content", "code"), [(None, "no-file"), ("", "missing")], ids=["no run", "no step yet"])
def test_run_without_steps_is_refused(content: str | None, code: Code, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert refusal(plot.main, [tmp_path]).code == code
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("values", "scale"), [(["1e-4", "1e-3", "3e-3"], "log"), (["2", "3"], "linear"), (["0", "9"], "linear")]
)
def test_learning_rates_of_a_sweep_are_on_a_logarithmic_axis(values: list[str], scale: str) -> None:
    axes = Figure().subplots()
    set_ticks(axes, {value: float(value) for value in values})
    assert axes.get_xscale() == scale
    assert [label.get_text() for label in axes.get_xticklabels()] == values


@pytest.mark.parametrize("name", ["loss.xyz", "loss", "loss.png.part"])
def test_unknown_picture_format_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 8, "loss": 2.0}\n')
    error = refusal(plot.main, [tmp_path, "--output", tmp_path / name])
    assert error.code == "unknown-name"
    assert "png, " in str(error)
    assert not (tmp_path / name).exists()
