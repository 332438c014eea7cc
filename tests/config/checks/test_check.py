"""Every rule of `config/check.py`: broken alone, it is reported alone, by its key and code."""

from __future__ import annotations

import pytest

from hybridtron.config.check import check, require, warnings
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.problems import Code, ConfigError
from tests.recipes import RECIPES
from tests.settings import Setting, flat


def reported(*settings: Setting, world_size: int | None = None) -> dict[str, Code]:
    """Return the codes of all problems by key."""
    return {problem.key: problem.code for problem in check(RunPlan.of(load(flat(settings))), world_size)}


def cures(*settings: Setting, world_size: int | None = None) -> str:
    """Return the message of the only problem, for the values that it proposes."""
    (problem,) = check(RunPlan.of(load(flat(settings))), world_size)
    return problem.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_keep_every_rule_and_are_named_after_their_files(recipe):
    config = load([f"recipe={recipe}"])
    assert config.run.name == recipe.removeprefix("ablations/").removeprefix("tasks/")
    require(RunPlan.of(config))
    assert warnings(RunPlan.of(config)) == []


@pytest.mark.parametrize(
    ("argument", "key", "code"),
    [
        ("model.width=0", "model.width", "out-of-range"),
        ("model.vocab_size=-5", "model.vocab_size", "out-of-range"),
        ("model.norm_eps=0", "model.norm_eps", "out-of-range"),
        ("model.layers.MM={kind: mamba}", "model.layers.MM", "malformed"),
        ("model.layers.(={kind: mamba}", "model.layers.(", "malformed"),
        ("model.layers.M.kind=mambo", "model.layers.M.kind", "unknown-name"),
        ("model.layers.Q={heads: 2}", "model.layers.Q.kind", "missing"),
        ("model.layers.M.stat=8", "model.layers.M.stat", "unknown-name"),
        ("model.layers.M.state='8'", "model.layers.M.state", "wrong-type"),
        ("model.layers.M.state=true", "model.layers.M.state", "wrong-type"),
        ("model.layers.M.state=8.5", "model.layers.M.state", "wrong-type"),
        ("model.layers.W.window=[1]", "model.layers.W.window", "wrong-type"),
        ("model.layers.M.conv=1", "model.layers.M.conv", "out-of-range"),
        ("model.layers.M.dt_min=0.2", "model.layers.M.dt_min", "out-of-range"),
        ("model.layers.W.heads=5", "model.layers.W.heads", "not-divisible"),
        ("model.layers.W.heads=0", "model.layers.W.heads", "out-of-range"),
        ("model.layers.W.kv_heads=3", "model.layers.W.kv_heads", "not-divisible"),
        ("model.layers.W.kv_heads=0", "model.layers.W.kv_heads", "out-of-range"),
        ("model.layers.W.head_dim=0", "model.layers.W.head_dim", "out-of-range"),
        ("model.layers.W.head_dim=7", "model.layers.W.head_dim", "not-divisible"),
        ("model.layers.W.window=512", "model.layers.W.window", "out-of-range"),
        ("model.layers.W.rotary_dim=64", "model.layers.W.rotary_dim", "out-of-range"),
        ("model.layers.W.conv_bias=true", "model.layers.W.conv_bias", "needs-other-key"),
        ("model.layers.M={kind: mamba2, head_dim: 60}", "model.layers.M.head_dim", "not-divisible"),
        ("model.layers.M={kind: mamba2, groups: 4}", "model.layers.M.groups", "not-divisible"),
        ("model.layers.M={kind: mamba2, groups: 0}", "model.layers.M.groups", "out-of-range"),
        ("model.layers.M={kind: mamba2, conv: 1}", "model.layers.M.conv", "out-of-range"),
        ("model.layers.M={kind: mamba2, a_min: 0}", "model.layers.M.a_min", "out-of-range"),
        ("model.layers.M={kind: mamba2, dt_max: 1e-4}", "model.layers.M.dt_min", "out-of-range"),
        ("model.layers.M={kind: mamba2, norm_eps: 0}", "model.layers.M.norm_eps", "out-of-range"),
        ("model.layers.-.hidden=0", "model.layers.-.hidden", "out-of-range"),
        ("model.pattern=(M-Wz)*2", "model.pattern", "malformed"),
        ("phases=[]", "phases", "missing"),
        ("phases.0.name=", "phases.0.name", "missing"),
        ("phases.0.lr=0", "phases.0.lr", "out-of-range"),
        ("phases.0.seq_len=0", "phases.0.seq_len", "out-of-range"),
        ("phases.0.global_batch=-1", "phases.0.global_batch", "out-of-range"),
        ("phases.0.micro_batch=0", "phases.0.micro_batch", "out-of-range"),
        ("phases.0.micro_batch=6", "phases.0.micro_batch", "not-divisible"),
        ("phases.0.micro_batch=32", "phases.0.micro_batch", "not-divisible"),
        ("phases.0.tokens=lots", "phases.0.tokens", "malformed"),
        ("phases.0.tokens=2K", "phases.0.tokens", "does-not-fit"),
        ("optim.betas=[0.9,1.0]", "optim.betas.1", "out-of-range"),
        ("optim.betas=[0.9]", "optim.betas", "wrong-type"),
        ("optim.eps=0", "optim.eps", "out-of-range"),
        ("optim.clip=-1", "optim.clip", "out-of-range"),
        ("optim.weight_decay=-0.1", "optim.weight_decay", "out-of-range"),
        ("optim.z_loss=-1", "optim.z_loss", "out-of-range"),
        ("optim.spike=0", "optim.spike", "out-of-range"),
        ("optim.skips=0", "optim.skips", "out-of-range"),
        ("optim.final_lr=2", "optim.final_lr", "out-of-range"),
        ("optim.warmup=soon", "optim.warmup", "malformed"),
        ("optim.warmup=200%", "optim.warmup", "does-not-fit"),
        ("run.name=", "run.name", "missing"),
        ("run.eval_every=often", "run.eval_every", "malformed"),
        ("run.eval_every=0", "run.eval_every", "out-of-range"),
        ("run.eval_tokens=some", "run.eval_tokens", "malformed"),
        ("run.eval_tokens=1000", "run.eval_tokens", "does-not-fit"),
        ("run.eval_lengths=[1,0]", "run.eval_lengths.1", "out-of-range"),
        ("run.max_steps=0", "run.max_steps", "out-of-range"),
        ("run.max_minutes=0", "run.max_minutes", "out-of-range"),
        ("run.timeout=1e-9", "run.timeout", "out-of-range"),
        ("run.seed=99999999999999999999999", "run.seed", "out-of-range"),
        ("run.eval_lengths=[]", "run.eval_lengths", "missing"),
        ("run.resume=" + 5000 * "a", "run.resume", "no-file"),
        ("data.path=" + 5000 * "a", "data.path", "malformed"),
        ("data.cache=" + 5000 * "a", "data.cache", "malformed"),
        ("data.mixture={a: {weight: 1, path: " + 5000 * "a" + "}}", "data.mixture.a.path", "malformed"),
        ("run.timeout=-1", "run.timeout", "out-of-range"),
        ("run.log_every=0", "run.log_every", "out-of-range"),
        ("run.sample_tokens=-1", "run.sample_tokens", "out-of-range"),
        ("run.seed=-1", "run.seed", "out-of-range"),
        ("run.dir=", "run.dir", "missing"),
        ("run.profile=[1,999999999]", "run.profile.1", "out-of-range"),
        ("run.profile=[0]", "run.profile.0", "out-of-range"),
        ("run.resume=no/such/folder", "run.resume", "no-file"),
        ("checkpoint.every=0.2", "checkpoint.every", "out-of-range"),
        ("checkpoint.every=x", "checkpoint.every", "malformed"),
        ("checkpoint.keep=0", "checkpoint.keep", "out-of-range"),
        ("checkpoint.keep_every=x", "checkpoint.keep_every", "malformed"),
        ("checkpoint.failures=0", "checkpoint.failures", "out-of-range"),
        ("optim.name=adam", "optim.name", "unknown-name"),
        ("optim.schedule=cosin", "optim.schedule", "unknown-name"),
        ("parallel.tensor=0", "parallel.tensor", "out-of-range"),
        ("parallel.pipeline=0", "parallel.pipeline", "out-of-range"),
        ("parallel.virtual_pipeline=-1", "parallel.virtual_pipeline", "out-of-range"),
        ("parallel.tensor=3", "parallel.tensor", "not-divisible"),
        ("parallel.pipeline=9", "parallel.pipeline", "out-of-range"),
        ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline", "needs-other-key"),
        ("cluster.peak_tflops=0", "cluster.peak_tflops", "out-of-range"),
        ("cluster.memory_gb=-80", "cluster.memory_gb", "out-of-range"),
        ("cluster.checks.disk_gb=-1", "cluster.checks.disk_gb", "out-of-range"),
        ("cluster.checks.shared_gb=-0.5", "cluster.checks.shared_gb", "out-of-range"),
        ("cluster.checks.clock_s=0", "cluster.checks.clock_s", "out-of-range"),
        ("cluster.checks.node_gb_per_s=-250", "cluster.checks.node_gb_per_s", "out-of-range"),
        ("cluster.checks.network_gb_per_s=0", "cluster.checks.network_gb_per_s", "out-of-range"),
        ("cluster.checks.timeout=0", "cluster.checks.timeout", "out-of-range"),
    ],
)
def test_each_rule_is_reported_alone(argument, key, code):
    assert reported(argument) == {key: code}


