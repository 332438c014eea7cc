"""The file of a sweep: its runs, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridtron.problems import Unusable
from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import Sweep, read


def sweep_of(tmp_path: Path, text: str) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read(path)


def test_sweep_has_a_run_for_every_combination(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        "settings: [recipe=laptop]\n"
        "variants: {samba: [], swa: ['model.pattern=(W-)*2']}\n"
        "grid: {model.layers.W.window: [32, 64], optim.spike: [null, 2.0], run.seed: [0, 1]}\n"
        "metrics: [loss]\n",
    )
    assert len(sweep.runs) == 16
    assert sweep.axes == ("model.layers.W.window", "optim.spike", "run.seed")
    first = sweep.runs[0]
    last = sweep.runs[-1]
    assert first.name == "samba-window=32-spike=null-seed=0"
    assert first.settings == ("recipe=laptop", "model.layers.W.window=32", "optim.spike=null", "run.seed=0")
    assert last.name == "swa-window=64-spike=2.0-seed=1"
    assert last.settings[:2] == ("recipe=laptop", "model.pattern=(W-)*2")
    assert len({run.point for run in sweep.runs}) == 8
    assert first.point == sweep.runs[1].point


def test_a_variant_starts_from_another_at_the_same_values(tmp_path: Path) -> None:
    text = "variants: {base: [recipe=laptop], longer: {from: base, settings: [recipe=a]}}\ngrid: {run.seed: [3]}\n"
    sweep = sweep_of(tmp_path, text)
    base, longer = sweep.runs
    assert (base.start, longer.start) == (None, base.name)
    folder = Folder(tmp_path / "out")
    assert folder.settings(longer) == [
        f"run.weights={folder.of('base-seed=3')}", "recipe=a", "run.seed=3",
        f"run.dir={folder.of('longer-seed=3')}", "run.name=longer-seed=3",
    ]  # fmt: skip


def test_a_variant_can_start_from_the_best_checkpoint(tmp_path: Path) -> None:
    text = "variants: {base: [recipe=laptop], longer: {from: base@best, settings: [recipe=a]}}\n"
    longer = sweep_of(tmp_path, text).runs[1]
    assert longer.start == "base"
    assert Folder(tmp_path / "out").settings(longer)[0] == f"run.weights={tmp_path / 'out' / 'base'}@best"


def test_keys_with_equal_endings_keep_their_full_names(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "grid: {phases.0.lr: [1e-3], phases.1.lr: [1e-4]}\n")
    assert sweep.runs[0].name == "phases.0.lr=1e-3-phases.1.lr=1e-4"


def test_lists_and_booleans_are_written_as_on_a_command_line(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "grid: {optim.betas: [[0.9, 0.95]], parallel.sequence: [true]}\n")
    assert sweep.runs[0].settings == ("optim.betas=[0.9,0.95]", "parallel.sequence=true")
    assert sweep.runs[0].name == "betas=_0.9,0.95_-sequence=true"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[1, 2]", "wrong-type"),
        ("sttings: [a=1]", "unknown-name"),
        ("settings: recipe=laptop", "wrong-type"),
        ("settings: [5]", "wrong-type"),
        ("settings: [laptop]", "malformed"),
        ("settings: [run.dir=x]", "misplaced"),
        ("variants: [a]", "wrong-type"),
        ("variants: {}", "missing"),
        ("variants: {a: {from: b}}", "unknown-name"),
        ("variants: {a: {form: b}}", "unknown-name"),
        ("grid: [run.seed]", "wrong-type"),
        ("grid: {1: [1]}", "wrong-type"),
        ("grid: {run.seed: 3}", "wrong-type"),
        ("grid: {run.seed: [{a: 1}]}", "wrong-type"),
        ("grid: {run.seed: []}", "missing"),
        ("grid: {run.seed: [1, 1]}", "duplicate"),
        ("metrics: loss", "wrong-type"),
        ("metrics: []", "missing"),
        ("settings: [a=1", "unreadable"),
        ("variants: {'a b': [], 'a/b': []}", "duplicate"),
    ],
)
def test_wrong_sweeps_are_refused(text: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"sweep\.yaml") as refused:
        sweep_of(tmp_path, text)
    assert refused.value.code == code


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"none\.yaml") as refused:
        read(tmp_path / "none.yaml")
    assert refused.value.code == "unreadable"


MALFORMED = {
    "settings: 5": "settings",
    "settings: recipe=laptop": "settings",
    "settings: {recipe: laptop}": "settings",
    "settings: [5]": "settings",
    "settings: [[recipe=laptop]]": "settings",
    "settings: [recipe]": "settings",
    "settings: [null]": "settings",
    "settings: [run.dir=x]": "settings",
    "settings: true": "settings",
    "grid: 5": "grid",
    "grid: [run.seed]": "grid",
    "grid: {1: [1]}": "grid",
    "grid: {null: [1]}": "grid",
    "grid: {run.seed: 1}": "grid.run.seed",
    "grid: {run.seed: []}": "grid.run.seed",
    "grid: {run.seed: null}": "grid.run.seed",
    "grid: {run.seed: {a: 1}}": "grid.run.seed",
    "grid: {run.seed: [{a: 1}]}": "grid.run.seed",
    "grid: {run.seed: [[{a: 1}]]}": "grid.run.seed",
    "grid: {run.seed: [1, 1]}": "grid.run.seed",
    "grid: {run.seed: !!set {1}}": "grid.run.seed",
    "variants: 5": "variants",
    "variants: [a]": "variants",
    "variants: {a: 5}": "variants.a",
    "variants: {a: [5]}": "variants.a",
    "variants: {a: {from: b}}": "variants.a",
    "variants: {a: {form: b}}": "variants.a",
    "variants: {a: {settings: 5}}": "variants.a",
    "variants: {null: []}": "variants.None",
    "metrics: loss": "metrics",
    "metrics: [5]": "metrics",
    "metrics: []": "metrics",
    "metrics: {loss: 1}": "metrics",
    "5": "settings",
    "sets: []": "sets",
    "{[a]: 1}": "sweep.yaml",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_sweep_is_refused_by_its_key(text: str, tmp_path: Path) -> None:
    with pytest.raises(Unusable) as caught:
        sweep_of(tmp_path, text)
    assert MALFORMED[text] in str(caught.value)
    assert "sweep.yaml" in str(caught.value)
