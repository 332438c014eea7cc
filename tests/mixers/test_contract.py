"""Contract of every registered mixer, regardless of its equations. A new mixer is tested once it is in OPTIONS."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.hf import HybridtronConfig, HybridtronForCausalLM
from hybridtron.inference.generate import generate
from hybridtron.interop.custom import Custom
from hybridtron.mixers.base import Mixer, build_mixer
from hybridtron.model.init import initialise, starting_value
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import Op, force, observed
from hybridtron.parallel.linear import SINGLE_RANK, PlainLinear
from tests.conftest import part_of, stored_weights
from tests.conftest import seq_info as evaluated

SIZES = ModelSizes(width=16, num_sublayers=4)
LENGTH = 21
OPTIONS = {
    "mamba": [
        {"state": 4},
        {"state": 4, "inner_norm": "learned"},
        {"state": 4, "inner_norm": "plain", "norm_eps": 1e-3},
        {"state": 4, "sparse": {"keys": 8, "hashes": 3}},
        {"state": 4, "sparse": {"pattern": "window_dilated", "keys": 6, "stride": 4, "projected": False}},
    ],
    "mamba2": [
        {"state": 6, "head_dim": 8},
        {"state": 4, "head_dim": 4, "groups": 2, "conv": 3},
        {"state": 4, "head_dim": 4, "groups": 3, "heads": 9},
        {
            "state": 4,
            "head_dim": 8,
            "norm": False,
            "multipliers": {"z": 0.5, "x": 0.25, "B": 0.75, "C": 1.5, "dt": 2.0},
            "output_multiplier": 0.5,
        },
        {"state": 4, "head_dim": 4, "groups": 2, "sparse": {"keys": 6, "bins": "sign", "hashes": 2, "target": "mean"}},
        {"state": 4, "head_dim": 4, "groups": 2, "sparse": {"pattern": "ks", "keys": 5, "projected": True}},
        {"state": 4, "head_dim": 8, "sparse": {"pattern": "lsh", "keys": 3, "hashes": 4}},
        {"state": 4, "head_dim": 8, "sparse": {"pattern": "sink_window", "keys": 6}},
    ],
    "mamba3": [{"state": 6, "head_dim": 8}, {"state": 4, "head_dim": 4, "groups": 2, "turned": 1.0, "norm": True}],
    "gla": [{"heads": 2, "gate_divisor": 2.0}, {"heads": 4, "expand_k": 1.0, "expand_v": 2.0, "conv": 3}],
    "retnet": [{"heads": 4}, {"heads": 2, "expand_k": 0.5, "expand_v": 1.0, "conv": 3}],
    "gated_deltanet": [
        {"heads": 2},
        {"heads": 4, "key_heads": 2, "expand_k": 0.5, "conv": 3, "negative_eigenvalues": True},
    ],
    "kda": [{"heads": 2, "negative_eigenvalues": True}, {"heads": 4, "expand_k": 0.5, "expand_v": 1.5, "conv": 3}],
    "rwkv6": [{"head_dim": 8, "mix_rank": 3, "decay_rank": 5}, {"head_dim": 4}],
    "rwkv6_channel_mix": [{"hidden": 24}, {}],
    "attention": [
        {"heads": 4},
        {"heads": 4, "kv_heads": 2, "window": 6},
        {"heads": 4, "kv_heads": 1, "window": 6, "conv": 4},
        {"heads": 2, "head_dim": 12, "rope": "none"},
        {"heads": 2, "rotary_dim": 4, "conv": 4, "conv_bias": True, "conv_silu": False},
        {"heads": 4, "kv_heads": 2, "qk_norm": "head", "gate": True, "rotary_dim": 2, "window": 6},
        {"heads": 4, "qk_norm": "all", "norm_after": True, "conv": 3},
        {"heads": 4, "kv_heads": 2, "window": 6, "scale": 0.1},
        {"heads": 2, "beside": True, "output_multiplier": 0.75},
        {"heads": 2, "window": 6, "rope": {"scale": "yarn", "factor": 4.0, "original": 6}},
        {"heads": 2, "rope": {"base": 100.0, "scale": "llama3", "factor": 4.0, "original": 20}},
        {"heads": 4, "kv_heads": 2, "rotary_dim": 2, "self_extend": {"group": 3, "neighbours": 5}},
    ],
    "span": [
        {"heads": 4, "kv_heads": 2, "chunk": 8, "block": 2, "blocks": 2, "remember": 16, "relevance": "previous_chunk"},
        {"heads": 4, "chunk": 4, "block": 2, "blocks": 2, "remember": 20, "eval": "span"},
        {
            "heads": 2,
            "kv_heads": 1,
            "chunk": [4, 8],
            "block": 4,
            "blocks": 1,
            "remember": 16,
            "memory": "landmark",
            "relevance": "previous_chunk",
            "conv": 4,
            "conv_bias": True,
            "conv_silu": False,
            "rotary_dim": 4,
            "rope": {"scale": "linear", "factor": 4.0},
        },
        {"heads": 4, "kv_heads": 2, "chunk": 4, "block": 2, "blocks": 2, "remember": 20, "memory": "random"},
        {"heads": 4, "kv_heads": 1, "chunk": 6, "block": 2, "memory": "none", "scale": 0.3},
        {"heads": 4, "kv_heads": 1, "chunk": 6, "block": 2, "memory": "shifted"},
    ],
    "shared_attention": [
        {"heads": 4, "hidden": 24, "rank": 3},
        {"heads": 4, "kv_heads": 2, "hidden": 24, "rank": 3, "adapt_attention": True, "window": 6, "rope": "none"},
    ],
    "shared_span": [
        {
            "heads": 4,
            "hidden": 24,
            "rank": 3,
            "adapt_attention": True,
            "chunk": 4,
            "block": 2,
            "blocks": 2,
            "remember": 20,
            "relevance": "previous_chunk",
        },
    ],
    "swiglu": [{"hidden": 24}, {"hidden": 24, "norm_after": True}, {"hidden": 24, "gate_multiplier": 0.5}],
    "squared_relu": [{"hidden": 24}],
    "moe": [
        {"experts": 4, "top_k": 2, "hidden": 8},
        {"experts": 6, "top_k": 2, "hidden": 6, "shared": 10, "shared_gate": True, "normalise": False, "z_loss": 0.01},
        {
            "experts": 8,
            "top_k": 3,
            "hidden": 6,
            "activation": "squared_relu",
            "shared": 12,
            "scores": "sigmoid",
            "scale": 2.5,
            "groups": 4,
            "group_limit": 2,
            "balance": "bias",
        },
        {"experts": 4, "top_k": 2, "hidden": 12, "shared": 6, "latent": 6},
    ],
}
CASES = [
    pytest.param(SPECS[kind](**options), id=f"{kind}-{i}")
    for kind in OPTIONS
    for i, options in enumerate(OPTIONS[kind])
]

RECURRENT = [  # whose states are of a fixed size, and numbers with gradients
    case
    for case in CASES
    if (parts := case.values[0].state_parts(SIZES))
    and not any(None in part.shape or part.dtype == "int64" for part in parts.values())
]


def seq_info(rows: int, length: int, documents: list[list[int]] | None = None) -> SeqInfo:
    """Return the sequence info of training, which a spec's states describe."""
    return dataclasses.replace(evaluated(rows, length, documents), key=7)


