"""The shipped class by itself: caches, padding, packed rows, precision, gradients, and the ways to call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridtron.architecture.table import architecture
from hybridtron.hf import HybridtronConfig, HybridtronForCausalLM, mixers_hybridtron
from hybridtron.hf.layers_hybridtron import SeqOnDevices
from hybridtron.hf.mixers_hybridtron import AttentionInputs, SeqInfo, attention_reference, span_attention
from hybridtron.hf.modeling_hybridtron import CACHE_NAME, CACHE_NAMES, HybridtronModel
from hybridtron.interop.custom import Custom
from tests.interop.models import VOCAB, model_config
from tests.slow import slow_except

ALL = ("everything", "samba", "mamba2-window", "conv", "span-chosen", "span-landmark", "span-shifted")
EVERY_MIXER = ("everything", "span-chosen")


def model_of(name: str) -> Any:
    """Weights are nowhere as they start."""
    settings = Custom().config(architecture(model_config(name)), 64)
    torch.manual_seed(0)
    model = HybridtronForCausalLM(HybridtronConfig(**settings))
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(computed: Tensor, expected: Tensor) -> bool:
    return bool((computed - expected).abs().max() < 1e-5 * expected.abs().max())


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_cached_pieces_give_the_logits_of_the_full_row(name: str) -> None:
    model = model_of(name)
    tokens_BL = tokens(2, 53)
    whole = model(tokens_BL, use_cache=False)
    assert getattr(whole, CACHE_NAME) is None
    cache = None
    parts = []
    for piece in tokens_BL.split([1, 4, 1, 12, 3, 20, 12], dim=1):
        out = model(piece, **{CACHE_NAME: cache}, use_cache=True)
        cache = out[CACHE_NAME]
        parts.append(out.logits)
    assert cache.get_seq_length() == 53
    assert close(torch.cat(parts, dim=1), whole.logits)


@pytest.mark.parametrize("how", slow_except([{}, {"num_beams": 3}, {"prefill_chunk_size": 5}], {"num_beams": 3}))
@pytest.mark.parametrize("name", EVERY_MIXER)
def test_generation_with_a_cache_equals_generation_without(name: str, how: dict[str, int]) -> None:
    """Rows of unequal length, padded on the left; greedily each is as it is alone."""
    model = model_of(name)
    tokens_BL = tokens(2, 13)
    mask_BL = torch.ones_like(tokens_BL)
    mask_BL[1, :8] = 0
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **how}
    cached = model.generate(tokens_BL, attention_mask=mask_BL, **settings)
    settings.pop("prefill_chunk_size", None)
    assert torch.equal(cached, model.generate(tokens_BL, attention_mask=mask_BL, use_cache=False, **settings))
    alone = model.generate(tokens_BL[1:, 8:], attention_mask=mask_BL[1:, 8:], **settings)
    assert torch.equal(cached[1, 8:], alone[0])


def test_generation_reads_every_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache under a name unknown to the model would be ignored, and all earlier tokens would be read again."""
    model = model_of("samba")
    lengths = []
    forward = HybridtronModel.forward

    def counted(self: Any, input_ids: Tensor, **options: Any) -> Any:
        lengths.append(input_ids.shape[1])
        return forward(self, input_ids, **options)

    monkeypatch.setattr(HybridtronModel, "forward", counted)
    model.generate(tokens(1, 9), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert lengths == [9, 1, 1, 1, 1]


@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_cache_is_accepted_by_its_current_and_former_name(name: str) -> None:
    model = model_of("samba")
    tokens_BL = tokens(1, 12)
    cache = model(tokens_BL[:, :7], use_cache=True)[CACHE_NAME]
    assert close(model(tokens_BL[:, 7:], **{name: cache}).logits, model(tokens_BL).logits[:, 7:])


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"prefill_chunk_size": 33}])
def test_shipped_span_attention_reads_selected_blocks_from_the_cache(
    how: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 64: one row ends in its second one, one reaches it while it is generated, both are read in pieces."""
    model = model_of("samba-span").double()
    tokens_BL = tokens(2, 70)
    read = []

    def counted(inputs: Any) -> Tensor:
        q, k, _, _, chosen = inputs
        if k.shape[1] > q.shape[1]:
            read.append(sum(int((blocks >= 0).sum()) for blocks in chosen if blocks is not None))
        return span_attention(inputs)

    monkeypatch.setattr(mixers_hybridtron, "span_attention", counted)
    mask_BL = torch.ones_like(tokens_BL)
    mask_BL[1, :12] = 0
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **how}
    cached = model.generate(tokens_BL, attention_mask=mask_BL, **settings)
    assert read[-1] > min(read[-18:]) > 0
    settings.pop("prefill_chunk_size", None)
    assert torch.equal(cached, model.generate(tokens_BL, attention_mask=mask_BL, use_cache=False, **settings))
    cache = None
    parts = []
    with torch.no_grad():
        for piece in cached.split([50, 13, 1, 1, 3, 12], dim=1):
            out = model(piece, **{CACHE_NAME: cache}, use_cache=True)
            cache = out[CACHE_NAME]
            parts.append(out.logits)
        whole = model(cached, use_cache=False).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_padding_changes_no_logit(name: str, side: str) -> None:
    model = model_of(name)
    tokens_BL = tokens(2, 40)
    mask_BL = torch.ones_like(tokens_BL)
    here = {"left": slice(17, None), "right": slice(None, 23)}[side]
    mask_BL[1] = 0
    mask_BL[1, here] = 1
    logits_BLV = model(tokens_BL, attention_mask=mask_BL).logits
    assert close(logits_BLV[:1], model(tokens_BL[:1]).logits)
    assert close(logits_BLV[1:, here], model(tokens_BL[1:, here]).logits)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_packed_documents_give_the_logits_of_separate_rows(name: str) -> None:
    model = model_of(name)
    tokens_BL = tokens(1, 60)
    lengths = (2, 25, 1, 32)
    positions_BL = torch.cat([torch.arange(length) for length in lengths])[None]
    logits_of_documents = model(tokens_BL, position_ids=positions_BL).logits.split(lengths, dim=1)
    for part_BL, document_BL in zip(logits_of_documents, tokens_BL.split(lengths, dim=1), strict=True):
        assert close(part_BL, model(document_BL).logits)


@pytest.mark.parametrize("name", EVERY_MIXER)
@torch.no_grad()
def test_row_that_begins_after_padded_pieces_starts_from_zero(name: str) -> None:
    """State from padding in the cache is forgotten when a row begins."""
    model = model_of(name)
    tokens_BL = tokens(2, 30)
    mask_BL = torch.ones_like(tokens_BL)
    mask_BL[1, :12] = 0
    cache = None
    parts = []
    for stop, piece in zip((6, 12, 20, 30), tokens_BL.split([6, 6, 8, 10], dim=1), strict=True):
        out = model(piece, attention_mask=mask_BL[:, :stop], **{CACHE_NAME: cache}, use_cache=True)
        cache = out[CACHE_NAME]
        parts.append(out.logits)
    logits_BLV = torch.cat(parts, dim=1)
    assert close(logits_BLV[:1], model(tokens_BL[:1]).logits)
    assert close(logits_BLV[1:, 12:], model(tokens_BL[1:, 12:]).logits)


@pytest.mark.parametrize("name", ["mamba2-window", "samba"])
def test_bf16_model_keeps_decays_in_fp32(name: str, tmp_path: Path) -> None:
    model_of(name).to(torch.float32).save_pretrained(tmp_path)
    model, report = HybridtronForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report.values())
    for key, weight in model.named_parameters():
        is_decay = key.endswith(("A_log", "mixer.D", "dt_bias", "dt_proj.bias"))
        assert (weight.dtype == torch.float32) == is_decay, key
        assert (weight.dtype == torch.bfloat16) != is_decay, key
    exact = model_of(name)
    tokens_BL = tokens(2, 20)
    with torch.no_grad():
        logits_BLV = model(tokens_BL).logits
        expected = exact(tokens_BL).logits
        assert model.generate(tokens_BL, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 23)
    assert logits_BLV.dtype == torch.bfloat16
    assert (logits_BLV - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("name", EVERY_MIXER)
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = model_of(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        out = model(tokens(2, 24), labels=tokens(2, 24), use_cache=checkpointing or None)
        assert getattr(out, CACHE_NAME) is None
        out.loss.backward()
        gradients.append({key: weight.grad for key, weight in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, key
        torch.testing.assert_close(gradients[1][key], gradient, msg=key)


@pytest.mark.parametrize("name", ["samba", "everything"])
@torch.no_grad()
def test_attention_implementations_give_equal_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of flash attention are stood in for by the reference, called as transformers calls them."""
    calls = []

    def flash(
        module: Any, q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, attention_mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q_BHLK, k_BGLK, v_BGLK))
        shape = q.shape
        documents = None
        if (borders := options.get("cu_seq_lens_q")) is not None:
            q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
            documents = torch.bucketize(torch.arange(q.shape[1]), borders, right=True)[None]
        assert options["scaling"] == q.shape[-1] ** -0.5
        calls.append(borders)
        return attention_reference(AttentionInputs(q, k, v, options["sliding_window"], documents)).view(shape), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash)
    tokens_BL = tokens(2, 30)
    mask_BL = torch.ones_like(tokens_BL)
    mask_BL[1, :7] = 0
    results = {}
    for implementation in ("eager", "sdpa", "flash_attention_2"):
        model = model_of(name)
        model.config._attn_implementation = implementation
        masked = model(tokens_BL, attention_mask=mask_BL).logits * mask_BL[..., None]
        generated = model.generate(tokens_BL, attention_mask=mask_BL, max_new_tokens=4, do_sample=False, pad_token_id=0)
        results[implementation] = (model(tokens_BL).logits, masked, generated.float())
    assert any(borders is None for borders in calls)
    assert any(borders is not None for borders in calls)
    for implementation in ("sdpa", "flash_attention_2"):
        for tensor, expected in zip(results[implementation], results["eager"], strict=True):
            assert close(tensor, expected)


