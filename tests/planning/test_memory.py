"""The plan of each rank, against counts made by hand, a played-through schedule, and the model's exact parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hybridtron.architecture.table import architecture, parameter_table
from hybridtron.config.check import check
from hybridtron.config.choices import StateMode
from hybridtron.config.layout import stages_of
from hybridtron.config.load import choices_of, load
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.planning.activations import MARGIN, held_micro_batches, sublayer_uses, with_frozen
from hybridtron.planning.count import count
from hybridtron.planning.fit import TENSOR_SIZES, fit, settings_of
from hybridtron.planning.memory import Plan, largest_phase, plan
from hybridtron.planning.rates import GPUS, HEAD_ROOM
from hybridtron.planning.step_seconds import count_of_last_share, step_seconds
from hybridtron.planning.weights import held_names, local_size
from hybridtron.rehearse.budget import FOLDER, read
from hybridtron.rehearse.suite import RecipeCase, SuiteRecords, origin_of
from hybridtron.shipped import shipped

RECIPES = [name for name in choices_of("recipe") if not name.startswith(("ablations/", "length/"))]


def planned(world_size: int, *arguments: str) -> tuple[Config, Plan]:
    config = load(arguments)
    assert not check(config, world_size)
    return config, plan(largest_phase(config), world_size)


@cache
def of_recipe(name: str) -> Config:
    return load([f"recipe={name}"])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("tensor", "pipeline", "virtual"), [(1, 1, 1), (2, 1, 1), (1, 4, 2), (2, 3, 1), (4, 5, 1)])
def test_ranks_together_hold_every_parameter(recipe, tensor, pipeline, virtual):
    config = of_recipe(recipe)
    layout = replace(config.parallel, tensor=tensor, pipeline=pipeline, virtual_pipeline=virtual)
    config = replace(config, parallel=layout)
    if any(problem.key == "parallel.tensor" or "stages" in problem.message for problem in check(config)):
        pytest.skip("refused: heads or layers that can't be shared out so")
    table = parameter_table(config.model)
    homes = held_names(table, architecture(config.model).letters, stages_of(config), pipeline)
    tied = config.model.tie_embeddings and pipeline > 1
    once_each = [name for names in homes for name in names if not table[name].shared]
    assert sorted(once_each) == sorted([*(n for n in table if not table[n].shared), *["embedding.weight"] * tied])
    assert {name for names in homes for name in names} == set(table)
    once = {name: table[name] for names in homes for name in names}
    holders = {name: 1 if weight.cut_over("tensor", tensor) is None else tensor for name, weight in once.items()}
    shares = sum(local_size(weight, config.parallel) * holders[name] for name, weight in once.items())
    assert shares == count(config.model, 4096).parameters


def test_one_process_holds_the_whole_model():
    """Without parallelism and recomputation, memory is the sum over all weights and sub-layers."""
    for recipe in RECIPES[::3]:
        config, made = planned(1, f"recipe={recipe}", "parallel.recompute=none", "phases.0.adapters=null")
        phase = largest_phase(config)
        arch = architecture(config.model)
        if phase.settings.adapters is not None or arch.carries_embedding:
            continue  # frozen weights have no gradients, and shared blocks keep the embedding too
        (rank,) = made.ranks
        held = rank.memory
        model = config.model
        value = 4 if config.precision.name == "fp32" else 2
        assert (held.states > 0) == (phase.states.mode is not StateMode.zero)
        weights = parameter_table(model).values()
        in_fp32 = sum(weight.size for weight in weights if weight.fp32)
        narrow = sum(weight.size for weight in weights) - in_fp32
        assert held.weights == 4 * in_fp32 + value * narrow
        assert held.gradients == 4 * (in_fp32 + narrow)
        assert held.optimizer == 8 * (in_fp32 + narrow) + (4 * narrow if value == 2 else 0)
        stream = 4 if model.residual_fp32 else value
        norms = 1 + sum(not spec.beside for spec in arch.specs)  # a norm of each, and the last
        around = (stream + value) * model.width * norms  # their inputs and outputs
        sizes = replace(arch.sizes, wide=4 // value)
        inside = value * sum(spec.activation_values(sizes) for spec in arch.specs)
        assert held.activations == (around + inside) * phase.settings.seq_len * phase.settings.micro_batch
        assert rank.traffic.total == made.bubble == 0
        assert (rank.in_flight, rank.parameters) == (1, count(config.model, 4096).parameters)


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
def test_micro_batches_in_flight(pipeline, virtual, micro_batches, in_flight):
    parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    played = [list(held_micro_batches(parallel, rank, micro_batches)) for rank in range(pipeline)]
    assert [max(map(sum, passes)) for passes in played] == in_flight
    assert all(live >= 0 for passes in played for stage in passes for live in stage)


def test_interleaved_stages_by_hand():
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
def test_one_process_by_hand(precision, gradients, moments, value, master):
    formats = {4: "fp32", 2: "bf16"}
    kept = f"precision.gradients={formats[gradients]}", f"precision.moments={formats[moments]}"
    held = planned(1, *TINY, f"precision={precision}", *kept)[1].ranks[0].memory
    parameters = count(load(TINY).model, 16).parameters
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


@pytest.mark.parametrize(("emulate", "copies"), [("true", 1), ("false", 2)])
def test_rounded_weights_that_are_kept_by_hand(emulate, copies):
    """Count two MLPs and attention; Mamba, the first sub-layer, stays in bf16."""
    settings = [*TINY, "precision=fp8_current", f"precision.emulate={emulate}", "precision.bf16_first=1"]
    phases = (largest_phase(load([*settings, f"precision.cache_weights={one}"])) for one in ("false", "true"))
    plain, cached = (plan(phase, 1).ranks[0] for phase in phases)  # unchecked: such small layers do not fit FP8
    kept = copies * (2 * 3 * 8 * 12 + 8 * 8 + 2 * 2 * 8 + 8 * 8)
    assert (plain.memory.rounded, cached.memory.rounded) == (0, kept)
    assert cached.memory.total == plain.memory.total + kept
    assert cached.traffic == plain.traffic


def test_what_tensor_parallel_ranks_hold_by_hand():
    (rank,) = planned(2, *TINY, "parallel.tensor=2")[1].ranks
    mamba = (32 * 8 + 16 * 4 + 16 + 8 * 16 + 16 * 2 + 16 + 16 * 3 + 16 + 8 * 16) // 2
    attention = 8 * 8 // 2 + 2 * 2 * 8 + 8 * 8 // 2  # the one key/value head stands on both
    around = 5 * 8 + 16 * 8 // 2  # norms are whole, the embedding is not
    assert rank.parameters == mamba + 2 * (3 * 8 * 12 // 2) + attention + around
    assert rank.memory.gradients == 4 * rank.parameters


def test_b_and_c_of_few_groups_stand_on_both_ranks_by_hand():
    mamba2 = "model.layers.S={kind: mamba2, state: 3, head_dim: 4, groups: %d}"
    whole, cut = (
        planned(2, *TINY, "model.pattern=S", mamba2 % groups, "parallel.tensor=2")[1].ranks[0] for groups in (1, 2)
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
def test_what_is_kept_by_hand(arguments, kept):
    config, made = planned(2, *TINY, "parallel.tensor=2", *arguments)
    uses = sublayer_uses(config)
    assert [use.kept for use in uses] == kept
    last_norm = 8 + (4 if config.parallel.sequence else 8) * (2 if config.model.residual_fp32 else 1)
    assert made.ranks[0].memory.activations == 2 * (sum(kept) + last_norm) * 16 * 2
    assert made.ranks[0].memory.logits == 2 * (16 * 2 * (8 + 8) + 8 * 8)  # logits, of the input, of the head


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
def test_frozen_projections_keep_no_input_by_hand(adapters, kept):
    phase = largest_phase(load([*TINY, f"phases.0.adapters={adapters}"]))
    uses = with_frozen(sublayer_uses(phase.config), phase, parameter_table(phase.model))
    assert [use.kept for use in uses] == kept


def test_frozen_weights_have_no_gradients_at_the_loss_by_hand():
    logits = planned(1, *TINY, "phases.0.adapters={rank: 2}")[1].ranks[0].memory.logits
    assert logits == 2 * 16 * 2 * (16 + 8)


def test_what_the_backward_pass_holds_by_hand():
    """The stream's gradient, and half as many values as Mamba keeps; recomputed, those that it keeps as well."""
    _, made = planned(2, *TINY, "parallel.pipeline=2")
    token = 2 * 16 * 2  # bytes of one value for every token
    inside = 5 * 16 + 2 + 2 * 3
    assert made.ranks[0].memory.backward == (8 + inside // 2) * token
    # at the loss: the input of the micro-batch before and its gradient; later the logits are gone, and it is less
    assert made.ranks[1].memory.backward == 2 * 8 * token
    again = planned(2, *TINY, "parallel.pipeline=2", "parallel.recompute=layer")[1].ranks[0].memory
    assert again.backward - made.ranks[0].memory.backward == (8 + inside) * token


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_sent_by_hand(wide):
    residual = f"model.residual_fp32={str(wide).lower()}"
    _, made = planned(4, *TINY, residual, "parallel.tensor=2", "parallel.pipeline=2")
    micro_batch = 2 * 16 * 2  # bytes of one value for every token
    assert made.micro_batches == 4
    first, last = made.ranks
    assert [len(chunk.layers) for rank in made.ranks for chunk in rank.chunks] == [1, 3]
    # Mamba sums its output, its input's gradient, and twice dt, B and C; the embedding sums its output
    assert first.traffic.tensor == (2 * (8 + 8) + 8) * micro_batch * 4
    assert last.traffic.tensor == (2 * 8 * 3 + 8) * micro_batch * 4
    border = 8 * micro_batch * 4 * (2 if wide else 1)  # one: forward, or back
    assert first.traffic.pipeline == last.traffic.pipeline == border
    assert first.traffic.gradients == last.traffic.gradients == 4 * 16 * 8 // 2  # the tied embedding alone
    assert made.bubble == 1 / 5


@pytest.mark.parametrize(("distributed", "gradients"), [("true", 1), ("false", 2)])
def test_data_parallel_traffic_by_hand(distributed, gradients):
    _, made = planned(4, *TINY, "phases.0.micro_batch=1", f"parallel.distributed_optimizer={distributed}")
    (rank,) = made.ranks
    whole = planned(1, *TINY)[1].ranks[0].memory
    assert rank.traffic.gradients == gradients * whole.gradients * 3 // 4
    assert rank.traffic.parameters == (whole.weights * 3 // 4 if gradients == 1 else 0)
    assert rank.memory.optimizer == (-(-whole.optimizer // 4) if gradients == 1 else whole.optimizer)


def test_plans_are_within_their_margin_of_stored_rehearsals():
    """Check some ranks of the suite that hold a gigabyte or more; the peaks of smaller models are in buffers."""
    stored = SuiteRecords(shipped("benchmarks") / "rehearse.jsonl").read().values()
    records = [record for record in stored if record.get("peak", 0) > 1e9 and origin_of(record["recipe"]) is None]
    for record in records[::25]:
        case = RecipeCase(record["recipe"], record["layout"])
        made = plan(largest_phase(case.config()), case.world)
        total = made.ranks[record["pipeline_rank"]].memory.total
        assert total == pytest.approx(record["peak"], rel=MARGIN), case


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_plans_are_within_their_margin_of_budgets(path):
    settings, budget = read(path)
    config = load(settings)
    made = plan(largest_phase(config), config.parallel.model_ranks)
    assert made.ranks[0].memory.total == pytest.approx(budget["peak bytes"], rel=MARGIN)


@pytest.mark.slow
def test_published_models_are_laid_out_sanely():
    """Samba 1.3B needs no model parallelism on 64 devices; 11 query heads keep Samba 3.8B from being cut at all."""
    small = load(["recipe=samba_1.3b"])
    best = fit(small, 64, 80e9)[0]
    assert (best.parallel.tensor, best.parallel.pipeline) == (1, 1)
    large = fit(load(["recipe=samba_3.8b"]), 256, 80e9)
    assert {layout.parallel.tensor for layout in large} == {1}


@pytest.mark.parametrize(
    ("recipe", "gpus", "gigabytes"),
    [pytest.param("samba_1.3b", 64, 24, marks=pytest.mark.slow), ("samba_1.7b", 12, 40), ("laptop", 4, 8)],
)
def test_what_is_proposed_keeps_every_rule_and_fits(recipe, gpus, gigabytes):
    config = load([f"recipe={recipe}"])
    found = fit(config, gpus, gigabytes * 1e9)
    assert found
    seconds = [float(f"{layout.seconds:.3g}") for layout in found]
    assert seconds == sorted(seconds)
    for layout in found[::5]:
        proposed = load([f"recipe={recipe}", *settings_of(layout, config)])
        assert proposed.parallel == layout.parallel
        assert not check(proposed, gpus)
        made = plan(largest_phase(proposed), gpus)
        assert made == layout.plan
        assert made.fullest.memory.total <= (1 - HEAD_ROOM) * gigabytes * 1e9


def test_short_rows_come_in_micro_batches_that_outlast_their_launches():
    """12 sub-layers launch for 3.6 ms; of 256 tokens a row 32 rows and more take longer, 65,536 tokens at most."""
    settings = ["recipe=mamba2_45m", "phases.0.seq_len=256", "phases.0.global_batch=2048"]
    rows = [layout.micro_batch for layout in fit(load(settings), 1, 80e9)]
    assert rows == [32, 64, 128, 256, 16, 8, 4, 2, 1]


@pytest.mark.slow
def test_settings_undo_what_the_configuration_sets():
    config = load(["recipe=samba_1.3b", "parallel.tensor=2", "parallel.recompute=layer"])
    best = fit(config, 64, 80e9)[0]
    reported = settings_of(best, config)
    assert "parallel.tensor=1" in reported
    assert "parallel.recompute=none" in reported


def test_a_row_that_no_device_holds_is_shared_out():
    """One row of a million tokens: data parallelism has nothing to do, and the fastest layout shares its tokens."""
    row = "phases.0.seq_len=1048576 phases.0.global_batch=1 phases.0.micro_batch=1 run.eval_tokens=4194304"
    config = load(["recipe=samba_421m", *row.split()])
    found = fit(config, 16, 80e9)
    assert (found[0].parallel.context, found[0].parallel.tensor, found[0].parallel.pipeline) == (16, 1, 1)
    assert not check(load(["recipe=samba_421m", *row.split(), *settings_of(found[0], config)]), 16)
    short = fit(load(["recipe=samba_421m"]), 16, 80e9)
    assert short[0].parallel.context == 1
    assert {layout.parallel.context for layout in short} == {1, 2}


def test_no_layout_is_proposed_that_a_rule_refuses():
    """torch.compile can't trace the exchange between context-parallel ranks."""
    for compiled, contexts in (("false", {1, 2}), ("true", {1})):
        found = fit(load(["recipe=samba_421m", f"run.compile={compiled}"]), 2, 80e9)
        assert {layout.parallel.context for layout in found} == contexts


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_the_last_share_attends_to_the_most(shares: int) -> None:
    """Query i in a row of 64 sees i + 1 keys, or its window's: counted one by one over the last sequence shard."""
    config = load([*TINY, "model.pattern=FW", "model.layers.F={kind: attention, heads: 4}",
                   "model.layers.W={kind: attention, heads: 4, window: 8}"])  # fmt: skip
    whole, window = count_of_last_share(config.model, 64, shares).layers
    mean, of_window = count(config.model, 64).layers
    last = range(64 - 64 // shares, 64)
    keys = [sum(query + 1 for query in places) / len(places) for places in (last, range(64))]
    assert whole.flops["attention"] / mean.flops["attention"] == pytest.approx(keys[0] / keys[1])
    keys = [sum(min(query + 1, 8) for query in places) / len(places) for places in (last, range(64))]
    assert window.flops["attention"] / of_window.flops["attention"] == pytest.approx(keys[0] / keys[1])
    assert whole.flops["projections"] == mean.flops["projections"]


def test_too_little_memory_fits_nothing():
    assert fit(load(["recipe=samba_3.8b"]), 8, 4e9) == []
    assert 8 in TENSOR_SIZES


STATES = "model.layers.S={kind: mamba2, state: 3, head_dim: 4, groups: 1}"


def test_carried_states_by_hand():
    """Count two copies of the states for this rank's lanes and layers, halved where tensor parallelism cuts them."""
    layout = ("parallel.tensor=2", "parallel.pipeline=2", "model.pattern=MS|W-")
    _, made = planned(8, *TINY, STATES, *layout, "states.mode=tbtt", "phases.0.micro_batch=1")
    mamba = 16 * 3 * 4 + 3 * 16 * 2
    mamba2 = 4 * 4 * 3 * 4 + 3 * 16 * 2
    whole = 3 * 2 * 3 * 2  # B and C of the one group
    lanes = 8 // 2
    assert made.ranks[0].memory.states == 2 * lanes * ((mamba + mamba2) // 2 + whole)
    assert made.ranks[1].memory.states == 2 * lanes * (2 * 3 * 1 * 2 * 2 + 8)  # the one head on both, and a length
    passing = planned(4, *TINY, STATES, *layout, "states.mode=passing")[1]
    assert [rank.memory.states for rank in passing.ranks] == [2 * 8 * (16 * 3 * 4 + 4 * 4 * 3 * 4) // 2, 0]
    for mode in ("zero", "random", "fitted"):
        assert planned(1, *TINY, f"states.mode={mode}")[1].ranks[0].memory.states == 0


def test_chunks_through_time_by_hand():
    """Activations grow with the number of chunks; with recompute only the states between chunks are kept.

    There are fewer micro-batches by that factor, each with more tokens.
    """
    tbtt = (*TINY, "parallel.pipeline=2", "phases.0.micro_batch=1", "states.mode=tbtt", "states.chunks=4")
    detached, through, again = (
        planned(2, *tbtt, *more)[1]
        for more in (
            (),
            ("states.through_time=true",),
            ("states.through_time=true", "parallel.recompute=layer"),
        )
    )
    assert (detached.micro_batches, through.micro_batches, again.micro_batches) == (8, 2, 2)
    tokens = 16 * 2  # bytes of a value of the stream for every token of a chunk
    for one, four, flat in zip(detached.ranks, through.ranks, again.ranks, strict=True):
        assert one.in_flight == four.in_flight
        assert four.memory.activations == 4 * one.memory.activations
        assert four.traffic == one.traffic
        assert flat.memory.activations < one.memory.activations + flat.in_flight * 4 * (8 * tokens + one.memory.states)
    assert detached.ranks[1].memory.logits == 2 * (16 * (16 + 8) + 16 * 8)
    assert again.ranks[1].memory.logits == through.ranks[1].memory.logits == 2 * (4 * 16 * (16 + 8) + 16 * 8)


def test_virtual_stages_count_what_runs_together():
    settings = [*TINY, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "states.mode=tbtt", "states.chunks=4"]
    assert not check(load([*settings, "phases.0.micro_batch=1"]), 2)
    (problem,) = check(load([*settings, "phases.0.micro_batch=2", "states.through_time=true"]), 2)
    assert "makes 1 micro batches" in problem.message
    assert "use 16" in problem.message
    assert not check(load([*settings, "phases.0.micro_batch=1", "states.through_time=true"]), 2)


def test_seconds_of_a_step_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Add up products, streams and updates. A step this small takes as long as launching its sub-layers."""
    config, made = planned(2, *TINY, "parallel.pipeline=2")
    gpu = GPUS["h100"]
    counted = count(config.model, 16)
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
        for rank in made.ranks
    ]
    assert made.micro_batches == 4
    launching = 50 * 6e-6 * (len(of_layers) - 1)  # of the second stage, which has all but the first
    assert step_seconds(made, largest_phase(config), gpu) == pytest.approx((4 + 1) * (launching + border) + max(once))
    monkeypatch.setattr("hybridtron.planning.step_seconds.LAUNCHES", 0)
    assert step_seconds(made, largest_phase(config), gpu) == pytest.approx((4 + 1) * max(passes) + max(once))


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (["parallel.recompute=layer"], []),
        (["parallel.tensor=2"], []),  # sums in every sub-layer, which nothing hides
        (["parallel.pipeline=4"], ["parallel.pipeline=4", "parallel.virtual_pipeline=2"]),  # the pipeline waits less
        (["parallel.overlap_grad_reduce=false"], []),  # gradients and weights are sent while it computes
    ],
)
def test_what_makes_a_step_slower_makes_the_model_slower(slower, faster):
    times = []
    for settings in (slower, faster):
        config, made = planned(32, "recipe=samba_421m", "phases.0.micro_batch=2", *settings)
        times.append(step_seconds(made, largest_phase(config), GPUS["h100"]))
    assert times[0] > times[1]