def build(spec: MixerSpec, dtype: torch.dtype = torch.float64) -> Mixer:
    mixer = build_mixer(spec, SIZES, SINGLE_RANK)
    for name, weight in mixer.named_parameters():
        start = starting_value(spec.parameters(SIZES)[name].init, tuple(weight.shape), 1, name)
        weight.data.copy_(start + 0.01 * torch.randn(start.shape))
    return mixer.to(dtype)


def gradients(mixer: Mixer, outputs: list[Tensor], inputs: list[Tensor], weights_of_loss: list[Tensor]) -> list[Tensor]:
    """Gradients of a random linear function of the outputs, with respect to the inputs and every weight.

    They are zeros for weights that learn by an auxiliary loss alone.
    """
    loss = sum(((y * w).sum() for y, w in zip(outputs, weights_of_loss, strict=True)), torch.zeros(()))
    wanted = [*inputs, *(weight for weight in mixer.parameters() if weight.requires_grad)]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))


def assert_all_close(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_registries_list_every_kind_of_mixer() -> None:
    assert set(SPECS) == set(OPTIONS)


@pytest.mark.parametrize("spec", CASES)
def test_module_has_the_parameters_of_its_spec(spec: MixerSpec) -> None:
    built = {name: tuple(weight.shape) for name, weight in build(spec).named_parameters()}
    table = spec.parameters(SIZES)
    assert built == {name: parameter.shape for name, parameter in table.items()}
    for parameter in table.values():
        assert sum(rows for _, rows in parameter.parts) in (0, parameter.shape[parameter.parts_axis])


@pytest.mark.parametrize("spec", CASES)
def test_output_does_not_depend_on_the_use_of_the_final_states(spec: MixerSpec) -> None:
    """A mixer may leave out states that nobody uses, but no others."""
    mixer = build(spec)
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64)
    seq = seq_info(2, LENGTH, [[4, 17], [21]])
    used, unused = (mixer(x, None, dataclasses.replace(seq, carried=carried)) for carried in (True, False))
    assert torch.equal(used.y_LBD, unused.y_LBD)
    assert unused.state.keys() <= used.state.keys()


