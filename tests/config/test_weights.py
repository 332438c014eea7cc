"""Recipes that start from a checkpoint: the settings that they take from it, precedence, and messages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from hybridtron.cli.main import main
from hybridtron.config.check import check
from hybridtron.config.load import CONFIGS, choices_of, load, to_yaml
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, Documents, Order, StateMode
from hybridtron.config.weights import lacking_weights
from hybridtron.problems import Code, ConfigError
from hybridtron.sweep.grid import read
from tests.recipes import FAST, NAMES
from tests.settings import Setting, flat
from tests.slow import slow_except

OFFICIAL = [name for name in choices_of("recipe") if name.startswith("length/official_")]
LENGTH = [name for name in choices_of("recipe") if name.startswith("length/") and name not in OFFICIAL]
BASE = ["recipe=mamba2_45m", "data.path=/data/pile", "run.name=base"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a run, as far as a recipe looks at it."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.yaml").write_text(to_yaml(load(BASE)))
    return tmp_path / "base"


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A checkpoint as an import writes it: nothing is known of its data and its training."""
    held = load(BASE)
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported/config.yaml").write_text(to_yaml(dataclasses.replace(held, phases=[])))
    return tmp_path / "imported"


def reported(*settings: Setting) -> dict[str, Code]:
    """Return the codes of the problems by key."""
    with pytest.raises(ConfigError) as caught:
        load(flat(settings))
    return {problem.key: problem.code for problem in caught.value.problems}


def test_length_recipes_are_four_interventions_and_a_control() -> None:
    assert {name.partition("/")[2] for name in LENGTH} == {"zero", "random", "fitted", "state_passing", "tbtt"}


@pytest.mark.parametrize("recipe", slow_except(LENGTH, "length/fitted"))
def test_recipes_follow_appendix_b_on_the_checkpoints_model(recipe: str, base: Path) -> None:
    config = load([f"recipe={recipe}", f"run.weights={base}"])
    held = load(BASE)
    assert check(RunPlan.of(config)) == []
    assert (config.model, config.precision) == (held.model, held.precision)
    walking = config.states.mode is StateMode.tbtt
    expected = (Documents.isolate, Order.lanes) if walking else (Documents.join, Order.windows)
    (phase,) = resolve(config)
    assert (phase.documents, phase.order) == expected
    assert dataclasses.replace(config.data, documents=None, order=None) == dataclasses.replace(
        held.data, documents=None, order=None
    )
    (phase,) = config.phases
    assert (phase.seq_len, phase.global_batch, phase.micro_batch) == (2048, 256, 32)
    assert phase.tokens == str(100 * 2048 * 256)
    assert phase.lr == 1e-4  # a tenth of 1e-3
    assert config.optim.final_lr == 0.1  # 1e-5
    assert (config.optim.warmup, config.optim.weight_decay, config.optim.clip) == ("10%", 0.01, 1.0)
    assert config.optim.betas == [0.9, 0.95]
    assert config.run.dir == f"runs/base_{config.states.mode}"


def test_the_command_line_wins_and_references_follow_it(base: Path) -> None:
    arguments = [
        "phases.0.tokens=${steps:500}",
        "phases.0.global_batch=64",
        "phases.0.lr=4e-5",
        "data.path=/data/books",
    ]
    config = load(["recipe=length/state_passing", *arguments, "model.layers.M.chunk=8", f"run.weights={base}"])
    assert config.phases[0].tokens == str(500 * 2048 * 64)
    assert config.optim.final_lr == 0.25
    assert config.data.path == "/data/books"
    assert config.model.layers["M"] == {**load(BASE).model.layers["M"], "chunk": 8}


def test_groups_of_the_command_line_win(base: Path) -> None:
    config = load(["recipe=length/random", "model=samba_421m", "data=embedded", f"run.weights={base}"])
    assert config.model == load(["model=samba_421m"]).model
    assert config.data.path == "data/embedded-32000"


def test_weights_give_the_data_of_the_last_phase(tmp_path: Path) -> None:
    held = load([*BASE, "phases.0.data.path=/data/last", "phases.0.data.mixture={a: {weight: 2}}"])
    (tmp_path / "config.yaml").write_text(to_yaml(held))
    config = load(["recipe=length/fitted", f"run.weights={tmp_path}", "data.mixture.b={weight: 1}"])
    assert config.data.path == "/data/last"
    assert {name: entry.weight for name, entry in config.data.mixture.items()} == {"a": 2, "b": 1}


TUNING = {
    "llama_7b_span", "llama3_1.6b_span", "mamba2_hybrid_2.7b_span", "zamba2_1.2b_span", "hax_mamba_130m",
    "hax_mamba_130m_3072", "hax_mamba_130m_chat", "hax_mamba_laptop_continual", "hax_mamba_laptop_needles",
    "samba_3.8b_chat",
}  # fmt: skip


@pytest.mark.parametrize(
    "names", [pytest.param({*FAST, *TUNING}, id="some"), pytest.param(NAMES, id="all", marks=pytest.mark.slow)]
)
def test_tuning_recipes_are_marked_and_need_weights(names: Collection[str]) -> None:
    """Recipes tune if their first phase has adapters, or a rate and steps meant for trained weights."""
    configs = {name: load([f"recipe={name}"]) for name in names}
    assert {name for name, config in configs.items() if config.run.tunes is not None} == TUNING
    frozen = {name for name, config in configs.items() if resolve(config)[0].model.adapters is not None}
    assert frozen < TUNING
    for name, config in configs.items():
        assert [problem.key for problem in lacking_weights(config)] == ["run.weights"] * (name in TUNING)