def test_overlap_param_gather_needs_the_distributed_optimizer():
    settings = ("parallel.overlap_param_gather=true", "parallel.distributed_optimizer=false")
    assert reported(settings) == {"parallel.overlap_param_gather": "needs-other-key"}
    assert not reported("parallel.overlap_param_gather=true")


def test_gradient_accumulation_fusion_is_not_compiled():
    settings = ("parallel.gradient_accumulation_fusion=true", "run.compile=true")
    assert reported(settings) == {"parallel.gradient_accumulation_fusion": "unsupported"}
    assert not reported("parallel.gradient_accumulation_fusion=true")


@pytest.mark.parametrize("other", ["parallel.recompute=layer", "run.compile=true"])
def test_offload_works_without_recompute_and_compile(other: str) -> None:
    assert reported("parallel.offload=2", other)["parallel.offload"] == "needs-other-key"
    assert not reported("parallel.offload=2")


def test_bf16_moments_need_a_small_decay_rate():
    assert reported("precision.moments=bf16", "optim.betas=[0.9,0.99]") == {"precision.moments": "conflict"}
    assert not reported("precision.moments=bf16", "optim.betas=[0.9,0.98]")
    of_phase = ["phases.0.optim={name: muon, muon: {momentum: 0.99}}", "precision.moments=bf16"]
    assert "use phases.0.optim.muon.momentum of at most 0.98" in cures(*of_phase)