@torch.no_grad()
def test_output_has_loss_logits_and_hidden_states() -> None:
    model = model_of("samba")
    tokens_BL = tokens(2, 9)
    out = model(tokens_BL, labels=tokens_BL, output_hidden_states=True)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert close(model.lm_head(out.hidden_states[-1]), out.logits)
    assert close(model(tokens_BL, logits_to_keep=1).logits, out.logits[:, -1:])
    assert close(model(inputs_embeds=model.get_input_embeddings()(tokens_BL)).logits, out.logits)
    assert isinstance(model(tokens_BL, return_dict=False), tuple)


def test_positions_follow_the_layers_to_other_devices() -> None:
    seq = SeqInfo(torch.arange(6)[None], torch.tensor([[0, 0, 0, 1, 1, 1]]))
    places = SeqOnDevices(seq)
    assert places.on(torch.device("cpu")) is seq
    moved = places.on(torch.device("meta"))
    assert moved is places.on(torch.device("meta"))
    assert moved.positions_BL.is_meta
    assert moved.documents_BL.is_meta
    assert moved.rope(4, mixers_hybridtron.RopeOptions())[0].is_meta


def test_initial_weights_have_the_documented_ranges() -> None:
    model = HybridtronForCausalLM(HybridtronConfig(**Custom().config(architecture(model_config("samba")), 64)))
    steps = torch.nn.functional.softplus(model.model.layers[0].mixer.dt_proj.bias)
    assert steps.min() > 0.0009
    assert steps.max() < 0.11
    assert torch.equal(model.model.layers[0].mixer.A_log[0], torch.arange(1.0, 5).log())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = HybridtronForCausalLM(HybridtronConfig(**Custom().config(architecture(model_config("mamba2-window")), 64)))
    assert 1 <= other.model.layers[0].mixer.A_log.exp().min() <= other.model.layers[0].mixer.A_log.exp().max() <= 16
    assert other.lm_head.weight is not other.model.embed_tokens.weight


