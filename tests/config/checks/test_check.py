"""Every rule of `config/check.py`: broken alone, it is reported alone, with the value that would work."""

from __future__ import annotations

import pytest

from hybridtron.config.check import check, require, warnings
from hybridtron.config.load import choices_of, load
from hybridtron.problems import ConfigError


def reported(*arguments: str, world_size: int | None = None) -> dict[str, str]:
    return {problem.key: problem.message for problem in check(load(arguments), world_size)}


def mentions(message: str, *values: str) -> bool:
    return all(value in message for value in values)


@pytest.mark.parametrize("recipe", [name for name in choices_of("recipe") if not name.startswith("length/")])
def test_recipes_keep_every_rule_and_are_named_after_their_files(recipe):
    config = load([f"recipe={recipe}"])
    assert config.run.name == recipe.removeprefix("ablations/").removeprefix("tasks/")
    require(config)
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("argument", "key", "says"),
    [
        ("model.width=0", "model.width", "is 0, must be at least 1"),
        ("model.vocab_size=-5", "model.vocab_size", "is -5, must be at least 1"),
        ("model.norm_eps=0", "model.norm_eps", "must be a number above 0"),
        ("model.layers.MM={kind: mamba}", "model.layers.MM", "use one character"),
        ("model.layers.(={kind: mamba}", "model.layers.(", "use one character"),
        ("model.layers.M.kind=mambo", "model.layers.M.kind", "did you mean mamba?"),
        ("model.layers.Q={heads: 2}", "model.layers.Q.kind", "have: mamba, mamba2, mamba3, gla, retnet"),
        ("model.layers.M.stat=8", "model.layers.M.stat", "did you mean state?"),
        ("model.layers.M.state='8'", "model.layers.M.state", "is '8', must be int"),
        ("model.layers.M.state=true", "model.layers.M.state", "must be int"),
        ("model.layers.M.state=8.5", "model.layers.M.state", "must be int"),
        ("model.layers.W.window=[1]", "model.layers.W.window", "must be int or null"),
        ("model.layers.M.conv=1", "model.layers.M.conv", "at least 2"),
        ("model.layers.M.dt_min=0.2", "model.layers.M.dt_min", "below dt_max=0.1"),
        ("model.layers.W.heads=5", "model.layers.W.heads", "must divide model.width=192: 4 or 6, or set head_dim"),
        ("model.layers.W.heads=0", "model.layers.W.heads", "at least 1"),
        ("model.layers.W.kv_heads=3", "model.layers.W.kv_heads", "must divide heads=4: 2 or 4"),
        ("model.layers.W.kv_heads=0", "model.layers.W.kv_heads", "at least 1"),
        ("model.layers.W.head_dim=0", "model.layers.W.head_dim", "at least 1"),
        ("model.layers.W.head_dim=7", "model.layers.W.head_dim", "must be even"),
        ("model.layers.W.window=512", "model.layers.W.window", "use at most 256"),
        ("model.layers.W.rotary_dim=64", "model.layers.W.rotary_dim", "from 2 to the head's 48 channels"),
        ("model.layers.W.conv_bias=true", "model.layers.W.conv_bias", "no convolution: set conv"),
        ("model.layers.M={kind: mamba2, head_dim: 60}", "model.layers.M.head_dim", "model.width=192): 48 or 64"),
        ("model.layers.M={kind: mamba2, groups: 4}", "model.layers.M.groups", "must divide the 6 heads: 3 or 6"),
        ("model.layers.M={kind: mamba2, groups: 0}", "model.layers.M.groups", "at least 1"),
        ("model.layers.M={kind: mamba2, conv: 1}", "model.layers.M.conv", "at least 2"),
        ("model.layers.M={kind: mamba2, a_min: 0}", "model.layers.M.a_min", "above 0 and below a_max=16.0"),
        ("model.layers.M={kind: mamba2, dt_max: 1e-4}", "model.layers.M.dt_min", "below dt_max=0.0001"),
        ("model.layers.M={kind: mamba2, norm_eps: 0}", "model.layers.M.norm_eps", "above 0"),
        ("model.layers.-.hidden=0", "model.layers.-.hidden", "8/3 of model.width"),
        ("model.pattern=(M-Wz)*2", "model.pattern", "unknown letter 'z'; have: M W -\n(M-Wz)*2\n    ^"),
        ("phases=[]", "phases", "at least one phase"),
        ("phases.0.name=", "phases.0.name", "is empty"),
        ("phases.0.lr=0", "phases.0.lr", "must be a number above 0"),
        ("phases.0.seq_len=0", "phases.0.seq_len", "at least 1"),
        ("phases.0.global_batch=-1", "phases.0.global_batch", "at least 1"),
        ("phases.0.micro_batch=0", "phases.0.micro_batch", "at least 1"),
        ("phases.0.micro_batch=6", "phases.0.micro_batch", "must divide global_batch=8: 4 or 8"),
        ("phases.0.micro_batch=32", "phases.0.micro_batch", "must divide global_batch=8: 8"),
        ("phases.0.tokens=lots", "phases.0.tokens", "such as 4M"),
        ("phases.0.tokens=2K", "phases.0.tokens", "use at least 2048"),
        ("optim.betas=[0.9,1.0]", "optim.betas.1", "below 1"),
        ("optim.betas=[0.9]", "optim.betas", "must have two"),
        ("optim.eps=0", "optim.eps", "above 0"),
        ("optim.clip=-1", "optim.clip", "above 0"),
        ("optim.weight_decay=-0.1", "optim.weight_decay", "at least 0"),
        ("optim.z_loss=-1", "optim.z_loss", "at least 0"),
        ("optim.spike=0", "optim.spike", "such as 6, or null"),
        ("optim.skips=0", "optim.skips", "at least 1"),
        ("optim.final_lr=2", "optim.final_lr", "between 0 and 1"),
        ("optim.warmup=soon", "optim.warmup", "a share such as 1%"),
        ("optim.warmup=200%", "optim.warmup", "use at most 750K"),
        ("run.name=", "run.name", "is empty"),
        ("run.eval_every=often", "run.eval_every", "number of steps"),
        ("run.eval_every=0", "run.eval_every", "is 0, must be at least 1"),
        ("run.eval_tokens=some", "run.eval_tokens", "such as 4M"),
        ("run.eval_tokens=1000", "run.eval_tokens", "use at least 1024"),
        ("run.eval_lengths=[1,0]", "run.eval_lengths.1", "at least 1"),
        ("run.max_steps=0", "run.max_steps", "at least 1"),
        ("run.max_minutes=0", "run.max_minutes", "above 0"),
        ("run.timeout=1e-9", "run.timeout", "at least 1"),
        ("run.seed=99999999999999999999999", "run.seed", "at most"),
        ("run.eval_lengths=[]", "run.eval_lengths", "is empty"),
        ("run.resume=" + 5000 * "a", "run.resume", "no folder"),
        ("data.path=" + 5000 * "a", "data.path", "can't be a path"),
        ("data.cache=" + 5000 * "a", "data.cache", "can't be a path"),
        ("data.mixture={a: {weight: 1, path: " + 5000 * "a" + "}}", "data.mixture.a.path", "can't be a path"),
        ("run.timeout=-1", "run.timeout", "at least 1"),
        ("run.log_every=0", "run.log_every", "at least 1"),
        ("run.sample_tokens=-1", "run.sample_tokens", "at least 0"),
        ("run.seed=-1", "run.seed", "at least 0"),
        ("run.dir=", "run.dir", "is empty"),
        ("run.profile=[1,999999999]", "run.profile.1", "beyond the run's last step"),
        ("run.profile=[0]", "run.profile.0", "at least 1"),
        ("run.resume=no/such/folder", "run.resume", "use auto, never"),
        ("checkpoint.every=0.2", "checkpoint.every", "is 0.2, must be at least 1"),
        ("checkpoint.every=x", "checkpoint.every", "number of steps"),
        ("checkpoint.keep=0", "checkpoint.keep", "at least 1"),
        ("checkpoint.keep_every=x", "checkpoint.keep_every", "number of steps"),
        ("checkpoint.failures=0", "checkpoint.failures", "at least 1"),
        ("optim.name=adam", "optim.name", "did you mean adamw?"),
        ("optim.schedule=cosin", "optim.schedule", "must be one of cosine, linear, wsd, constant"),
        ("parallel.tensor=0", "parallel.tensor", "is 0, must be at least 1"),
        ("parallel.pipeline=0", "parallel.pipeline", "is 0, must be at least 1"),
        ("parallel.virtual_pipeline=-1", "parallel.virtual_pipeline", "is -1, must be at least 1"),
        ("parallel.tensor=3", "parallel.tensor", "W.heads is 4 (4 in q.weight), which 3 ranks can't share evenly"),
        ("parallel.pipeline=9", "parallel.pipeline", "are 9 stages for 8 layers: use at most 8"),
        ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline", "use 1, or parallel.pipeline of at least 2"),
        ("cluster.peak_tflops=0", "cluster.peak_tflops", "above 0"),
        ("cluster.memory_gb=-80", "cluster.memory_gb", "above 0"),
        ("cluster.checks.disk_gb=-1", "cluster.checks.disk_gb", "is -1.0, must be at least 0"),
        ("cluster.checks.shared_gb=-0.5", "cluster.checks.shared_gb", "at least 0"),
        ("cluster.checks.clock_s=0", "cluster.checks.clock_s", "above 0"),
        ("cluster.checks.node_gb_per_s=-250", "cluster.checks.node_gb_per_s", "above 0"),
        ("cluster.checks.network_gb_per_s=0", "cluster.checks.network_gb_per_s", "above 0"),
        ("cluster.checks.timeout=0", "cluster.checks.timeout", "is 0, must be at least 1"),
    ],
)
def test_each_rule_alone(argument, key, says):
    problems = reported(argument)
    assert list(problems) == [key] or argument.startswith("model.layers.M.kind")
    assert says in problems[key]