def test_allowed_extremes_are_accepted(tmp_path):
    assert not reported(
        "optim.schedule=wsd",
        "optim.warmup=80%",
        "optim.decay=20%",
        "phases.0.tokens=4096",
        "model.layers.W.window=256",
        "run.eval_tokens=1024",
        f"run.resume={tmp_path}",
        "checkpoint.every=1M",
    )


def test_decay_counts_only_where_it_is_used():
    assert not reported("optim.decay=90%", "optim.warmup=50%", "optim.schedule=cosine")
    assert reported("optim.decay=never", "optim.schedule=wsd") == {"optim.decay": "malformed"}
    together = reported("optim.schedule=wsd", "optim.warmup=50%", "optim.decay=51%")
    assert together == {"optim.warmup": "does-not-fit"}


def test_phases_need_different_names():
    phase = "{name: a, tokens: 1M, seq_len: 256, global_batch: 16, lr: 1e-3}"
    assert reported(f"phases=[{phase},{phase}]") == {"phases.1.name": "duplicate"}


def test_window_may_be_as_long_as_the_longest_phase():
    phases = "phases=[{name: a, tokens: 1M, seq_len: 64, global_batch: 16, lr: 1e-3}"
    assert "model.layers.W.window" in reported(phases + "]")
    assert not reported(phases + ", {name: b, tokens: 1M, seq_len: 128, global_batch: 16, lr: 1e-3}]")


def test_the_error_text_lists_all_problems():
    config = load(["model.pattern=MX", "phases.0.micro_batch=3", "optim.clip=0", "model.layers.W.heads=5"])
    with pytest.raises(ConfigError) as caught:
        require(RunPlan.of(config))
    text = str(caught.value)
    assert text.startswith("4 problems in the configuration\n")
    lines = text.splitlines()
    shown = next(index for index, line in enumerate(lines) if line.endswith(" MX"))
    assert lines[shown + 1].index("^") == lines[shown].index("X")  # the caret still stands under its character


