"""The span mixer beyond the contract: its variants against each other, causality, carrying, draws and evaluation."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo, step_key
from hybridtron.limits import limit_problems
from hybridtron.mixers.base import Mixer, State, build_mixer
from hybridtron.model.init import starting_value
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import force
from hybridtron.parallel.linear import SINGLE_RANK
from tests.conftest import random_batch, small_config

SIZES = ModelSizes(width=16, num_sublayers=4)
LENGTH = 32
SMALL = {"heads": 4, "kv_heads": 2, "chunk": 8, "block": 2, "blocks": 2}
MEMORIES = ("span", "none", "random", "landmark", "shifted")


def build(kind: str = "span", sizes: ModelSizes = SIZES, **options: object) -> Mixer:
    """A mixer whose weights depend on their names and shapes alone, in float64."""
    spec = SPECS[kind](**options)
    mixer = build_mixer(spec, sizes, SINGLE_RANK)
    for name, weight in mixer.named_parameters():
        weight.data.copy_(3 * starting_value(spec.parameters(sizes)[name].init, tuple(weight.shape), 1, name))
    return mixer.double()


def rows(length: int = LENGTH, key: int | None = 7, start: int = 0) -> SeqInfo:
    return dataclasses.replace(SeqInfo.stream(2, length, start), key=key)


def x_of(length: int = LENGTH) -> Tensor:
    return torch.randn(length, 2, SIZES.width, dtype=torch.float64)


def test_span_has_the_weights_of_attention() -> None:
    for options in ({}, {"kv_heads": 1, "rotary_dim": 4, "conv": 4, "conv_bias": True, "conv_silu": False}):
        ours, theirs = (SPECS[kind](heads=2, **options).parameters(SIZES) for kind in ("span", "attention"))
        assert ours == theirs


def test_span_with_all_blocks_equals_attention() -> None:
    x = x_of()
    everything = build(**{**SMALL, "blocks": 100})(x, None, rows()).y_LBD
    torch.testing.assert_close(everything, build("attention", heads=4, kv_heads=2)(x, None, rows()).y_LBD)


@pytest.mark.parametrize("memory", MEMORIES)
def test_memory_variants_differ_from_the_second_chunk_on(memory: str) -> None:
    x = x_of()
    alone = build(**SMALL, memory="none")(x, None, rows()).y_LBD
    y = build(**SMALL, memory=memory)(x, None, rows()).y_LBD
    if memory == "none":
        full = build("attention", heads=4, kv_heads=2)
        chunks = [full(x[a : a + 8], None, rows(8, start=a)).y_LBD for a in range(0, LENGTH, 8)]
        torch.testing.assert_close(y, torch.cat(chunks))
    else:
        assert not torch.allclose(y[8:], alone[8:])
        equal = 8
        if memory == "shifted":
            equal = 4
        torch.testing.assert_close(y[:equal], alone[:equal])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shifted_memory_equals_two_ways_to_cut_a_row(kv_heads: int) -> None:
    """Compute each half of the heads by itself, with its groups cut out of the row and an identity as output
    projection.
    """
    mixer = build(**{**SMALL, "kv_heads": kv_heads, "memory": "shifted"})
    x = x_of()
    full = build("attention", heads=4, kv_heads=kv_heads)
    for module in (mixer, full):
        module.out.weight.data = torch.eye(16, dtype=torch.float64)
    y = mixer(x, None, rows()).y_LBD
    for shift, channels in ((0, slice(0, 8)), (4, slice(8, 16))):
        borders = sorted({0, *range(shift, LENGTH, 8), LENGTH})
        parts = [full(x[a:b], None, rows(b - a, start=a)).y_LBD for a, b in itertools.pairwise(borders)]
        torch.testing.assert_close(y[..., channels], torch.cat(parts)[..., channels])


@pytest.mark.parametrize("form", ["reference", "native"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("relevance", ["chunk", "previous_chunk"])
def test_later_tokens_change_no_bit_before_their_chunk(memory: str, relevance: str, form: str) -> None:
    """Bit for bit; and nothing before itself, unless the chunk's own queries choose."""
    mixer = build(**SMALL, memory=memory, relevance=relevance)
    x = x_of()
    asks = memory in ("span", "landmark") and relevance == "chunk"
    reached = False
    for changed in (11, 21, 30):
        other = x.clone()
        other[changed:] = 3 * torch.randn_like(other[changed:])
        with force(span_attention=form):
            before, after = (mixer(tokens, None, rows()).y_LBD for tokens in (x, other))
        assert torch.equal(after[: changed // 8 * 8], before[: changed // 8 * 8])
        reached |= not torch.equal(after[:changed], before[:changed])
        assert not torch.equal(after[changed:], before[changed:])
    assert reached == asks


@pytest.mark.parametrize("memory", MEMORIES)
def test_span_returns_no_state_where_none_is_carried(memory: str) -> None:
    """Otherwise each layer's copy of the last keys and values would stay until the forward pass ends."""
    mixer = build(**SMALL, memory=memory)
    x = x_of()
    seq = rows()
    stateless = mixer(x, None, dataclasses.replace(seq, carried=False))
    kept = mixer(x, None, seq)
    assert torch.equal(stateless.y_LBD, kept.y_LBD)
    assert (stateless.state == {}, "keys" in kept.state) == (True, True)


def carried_over(mixer: Mixer, x: Tensor, cuts: list[int]) -> tuple[Tensor, State]:
    """The outputs of a row that is read in pieces, and its last state."""
    outputs = []
    state = None
    for start, stop in itertools.pairwise([0, *cuts, len(x)]):
        y, state, *_ = mixer(x[start:stop], state, rows(stop - start, start=start))
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs), state


@pytest.mark.parametrize("cuts", [[1, 2, 3], [5, 19], [8, 16], [7, 8, 9, 31], list(range(1, LENGTH))])
@pytest.mark.parametrize("memory", ["span", "landmark", "random", "shifted"])
def test_pieces_of_any_size_equal_the_whole_row_under_relevance_previous_chunk(memory: str, cuts: list[int]) -> None:
    options = {**SMALL, "memory": memory, "relevance": "previous_chunk"}
    if memory != "shifted":
        options["remember"] = 32
    mixer = build(**options)
    x = x_of().requires_grad_()
    whole = mixer(x, None, rows())
    y, state = carried_over(mixer, x, cuts)
    torch.testing.assert_close(y, whole.y_LBD)
    assert set(state) == set(whole.state)
    for name, tensor in whole.state.items():
        torch.testing.assert_close(state[name], tensor)
    weight = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad((output * weight).sum(), x)[0] for output in (y, whole.y_LBD))
    torch.testing.assert_close(ours, theirs)