@pytest.mark.parametrize("spec", CASES)
def test_projections_of_the_table_are_linear_layers(spec: MixerSpec) -> None:
    layers = {name for name, module in build(spec).named_modules() if isinstance(module, PlainLinear)}
    marked = {name for name, parameter in spec.parameters(SIZES).items() if parameter.projection}
    assert marked == {f"{layer}.weight" for layer in layers}


@pytest.mark.parametrize("spec", CASES)
def test_state_has_the_parts_of_its_spec(spec: MixerSpec) -> None:
    state = build(spec, torch.float32)(torch.randn(LENGTH, 2, spec.input_width(SIZES)), None, seq_info(2, LENGTH)).state
    parts = spec.state_parts(SIZES)
    assert set(state) == set(parts)
    for name, part in parts.items():
        expected = [size or LENGTH for size in part.shape]
        assert list(state[name].shape) == [2, *expected]
        assert str(state[name].dtype) == f"torch.{part.dtype or 'float32'}"


@pytest.mark.parametrize("cut", [1, 3, 13])
@pytest.mark.parametrize("documents", [None, [[21], [21]], [[5, 16], [13, 8]]], ids=["join", "whole", "borders"])
@pytest.mark.parametrize("spec", CASES)
def test_chunks_with_a_carried_state_equal_the_whole_row(
    spec: MixerSpec, documents: list[list[int]] | None, cut: int
) -> None:
    mixer = build(spec)
    seq = seq_info(2, LENGTH, documents)
    cut = next(place for place in range(cut, LENGTH) if may_end(spec, seq, place))
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(LENGTH, 2, SIZES.width, dtype=torch.float64)
    whole = mixer(x, None, seq)
    first = mixer(x[:cut], None, part_of(seq, 0, cut))
    state = carried(first.state, seq, cut)
    second = mixer(x[cut:], state, part_of(seq, cut, LENGTH))
    joined = torch.cat([first.y_LBD, second.y_LBD])
    assert_all_close([joined], [whole.y_LBD], 1e-10)
    for name, tensor in whole.state.items():
        if name not in ("keys", "values"):  # their padding may differ; `length` says what of them is real
            torch.testing.assert_close(second.state[name], tensor, rtol=1e-10, atol=1e-10)
    assert_all_close(gradients(mixer, [joined], [x], [weight]), gradients(mixer, [whole.y_LBD], [x], [weight]), 1e-9)


def may_end(spec: MixerSpec, seq: SeqInfo, cut: int) -> bool:
    """Return True if a mixer's rows may end before this token, at any position in its document."""
    return not any(problem for place in seq.positions_BL[:, cut].tolist() for problem in spec.carry_problems(place))