def test_a_phase_without_a_matrix_for_muon_is_warned_of() -> None:
    adapters = "model.adapters={weights: ['*']}"
    settings = ["model.pattern=M-", adapters]
    (warned,) = set(warnings(RunPlan.of(load([*settings, "optim.name=muon"])))) - set(
        warnings(RunPlan.of(load(settings)))
    )
    assert warned.startswith("optim.name=muon updates no matrix in phase")
    of_phase = warnings(RunPlan.of(load([*settings, "phases.0.optim.name=muon"])))
    assert any(text.startswith("phases.0.optim.name=muon updates no matrix in phase") for text in of_phase)
    for without in (["optim.name=muon"], [adapters]):
        assert not any("no matrix" in text for text in warnings(RunPlan.of(load(["model.pattern=M-", *without]))))


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ("optim: {name: muon}, lr_piece: carry_on", True),
        ("optim: {name: muon}, lr_piece: decay, lr_to: 1e-5", True),
        ("lr_piece: carry_on", False),
        ("optim: {name: muon}, lr: 1e-3", False),
    ],
)
def test_a_zero_state_without_a_warm_up_is_warned_of(changes: str, is_warned: bool) -> None:
    sizes = "tokens: 1M, seq_len: 256, global_batch: 8, micro_batch: 8"
    plan = RunPlan.of(load([f"phases=[{{name: a, {sizes}, lr: 1e-3}}, {{name: b, {sizes}, {changes}}}]"]))
    assert check(plan) == []
    texts = [text for text in warnings(plan) if text.startswith("phases.1.lr_piece=")]
    assert bool(texts) == is_warned
    assert all("phase b at the previous phase's learning rate" in text for text in texts)


def test_warnings_name_what_has_no_effect():
    warned = warnings(RunPlan.of(load(["model.pattern=M-", "optim.decay=5%"])))
    assert len(warned) == 2
    assert "model.layers.W" in warned[0]
    assert "optim.schedule=wsd" in warned[1]


def test_proposed_tensor_sizes_divide_every_letter():
    problems = reported("recipe=samba_3.8b", "parallel.tensor=4")
    assert problems == {"parallel.tensor": "not-divisible"}
    assert cures("recipe=samba_3.8b", "parallel.tensor=4").endswith("use 1")
    heads = "model.layers.W={kind: attention, heads: 12, kv_heads: 12}"
    message = cures(heads, "model.pattern=MW", "model.vocab_size=2055", "parallel.tensor=4")
    assert message.endswith("use 1 or 3")
    assert cures("recipe=samba_1.7b", "parallel.tensor=8").endswith("use 1, 2 or 4")


def test_unused_letters_need_not_be_divisible():
    assert not reported("model.pattern=(M-)*2", "parallel.tensor=8")


def test_sequence_parallel_rows_must_be_shared_evenly():
    arguments = ("parallel.tensor=4", "parallel.sequence=true", "phases.0.seq_len=250")
    assert reported(arguments) == {"phases.0.seq_len": "not-divisible"}
    assert cures(arguments).endswith("use 248 or 252")


def test_processes_must_fill_the_layout():
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "phases.0.micro_batch=1")
    assert not reported(layout, world_size=8)
    for processes, fitting in ((6, "4 or 8"), (2, "start 4")):
        assert reported(layout, world_size=processes)["parallel.tensor"] == "not-divisible"
        assert fitting in cures(layout, world_size=processes)


def test_the_batch_must_be_shared_evenly():
    rows = ("phases.0.global_batch=12", "phases.0.micro_batch=4")
    assert not reported(rows, world_size=3)
    assert reported(rows, world_size=2) == {"phases.0.global_batch": "not-divisible"}
    assert "use 8 or 16" in cures(rows, world_size=2)


def test_interleaved_stages_need_a_multiple_of_the_pipeline():
    layout = ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "phases.0.micro_batch=2")
    assert not reported(layout, "phases.0.global_batch=8", world_size=4)
    odd = (*layout, "phases.0.global_batch=12")
    assert reported(odd, world_size=4) == {"phases.0.global_batch": "not-divisible"}
    assert "use 8 or 16" in cures(odd, world_size=4)
    assert not reported("parallel.pipeline=2", "phases.0.micro_batch=2", "phases.0.global_batch=12", world_size=4)