def test_rows_end_at_chunk_boundaries_under_relevance_chunk() -> None:
    mixer = build(**SMALL, remember=32)
    x = x_of()
    whole = mixer(x, None, rows()).y_LBD
    torch.testing.assert_close(carried_over(mixer, x, [8, 24])[0], whole)
    assert not torch.allclose(carried_over(mixer, x, [8, 28])[0], whole)
    assert not list(SPECS["span"](**SMALL).carry_problems(24))
    (problem,) = SPECS["span"](**SMALL).carry_problems(28)
    assert (problem.key, problem.code) == ("chunk", "not-divisible")


def test_tokens_before_the_remembered_ones_change_nothing() -> None:
    """Tokens further back than that change nothing, nearer ones do; all blocks are read, so that choices hide none."""
    options = {**SMALL, "blocks": 100, "relevance": "previous_chunk"}
    for remember in (0, 4, 10):
        mixer = build(**options, remember=remember)
        x = x_of()
        first = mixer(x[:20], None, rows(20)).state
        assert first["keys"].shape[1] == remember + 8
        for token, seen in ((16 - remember - 1, False), (16 - remember, True), (17, True)):
            other = x.clone()
            other[token] += 1
            again = mixer(other[:20], None, rows(20)).state
            y, same = (mixer(x[20:], state, rows(12, start=20)).y_LBD for state in (first, again))
            assert torch.equal(y[:4], same[:4]) != seen, (remember, token)


