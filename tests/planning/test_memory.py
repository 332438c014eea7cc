"""The plan of each rank, against counts made by hand, a played-through schedule, and the model's exact parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.cli.inspect import _left_out
from hybridtron.config.check import check
from hybridtron.config.checks.experts import moe_letters
from hybridtron.config.choices import StateMode
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import stages_of
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.planning.activations import MARGIN, MARGIN_FROM, held_micro_batches, sublayer_uses, with_frozen
from hybridtron.planning.count import count
from hybridtron.planning.fit import TENSOR_SIZES, fit, settings_of
from hybridtron.planning.memory import Plan, fullest_phase, largest_phase, plan
from hybridtron.planning.rates import GPUS, HEAD_ROOM
from hybridtron.planning.step_time import count_of_last_shard, step_seconds
from hybridtron.planning.weights import local_size, weights_by_rank
from hybridtron.rehearse.budget import FOLDER, read
from hybridtron.rehearse.suite import RecipeCase, SuiteRecords, origin_of
from hybridtron.resources import shipped
from tests.recipes import FAST, RECIPES


def planned(world_size: int, arguments: Sequence[str]) -> tuple[Config, Plan]:
    config = load(arguments)
    assert not check(RunPlan.of(config), world_size)
    return config, plan(largest_phase(RunPlan.of(config)), world_size)


@cache
def of_recipe(name: str) -> Config:
    return load([f"recipe={name}"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("tensor", "pipeline", "virtual"),
    [(2, 1, 1), (4, 5, 1), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((1, 1, 1), (1, 4, 2), (2, 3, 1)))],
)
def test_ranks_together_hold_every_parameter(recipe, tensor, pipeline, virtual):
    config = of_recipe(recipe)
    layout = replace(config.parallel, tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual)
    config = replace(config, parallel=layout)
    if any(problem.key == "parallel.tensor" or "stages" in problem.message for problem in check(RunPlan.of(config))):
        pytest.skip("refused: heads or layers that can't be shared out so")
    table = architecture(config.model).table
    homes = weights_by_rank(
        table, architecture(config.model).letters, stages_of(architecture(config.model), config), pipeline
    )
    tied = config.model.tie_embeddings and pipeline > 1
    once_each = [name for names in homes for name in names if not table[name].shared]
    assert sorted(once_each) == sorted([*(n for n in table if not table[n].shared), *["embedding.weight"] * tied])
    assert {name for names in homes for name in names} == set(table)
    once = {name: table[name] for names in homes for name in names}
    sizes = config.parallel.mesh_sizes
    holders = {n: math.prod(sizes[cut.over] for cut in weight.active_cuts(sizes)) for n, weight in once.items()}
    shares = sum(local_size(weight, config.parallel) * holders[name] for name, weight in once.items())
    assert shares == count(architecture(config.model), 4096).parameters


def test_memory_of_one_process_is_the_sum_over_weights_and_sub_layers():
    """Without parallelism and recomputation, memory is the sum over all weights and sub-layers."""
    for recipe in FAST[::3]:
        config, planned_run = planned(1, [f"recipe={recipe}", "parallel.recompute=none", "phases.0.adapters=null"])
        phase = largest_phase(RunPlan.of(config))
        arch = architecture(config.model)
        if phase.settings.adapters is not None or arch.carries_embedding:
            continue  # frozen weights have no gradients, and shared blocks keep the embedding too
        (rank,) = planned_run.ranks
        held = rank.memory
        model = config.model
        value = 2
        master = 4
        if config.precision.name == "fp32":
            value = 4
            master = 0
        assert (held.states > 0) == (phase.states.mode is not StateMode.zero)
        weights = architecture(model).table.values()
        in_fp32 = sum(weight.size for weight in weights if weight.fp32 and weight.trained)
        narrow = sum(weight.size for weight in weights if not weight.fp32)
        untrained = sum(weight.size for weight in weights if not weight.trained)
        assert held.weights == 4 * (in_fp32 + untrained) + value * narrow
        assert held.gradients == 4 * (in_fp32 + narrow)
        assert held.optimizer == 8 * (in_fp32 + narrow) + master * narrow
        stream = value
        if model.residual_fp32:
            stream = 4
        norms = 1 + sum(not spec.beside for spec in arch.specs)  # a norm of each, and the last
        around = (stream + value) * model.width * norms  # their inputs and outputs
        sizes = replace(arch.sizes, wide=4 // value)
        inside = value * sum(spec.activation_values(sizes) for spec in arch.specs)
        assert held.activations == (around + inside) * phase.settings.seq_len * phase.settings.micro_batch
        assert rank.traffic.total == planned_run.bubble == 0
        assert (rank.in_flight, rank.parameters) == (1, count(architecture(config.model), 4096).parameters)


@pytest.mark.parametrize(
    ("pipeline", "virtual", "micro_batches", "in_flight"),
    [
        (1, 1, 8, [1]),
        (2, 1, 8, [2, 1]),
        (4, 1, 8, [4, 3, 2, 1]),
        (4, 1, 2, [2, 2, 2, 1]),
        (2, 2, 4, [5, 3]),  # warm-up 2 (2 - r - 1) + (2 - 1) 2, and one more
        (4, 2, 8, [11, 9, 7, 5]),
        (2, 2, 2, [4, 3]),  # never more than there are
        (2, 3, 6, [7, 5]),
    ],
)
def test_micro_batches_in_flight_equal_hand_counts(pipeline, virtual, micro_batches, in_flight):
    parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    played = [list(held_micro_batches(parallel, rank, micro_batches)) for rank in range(pipeline)]
    assert [max(map(sum, passes)) for passes in played] == in_flight
    assert all(live >= 0 for passes in played for stage in passes for live in stage)


def test_interleaved_stages_run_in_the_hand_written_order():
    """The last of two ranks runs its stages forward as 0 0 1 1 0 0 1 1, and one back after each from the third on."""
    played = held_micro_batches(ParallelConfig(pipeline=2, virtual_pipeline=2), rank=1, micro_batches=4)
    assert list(played) == [
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 1),
        (3, 0),
        (3, 0),
        (2, 1),
        (2, 1),
    ]


TINY = (
    "model.width=8",
    "model.vocab_size=16",
    "model.pattern=M-W-",
    "model.layers.M={kind: mamba, state: 3, dt_rank: 2}",
    "model.layers.W={kind: attention, heads: 4, kv_heads: 1, window: 4}",
    "model.layers.-={kind: swiglu, hidden: 12}",
    "phases.0.seq_len=16",
    "phases.0.global_batch=8",
    "phases.0.micro_batch=2",
    "precision=bf16",
)


@pytest.mark.parametrize(
    ("precision", "gradients", "moments", "value", "master"),
    [("bf16", 4, 4, 2, 4), ("bf16", 2, 2, 2, 4), ("fp32", 4, 4, 4, 0)],
)
def test_memory_of_one_process_equals_hand_counts(precision, gradients, moments, value, master):
    formats = {4: "fp32", 2: "bf16"}
    settings = [f"precision.gradients={formats[gradients]}", f"precision.moments={formats[moments]}"]
    held = planned(1, [*TINY, f"precision={precision}", *settings])[1].ranks[0].memory
    parameters = count(architecture(load(TINY).model), 16).parameters
    kept_in_fp32 = 16 + 16 * 3 + 16  # dt_bias, A_log, D
    assert held.weights == value * (parameters - kept_in_fp32) + 4 * kept_in_fp32
    assert held.gradients == gradients * (parameters - kept_in_fp32) + 4 * kept_in_fp32
    assert held.optimizer == 2 * moments * parameters + master * (parameters - kept_in_fp32)
    # a state of 16 x 3 in fp32 every 128 tokens is less than a value a token; keys before and after they are rotated
    number = 4 // value  # of attention, for each of 4 heads in fp32
    inside = (5 * 16 + 2 + 6) + (3 * 12) + (8 + 3 * 2 + 8 + 4 * number) + (3 * 12)
    assert held.activations == value * (inside + 2 * 8 * 5) * 16 * 2  # input and output of five norms
    assert held.logits == value * (16 * 2 * (16 + 8) + 16 * 8)  # logits, gradients of their input and of the head
    parts = held.weights + held.gradients + held.optimizer + held.activations + held.logits
    assert held.total == parts + held.backward


@pytest.mark.parametrize("seq_len", [16, 17])
def test_the_fullest_phase_has_the_optimizer_with_more_state(seq_len: int) -> None:
    size = "tokens: 1M, global_batch: 8, micro_batch: 1, lr: 1e-3"
    muon = f"{{name: muon, seq_len: {seq_len}, {size}, optim: {{name: muon}}}}"
    run_plan = RunPlan.of(
        load([*TINY[:-4], f"phases=[{muon}, {{name: adamw, seq_len: 16, {size}}}]", "precision=bf16"])
    )
    phase, planned = fullest_phase(run_plan, 1)
    assert phase.settings.name == "adamw"
    assert planned == plan(phase, 1)
    assert largest_phase(run_plan).settings.name == "muon"


@pytest.mark.parametrize(("emulate", "copies"), [("true", 1), ("false", 2)])
def test_cached_fp8_weights_take_hand_counted_bytes(emulate, copies):
    """Count two MLPs and attention; Mamba, the first sub-layer, stays in bf16."""
    settings = [*TINY, "precision=fp8_current", f"precision.emulate={emulate}", "precision.bf16_first=1"]
    phases = (
        largest_phase(RunPlan.of(load([*settings, f"precision.cache_weights={cache}"]))) for cache in ("false", "true")
    )
    plain, cached = (plan(phase, 1).ranks[0] for phase in phases)  # unchecked: such small layers do not fit FP8
    kept = copies * (2 * 3 * 8 * 12 + 8 * 8 + 2 * 2 * 8 + 8 * 8)
    assert (plain.memory.rounded, cached.memory.rounded) == (0, kept)
    assert cached.memory.total == plain.memory.total + kept
    assert cached.traffic == plain.traffic


def test_tensor_parallel_ranks_hold_hand_counted_parameters():
    (rank,) = planned(2, [*TINY, "parallel.tensor=2"])[1].ranks
    mamba = (32 * 8 + 16 * 4 + 16 + 8 * 16 + 16 * 2 + 16 + 16 * 3 + 16 + 8 * 16) // 2
    attention = 8 * 8 // 2 + 2 * 2 * 8 + 8 * 8 // 2  # the one key/value head stands on both
    around = 5 * 8 + 16 * 8 // 2  # norms are whole, the embedding is not
    assert rank.parameters == mamba + 2 * (3 * 8 * 12 // 2) + attention + around
    assert rank.memory.gradients == 4 * rank.parameters


def test_b_and_c_of_few_groups_are_replicated_over_tensor_ranks():
    mamba2 = "model.layers.S={kind: mamba2, state: 3, head_dim: 4, groups: %d}"
    whole, cut = (
        planned(2, [*TINY, "model.pattern=S", mamba2 % groups, "parallel.tensor=2"])[1].ranks[0] for groups in (1, 2)
    )
    # norms; embedding; z, x, dt, their convolution, dt_bias, A_log, D, the gated norm and out, shared by two
    shared = 2 * 8 + (16 * 8 + 8 * (16 + 16 + 4) + 5 * 16 + 3 * 4 + 16 + 16 * 8) // 2
    assert whole.parameters == shared + 2 * 3 * (8 + 5)
    assert cut.parameters == shared + 2 * 2 * 3 * (8 + 5) // 2


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        # per layer: the norm's input, its output, half of the inside, 5 x 16 + 2 + 6, 3 x 12, 8 + 3 x 2 + 8 + 8
        ((), [8 + 8 + 44, 8 + 8 + 18, 8 + 8 + 15, 8 + 8 + 18]),
        (("parallel.sequence=true",), [4 + 8 + 44, 4 + 8 + 18, 4 + 8 + 15, 4 + 8 + 18]),
        (("parallel.sequence=true", "parallel.regather=true"), [4 + 4 + 44, 4 + 4 + 18, 4 + 4 + 15, 4 + 4 + 18]),
        (("parallel.recompute=selective",), [8, 8 + 8 + 18, 8, 8 + 8 + 18]),
        (("parallel.recompute=layer", "parallel.sequence=true"), [4, 4, 4, 4]),
        # the norm's input is of fp32, twice as wide
        (("model.residual_fp32=true",), [16 + 8 + 44, 16 + 8 + 18, 16 + 8 + 15, 16 + 8 + 18]),
        (("model.residual_fp32=true", "parallel.recompute=layer", "parallel.sequence=true"), [8, 8, 8, 8]),
    ],
)
def test_kept_activations_equal_hand_counts(arguments, kept):
    config, planned_run = planned(2, [*TINY, "parallel.tensor=2", *arguments])
    uses = sublayer_uses(largest_phase(RunPlan.of(config)))
    assert [use.kept for use in uses] == kept
    last_norm = 8 + 8 // (1 + config.parallel.sequence) * (1 + config.model.residual_fp32)
    assert planned_run.ranks[0].memory.activations == 2 * (sum(kept) + last_norm) * 16 * 2
    assert planned_run.ranks[0].memory.logits == 2 * (16 * 2 * (8 + 8) + 8 * 8)  # logits, of the input, of the head


NORMED = 8  # values that a sub-layer reads
MLP = NORMED + 24  # without its two projections' inputs
ATTENTION = NORMED + 30 - 8  # without the last projection's input
MAMBA = NORMED + 88 - 2 * 16


@pytest.mark.parametrize(
    ("adapters", "kept"),
    [
        # beside q and kv: attention alone keeps its input
        ("{rank: 2, weights: ['*.q.*', '*.kv.*']}", [MAMBA, MLP, ATTENTION + NORMED, MLP]),
        # with DoRA what it scales: gate and up, and the MLP's outputs
        (
            "{rank: 2, weights: ['*.gate_up.*', '*.down.*'], dora: true}",
            [MAMBA, MLP + NORMED + 12 + 24 + 8, ATTENTION, MLP + NORMED + 12 + 24 + 8],
        ),
    ],
)
def test_frozen_projections_keep_no_input(adapters, kept):
    phase = largest_phase(RunPlan.of(load([*TINY, f"phases.0.adapters={adapters}"])))
    uses = with_frozen(sublayer_uses(phase), phase, phase.table)
    assert [use.kept for use in uses] == kept


def test_frozen_head_has_no_gradient_at_the_loss():
    logits = planned(1, [*TINY, "phases.0.adapters={rank: 2}"])[1].ranks[0].memory.logits
    assert logits == 2 * 16 * 2 * (16 + 8)


def test_backward_pass_holds_hand_counted_bytes():
    """The stream's gradient, and half as many values as Mamba keeps; recomputed, those that it keeps as well."""
    _, planned_run = planned(2, [*TINY, "parallel.pipeline=2"])
    token = 2 * 16 * 2  # bytes of one value for every token
    inside = 5 * 16 + 2 + 2 * 3
    assert planned_run.ranks[0].memory.backward == (8 + inside // 2) * token
    # at the loss: the input of the micro-batch before and its gradient; later the logits are gone, and it is less
    assert planned_run.ranks[1].memory.backward == 2 * 8 * token
    again = planned(2, [*TINY, "parallel.pipeline=2", "parallel.recompute=layer"])[1].ranks[0].memory
    assert again.backward - planned_run.ranks[0].memory.backward == (8 + inside) * token


@pytest.mark.parametrize("wide", [False, True])
def test_traffic_of_tensor_and_pipeline_ranks_equals_hand_counts(wide):
    residual = f"model.residual_fp32={str(wide).lower()}"
    _, planned_run = planned(4, [*TINY, residual, "parallel.tensor=2", "parallel.pipeline=2"])
    micro_batch = 2 * 16 * 2  # bytes of one value for every token
    assert planned_run.micro_batches == 4
    first, last = planned_run.ranks
    assert [len(chunk.layers) for rank in planned_run.ranks for chunk in rank.chunks] == [1, 3]
    # Mamba sums its output, its input's gradient, and twice dt, B and C; the embedding sums its output
    assert first.traffic.tensor == (2 * (8 + 8) + 8) * micro_batch * 4
    assert last.traffic.tensor == (2 * 8 * 3 + 8) * micro_batch * 4
    border = 8 * micro_batch * 4 * (1 + wide)  # one: forward, or back
    assert first.traffic.pipeline == last.traffic.pipeline == border
    assert first.traffic.gradients == last.traffic.gradients == 4 * 16 * 8 // 2  # the tied embedding alone
    assert planned_run.bubble == 1 / 5


def test_outputs_of_full_experts_are_not_summed_over_tensor_ranks():
    """Without a shared expert, tensor-parallel ranks exchange nothing in layers with full experts."""
    settings = ["recipe=moe_laptop", "parallel.tensor=2", "parallel.sequence=true"]
    divided, full = (
        plan(largest_phase(RunPlan.of(load([*settings, *more]))), 2).ranks[0].traffic
        for more in ((), ("parallel.expert_tensor=1", "parallel.expert=2"))
    )
    layers = 4
    output = 192 * 8 * 256 * 4  # bytes of one output in fp32, of all tokens
    assert divided.tensor - full.tensor == layers * 2 * 2 * output // 2
    assert full.experts > 0


@pytest.mark.parametrize("distributed", [True, False])
def test_traffic_of_data_parallel_ranks_equals_hand_counts(distributed):
    setting = f"parallel.distributed_optimizer={str(distributed).lower()}"
    (rank,) = planned(4, [*TINY, "phases.0.micro_batch=1", setting])[1].ranks
    whole = planned(1, TINY)[1].ranks[0].memory
    if distributed:
        assert rank.traffic.gradients == whole.gradients * 3 // 4
        assert rank.traffic.parameters == whole.weights * 3 // 4
        assert rank.memory.optimizer == -(-whole.optimizer // 4)
    else:
        assert rank.traffic.gradients == 2 * whole.gradients * 3 // 4
        assert rank.traffic.parameters == 0
        assert rank.memory.optimizer == whole.optimizer


def test_plans_are_within_their_margin_of_stored_rehearsals():
    """Check some ranks of the suite."""
    stored = SuiteRecords(shipped("benchmarks") / "rehearse.jsonl").read().values()
    records = [
        record for record in stored if record.get("peak", 0) >= MARGIN_FROM and origin_of(record["recipe"]) is None
    ]
    for record in records[::50]:
        case = RecipeCase(record["recipe"], record["layout"])
        planned_run = plan(largest_phase(case.plan()), case.world)
        total = planned_run.ranks[record["pipeline_rank"]].memory.total
        assert total == pytest.approx(record["peak"], rel=MARGIN), case


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_plans_are_within_their_margin_of_budgets(path):
    settings, budget = read(path)
    config = load(settings)
    planned_run = plan(largest_phase(RunPlan.of(config)), config.parallel.model_ranks)
    assert planned_run.ranks[0].memory.total == pytest.approx(budget["peak bytes"], rel=MARGIN)


@pytest.mark.slow
def test_published_models_have_plausible_layouts():
    """Samba 1.3B needs no model parallelism on 64 devices; 11 query heads keep Samba 3.8B from being cut at all."""
    small = load(["recipe=samba_1.3b"])
    best = fit(RunPlan.of(small), 64, 80e9)[0]
    assert (best.parallel.tensor, best.parallel.pipeline) == (1, 1)
    large = fit(RunPlan.of(load(["recipe=samba_3.8b"])), 256, 80e9)
    assert {layout.parallel.tensor for layout in large} == {1}


@pytest.mark.parametrize(
    ("recipe", "gpus", "gigabytes"),
    [pytest.param("samba_1.3b", 64, 24, marks=pytest.mark.slow), ("samba_1.7b", 12, 40), ("laptop", 4, 8)],
)
def test_proposed_layouts_keep_every_rule_and_fit(recipe, gpus, gigabytes):
    config = load([f"recipe={recipe}"])
    layouts = fit(RunPlan.of(config), gpus, gigabytes * 1e9)
    assert layouts
    seconds = [float(f"{layout.seconds:.3g}") for layout in layouts]
    assert seconds == sorted(seconds)
    for layout in layouts[::5]:
        proposed = load([f"recipe={recipe}", *settings_of(layout, config)])
        assert proposed.parallel == layout.parallel
        assert not check(RunPlan.of(proposed), gpus)
        planned_run = plan(largest_phase(RunPlan.of(proposed)), gpus)
        assert planned_run == layout.plan
        assert planned_run.fullest.memory.total <= (1 - HEAD_ROOM) * gigabytes * 1e9


def test_proposed_micro_batches_of_short_rows_outlast_their_launches():
    """12 sub-layers launch for 12.9 ms; of 256 tokens a row 128 rows and more take longer, 65,536 tokens at most."""
    settings = ["recipe=mamba2_45m", "phases.0.seq_len=256", "phases.0.global_batch=2048"]
    rows = [layout.micro_batch for layout in fit(RunPlan.of(load(settings)), 1, 80e9)]
    assert rows == [128, 256, 64, 32, 16, 8, 4, 2, 1]


@pytest.mark.slow
def test_settings_of_a_layout_replace_those_of_the_configuration():
    config = load(["recipe=samba_1.3b", "parallel.tensor=2", "parallel.recompute=layer"])
    best = fit(RunPlan.of(config), 64, 80e9)[0]
    reported = settings_of(best, config)
    assert "parallel.tensor=1" in reported
    assert "parallel.recompute=none" in reported


@pytest.mark.slow
def test_row_too_long_for_a_device_is_sharded():
    """One row of a million tokens: data parallelism has nothing to do, and the fastest layout shares its tokens."""
    row = "phases.0.seq_len=1048576 phases.0.global_batch=1 phases.0.micro_batch=1 run.eval_tokens=4194304"
    config = load(["recipe=samba_421m", *row.split()])
    layouts = fit(RunPlan.of(config), 16, 80e9)
    assert (layouts[0].parallel.context, layouts[0].parallel.tensor, layouts[0].parallel.pipeline) == (16, 1, 1)
    assert not check(RunPlan.of(load(["recipe=samba_421m", *row.split(), *settings_of(layouts[0], config)])), 16)
    short = fit(RunPlan.of(load(["recipe=samba_421m"])), 16, 80e9)
    assert short[0].parallel.context == 1
    assert {layout.parallel.context for layout in short} == {1, 2}


def test_layouts_that_a_rule_refuses_are_not_proposed():
    """torch.compile can't trace the exchange between context-parallel ranks."""
    for compiled, contexts in (("false", {1, 2}), ("true", {1})):
        layouts = fit(RunPlan.of(load(["recipe=samba_421m", f"run.compile={compiled}"])), 2, 80e9)
        assert {layout.parallel.context for layout in layouts} == contexts


def test_inner_channels_of_full_experts_need_not_be_divisible():
    settings = ["recipe=moe_laptop", "model.layers.-.hidden=129"]
    run_plan = RunPlan.of(load(settings))
    layouts = fit(run_plan, 2, 80e9)
    assert {layout.parallel.expert_tensor for layout in layouts if layout.parallel.tensor == 2} == {1}
    assert not any("parallel.tensor=2" in line for line in _left_out(run_plan.arch, layouts))


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_last_sequence_shard_has_the_most_attention_flops(shares: int) -> None:
    """Query i in a row of 64 sees i + 1 keys, or its window's: counted one by one over the last sequence shard."""
    config = load([*TINY, "model.pattern=FW", "model.layers.F={kind: attention, heads: 4}",
                   "model.layers.W={kind: attention, heads: 4, window: 8}"])  # fmt: skip
    whole, window = count_of_last_shard(architecture(config.model), 64, shares).layers
    mean, of_window = count(architecture(config.model), 64).layers
    last = range(64 - 64 // shares, 64)
    keys = [sum(query + 1 for query in places) / len(places) for places in (last, range(64))]
    assert whole.flops["attention"] / mean.flops["attention"] == pytest.approx(keys[0] / keys[1])
    keys = [sum(min(query + 1, 8) for query in places) / len(places) for places in (last, range(64))]
    assert window.flops["attention"] / of_window.flops["attention"] == pytest.approx(keys[0] / keys[1])
    assert whole.flops["projections"] == mean.flops["projections"]


def test_too_little_memory_fits_no_layout():
    assert fit(RunPlan.of(load(["recipe=samba_3.8b"])), 8, 4e9) == []
    assert 8 in TENSOR_SIZES


STATES = "model.layers.S={kind: mamba2, state: 3, head_dim: 4, groups: 1}"


def test_memory_of_carried_states_equals_hand_counts():
    """Count two copies of the states for this rank's lanes and layers, halved where tensor parallelism cuts them."""
    settings = [*TINY, STATES, "parallel.tensor=2", "parallel.pipeline=2", "model.pattern=MS|W-"]
    _, planned_run = planned(8, [*settings, "states.mode=tbtt", "phases.0.micro_batch=1"])
    mamba = 16 * 3 * 4 + 3 * 16 * 2
    mamba2 = 4 * 4 * 3 * 4 + 3 * 16 * 2
    whole = 3 * 2 * 3 * 2  # B and C of the one group
    lanes = 8 // 2
    assert planned_run.ranks[0].memory.states == 2 * lanes * ((mamba + mamba2) // 2 + whole)
    attention = 2 * 3 * 1 * 2 * 2 + 8  # the one head on both, and a length
    assert planned_run.ranks[1].memory.states == 2 * lanes * attention
    passing = planned(4, [*settings, "states.mode=passing"])[1]
    assert [rank.memory.states for rank in passing.ranks] == [2 * 8 * (16 * 3 * 4 + 4 * 4 * 3 * 4) // 2, 0]
    for mode in ("zero", "random", "fitted"):
        assert planned(1, [*TINY, f"states.mode={mode}"])[1].ranks[0].memory.states == 0


def test_memory_of_chunks_through_time_equals_hand_counts():
    """Activations grow with the number of chunks; with recompute only the states between chunks are kept.

    There are fewer micro-batches by that factor, each with more tokens.
    """
    tbtt = (*TINY, "parallel.pipeline=2", "phases.0.micro_batch=1", "states.mode=tbtt", "states.chunks=4")
    detached, through, again = (
        planned(2, [*tbtt, *more])[1]
        for more in (
            (),
            ("states.through_time=true",),
            ("states.through_time=true", "parallel.recompute=layer"),
        )
    )
    assert (detached.micro_batches, through.micro_batches, again.micro_batches) == (8, 2, 2)
    tokens = 16 * 2  # bytes of a value of the stream for every token of a chunk
    for chunk, joined, flat in zip(detached.ranks, through.ranks, again.ranks, strict=True):
        assert chunk.in_flight == joined.in_flight
        assert joined.memory.activations == 4 * chunk.memory.activations
        assert joined.traffic == chunk.traffic
        between = flat.in_flight * 4 * (8 * tokens + chunk.memory.states)
        assert flat.memory.activations < chunk.memory.activations + between
    assert detached.ranks[1].memory.logits == 2 * (16 * (16 + 8) + 16 * 8)
    assert again.ranks[1].memory.logits == through.ranks[1].memory.logits == 2 * (4 * 16 * (16 + 8) + 16 * 8)


def test_virtual_stages_need_enough_micro_batches():
    settings = [*TINY, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "states.mode=tbtt", "states.chunks=4"]
    assert not check(RunPlan.of(load([*settings, "phases.0.micro_batch=1"])), 2)
    (problem,) = check(RunPlan.of(load([*settings, "phases.0.micro_batch=2", "states.through_time=true"])), 2)
    assert (problem.key, problem.code) == ("phases.0.global_batch", "not-divisible")
    assert "16" in problem.message
    assert not check(RunPlan.of(load([*settings, "phases.0.micro_batch=1", "states.through_time=true"])), 2)


def test_seconds_of_a_step_equal_a_hand_count(monkeypatch: pytest.MonkeyPatch):
    """Add up products, streams and updates. A step this small takes as long as launching its sub-layers."""
    config, planned_run = planned(2, [*TINY, "parallel.pipeline=2"])
    gpu = GPUS["h100"]
    counted = count(architecture(config.model), 16)
    of_layers = [
        3 * layer.flops["projections"] / 600e12 + 3.5 * layer.flops.get("attention", 0) / 300e12
        for layer in counted.layers
    ]
    # of one micro-batch: a stream of bf16, sent once by each rank
    tokens = 2 * 16
    border = 8 * 2 * 16 * 2 / 360e9
    passes = [tokens * of_layers[0] + border, tokens * (sum(of_layers[1:]) + 3 * 2 * 8 * 16 / 600e12) + border]
    once = [  # the tied embedding's gradient; the optimizer's state read and written, gradients and weights read
        4 * 16 * 8 / 360e9 + (2 * rank.memory.optimizer + rank.memory.gradients + rank.memory.weights) / (0.85 * 3350e9)
        for rank in planned_run.ranks
    ]
    assert planned_run.micro_batches == 4
    launching = 50 * 21.5e-6 * (len(of_layers) - 1)  # of the second stage, which has all but the first
    assert step_seconds(planned_run, largest_phase(RunPlan.of(config)), gpu) == pytest.approx(
        (4 + 1) * (launching + border) + max(once)
    )
    monkeypatch.setattr("hybridtron.planning.step_time.LAUNCHES", 0)
    assert step_seconds(planned_run, largest_phase(RunPlan.of(config)), gpu) == pytest.approx(
        (4 + 1) * max(passes) + max(once)
    )


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (["parallel.recompute=layer"], []),
        (["parallel.tensor=2"], []),  # sums in every sub-layer, which nothing hides
        (["parallel.pipeline=4"], ["parallel.pipeline=4", "parallel.virtual_pipeline=2"]),  # the pipeline waits less
        (["parallel.overlap_grad_reduce=false"], []),  # gradients and weights are sent while it computes
    ],
)
def test_estimated_seconds_are_ordered_as_the_layouts(slower, faster):
    times = []
    for settings in (slower, faster):
        config, planned_run = planned(32, ["recipe=samba_421m", "phases.0.micro_batch=2", *settings])
        times.append(step_seconds(planned_run, largest_phase(RunPlan.of(config)), GPUS["h100"]))
    assert times[0] > times[1]


EXPERTS = ["recipe=moe_laptop", "phases.0.micro_batch=1", "phases.0.seq_len=256"]


def planned_experts(*layout: str, gpus: int = 8) -> Plan:
    return plan(RunPlan.of(load([*EXPERTS, *(f"parallel.{setting}" for setting in layout)])).phases[0], gpus)


def test_ranks_divide_experts_and_their_states_apart_from_other_weights() -> None:
    """Eight devices: AdamW's 8 bytes a weight are divided among those with the same experts."""
    weights = architecture(load(EXPERTS).model).table.values()
    experts = sum(weight.size for weight in weights if weight.active < 1)
    others = sum(weight.size for weight in weights if weight.active == 1)
    for ranks in (1, 2, 8):
        (rank,) = planned_experts(f"expert={ranks}").ranks
        assert rank.parameters == others + experts // ranks
        assert rank.memory.optimizer == others * 8 // 8 + experts // ranks * 8 // (8 // ranks)
        sent = 4 * (others * 7 // 8 + experts // ranks * (8 // ranks - 1) // (8 // ranks))
        assert rank.traffic.gradients == rank.traffic.parameters == sent


def test_latent_experts_are_sent_rows_of_their_width() -> None:
    full, latent = (
        plan(RunPlan.of(load([*EXPERTS, "parallel.expert=2", *settings])).phases[0], 2).ranks[0].traffic.experts
        for settings in ([], ["model.layers.-.latent=48"])
    )
    assert latent * 192 == full * 48 > 0


def test_rows_of_each_choice_are_sent_twice_in_each_pass() -> None:
    config = load(EXPERTS)
    (spec,) = moe_letters(architecture(config.model)).values()
    tokens = 256 * config.phases[0].global_batch // 8
    rows = sum(layer.kind == "moe" for layer in architecture(config.model).specs) * tokens * spec.top_k
    one_way = rows * config.model.width * 4
    assert planned_experts("expert=1").ranks[0].traffic.experts == 0
    assert planned_experts("expert=2").ranks[0].traffic.experts == 4 * one_way // 2
    assert planned_experts("expert=2", "recompute=layer").ranks[0].traffic.experts == 6 * one_way // 2
    full = planned_experts("tensor=2", "sequence=true", "expert=2", "expert_tensor=1").ranks[0]
    assert full.traffic.experts == 4 * 2 * one_way // 2 // 2  # half the data ranks, each with half of the tokens


def test_fit_divides_experts() -> None:
    layouts = fit(RunPlan.of(load(EXPERTS)), 4, 80e9)
    pairs = {(layout.parallel.expert, layout.parallel.expert_tensor) for layout in layouts}
    assert {(1, None), (2, None), (4, None), (2, 1)} <= pairs