def test_bars_must_make_as_many_stages_as_the_layout():
    pattern = "model.pattern=M-|W-|M-|W-"
    assert not reported(pattern, "parallel.pipeline=4", "phases.0.micro_batch=1")
    assert not reported(pattern, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "phases.0.micro_batch=1")
    assert reported(pattern, "parallel.pipeline=2") == {"model.pattern": "conflict"}
    fitting = "pipeline=4 virtual_pipeline=1 or pipeline=2 virtual_pipeline=2"
    assert fitting in cures(pattern, "parallel.pipeline=2")


def test_settings_without_effect_in_a_layout_are_warned_of():
    warned = warnings(RunPlan.of(load(["model.pattern=M-|W-", "parallel.sequence=true"])))
    assert len(warned) == 2
    assert "parallel.tensor of at least 2" in warned[0]
    assert "stage boundaries" in warned[1]


def test_a_phases_folder_outside_the_mixture_is_refused():
    mixed = ("data=folder", "data.mixture={code: {weight: 4, path: data/code}, text: {weight: 1, path: data/text}}")
    assert reported(mixed, "phases.0.data.path=data/chats") == {"phases.0.data.path": "no-effect"}
    assert not reported(mixed, "phases.0.data.path=data/chats", "phases.0.data.mixture=null")
    assert not reported(mixed, "phases.0.data.path=data/chats", "phases.0.data.mixture={chats: {weight: 1}}")
    elsewhere = "phases.0.data.mixture={chats: {weight: 1, path: data/more}}"
    assert reported(mixed, "phases.0.data.path=data/chats", elsewhere) == {"phases.0.data.path": "no-effect"}
    assert not reported("data=slimpajama", "phases.0.data.path=/other/slimpajama")  # sources by their names there


def test_carried_rows_end_at_chunk_boundaries() -> None:
    span = ("recipe=samba_span_laptop", "model.layers.X.chunk=[32,96]", "states.mode=tbtt")
    assert not reported(span)
    assert reported(span, "model.layers.X.relevance=chunk") == {"model.layers.X.chunk": "not-divisible"}
    assert not reported(span, "model.layers.X.relevance=chunk", "states.carry=[ssm]")
    assert reported("recipe=samba_span_laptop", "model.layers.X.chunk=[a]") == {"model.layers.X.chunk": "wrong-type"}


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ((), []),
        (("model.layers.X.relevance=chunk",), ["eval"]),
        (("model.layers.X.relevance=chunk", "model.layers.X.eval=full"), []),
        (("model.layers.X.relevance=chunk", "model.layers.X.memory=none"), []),
        (("model.layers.X.remember=64",), ["remember"]),
        (("model.layers.X.remember=64", "states.mode=tbtt"), []),
        (("model.layers.X.remember=64", "states.mode=tbtt", "states.carry=[ssm]"), ["remember"]),
        (("model.layers.X.remember=64", "states.mode=tbtt", "states.layers=[0]"), ["remember"]),
    ],
)
def test_surprising_span_options_are_warned_of(settings: tuple[str, ...], keys: list[str]) -> None:
    noted = warnings(RunPlan.of(load(["recipe=samba_span_laptop", *settings])))
    assert [warning.split()[0] for warning in noted] == [f"model.layers.X.{key}" for key in keys]


FULL_EXPERTS = ("parallel.expert_tensor=1", "parallel.tensor=2", "parallel.sequence=true")


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        (("parallel.expert=4",), {}),
        (("parallel.expert=3",), {"parallel.expert": "not-divisible"}),
        (("parallel.expert=0",), {"parallel.expert": "out-of-range"}),
        (("parallel.expert=2", "parallel.tensor=2"), {}),
        (("parallel.expert_tensor=1", "parallel.tensor=2"), {"parallel.expert_tensor": "needs-other-key"}),
        (("parallel.expert_tensor=1", "parallel.tensor=2", "parallel.sequence=true"), {}),
        (("parallel.expert_tensor=2", "parallel.tensor=4"), {"parallel.expert_tensor": "out-of-range"}),
        (("parallel.expert_tensor=2",), {"parallel.expert_tensor": "out-of-range"}),
        ((*FULL_EXPERTS, "model.layers.-.hidden=255"), {}),
        ((*FULL_EXPERTS, "model.layers.-.shared=255"), {"parallel.tensor": "not-divisible"}),
        (("parallel.tensor=2", "model.layers.-.hidden=255"), {"parallel.tensor": "not-divisible"}),
    ],
)
def test_layouts_that_cannot_divide_experts_are_refused(settings: tuple[str, ...], problems: dict[str, Code]) -> None:
    batch = ("phases.0.micro_batch=1", "phases.0.global_batch=48")
    assert reported("recipe=moe_laptop", *batch, *settings) == problems