def test_weights_are_gathered_ahead_only_where_they_are_shared_out():
    (message,) = reported("parallel.overlap_param_gather=true", "parallel.distributed_optimizer=false").values()
    assert "set both, or use false" in message
    assert not reported("parallel.overlap_param_gather=true")


def test_products_that_add_up_gradients_are_not_compiled():
    (message,) = reported("parallel.gradient_accumulation_fusion=true", "run.compile=true").values()
    assert "set one to false" in message
    assert not reported("parallel.gradient_accumulation_fusion=true")


@pytest.mark.parametrize("other", ["parallel.recompute=layer", "run.compile=true"])
def test_what_waits_on_the_host_is_kept_and_not_traced(other: str) -> None:
    problems = reported("parallel.offload=2", other)
    assert "needs" in problems["parallel.offload"]
    assert not reported("parallel.offload=2")


def test_moments_in_bf16_need_steps_that_they_can_hold():
    (message,) = reported("precision.moments=bf16", "optim.betas=[0.9,0.99]").values()
    assert "optim.betas of at most 0.98" in message
    assert not reported("precision.moments=bf16", "optim.betas=[0.9,0.98]")


def test_good_edges_are_accepted(tmp_path):
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
    assert set(reported("optim.decay=never", "optim.schedule=wsd")) == {"optim.decay"}
    assert (
        "together with optim.decay"
        in reported("optim.schedule=wsd", "optim.warmup=50%", "optim.decay=51%")["optim.warmup"]
    )