def carried(state: dict[str, Tensor], seq: SeqInfo, cut: int) -> dict[str, Tensor]:
    """The state as the code that carries it hands it on: zero for rows that start a new document at the cut."""
    if seq.documents_BL is None:
        return state
    continues = seq.documents_BL[:, cut] == seq.documents_BL[:, cut - 1]
    return {
        name: tensor * continues.view(-1, *[1] * (tensor.dim() - 1)).to(tensor.dtype) for name, tensor in state.items()
    }


@pytest.mark.parametrize("spec", CASES)
def test_absent_state_equals_a_state_of_zeros(spec: MixerSpec) -> None:
    mixer = build(spec)
    seq = seq_info(2, LENGTH)
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64)
    from_none = mixer(x, None, seq)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in from_none.state.items()}
    torch.testing.assert_close(mixer(x, zeros, seq).y_LBD, from_none.y_LBD, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", CASES)
def test_document_in_mid_row_starts_without_a_state(spec: MixerSpec) -> None:
    mixer = build(spec)
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64)
    packed = mixer(x, None, seq_info(2, LENGTH, [[8, 13], [8, 13]])).y_LBD
    alone = [mixer(part, None, seq_info(2, len(part))).y_LBD for part in (x[:8], x[8:])]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spec", CASES)
def test_later_tokens_change_no_bit_of_earlier_outputs(spec: MixerSpec, dtype: torch.dtype) -> None:
    """Mixers compute the same bits before a changed token, in training and evaluation, by every form of their ops."""
    mixer = as_trained(build(spec, torch.float32), spec, dtype)
    x = 4 * torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=dtype)
    other = torch.cat([x[:12], 4 * torch.randn_like(x[12:])])
    with torch.no_grad():
        for seq in (seq_info(2, LENGTH), evaluated(2, LENGTH)):
            for forms in every_form(mixer, x, seq):
                with force(**forms):
                    before = mixer(x, None, seq).y_LBD
                    after = mixer(other, None, seq).y_LBD
                if (
                    spec.kind == "moe"
                ):  # the tokens that share an expert, of which there are more or fewer, are one product
                    rounding = 4 * torch.finfo(dtype).eps
                    torch.testing.assert_close(after[:12], before[:12], rtol=rounding, atol=rounding)
                else:
                    assert torch.equal(after[:12], before[:12]), forms
                assert not torch.equal(after[12:], before[12:])


def as_trained(mixer: Mixer, spec: MixerSpec, dtype: torch.dtype) -> Mixer:
    """Convert a mixer to a precision as training does: in bf16 some weights stay in fp32."""
    for name, weight in mixer.named_parameters():
        if dtype != torch.bfloat16 or not spec.parameters(SIZES)[name].fp32:
            weight.data = weight.data.to(dtype)
    return mixer


def every_form(mixer: Mixer, x: Tensor, seq: SeqInfo) -> list[dict[str, str]]:
    """List forms by op to force in turn, until each form of each op that the mixer calls has run on a CPU."""
    forms: dict[str, list[str]] = {}

    def note(op: Op, inputs: tuple) -> None:
        fitting = (f for f in op.implementations if not (f.unavailable_reason("cpu") or f.unsupported_reason(inputs)))
        forms[op.name] = ["reference", *(form.name for form in fitting)]

    with observed(note):
        mixer(x, None, seq)
    most = max(map(len, forms.values()), default=1)
    return [{name: choices[n % len(choices)] for name, choices in forms.items()} for n in range(most)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float32, 2**-20)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("spec", CASES)
def test_token_by_token_equals_the_whole_row_but_for_rounding(
    spec: MixerSpec, dtype: torch.dtype, tolerance: float
) -> None:
    mixer = as_trained(build(spec, torch.float32), spec, dtype)
    seq = evaluated(2, LENGTH)
    if not all(may_end(spec, seq, place) for place in range(1, LENGTH)) or spec.chunk_multiple > 1:
        return  # its rows are read in longer pieces
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=dtype)
    state = None
    outputs = []
    with torch.no_grad():
        whole = mixer(x, None, seq).y_LBD.double()
        for t in range(LENGTH):
            out = mixer(x[t : t + 1], state, part_of(seq, t, t + 1))
            state = out.state
            outputs.append(out.y_LBD)
    assert (torch.cat(outputs) - whole).norm() <= tolerance * whole.norm()


