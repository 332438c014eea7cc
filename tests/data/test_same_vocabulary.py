"""Tokenizers are compared by their behaviour, and a model's weights never see tokens that they do not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtron.config.load import load, to_yaml
from hybridtron.config.resolve import RunPlan
from hybridtron.data.check_vocabulary import meaning_problems, vocabulary_warnings
from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.data.problems import data_problems
from hybridtron.data.same_vocabulary import difference, is_readable
from tests.settings import Setting, flat


def trained(text: str) -> dict[str, Any]:
    return json.loads(train_tokenizer([text] * 3, 300).to_str())


def stored(tokenizer: dict[str, Any]) -> bytes:
    return json.dumps(tokenizer).encode()


BASE = trained("the theory of these thoughts: there, then, thirty theses")


def written_by_another_version(base: dict[str, Any]) -> dict[str, Any]:
    merges = [" ".join(pair) for pair in base["model"]["merges"]]
    return (
        {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
        | {key: value for key, value in base.items() if key not in ("truncation", "padding")}
        | {"model": base["model"] | {"merges": merges}, "padding": None}
    )


def grown(base: dict[str, Any]) -> dict[str, Any]:
    token = {"id": len(base["model"]["vocab"]), "content": "<|user|>", "single_word": False, "lstrip": False}
    more = {**token, "rstrip": False, "normalized": False, "special": True}
    return base | {"added_tokens": [*base["added_tokens"], more]}


def lower_case(base: dict[str, Any]) -> dict[str, Any]:
    return base | {"normalizer": {"type": "Lowercase"}}


def merged_in_another_order(base: dict[str, Any]) -> dict[str, Any]:
    return base | {"model": base["model"] | {"merges": base["model"]["merges"][::-1]}}


def of_other_text(_: dict[str, Any]) -> dict[str, Any]:
    return trained("quick jumping zebras vex bold foxes")


@pytest.mark.parametrize("change", [written_by_another_version, grown])
def test_equivalent_and_extended_tokenizers_do_not_differ(change: Callable) -> None:
    for held, other in ((BASE, change(BASE)), (change(BASE), BASE)):
        assert stored(held) != stored(other)
        assert difference(stored(held), stored(other)) is None


@pytest.mark.parametrize("change", [lower_case, merged_in_another_order, of_other_text])
def test_tokenizers_that_encode_otherwise_differ(change: Callable) -> None:
    assert difference(stored(BASE), stored(change(BASE))) is not None


def test_files_that_are_no_tokenizer_are_not_readable() -> None:
    assert is_readable(stored(BASE))
    assert not any(is_readable(text) for text in (b"", b"{}", b"[" * 100_000, b"\xff", b"null"))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A run with a checkpoint, as far as it is looked at here."""
    run = tmp_path / "run"
    for step, tokenizer in ((5, of_other_text(BASE)), (10, BASE)):
        folder = run / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_bytes(stored(tokenizer))
        (folder / "config.yaml").write_text(to_yaml(load([])))
    (run / "config.yaml").write_text(to_yaml(load([])))
    return run


def problem_keys(tokenizer: Path, *settings: Setting, index: int = 0) -> list[str]:
    """Return the keys of the problems with tokens of this tokenizer, in the phase with this index."""
    folder: Any = SimpleNamespace(name="tokens", tokenizer_file=tokenizer)
    return [problem.key for problem in meaning_problems(load(flat(settings)), index, folder)]


def test_tokens_of_another_vocabulary_than_the_weights_are_a_problem(weights: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    weights_setting = f"run.weights={weights}"
    file.write_bytes(stored(grown(BASE)))
    assert problem_keys(file, weights_setting) == problem_keys(file) == []
    file.write_bytes(stored(of_other_text(BASE)))
    assert problem_keys(file, weights_setting) == ["run.weights"]
    assert problem_keys(file, f"{weights_setting}/checkpoints/step-00000010") == ["run.weights"]
    assert problem_keys(file, weights_setting, "run.accept_data_changes=true") == problem_keys(file) == []


def test_weights_of_a_later_phase_are_checked_from_then_on(weights: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(stored(of_other_text(BASE)))
    phases = ["recipe=laptop_phases", f"phases.1.init_from={weights}"]
    assert [problem_keys(file, phases, index=index) for index in range(3)] == [[], *[["phases.1.init_from"]] * 2]


def test_no_tokenizer_is_trained_for_weights_that_have_one(weights: Path, tmp_path: Path) -> None:
    arguments = [f"run.weights={weights}", f"data.path={tmp_path / 'none'}"]
    assert [problem.key for problem in data_problems(RunPlan.of(load(arguments)))] == ["run.weights"]
    assert data_problems(RunPlan.of(load([*arguments, "run.accept_data_changes=true"]))) == []


def test_weights_without_a_tokenizer_are_named(weights: Path, tmp_path: Path) -> None:
    config = load([f"run.weights={weights}"])
    assert vocabulary_warnings(config) == []
    (weights / "checkpoints/step-00000010/tokenizer.json").write_text("{}")
    assert len(vocabulary_warnings(config)) == 1
    file = tmp_path / "tokenizer.json"
    file.write_bytes(stored(BASE))
    assert problem_keys(file, f"run.weights={weights}") == []