def test_phases_need_different_names():
    phase = "{name: a, tokens: 1M, seq_len: 256, global_batch: 16, lr: 1e-3}"
    assert "give it another" in reported(f"phases=[{phase},{phase}]")["phases.1.name"]


def test_window_may_be_as_long_as_the_longest_phase():
    phases = "phases=[{name: a, tokens: 1M, seq_len: 64, global_batch: 16, lr: 1e-3}"
    assert "model.layers.W.window" in reported(phases + "]")
    assert not reported(phases + ", {name: b, tokens: 1M, seq_len: 128, global_batch: 16, lr: 1e-3}]")


def test_all_problems_at_once_in_one_text():
    config = load(["model.pattern=MX", "phases.0.micro_batch=3", "optim.clip=0", "model.layers.W.heads=5"])
    with pytest.raises(ConfigError) as caught:
        require(config)
    text = str(caught.value)
    assert text.startswith("4 problems in the configuration\n")
    lines = text.splitlines()
    shown = next(index for index, line in enumerate(lines) if line.endswith(" MX"))
    assert lines[shown + 1].index("^") == lines[shown].index("X")  # the caret still stands under its character


def test_warnings_name_what_has_no_effect():
    found = warnings(load(["model.pattern=M-", "optim.decay=5%"]))
    assert len(found) == 2
    assert "model.layers.W" in found[0]
    assert "optim.schedule=wsd" in found[1]


def test_tensor_sizes_that_work_are_those_of_the_whole_model():
    found = reported("recipe=samba_3.8b", "parallel.tensor=4")
    assert found.keys() == {"parallel.tensor"}
    assert mentions(found["parallel.tensor"], "is 4", "model.layers.W.heads is 11", "use 1")
    heads = "model.layers.W={kind: attention, heads: 12, kv_heads: 12}"
    message = reported(heads, "model.pattern=MW", "model.vocab_size=2055", "parallel.tensor=4")["parallel.tensor"]
    assert mentions(message, "model.vocab_size is 2055", "use 1 or 3")
    message = reported("recipe=samba_1.7b", "parallel.tensor=8")["parallel.tensor"]
    assert mentions(message, "is 8", "model.layers.-.hidden is 8196", "use 1, 2 or 4")


