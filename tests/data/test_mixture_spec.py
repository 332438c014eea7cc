"""Sources of a mixture, and the configuration check's messages about data before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridtron.architecture.model import ModelConfig
from hybridtron.config.check import check
from hybridtron.config.load import CONFIGS, load
from hybridtron.config.phase_schema import PhaseDataConfig
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import (
    Config,
    DataConfig,
    IngredientConfig,
    PhaseConfig,
    RunConfig,
    Source,
)
from hybridtron.data.folder import FolderError, TokenFolder
from hybridtron.data.mixture_spec import mixture_of
from hybridtron.data.prepare.writer import write_folder
from hybridtron.data.problems import RECIPES_PATHS, data_problems
from hybridtron.problems import Code, Problem
from tests.refusals import raises_code
from tests.settings import Setting, flat


def config_of(
    path: Path | str,
    source: Source = Source.folder,
    vocab_size: int = 999,
    seq_len: int = 8,
    lengths: tuple[int, ...] = (1, 2),
    phase: PhaseDataConfig | None = None,
    mixture: dict[str, IngredientConfig] | None = None,
) -> Config:
    model = ModelConfig(width=8, vocab_size=vocab_size, pattern="M", layers={})
    first, second = (PhaseConfig(tokens="1M", seq_len=seq_len, global_batch=4, lr=1e-3) for _ in range(2))
    second.data = phase or PhaseDataConfig()
    run = RunConfig(name="test", eval_lengths=list(lengths))
    data = DataConfig(source, str(path), mixture or {}, epochs=None)
    return Config(model=model, data=data, phases=[first, second], run=run)


def problems(config: Config) -> list[Problem]:
    return data_problems(RunPlan.of(config))


def problems_of(config: Config) -> list[tuple[str, Code]]:
    """Return key and code of each problem."""
    return [(problem.key, problem.code) for problem in problems(config)]


@pytest.fixture
def two_sources(tmp_path: Path) -> TokenFolder:
    splits = {"train": {"web": [[5] * 99], "code": [[6] * 299]}, "validation": {"web": [[5] * 99]}}
    return write_folder(tmp_path / "two", splits, "{}", 999, 0, {})


def mixed(data: DataConfig) -> list[tuple[str, str, str, float]]:
    mixture_sources = mixture_of(data, lambda path: TokenFolder.open(Path(path)))
    return [(source.name, source.folder.path.name, source.source, source.weight) for source in mixture_sources]


def test_without_a_mixture_every_source_counts_by_its_tokens(two_sources: TokenFolder):
    data = DataConfig(path=str(two_sources.path))
    assert mixed(data) == [("code", "two", "code", 300.0), ("web", "two", "web", 100.0)]


def test_a_mixture_names_sources_here_and_elsewhere(two_sources: TokenFolder, toy: TokenFolder):
    mixture = {
        "web": IngredientConfig(3),
        "books": IngredientConfig(1, path=str(toy.path)),  # the only source there, whatever its name
        "python": IngredientConfig(2, source="code"),
    }
    data = DataConfig(path=str(two_sources.path), mixture=mixture)
    assert mixed(data) == [("web", "two", "web", 3), ("books", "toy", "text", 1), ("python", "two", "code", 2)]


def test_a_missing_source_is_refused(two_sources: TokenFolder):
    data = DataConfig(path=str(two_sources.path), mixture={"books": IngredientConfig(1)})
    with raises_code(FolderError, "unknown-name", "mixture.books", "'books'", "code, web"):
        mixed(data)


def test_sources_with_different_tokenizers_are_refused(tmp_path: Path, two_sources: TokenFolder):
    splits = {"train": {"text": [[5] * 99]}, "validation": {}}
    other = write_folder(tmp_path / "other", splits, '{"another": 1}', 999, 0, {})
    mixture = {"web": IngredientConfig(1), "text": IngredientConfig(1, path=str(other.path))}
    assert problems_of(config_of(two_sources.path, mixture=mixture)) == [("data.mixture", "conflict")]


def test_sources_with_different_eos_are_refused(tmp_path: Path, two_sources: TokenFolder):
    splits = {"train": {"text": [[5] * 99]}, "validation": {}}
    other = write_folder(tmp_path / "other", splits, "{}", 999, 2, {})
    mixture = {"web": IngredientConfig(1), "text": IngredientConfig(1, path=str(other.path))}
    assert problems_of(config_of(two_sources.path, mixture=mixture)) == [("data.mixture", "conflict")]
    phase = PhaseDataConfig(mixture=mixture)
    assert problems_of(config_of(two_sources.path, phase=phase)) == [("phases.1.data.mixture", "conflict")]


def test_a_source_that_is_hardly_read_is_refused(two_sources: TokenFolder):
    """A tiny weight is refused at the start; else laying out rows would fail once its phase has begun."""
    mixture = {"web": IngredientConfig(1e-9), "code": IngredientConfig(1)}
    assert problems_of(config_of(two_sources.path, mixture=mixture)) == [("data.mixture", "out-of-range")]


def test_every_folder_that_is_missing_is_named_once_with_its_key(tmp_path: Path, two_sources: TokenFolder):
    mixture = {
        "web": IngredientConfig(1, path=str(tmp_path / "none")),
        "code": IngredientConfig(1),
        "books": IngredientConfig(1, path="s3://bucket/books"),
        "talk": IngredientConfig(1, path=str(tmp_path / "nowhere")),
    }
    assert problems_of(config_of(two_sources.path, mixture=mixture)) == [
        ("data.mixture.web.path", "no-file"),
        ("data.mixture.talk.path", "no-file"),
    ]


def test_a_good_folder_has_no_problems(toy: TokenFolder):
    assert not problems_of(config_of(toy.path))
    assert not problems_of(config_of(toy.path, vocab_size=2000))


def test_damage_is_reported_with_a_cure(toy: TokenFolder):
    (toy.path / "train" / "text" / "index.json").unlink()
    assert problems_of(config_of(toy.path)) == [("data.path", "unreadable")]
    (problem,) = problems(config_of(toy.path, Source.embedded))
    assert f"delete {toy.path}" in problem.message


def test_a_missing_folder_is_a_problem_unless_it_is_embedded(tmp_path: Path):
    assert problems_of(config_of(tmp_path / "none")) == [("data.path", "no-file")]
    assert not problems_of(config_of(tmp_path / "none", Source.embedded))


def test_unparsed_tokens_are_left_to_the_rules_of_phases(toy: TokenFolder):
    config = config_of(toy.path)
    config.data.epochs = 1.0
    config.phases[0].tokens = "-5"
    assert not [problem for problem in problems(config) if "phases.0" in problem.key]


def test_a_url_is_not_opened_by_the_check():
    assert not problems_of(config_of("s3://bucket/tokens"))


def test_a_missing_folder_is_reported_by_the_key_that_names_it(toy: TokenFolder, tmp_path: Path):
    phase = PhaseDataConfig(path=str(tmp_path / "none"))
    (problem,) = problems(config_of(toy.path, phase=phase))
    assert problem.key == "phases.1.data.path"
    (problem,) = problems(config_of(tmp_path / "none", phase=PhaseDataConfig(path=str(toy.path))))
    assert problem.key == "data.path"


def test_a_vocabulary_that_differs_from_the_models_is_a_problem(toy: TokenFolder):
    for config in (config_of(toy.path, vocab_size=998), config_of(toy.path, Source.embedded, vocab_size=1000)):
        (problem,) = problems(config)
        assert (problem.key, problem.code) == ("data.path", "mismatch")
        assert "model.vocab_size=999" in problem.message
    small = config_of(toy.path, Source.embedded, vocab_size=299)
    assert problems_of(small) == [("model.vocab_size", "out-of-range")]


def test_an_embedded_folder_may_have_fewer_entries_than_it_was_asked_for(tmp_path: Path):
    splits = {"train": {"text": [[5] * 40]}, "validation": {"text": [[5] * 40]}}
    write_folder(tmp_path / "data", splits, "{}", 400, 0, {"asked_vocab_size": 500})
    assert not problems_of(config_of(tmp_path / "data", Source.embedded, vocab_size=500))
    assert not problems_of(config_of(tmp_path / "data", Source.embedded, vocab_size=400))
    (problem,) = problems(config_of(tmp_path / "data", Source.embedded, vocab_size=600))
    assert "model.vocab_size=500" in problem.message


def test_folders_with_too_few_tokens_are_refused(make_folder: Callable[..., TokenFolder]):
    toy = make_folder()  # 212 tokens of training and 43 of validation
    assert not problems_of(config_of(toy.path, seq_len=21))
    assert problems_of(config_of(toy.path, seq_len=22)) == [("data.path", "does-not-fit")]
    assert not problems_of(config_of(toy.path, seq_len=22, lengths=(1,)))
    assert ("data.path", "does-not-fit") in problems_of(config_of(toy.path, seq_len=212))


def test_reading_a_source_more_often_than_epochs_is_refused(toy: TokenFolder) -> None:
    config = config_of(toy.path)
    config.data.epochs = 1.0
    config.phases[1].name = "second"
    tokens = toy.manifest.splits["train"]["text"].tokens
    config.phases[0].tokens = str(tokens)
    config.phases[1].tokens = str(3 * tokens)
    (problem,) = problems(config)
    assert (problem.key, problem.code) == ("data.epochs", "does-not-fit")
    assert "data.epochs=3," in problem.message
    assert f"it has {tokens} tokens, and needs {2 * tokens} more" in problem.message
    config.phases[1].data.epochs = 3.0
    assert not problems(config)


def test_a_far_too_small_text_is_not_cured_by_epochs(toy: TokenFolder) -> None:
    config = config_of(toy.path)
    config.data.epochs = 1.0
    config.phases[1].name = "second"
    config.phases[0].tokens = "8"
    config.phases[1].tokens = "20M"
    config.model.vocab_size = 2 * toy.manifest.vocab_size
    (problem,) = problems(config)
    assert "data.epochs=" not in problem.message
    assert f"{toy.manifest.vocab_size} entries" in problem.message
    advised = problem.message.partition("phases.1.tokens=")[2].partition(",")[0]
    config.phases[1].tokens = advised
    assert not problems(config), advised


def keys(*settings: Setting) -> list[str]:
    return [problem.key for problem in problems(load([*flat(settings), "run.dir=run"]))]


def test_a_too_small_embedded_corpus_is_reported_before_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert keys() == []  # the laptop recipe
    assert keys("phases.0.tokens=20B") == ["data.epochs"]
    assert keys("phases.0.tokens=20B", "data.epochs=null") == []
    assert keys("phases.0.tokens=20B", "data.mixture={text: {weight: 1}}") == ["data.epochs"]
    (problem,) = problems(load(["phases.0.tokens=20B", "run.dir=run"]))
    assert re.search(r"at least [\d,.]+ times: it has at most [\d.]+M tokens;", problem.message)
    assert list(tmp_path.iterdir()) == []


def test_embedded_text_is_not_written_to_paths_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert keys("recipe=samba_421m") == ["data.path"]
    assert "data.path" in keys("recipe=samba_421m", "data.source=embedded")
    assert "data.path" in keys("recipe=samba_421m", "data.source=embedded", "data.path=./data//tokens/")
    assert keys("recipe=samba_421m", "data.source=embedded", "data.path=x", "phases.0.tokens=1M") == []
    advised = load(["recipe=samba_421m", "data=embedded", "data.epochs=null", "run.max_steps=10", "run.dir=run"])
    assert check(RunPlan.of(advised), 1) + problems(advised) == []


def test_embedded_text_in_paths_of_recipes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version wrote it there."""
    monkeypatch.chdir(tmp_path)
    splits = {split: {"code": [[5] * 99999]} for split in ("train", "validation")}
    write_folder(Path("data/tokens"), splits, "{}", 32000, 0, {"corpus": "embedded", "asked_vocab_size": 32000})
    Path("mine").symlink_to("data/tokens")
    chosen = ["recipe=samba_421m", "phases.0.tokens=80K"]
    assert keys(chosen) == ["data.path"]
    assert keys(chosen, "data.path=mine") == []
    assert keys(chosen, "data.source=embedded") == []


def test_every_path_of_the_recipes_is_known() -> None:
    named = re.findall(r"path: (data/[\w/]+)", "".join(file.read_text() for file in CONFIGS.glob("data/*.yaml")))
    named = [path for path in named if not path.startswith("data/embedded")]
    assert named
    assert all(path.startswith(RECIPES_PATHS) for path in named)