@pytest.mark.parametrize("spec", CASES)
def test_fast_forms_equal_the_reference(spec: MixerSpec) -> None:
    mixer = build(spec)
    seq = seq_info(2, LENGTH, [[5, 16], [13, 8]])
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(LENGTH, 2, SIZES.width, dtype=torch.float64)
    fast = mixer(x, None, seq).y_LBD
    fast_gradients = gradients(mixer, [fast], [x], [weight])
    with force("reference"):
        reference = mixer(x, None, seq).y_LBD
        reference_gradients = gradients(mixer, [reference], [x], [weight])
    assert_all_close([fast, *fast_gradients], [reference, *reference_gradients], 1e-9)


@pytest.mark.parametrize("form", ["reference", None])
@pytest.mark.parametrize("spec", CASES)
def test_documents_leak_no_bit_into_the_next(spec: MixerSpec, form: str | None) -> None:
    """The leak probe: other tokens in document A leave all that concerns document B bit-identical.

    With experts they are equal but for rounding: a product has the tokens that share an expert, of both documents.
    """
    mixer = build(spec, torch.float32)
    seq = seq_info(2, LENGTH, [[8, 13], [8, 13]])
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES))
    other = x.clone()
    other[:8] = torch.randn(8, 2, spec.input_width(SIZES))
    weight = torch.randn(LENGTH - 8, 2, SIZES.width)

    def document_b(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = mixer(x, None, seq).y_LBD[8:]
        of_x, *weight_gradients = gradients(mixer, [y], [x], [weight])
        assert not of_x[:8].any()
        return [y, of_x[8:], *weight_gradients]

    with force(form):
        for ours, theirs in zip(document_b(x), document_b(other), strict=True):
            if spec.kind == "moe":
                torch.testing.assert_close(ours, theirs, rtol=2**-18, atol=2**-20)
            else:
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("spec", CASES)
def test_auxiliary_losses_are_named_by_the_spec(spec: MixerSpec) -> None:
    mixer = build(spec)
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64)
    assert mixer(x, None, seq_info(2, LENGTH)).aux.keys() == set(spec.auxiliary)
    assert mixer(x, None, evaluated(2, LENGTH)).aux == {}


@pytest.mark.parametrize("spec", CASES)
def test_every_weight_gets_a_gradient(spec: MixerSpec) -> None:
    mixer = build(spec)
    out = mixer(torch.randn(LENGTH, 2, spec.input_width(SIZES), dtype=torch.float64), None, seq_info(2, LENGTH))
    loss = out.y_LBD.square().sum() + sum(loss.sum() for loss in out.aux.values())
    table = spec.parameters(SIZES)
    trained = [weight for name, weight in mixer.named_parameters() if table[name].trained]
    for gradient in torch.autograd.grad(loss, trained):
        assert gradient.any()


@pytest.mark.parametrize("spec", CASES)
def test_gradients_are_the_slopes(spec: MixerSpec) -> None:
    mixer = build(spec)
    seq = seq_info(2, 5, [[2, 3], [5]])
    x = torch.randn(5, 2, spec.input_width(SIZES), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mixer(x, None, seq).y_LBD, (x,), fast_mode=True)


