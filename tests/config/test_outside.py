"""Configuration files of the user's: named by their paths, and in a configs/ beside the work."""

from __future__ import annotations

import re

import pytest

from hybridtron.cluster.submit import copy_code
from hybridtron.config.load import CONFIGS, carried, choices_of, load, to_yaml
from hybridtron.config.outside import COMPLETE, copy_into
from hybridtron.problems import ConfigError, Problem

HEAD = "# @package _global_\n"
MINE = """
defaults:
  - /recipe/laptop
  - override /cluster: CLUSTER
  - _self_
model:
  width: 96
run:
  name: mine
"""
CLUSTER = """
defaults:
  - h100
  - _self_
name: ours
peak_tflops: 123
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder to work in, which a quote and a space are part of."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(*arguments) -> dict[str, Problem]:
    """Return the problems by key."""
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize("named", ["./mine.yaml", "mine.yaml", "{work}/mine.yaml"])
@pytest.mark.parametrize("head", ["", HEAD])
def test_a_recipe_is_loaded_by_its_path(work, named, head):
    write(work / "mine.yaml", head + MINE.replace("CLUSTER", "h100"))
    config = load([f"recipe={named.format(work=work)}", "phases.0.lr=1e-4"])
    beside = load(["recipe=laptop", "cluster=h100", "model.width=96", "run.name=mine", "phases.0.lr=1e-4"])
    assert re.fullmatch("mine-[0-9a-f]{12}", config.run.recipe or "")
    beside.run.recipe = config.run.recipe
    assert config == beside


def test_clusters_and_models_are_loaded_by_their_paths(work):
    write(work / "ours.yaml", CLUSTER)
    write(work / "mine.yaml", MINE.replace("CLUSTER", "local"))
    config = load(["recipe=samba_421m", "cluster=./ours.yaml", "model=./mine.yaml"])
    assert (config.cluster.name, config.cluster.peak_tflops, config.cluster.memory_gb) == ("ours", 123, 80)
    assert config.model == load(["recipe=laptop", "model.width=96"]).model
    assert config.phases == load(["recipe=samba_421m"]).phases


def test_an_edited_file_is_read_again(work):
    file = write(work / "mine.yaml", MINE.replace("CLUSTER", "h100"))
    assert load(["recipe=./mine.yaml"]).model.width == 96
    file.write_text(file.read_text().replace("96", "64"))
    assert load(["recipe=./mine.yaml"]).model.width == 64


def test_configs_in_the_working_folder_add_names(work):
    write(work / "configs/recipe/mine.yaml", HEAD + MINE.replace("CLUSTER", "ours"))
    write(work / "configs/recipe/deep/mine.yaml", HEAD + "defaults: [/recipe/mine, _self_]\nmodel: {width: 64}\n")
    write(work / "configs/cluster/ours.yaml", CLUSTER)
    write(work / "configs/config.yaml", "defaults: [no_such]\n")  # another program's
    config = load(["recipe=mine"])
    assert (config.model.width, config.cluster.peak_tflops) == (96, 123)
    config = load(["recipe=deep/mine", "model=mine"])
    assert (config.model.width, config.run.name) == (96, "mine")
    assert "mine" not in choices_of("recipe")  # the package's own, which suites go through
    assert "mine?" in refusal("recipe=mime")["recipe"].message
    assert load(["recipe=laptop"]) == load(["recipe=laptop"], CONFIGS)


def test_a_file_that_shadows_a_shipped_one_is_refused(work):
    write(work / "configs/recipe/mine.yaml", HEAD + MINE.replace("CLUSTER", "h100"))
    copy = write(work / "configs/cluster/h100.yaml", (CONFIGS / "cluster/h100.yaml").read_text())
    assert load(["recipe=mine"]).cluster.peak_tflops == 989  # a copy of the same text may lie there
    copy.write_text("name: h100\npeak_tflops: 1\n")
    for chosen in ("recipe=mine", "recipe=samba_421m", "cluster=h100"):
        assert refusal(chosen)["cluster"].code == "duplicate"
    assert load(["recipe=laptop"]).cluster.name == "local"


@pytest.mark.parametrize("recipe", [MINE.replace("CLUSTER", "h100"), "model: {width: 96}\n"])
def test_a_recipe_without_its_package_line_is_refused(work, recipe):
    write(work / "configs/recipe/mine.yaml", recipe)
    problem = refusal("recipe=mine")["recipe"]
    assert problem.code == "missing"
    assert str(work / "configs/recipe/mine.yaml") in problem.message


def test_a_recipe_without_required_keys_is_refused(work):
    write(work / "mine.yaml", "model: {pattern: M, layers: {M: {kind: mamba}}}\nphases: [{seq_len: 8}]\n")
    problems = refusal("recipe=./mine.yaml")
    assert problems.keys() == {
        "model.width",
        "model.vocab_size",
        "run.name",
        "phases.0.tokens",
        "phases.0.global_batch",
    }
    assert {problem.code for problem in problems.values()} == {"missing"}


@pytest.mark.parametrize(
    ("argument", "code"),
    [
        ("recipe=./none.yaml", "no-file"),
        ("recipe=./there", "no-file"),
        ("recipe=there", "unknown-name"),
        ("recipe=laptop.yaml", "no-file"),
        ("recipe=./list.yaml", "missing"),
        ("recipe=./empty.yaml", "missing"),
        ("recipe=./torn.yaml", "unreadable"),
        ("recipe=./bytes.yaml", "unreadable"),
        ("recipe=.", "unknown-name"),
        ("recipe=./", "unreadable"),
        ("recipe=/dev/zero", "unreadable"),
        ("recipe=" + 300 * "a", "unknown-name"),
        ("recipe=./" + 252 * "a", "no-file"),
        ("recipe=./" + 300 * "a", "unreadable"),
        ("recipe=./a\0b", "unreadable"),
        ("./" + 300 * "a", "malformed"),
        ("recipe=./wrong.yaml", "malformed"),
        ("recipe=./builds.yaml", "unknown-name"),
        ("recipe=samba_421", "unknown-name"),
    ],
)
def test_unusable_files_are_refused(work, argument, code):
    write(work / "there.yaml", "")
    write(work / "list.yaml", "- 1\n")
    write(work / "empty.yaml", "# nothing\n")
    write(work / "torn.yaml", "model: {width: 1\n")
    (work / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    write(work / "wrong.yaml", "model: {widht: 1}\n")
    write(work / "builds.yaml", "defaults: [/recipe/no_such]\n")
    (problem,) = refusal(argument).values()
    assert problem.code == code
    assert len(problem.message) < 1000


def test_a_job_gets_the_files_of_the_user(work):
    """A job reads its own copies: edits after the submission change nothing, and no other folder is read."""
    write(work / "mine.yaml", MINE.replace("CLUSTER", "ours"))
    cluster = write(work / "configs/cluster/ours.yaml", CLUSTER)
    settings = ["recipe=./mine.yaml", "phases.0.lr=1e-4", "model=./mine.yaml"]
    before = load(settings)
    renamed, files = carried(settings)
    copy_code(work / "run/code", files)
    (work / "mine.yaml").unlink()
    cluster.write_text("name: edited\n")
    copied = work / "run/code/hybridtron/configs"
    assert load(renamed, copied) == before
    assert str(work / "mine.yaml") in (copied / COMPLETE).read_text()


def test_files_are_copied_from_the_named_folder(work):
    named_folder = work / "elsewhere"
    write(named_folder / "cluster/ours.yaml", CLUSTER)
    write(work / "configs/cluster/ours.yaml", "name: of another folder\n")
    (work / "copy/cluster").mkdir(parents=True)
    copy_into(work / "copy", named_folder, [])
    assert (work / "copy/cluster/ours.yaml").read_text() == CLUSTER


@pytest.mark.parametrize("recipe", ["laptop_phases", "samba_1.3b", "samba_3.8b", "zamba2_1.2b_span"])
def test_a_saved_configuration_is_a_recipe(work, recipe):
    config = load([f"recipe={recipe}"])
    write(work / "runs/x/config.yaml", to_yaml(config))
    assert load(["recipe=runs/x/config.yaml"]) == config