def test_tuning_recipes_are_refused_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "recipe=hax_mamba_laptop_continual"
    for command in (["train", recipe], ["submit", recipe, "--dry-run"]):
        assert main(command) == 2
        printed = capsys.readouterr().err
        assert "run.weights" in printed
        assert "hax_mamba_laptop (" in printed
    assert list(tmp_path.iterdir()) == []
    for command in (["train", recipe, "run.plan=true"], ["inspect", recipe]):
        assert main(command) == 0
    output = capsys.readouterr().out
    assert "hax_mamba_laptop" in output
    assert lacking_weights(load([recipe, "run.tunes=null"])) == []
    assert reported("recipe=length/zero") == {"run.weights": "missing"}


def test_a_saved_configuration_has_no_references(base: Path) -> None:
    text = to_yaml(load(["recipe=length/tbtt", f"run.weights={base}"]))
    assert "${" not in text
    assert "pattern: M*12" in text


def test_config_groups_refer_to_every_key_of_the_weights(base: Path) -> None:
    """A key that is new in the schema must come from the checkpoint as well; but adapters are merged there."""
    held = dataclasses.asdict(load(BASE))
    del held["model"]["adapters"]
    text = {group: (CONFIGS / group / "from_checkpoint.yaml").read_text() for group in ("model", "data", "precision")}
    for group, keys in ((group, held[group]) for group in text):
        assert [key for key in keys if not re.search(rf"{{weights:{group}\.{key}[.}}]", text[group])] == []


def test_missing_weights_are_reported_by_their_key(tmp_path: Path) -> None:
    assert reported("recipe=length/tbtt") == {"run.weights": "missing"}
    assert reported("recipe=length/tbtt", "run.weights=/nowhere") == {"run.weights": "no-file"}
    assert reported("recipe=length/tbtt", f"run.weights={tmp_path}") == {"run.weights": "no-file"}
    assert reported("run.weights=/nowhere") == {"run.weights": "no-file"}
    (tmp_path / "config.yaml").write_text("model: {depth: 3}")
    assert reported("recipe=length/tbtt", f"run.weights={tmp_path}") == {"run.weights": "unreadable"}


def test_a_run_may_start_from_weights_under_a_recipe_of_its_own(base: Path) -> None:
    config = load([*BASE, f"run.weights={base}"])
    assert isinstance(config, Config)
    assert config.run.weights == str(base)


def test_weights_of_several_phases_give_the_last_phases_settings(base: Path) -> None:
    (base / "config.yaml").write_text(to_yaml(load(["recipe=laptop_phases"])))
    config = load(["recipe=length/tbtt", f"run.weights={base}"])
    assert config.model.layers["W"]["kind"] == "span"
    assert config.precision.name == "bf16"
    assert config.phases[0].lr == pytest.approx(6e-5)  # a tenth of the last peak


@pytest.mark.parametrize("recipe", LENGTH)
def test_keys_that_an_import_lacks_are_all_reported(recipe: str, imported: Path) -> None:
    arguments = [f"recipe={recipe}", f"run.weights={imported}"]
    missing = {f"phases.0.{name}": value for name, value in (("seq_len", 2048), ("global_batch", 256))}
    missing |= {"phases.0.micro_batch": 4, "phases.0.lr": 6e-5, "data.path": "/data/pile"}
    assert reported(arguments).keys() == missing.keys()
    assert reported(arguments, "phases.0.lr=6e-5").keys() == missing.keys() - {"phases.0.lr"}
    config = load([*arguments, *(f"{key}={value}" for key, value in missing.items())])
    assert check(RunPlan.of(config)) == []
    assert config.model == load(BASE).model
    assert config.data.source == "folder"


@pytest.mark.parametrize(
    ("recipe", "peak"), slow_except([("130m", 6e-4), ("370m", 3e-4), ("780m", 2.5e-4), ("1.3b", 2e-4)], ("130m", 6e-4))
)
def test_official_checkpoints_have_the_papers_numbers(recipe: str, peak: float, imported: Path) -> None:
    config = load([f"recipe=length/official_{recipe}", f"run.weights={imported}", "data.path=/data/pile"])
    assert check(RunPlan.of(config)) == []
    (phase,) = config.phases
    assert (phase.tokens, phase.seq_len, phase.global_batch) == (str(100 * 2**19), 2048, 256)
    assert phase.lr == pytest.approx(peak / 10)
    assert config.optim.final_lr * phase.lr == pytest.approx(1e-5)
    assert (config.optim.warmup, config.optim.weight_decay, config.optim.clip) == ("10%", 0.01, 1.0)
    assert (config.states.mode, config.states.dropout) == (StateMode.passing, 0.1)
    walking = ["states.mode=tbtt", "data.documents=null", "data.order=lanes"]
    assert (
        check(
            RunPlan.of(load([f"recipe=length/official_{recipe}", f"run.weights={imported}", *walking, "data.path=/p"]))
        )
        == []
    )


def test_the_sweep_of_figure_12_starts_from_an_import(imported: Path) -> None:
    sweep = read(Path(__file__).parents[2] / "studies" / "sweeps" / "length" / "sigma.yaml")
    deviations = []
    for run in sweep.runs:
        config = load(
            [f"run.weights={imported}" if setting.startswith("run.weights=") else setting for setting in run.settings]
        )
        assert check(RunPlan.of(config)) == []
        assert config.states.mode is StateMode.random
        deviations.append(config.states.sigma)
    assert deviations == sorted(deviations)
    assert len(set(deviations)) == 6