def test_letters_that_are_not_used_need_not_be_cut():
    assert not reported("model.pattern=(M-)*2", "parallel.tensor=8")


def test_sequence_parallel_rows_must_be_shared_evenly():
    arguments = ("parallel.tensor=4", "parallel.sequence=true", "phases.0.seq_len=250")
    found = reported(*arguments)
    assert found.keys() == {"phases.0.seq_len"}
    assert mentions(found["phases.0.seq_len"], "is 250", "parallel.sequence", "parallel.tensor=4", "use 248 or 252")


def test_processes_must_fill_the_layout():
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "phases.0.micro_batch=1")
    assert not reported(*layout, world_size=8)
    for processes, fitting in ((6, "start 4 or 8"), (2, "start 4")):
        message = reported(*layout, world_size=processes)["parallel.tensor"]
        assert mentions(message, "is 2", "parallel.pipeline=2", "4 ranks", fitting)


def test_the_batch_must_be_shared_evenly():
    rows = ("phases.0.global_batch=12", "phases.0.micro_batch=4")
    assert not reported(*rows, world_size=3)
    message = reported(*rows, world_size=2)["phases.0.global_batch"]
    assert mentions(message, "2 data-parallel ranks", "micro batches of 4", "use 8 or 16", "micro_batch")


def test_interleaved_stages_need_a_multiple_of_the_pipeline():
    layout = ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "phases.0.micro_batch=2")
    assert not reported(*layout, "phases.0.global_batch=8", world_size=4)
    message = reported(*layout, "phases.0.global_batch=12", world_size=4)["phases.0.global_batch"]
    assert mentions(message, "3 micro batches", "a multiple of 2", "use 8 or 16")
    assert not reported("parallel.pipeline=2", "phases.0.micro_batch=2", "phases.0.global_batch=12", world_size=4)


def test_bars_must_make_as_many_stages_as_the_layout():
    pattern = "model.pattern=M-|W-|M-|W-"
    assert not reported(pattern, "parallel.pipeline=4", "phases.0.micro_batch=1")
    assert not reported(pattern, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "phases.0.micro_batch=1")
    message = reported(pattern, "parallel.pipeline=2")["model.pattern"]
    assert mentions(message, "3 bars", "4 stages", "pipeline=2 times virtual_pipeline=1 are 2")
    assert mentions(message, "pipeline=4 virtual_pipeline=1", "pipeline=2 virtual_pipeline=2", "no bars")


def test_what_a_layout_does_not_use_is_noted():
    found = warnings(load(["model.pattern=M-|W-", "parallel.sequence=true"]))
    assert len(found) == 2
    assert "parallel.tensor of at least 2" in found[0]
    assert "stage borders" in found[1]


def test_a_folder_that_a_phase_names_is_read():
    mixed = ("data=folder", "data.mixture={code: {weight: 4, path: data/code}, text: {weight: 1, path: data/text}}")
    message = reported(*mixed, "phases.0.data.path=data/chats")["phases.0.data.path"]
    assert mentions(
        message, "is 'data/chats', which the run's mixture does not read", "(code of data/code, text of data"
    )
    assert mentions(message, "to read that folder alone write mixture: null beside it")
    assert not reported(*mixed, "phases.0.data.path=data/chats", "phases.0.data.mixture=null")
    assert not reported(*mixed, "phases.0.data.path=data/chats", "phases.0.data.mixture={chats: {weight: 1}}")
    elsewhere = "phases.0.data.mixture={chats: {weight: 1, path: data/more}}"
    assert "the phase's mixture" in reported(*mixed, "phases.0.data.path=data/chats", elsewhere)["phases.0.data.path"]
    assert not reported("data=slimpajama", "phases.0.data.path=/other/slimpajama")  # sources by their names there


def test_rows_that_continue_end_where_chunks_do() -> None:
    span = ("recipe=samba_span_laptop", "model.layers.X.chunk=[32,96]", "states.mode=tbtt")
    assert not reported(*span)
    problems = reported(*span, "model.layers.X.relevance=chunk")
    assert "previous_chunk" in problems["model.layers.X.chunk"]
    assert not reported(*span, "model.layers.X.relevance=chunk", "states.carry=[ssm]")
    assert "list[int]" in reported("recipe=samba_span_laptop", "model.layers.X.chunk=[a]")["model.layers.X.chunk"]


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
def test_what_spans_do_otherwise_than_it_looks_is_noted(settings: tuple[str, ...], keys: list[str]) -> None:
    found = warnings(load(["recipe=samba_span_laptop", *settings]))
    assert [one.split()[0] for one in found] == [f"model.layers.X.{key}" for key in keys]