@pytest.mark.parametrize("spec", RECURRENT)
def test_gradients_from_state_to_state_are_the_slopes(spec: MixerSpec) -> None:
    """Check gradients through the state before the row to the state after it; a document begins in one row."""
    mixer = build(spec)
    seq = seq_info(2, 5, [[2, 3], [5]])
    x, before = torch.randn(2, 5, 2, spec.input_width(SIZES), dtype=torch.float64)
    state = {name: part.detach().requires_grad_() for name, part in mixer(before, None, seq).state.items()}

    def row(x: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        out = mixer(x, dict(zip(state, parts, strict=True)), seq)
        return out.y_LBD, *out.state.values()

    assert torch.autograd.gradcheck(row, (x.requires_grad_(), *state.values()), fast_mode=True)


@pytest.mark.parametrize("spec", CASES)
def test_bf16_outputs_are_near_fp32_with_the_state_types_of_the_spec(spec: MixerSpec) -> None:
    mixer = build(spec, torch.float32)
    seq = seq_info(2, LENGTH)
    x = torch.randn(LENGTH, 2, spec.input_width(SIZES))
    exact = mixer(x, None, seq).y_LBD
    y, state, *_ = as_trained(mixer, spec, torch.bfloat16)(x.bfloat16(), None, seq)
    assert y.dtype == torch.bfloat16
    for name, part in spec.state_parts(SIZES).items():
        assert state[name].dtype == getattr(torch, part.dtype or "bfloat16")
    assert (y.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("spec", CASES)
def test_flops_grow_with_visible_tokens_alone(spec: MixerSpec) -> None:
    short, long = (sum(spec.flops(SIZES, length).values()) for length in (512, 2048))
    # what grows with the tokens that are seen shows in a state of no fixed size, or in blocks to choose from
    seen = any(None in part.shape for part in spec.state_parts(SIZES).values())
    grows = seen or "relevance" in spec.flops(SIZES, 512)
    if grows:
        assert long > short
    else:
        assert long <= short * 1.05
    assert spec.activation_values(SIZES) > 0


@pytest.mark.parametrize("spec", CASES)
def test_mixer_is_exported_by_the_shipped_class_and_imported_again(spec: MixerSpec) -> None:
    """Every weight bit for bit, every option; the shipped class computes and generates the same, from a cache too."""
    layers = {"X": {"kind": spec.kind, **dataclasses.asdict(spec)}, "-": {"kind": "swiglu", "hidden": 16}}
    pattern = "XX"
    if spec.feeds_next:
        pattern = "X-X-"
    elif spec.beside:
        pattern = "-X-X"
    layers = {letter: options for letter, options in layers.items() if letter in pattern}
    model = ModelConfig(width=16, vocab_size=32, pattern=pattern, layers=layers, tie_embeddings=False)
    ours = LanguageModel(architecture(model))
    target = Custom()
    initialise(ours, 0)
    for weight in ours.parameters():  # what starts at zero would hide the rest
        weight.data += 0.05 * torch.randn(weight.shape)
    settings = json.loads(json.dumps(target.config(architecture(model), 64)))
    theirs = HybridtronForCausalLM(HybridtronConfig(**settings)).eval()
    stored = stored_weights(ours)
    rules = target.rules(architecture(model))
    theirs.load_state_dict({rule.theirs: rule.to_theirs(stored.__getitem__) for rule in rules})
    held = theirs.state_dict()
    back = {key: part for rule in rules for key, part in rule.to_ours(held[rule.theirs]).items()}
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], weight) for key, weight in stored.items())
    options = architecture(target.model(settings)).by_letter["X"].exported_options(SIZES)
    assert options == spec.exported_options(SIZES)

    tokens_BL = torch.randint(32, (2, LENGTH))
    ours = ours.double().eval()
    theirs = theirs.double()
    with torch.no_grad():
        expected = ours(tokens_BL, None, SeqInfo.stream(2, LENGTH)).output.transpose(0, 1)
        torch.testing.assert_close(theirs(tokens_BL).logits, expected, rtol=1e-10, atol=1e-10)
    if spec.chunk_multiple > 1:
        return  # what a generated token sees depends on how the text was read
    generated = generate(ours, tokens_BL, 6, temperature=0, seed=0)
    all_BL = torch.ones_like(tokens_BL)
    for use_cache in (True, False):
        whole = theirs.generate(
            tokens_BL, attention_mask=all_BL, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=use_cache
        )
        assert torch.equal(whole[:, LENGTH:], generated)