def test_chunk_sizes_are_drawn_by_the_key() -> None:
    def drawn(key: int, layer: int, draw: str) -> int:
        mixer = build(sizes=dataclasses.replace(SIZES, layer=layer), **{**SMALL, "chunk": [4, 8, 16], "draw": draw})
        return mixer._chunk(rows(key=key))

    keys = [step_key(1, step, 0, row) for step in range(20) for row in range(3)]
    by_batch = [[drawn(key, layer, "batch") for layer in range(4)] for key in keys]
    by_layer = [[drawn(key, layer, "layer") for layer in range(4)] for key in keys]
    assert all(len(set(layers)) == 1 for layers in by_batch)
    assert any(len(set(layers)) > 1 for layers in by_layer)
    for sizes in (by_batch, by_layer):
        counts = [sum(layers.count(size) for layers in sizes) for size in (4, 8, 16)]
        assert min(counts) > 40
    assert by_layer == [[drawn(key, layer, "layer") for layer in range(4)] for key in keys]


def test_random_blocks_are_drawn_by_the_key() -> None:
    mixer = build(**SMALL, memory="random")
    x = x_of()
    first, again, other = (mixer(x, None, rows(key=key)).y_LBD for key in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("memory", MEMORIES)
def test_evaluation_is_full_attention_unless_asked_otherwise(memory: str) -> None:
    x = x_of()
    attention = build("attention", heads=4, kv_heads=2)(x, None, rows(key=None))
    full = build(**SMALL, memory=memory)(x, None, rows(key=None))
    assert torch.equal(full.y_LBD, attention.y_LBD)
    assert {name: tensor.shape for name, tensor in full.state.items()} == {
        name: tensor.shape for name, tensor in attention.state.items()
    }
    kept = build(**{**SMALL, "chunk": [4, 8]}, memory=memory, eval="span")(x, None, rows(key=None)).y_LBD
    assert not torch.allclose(kept, attention.y_LBD)
    if memory != "random":
        torch.testing.assert_close(kept, build(**SMALL, memory=memory)(x, None, rows()).y_LBD)


@pytest.mark.parametrize("eval_form", ["full", "span"])
def test_token_by_token_equals_the_whole_row(eval_form: str) -> None:
    options = {**SMALL, "relevance": "previous_chunk", "eval": eval_form, "remember": 64, "kind": "span"}
    model = LanguageModel(
        architecture(dataclasses.replace(small_config("X-X"), layers={**small_config().layers, "X": options}))
    )
    for name, weight in model.named_parameters():
        weight.data.copy_(starting_value(model.table[name].init, tuple(weight.shape), 1, name))
    tokens = random_batch().tokens_BL
    whole, *_ = model(tokens, None, SeqInfo.stream(2, 24))
    states = None
    outputs = []
    for place in range(24):
        output, states, *_ = model(tokens[:, place : place + 1], states, SeqInfo.stream(2, 1, place))
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "key", "code"),
    [
        ({"block": 3}, "block", "not-divisible"),
        ({"chunk": 64}, "chunk", "out-of-range"),
        ({"chunk": []}, "chunk", "missing"),
        ({"blocks": 0}, "blocks", "out-of-range"),
        ({"relevance": "next"}, "relevance", "unknown-name"),
        ({"memory": "all"}, "memory", "unknown-name"),
        ({"remember": 3}, "remember", "not-divisible"),
        ({"remember": 8, "memory": "none"}, "remember", "no-effect"),
        ({"heads": 1, "kv_heads": 1, "memory": "shifted"}, "heads", "not-divisible"),
        ({"chunk": 9, "block": 3, "memory": "shifted"}, "chunk", "not-divisible"),
    ],
)
def test_wrong_options_are_reported_by_key_and_code(options: dict, key: str, code: str) -> None:
    spec = SPECS["span"](**{**SMALL, **options})
    (problem,) = [*limit_problems(spec), *spec.problems(SIZES, LENGTH)]
    assert (problem.key, problem.code) == (key, code)


def test_ranks_that_share_a_choosing_group_are_refused() -> None:
    spec = SPECS["span"](**{**SMALL, "kv_heads": 1})
    (problem,) = spec.layout_problems(SIZES, 2)
    assert problem.key == "kv_heads"
    assert not list(SPECS["span"](**{**SMALL, "kv_heads": 1, "memory": "shifted"}).layout_problems(SIZES, 2))
