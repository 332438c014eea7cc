"""The plain Llama is a Llama, and as fast as torch's own layers of its sizes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import plain_llama
from benchmarks.plain_llama import LlamaSizes, PlainLlama

SIZES = LlamaSizes(width=32, layers=2, heads=4, hidden=48, vocabulary=61)


def test_llama_logits_equal_those_of_transformers() -> None:
    ours = PlainLlama(SIZES)
    settings = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=61,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = LlamaForCausalLM(settings)
    weights = {"model.embed_tokens.weight": ours.embedding.weight, "model.norm.weight": ours.norm.weight}
    for i, layer in enumerate(ours.layers):
        q, k, v = layer.qkv.weight.chunk(3)
        gate, up = layer.gate_up.weight.chunk(2)
        named = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": layer.out.weight,
            "mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down.weight,
            "input_layernorm": layer.norm.weight, "post_attention_layernorm": layer.mlp_norm.weight,
        }  # fmt: skip
        weights |= {f"model.layers.{i}.{name}.weight": weight for name, weight in named.items()}
    theirs.load_state_dict(weights | {"lm_head.weight": ours.embedding.weight})
    tokens = torch.randint(61, (2, 19))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_llama_has_the_wanted_number_of_parameters() -> None:
    sizes = LlamaSizes.of(1_500_000, width=192, layers=4, heads=4, vocabulary=2048)
    parameters = sum(weight.numel() for weight in PlainLlama(sizes).parameters())
    assert abs(parameters - 1_500_000) <= 4 * 3 * 192 / 2


def test_the_llama_baseline_is_short() -> None:
    from pathlib import Path

    assert Path(plain_llama.__file__).read_text().count("\n") <= 100


def seconds(model: nn.Module, inputs: Tensor) -> float:
    started = time.process_time()
    model(inputs).square().mean().backward()
    return time.process_time() - started


class TorchLayers(nn.Module):
    """Torch's own encoder layers with causal attention. The MLP's two products cost as much as a Llama's three."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        hidden = sizes.hidden * 3 // 2
        layer = nn.TransformerEncoderLayer(sizes.width, sizes.heads, hidden, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens_BL.shape[1])
        return self.head(self.layers(self.embedding(tokens_BL), mask=mask, is_causal=True))


@pytest.mark.slow
def test_llama_is_no_slower_than_torch_layers() -> None:
    sizes = LlamaSizes(width=192, layers=4, heads=4, hidden=512, vocabulary=2048)
    tokens = torch.randint(2048, (4, 256))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = PlainLlama(sizes)
        theirs = TorchLayers(sizes)
        rounds = [(seconds(ours, tokens), seconds(theirs, tokens)) for _ in range(7)]
    finally:
        torch.set_num_threads(threads)
    assert min(ours for ours, _ in rounds) <= 1.2 * min(layers for _, layers in rounds)