@pytest.mark.parametrize("key", ["expert", "expert_tensor"])
def test_layouts_of_experts_are_refused_in_a_model_without_experts(key: str) -> None:
    ranks = {"expert": 2, "expert_tensor": 1}[key]
    assert reported(f"parallel.{key}={ranks}", "phases.0.micro_batch=1") == {f"parallel.{key}": "no-effect"}


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (("parallel.expert=4",), [4, 8]),
        (("parallel.expert=2", "parallel.tensor=2"), [4, 8]),
        (("parallel.expert=2", "parallel.context=2"), [2, 4, 8]),
        (("parallel.expert=2", "parallel.pipeline=2"), [4, 8]),
        (("parallel.expert=4", "parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=1"), [4, 8]),
    ],
)
def test_ranks_of_a_stage_must_divide_the_experts(settings: tuple[str, ...], processes: list[int]) -> None:
    recipe = ("recipe=moe_laptop", "phases.0.micro_batch=1", *settings)
    for count in (1, 2, 4, 8):
        keys = set(reported(*recipe, world_size=count))
        assert (not keys) == (count in processes), f"{count} processes: {keys}"


@pytest.mark.parametrize("settings", [("parallel.expert=2",), FULL_EXPERTS], ids=str)
def test_muon_takes_experts_that_ranks_divide(settings: tuple[str, ...]) -> None:
    assert reported("recipe=moe_laptop", "phases.0.micro_batch=1", *settings, "optim.name=muon") == {}


@pytest.mark.parametrize(("recipe", "warned"), [("moe_laptop", True), ("laptop", False)])
def test_experts_that_stay_in_bf16_are_warned_of(recipe: str, warned: bool) -> None:
    settings = [f"recipe={recipe}", "precision=fp8_current", "precision.emulate=true"]
    plan = RunPlan.of(load(settings))
    assert check(plan) == []
    assert any("experts, routed and shared, are computed in bf16" in text for text in warnings(plan)) == warned


def test_optimizers_without_rules_for_latent_experts_are_refused() -> None:
    latent = ("recipe=moe_laptop", "model.layers.-.latent=64")
    assert reported(*latent) == {}
    assert reported(*latent, "optim.name=muon") == {"optim.name": "unsupported"}
    assert reported(*latent, "model.mup.base_width=96") == {"model.layers.-.latent": "unsupported"}


@pytest.mark.parametrize("patterns", [["*.correction"], ["*.correction", "*.router"]])
def test_train_refuses_a_pattern_that_matches_only_weights_without_a_gradient(patterns: list[str]) -> None:
    """A step moves the corrections of routers by the experts' loads, whatever `train` names."""
    settings = ("recipe=moe_bias_laptop", f"phases.0.train={patterns}")
    assert reported(*settings) == {"phases.0.train": "no-effect"}
    assert "mixer.correction: leave it out" in cures(*settings)


@pytest.mark.parametrize("pattern", ["*.router", "layers.*.mixer.*"])
def test_train_accepts_a_pattern_that_also_matches_weights_with_a_gradient(pattern: str) -> None:
    assert reported("recipe=moe_bias_laptop", f"phases.0.train=['{pattern}']") == {}


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["precision=bf16"], []),
        (["model.layers.-.hidden=252"], []),
        (["precision=bf16", "model.layers.-.hidden=252"], ["model.layers.-.hidden"]),
        (["precision=bf16", "parallel.tensor=4", "model.layers.-.hidden=240"], ["model.layers.-.hidden"]),
        (["precision=bf16", "phases.0.layers.-.hidden=252"], ["phases.0.layers.-.hidden"]),
        (["precision=bf16", "model.layers.W={heads: 2, kv_heads: 2}", "model.width=252"], ["model.width"]),
    ],
)
def test_sizes_with_which_a_gpu_runs_experts_one_after_the_other(settings: list[str], warned: list[str]) -> None:
    texts = warnings(RunPlan.of(load(["recipe=moe_laptop", *settings])))
    assert [text.partition(" ")[0] for text in texts if "experts run one after the other" in text] == warned