def test_hybridtron_registers_its_class_with_transformers() -> None:
    config = AutoConfig.for_model(**Custom().config(architecture(model_config("conv")), 64))
    assert isinstance(AutoModelForCausalLM.from_config(config), HybridtronForCausalLM)
    assert config.num_attention_heads == 4
    assert config.num_key_value_heads == 2


def test_meaningless_inputs_are_refused() -> None:
    model = model_of("samba")
    tokens_BL = tokens(1, 4)
    with pytest.raises(ValueError, match="padding between"):
        model(tokens_BL, attention_mask=torch.tensor([[1, 0, 1, 1]]))
    cache = model(tokens_BL, attention_mask=torch.tensor([[1, 1, 1, 0]]), use_cache=True)[CACHE_NAME]
    with pytest.raises(ValueError, match="padding between"):
        model(tokens_BL[:, :1], attention_mask=torch.tensor([[1, 1, 1, 0, 1]]), **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="must be \\(rows, 4\\)"):
        model(tokens_BL, attention_mask=torch.ones(1, 3))
    with pytest.raises(TypeError, match="DynamicCache"):
        model(tokens_BL, **{CACHE_NAME: DynamicCache()})
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(tokens_BL, cache_implementation="static", max_new_tokens=1)
    with pytest.raises(ValueError, match="either"):
        model()
    with pytest.raises(ValueError, match="kind 'retention'"):
        HybridtronForCausalLM(HybridtronConfig(pattern="R", layers={"R": {"kind": "retention"}}))
    with pytest.raises(NotImplementedError, match="taken back"):
        cache.crop(1)


def test_peft_adapters_reach_every_projection() -> None:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "x_proj", "dt_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=["conv1d"], init_lora_weights=False)
    model = peft.get_peft_model(model_of("everything").train(), config)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model(input_ids=tokens(2, 12), labels=tokens(2, 12)).loss.backward()
    for key, weight in model.named_parameters():
        if weight.requires_grad:
            assert weight.grad is not None, key
            assert weight.grad.abs().max() > 0, key
