"""Composition of a configuration: precedence, and mistakes by key and code."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridtron.config.check import check
from hybridtron.config.load import CONFIGS, load, load_saved, to_yaml
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Documents, Precision, Source
from hybridtron.problems import Code, ConfigError, Problem
from tests.refusals import raises_code

SIZES = "tokens: 1M, seq_len: 8, global_batch: 1, lr: 1"


def refused(arguments, configs=CONFIGS) -> dict[str, Problem]:
    """Return the problems by key."""
    with pytest.raises(ConfigError) as caught:
        load(arguments, configs)
    return {problem.key: problem for problem in caught.value.problems}


def reported(arguments, configs=CONFIGS) -> dict[str, Code]:
    """Return the codes of the problems by key."""
    return {key: problem.code for key, problem in refused(arguments, configs).items()}


@pytest.mark.parametrize("settings", [[], ["recipe=laptop"], ["recipe=laptop", "model=laptop_phases"]])
def test_a_run_has_the_name_of_its_recipe(settings: list[str], tmp_path: Path) -> None:
    config = load(settings)
    assert config.run.recipe == "laptop"
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config))
    assert load([f"recipe={saved}"]).run.recipe == "laptop"


def test_command_line_beats_recipe_beats_groups():
    config = load(["recipe=samba_421m", "phases.0.lr=1e-3", "precision=fp32"])
    assert config.phases[0].lr == 1e-3  # the command line
    assert config.phases[0].tokens == "20B"  # the recipe
    assert config.data.documents == Documents.join  # the recipe, over its own choice of data=folder
    assert config.data.source == Source.folder
    assert config.precision.name == Precision.fp32  # a group named on the command line beats the recipe's choice
    assert config.optim.clip == 1.0  # the default


def test_a_file_that_is_edited_is_read_again(tmp_path):
    configs = tmp_path / "configs"
    shutil.copytree(CONFIGS, configs)
    first = load(["recipe=laptop"], configs)
    first.model.layers.clear()  # what was loaded belongs to its caller
    assert load(["recipe=laptop"], configs).model.layers
    recipe = configs / "recipe/laptop.yaml"
    recipe.write_text(recipe.read_text().replace("width: 192", "width: 96"))
    assert load(["recipe=laptop"], configs).model.width == 96


def test_a_key_may_be_a_python_keyword():
    assert load(["checkpoint.async=true"]).checkpoint.asynchronous


def test_ablation_builds_on_its_recipe():
    config = load(["recipe=ablations/samba_421m_heads_12_2"])
    base = load(["recipe=samba_421m"])
    assert config.phases == base.phases
    assert config.model.layers["W"] == {"kind": "attention", "heads": 12, "kv_heads": 2, "window": 2048}
    assert config.model.layers["-"]["hidden"] == 4608
    assert config.run.dir == "runs/samba_421m_heads_12_2"


@pytest.mark.parametrize(
    ("argument", "pattern"),
    [
        ("model.pattern=(M-W-)*3", "(M-W-)*3"),
        ("model.pattern='(M-W-)*3'", "(M-W-)*3"),
        ("model.pattern=M*3|M-", "M*3|M-"),
    ],
)
def test_pattern_needs_no_quotes(argument, pattern):
    assert load([argument]).model.pattern == pattern


def test_letters_and_options_can_be_added():
    config = load(["model.layers.M.state=8", "model.layers.Q={kind: attention, heads: 2}", "model.layers.-.hidden=64"])
    assert config.model.layers["M"]["state"] == 8
    assert config.model.layers["Q"] == {"kind": "attention", "heads": 2}
    assert config.model.layers["-"]["hidden"] == 64


@pytest.mark.parametrize(
    ("argument", "key", "code"),
    [
        ("modle.width=3", "modle.width", "unknown-name"),
        ("model.widht=3", "model.widht", "unknown-name"),
        ("recipe=samba_421", "recipe", "unknown-name"),
        ("model=zzz", "model", "unknown-name"),
        ("cluster=mars", "cluster", "unknown-name"),
        ("recipie=laptop", "recipie", "unknown-name"),
        ("laptop", "laptop", "malformed"),
        ("configs/recipe/length/zero.yaml", "configs/recipe/length/zero.yaml", "malformed"),
        ("tests/live.py", "tests/live.py", "malformed"),
        ("--config-dir=here", "--config-dir=here", "unknown-name"),
        ("phases.3.lr=1", "phases.3.lr", "unknown-name"),
        ("phases.1={lr: 1}", "phases.1", "unknown-name"),
        ("model.width=wide", "model.width", "wrong-type"),
        ("run.seed=1.5", "run.seed", "wrong-type"),
        ("data.documents=cut", "data.documents", "unknown-name"),
        ("model.layers.M=mamba", "model.layers.M", "wrong-type"),
        ("run.wandb.project=x", "run.wandb.project", "unknown-name"),
        ("phases=[{lr: 1}]", "phases.0.tokens", "missing"),
        ("run.dir='${run.nam}'", "run.dir", "unknown-name"),
        ("run.eval_lengths=[1", "run.eval_lengths", "malformed"),
        ("lr=1e-3", "lr", "unknown-name"),
        ("optim.lr=1e-3", "optim.lr", "unknown-name"),
        ("batch_size=8", "batch_size", "unknown-name"),
        ("--lr=3", "--lr=3", "malformed"),
        ("--max-steps", "--max-steps", "malformed"),
        ("=3", "=3", "malformed"),
        ("phases.0.lr=abc", "phases.0.lr", "wrong-type"),
        ("run.eval_lengths=2", "run.eval_lengths", "wrong-type"),
        ("run.weights=${nope:1}", "run.weights", "unknown-name"),
        ("run.weights=${x@P}", "run.weights", "unknown-name"),
        ("run.weights=" + 5000 * "a", "run.weights", "no-file"),
        ('model.layers={"-": {kind: swiglu}}', "model.layers", "malformed"),
        ("verbose", "verbose", "malformed"),
        ("model=laptop=3", "model", "unknown-name"),
        ("states=passing", "states", "wrong-type"),
        ("optim=adamw", "optim", "wrong-type"),
    ],
)
def test_mistakes_are_reported_by_key_and_code(argument, key, code):
    assert reported([argument])[key] == code


def test_a_dashed_option_is_refused_with_its_value():
    assert reported(["--recipe", "samba_421m"]) == {"--recipe": "malformed"}
    assert set(reported(["--deterministic", "run.seed=1", "samba"])) == {"--deterministic", "samba"}


def test_a_letter_of_another_kind_starts_from_defaults():
    """Options of one kind mean nothing to another; those of the same kind are merged."""
    span = "recipe=mamba2_span_laptop"
    assert load([span, "model.layers.X={kind: attention, heads: 4}"]).model.layers["X"] == {
        "kind": "attention",
        "heads": 4,
    }
    assert load([span, "model.layers={X: {kind: attention, heads: 2}}"]).model.layers["X"] == {
        "kind": "attention",
        "heads": 2,
    }
    kept = load([span]).model.layers["X"] | {"block": 16}
    assert load([span, "model.layers.X={kind: span, block: 16}"]).model.layers["X"] == kept
    assert load([span, "model.layers.X={block: 16}"]).model.layers["X"] == kept


def test_letters_are_set_in_one_argument():
    layers = load(["model.layers={M: {kind: mamba2, state: 16}, Q: {kind: swiglu}}"]).model.layers
    assert layers["M"] == {"kind": "mamba2", "state": 16}
    assert layers["Q"] == {"kind": "swiglu"}
    assert "W" in layers


def test_a_secret_is_not_resolved_into_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    monkeypatch.setenv("SCRATCH", "/scratch")
    problem = refused(["run.wandb=${oc.env:MY_API_KEY}"])["run.wandb"]
    assert problem.code == "secret"
    assert "s3cret" not in problem.message
    assert reported(["cluster.environment.A=x-${oc.env:MY_API_KEY,none}"]) == {"cluster.environment.A": "secret"}
    assert load(["data.path=${oc.env:SCRATCH}/text"]).data.path == "/scratch/text"


@pytest.mark.parametrize("text", ["run: {name: '${oc.env:HOME}'}", "run: {name: a", "- 1", "run: {name: !!python/x 1}"])
def test_a_saved_configuration_with_references_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_saved(tmp_path / "config.yaml")
    assert all(str(tmp_path) in problem.key for problem in caught.value.problems)
    assert set(reported([f"run.weights={tmp_path}"])) == {"run.weights"}


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_infinite_numbers_are_refused(value):
    keys = {
        "model.layers.W.rope.base",
        "model.layers.M.dt_max",
        "model.norm_eps",
        "optim.weight_decay",
        "optim.betas.1",
        "phases.0.lr",
        "phases.0.layers.W.rope.base",
        "phases.0.states.sigma",
        "data.mixture.web.weight",
        "run.timeout",
    }
    assert reported([f"{key}={value}" for key in keys]) == dict.fromkeys(keys, "out-of-range")


def test_all_mistakes_are_reported_at_once():
    assert reported(["model.widht=3", "optim.clip=x", "phases.0.rows=1", "run.seed=2"]) == {
        "model.widht": "unknown-name",
        "optim.clip": "wrong-type",
        "phases.0.rows": "unknown-name",
    }


@pytest.mark.parametrize(
    ("recipe", "code"),
    [
        ("model: {widht: 3}", "malformed"),
        ("phases: [}", "malformed"),
        ("defaults: [override /model: none_such]", "unknown-name"),
    ],
)
def test_mistakes_in_a_recipe_are_reported_by_code(tmp_path, recipe, code):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    (tmp_path / "configs/recipe/mine.yaml").write_text(f"# @package _global_\n{recipe}\n")
    assert reported(["recipe=mine"], tmp_path / "configs") == {"recipe": code}


def test_saved_configurations_are_loaded_unchanged(tmp_path):
    config = load(["recipe=samba_1.7b", "run.profile=[3,4]"])
    texts = ("1e-3", "nan", "1_0", "0x1f", "on", "1:30", "null", "a: b", "é")
    config.model.layers["-"] |= {text: text for text in texts}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_saved(tmp_path / "config.yaml") == config
    (tmp_path / "config.yaml").write_text("model: {depth: 3}")
    with raises_code(ConfigError, "unreadable", "model.depth"):
        load_saved(tmp_path / "config.yaml")


@pytest.mark.parametrize("stored", [b"!!python/object/apply:os.system [ls]", b"\0", b"\xff", b"[1]", b"7", b"[" * 3000])
def test_files_that_are_no_configuration_are_refused_by_name(stored, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(stored)
    with pytest.raises(ConfigError) as raised:
        load_saved(file)
    assert [problem.key for problem in raised.value.problems] == [str(file)]


def test_keys_missing_in_old_configurations_keep_old_values(tmp_path):
    later = ("residual_fp32", "init:", "weight_decay_schedule", "decay_all")
    lines = to_yaml(load([])).splitlines()
    (tmp_path / "config.yaml").write_text("\n".join(line for line in lines if not line.strip().startswith(later)))
    loaded = load_saved(tmp_path / "config.yaml")
    assert (loaded.model.residual_fp32, loaded.model.init) == (False, "mamba")
    assert (loaded.optim.weight_decay_schedule, loaded.optim.decay_all) == ("constant", False)


def test_saved_numbers_of_ranks_that_divide_experts_are_kept(tmp_path):
    config = load(["recipe=moe_laptop", "parallel.expert=4"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_saved(tmp_path / "config.yaml").parallel.expert == 4


def test_a_mixture_is_set_on_the_command_line() -> None:
    config = load(["data=slimpajama", "data.mixture={a: {weight: 3}, b: {weight: 1, path: c}}"])
    assert {name: (ingredient.weight, ingredient.path) for name, ingredient in config.data.mixture.items()} == {
        "a": (3, None),
        "b": (1, "c"),
    }
    config = load(["data=slimpajama", "data.mixture.RedPajamaC4.weight=9", "data.mixture.mine={weight: 2}"])
    assert len(config.data.mixture) == 8
    assert config.data.mixture["RedPajamaC4"].weight == 9
    config = load(["phases.0.data.mixture={a: {weight: 3}}"])
    assert resolve(config)[0].data.mixture["a"].weight == 3


@pytest.mark.parametrize(
    "settings",
    [
        ["recipe=samba_3.8b", "phases.1.data.mixture=null", "phases.1.data.path=x"],
        ["recipe=samba_3.8b", "phases.1.data={path: x, mixture: null}"],
        ["recipe=samba_3.8b", "phases.1={data: {path: x, mixture: null}}"],
        ["data=slimpajama", f"phases=[{{{SIZES}}}, {{{SIZES}, data: {{path: x, mixture: null}}}}]"],
        ["data=slimpajama", f"phases=[{{{SIZES}}}, {{{SIZES}, data: {{path: x, mixture: {{}}}}}}]"],
        ["recipe=inner"],
        ["recipe=outer"],
        ["recipe=mixed", "phases.1.data.mixture=null", "data.path=x"],
        ["recipe=mixed", "data.mixture=null", "data.path=x"],
    ],
)
def test_a_null_mixture_takes_every_source_of_the_path(settings: list[str], tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(CONFIGS, configs)
    recipes = {
        "mixed": f"data: {{mixture: {{a: {{weight: 1}}}}}}\nphases: [{{{SIZES}}}, {{{SIZES}}}]",
        "inner": f"phases: [{{{SIZES}}}, {{{SIZES}, data: {{path: x, mixture: null}}}}]",
        "outer": "data: {path: x, mixture: null}",
    }
    bases = {"mixed": "laptop", "inner": "mixed", "outer": "mixed"}
    for name, text in recipes.items():
        head = f"defaults: [/recipe/{bases[name]}, _self_]"
        (configs / f"recipe/{name}.yaml").write_text(f"# @package _global_\n{head}\n{text}\n")
    phases = resolve(load(settings, configs))
    assert (phases[1].data.path, phases[1].data.mixture) == ("x", {})


def test_null_in_a_saved_configuration_is_no_override(tmp_path: Path) -> None:
    config = load(["data=slimpajama"])
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert "mixture: null" in (tmp_path / "config.yaml").read_text()
    assert len(resolve(load_saved(tmp_path / "config.yaml"))[0].data.mixture) == 7


def test_a_wrong_mixture_is_reported() -> None:
    with raises_code(ConfigError, "missing", "data.mixture.a.weight"):
        load(["data.mixture={a: {path: b}}"])
    with raises_code(ConfigError, "wrong-type", "wieght"):
        load(["data.mixture={a: {wieght: 1}}"])


def test_model_loads_the_model_of_a_recipe():
    larger = load(["recipe=samba_421m", "model=samba_1.3b", "model.layers.W.window=64"])
    assert (larger.model.width, larger.run.name, larger.phases) == (
        2304,
        "samba_421m",
        load(["recipe=samba_421m"]).phases,
    )
    assert larger.model.layers["W"]["window"] == 64
    assert set(load(["recipe=samba_421m", "model=mamba2_130m"]).model.layers) == {"M"}


@pytest.mark.parametrize("choice", ["precision=fp32", "precision=fp8_block", "parallel=single", "cluster=local"])
def test_choices_set_the_name_of_their_group(choice):
    group, name = choice.split("=")
    config = load(["recipe=samba_421m", choice])
    assert name == getattr(getattr(config, group), "name", "single")


@pytest.mark.parametrize("name", ["from_checkpoint", "of_weights"])
def test_from_checkpoint_and_of_weights_take_a_checkpoints_settings(name, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(load(["recipe=mamba2_45m", "data.path=x"])))
    choices = [f"{group}={name}" for group in ("model", "data", "precision")]
    config = load([*choices, f"run.weights={tmp_path}"])
    assert (config.model.pattern, config.data.path, config.precision.name.value) == ("M*12", "x", "bf16")


POINTED = [
    ["model.layers.M.memory=${.}"], ["model.layers.Q.memory=${.}"], ["model.layers.M.kind=${.kind}"],
    ["model.layers.M.a=${.b}", "model.layers.M.b=${.a}"], ["model.layers.M=${model.layers}"],
    ["model.layers.M.a=${model.layers.X}", "model.layers.X.a=${model.layers.M}"], ["model=${model}"],
    ["run.name=${run.dir}", "run.dir=${run.name}"], ["data.mixture.a=${data.mixture}"], ["phases=${phases}"],
    ["phases.0.model.layers.M.a=${.}"], ["cluster.environment.X=${.X}"], ["model.layers.M.a={b: ${..a}}"],
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("settings", POINTED, ids=" ".join)
def test_a_value_that_refers_to_itself_is_reported_by_its_key(settings: list[str]) -> None:
    keys = {setting.partition("=")[0] for setting in settings}
    assert any(key.startswith(tuple(keys)) for key in reported(["recipe=laptop", *settings]))


def checked(settings: Sequence[str]) -> dict[str, list[Problem]]:
    """Return the problems that train and submit report, by key."""
    problems: dict[str, list[Problem]] = {}
    for problem in check(RunPlan.of(load(settings))):
        problems.setdefault(problem.key, []).append(problem)
    return problems


SECRET_NAMES = [
    "HF_PAT", "HF_TOKEN", "WANDB_KEY", "WANDB_API_KEY", "DB_PASSWD", "PRIVATE_KEY", "MY_SECRET", "MYSQL_PWD", "GH_AUTH",
    "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "SSH_PASSPHRASE", "APIKEY", "github_token", "AZURE_SAS", "CREDS",
]  # fmt: skip
OTHER_NAMES = ["HOME", "PWD", "OLDPWD", "SCRATCH", "TOKENIZERS_PARALLELISM", "TOKENIZER", "KEYBOARD", "NCCL_IB_PKEY"]


@pytest.mark.parametrize("name", [*SECRET_NAMES, *OTHER_NAMES])
def test_secrets_are_known_by_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "v4lue")
    taken = f"run.wandb=${{oc.env:{name}}}"
    set_there = f"cluster.environment.{name}=v4lue"
    kept = {key: problems for key, problems in checked([set_there]).items() if key.startswith("cluster.environment")}
    if name in OTHER_NAMES:
        assert load([taken]).run.wandb == "v4lue"
        assert kept == {}
    else:
        problems = [refused([taken])["run.wandb"], *kept[f"cluster.environment.{name}"]]
        assert [problem.code for problem in problems] == ["secret", "secret"]
        assert not any("v4lue" in problem.message for problem in problems)


WITH_PASSWORDS = ["s3://KEY:PASS@bucket/a", "s3://KEY:PA/SS@bucket", "https://hf_abc@host/x", "redis://:PASS@h:6379/0"]


@pytest.mark.parametrize("url", [*WITH_PASSWORDS, "s3://bucket/a", "https://host:9000/a@b", "runs/laptop@best"])
def test_urls_with_passwords_are_refused_in_every_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRROR", url)
    settings = [f"checkpoint.mirror='{url}'", f"data.path='{url}'", "run.wandb=${oc.env:MIRROR}"]
    leaking = {key for key, problems in checked(settings).items() if "secret" in [p.code for p in problems]}
    if url in WITH_PASSWORDS:
        assert leaking == {"checkpoint.mirror", "data.path", "run.wandb"}
    else:
        assert leaking == set()


@pytest.mark.parametrize("setting", ["phases.0.states.layers={a: 1}", "phases.0.states.layers.a=1"])
def test_layers_of_carried_states_are_no_letters(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load([setting])
    assert [problem.key for problem in refused.value.problems] == [setting.partition("=")[0]]
