"""Times a step with experts beside a step of its dense sibling, which has as many FLOPs a token.

Experts are slower than a dense MLP of equal FLOPs if routing and the copies of rows cost much, or if the products of
few tokens are inefficient. The ratio of the two times shows both.
"""

from __future__ import annotations

from hybridtron.device import forget_peak_memory
from hybridtron.proving.gpu.queue.rows import Recorder, Row
from hybridtron.proving.gpu.queue.whole_step import NARROW, build_engine, kernels, time_step
from hybridtron.proving.steps import load_checked

SAMBA = "samba_moe_1.3b_a0.4b"
NEMOTRON = "nemotron_3_nano_30b"
PAIRS: dict[str, tuple[tuple[int, int], tuple[str, ...], tuple[str, ...]]] = {
    SAMBA: ((8, 4096), (f"recipe={SAMBA}",), ("recipe=samba_421m",)),
    NEMOTRON: (
        (2, 8192),
        (f"recipe={NEMOTRON}", "model.pattern=ME", "model.vocab_size=32000"),
        (
            *(f"recipe={NEMOTRON}", "model.pattern=M-", "model.vocab_size=32000"),
            "model.layers.-={kind: squared_relu, hidden: 14848}",
        ),
    ),
}
"""Name -> (sequences in the micro-batch, tokens in a sequence), settings with experts, settings of the dense sibling.

The Nemotron-like model has one layer of Mamba-2 and one of 128 experts; its sibling's MLP has as many channels as the 6
experts and the shared expert of a token.
"""
TINY_EXPERTS = "kind: moe, experts: 4, top_k: 2, hidden: 32, shared: 64"
TINY = {
    SAMBA: (
        ("model.pattern=M-W-", "model.layers.W.heads=2", "model.layers.W.kv_heads=2", "model.layers.W.window=64"),
        f"model.layers.-={{{TINY_EXPERTS}}}",
        "model.layers.-.hidden=128",
    ),
    NEMOTRON: (
        ("model.layers.M={kind: mamba2, state: 16, heads: 4, head_dim: 64, groups: 2}",),
        f"model.layers.E={{{TINY_EXPERTS}, activation: squared_relu}}",
        "model.layers.-.hidden=128",
    ),
}
"""Name -> settings for tiny models: of both, with experts, dense."""


def settings(pair: str, tiny: bool = False) -> dict[str, list[str]]:
    """Return case -> key=value settings for a step with one micro-batch: `experts` and `dense`."""
    (rows, length), with_experts, dense = PAIRS[pair]
    chosen = {"experts": list(with_experts), "dense": list(dense)}
    if tiny:
        rows = 4
        length = 128
        both, of_experts, of_dense = TINY[pair]
        chosen = {
            "experts": [*chosen["experts"], *NARROW, *both, of_experts],
            "dense": [*chosen["dense"], *NARROW, *both, of_dense],
        }
    sizes = [f"phases.0.micro_batch={rows}", f"phases.0.global_batch={rows}", f"phases.0.seq_len={length}"]
    return {case: [*texts, "precision=bf16", "cluster=h100", *sizes] for case, texts in chosen.items()}


def experts_step(record: Recorder, pair: str) -> None:
    """Time both steps, and record the kernels of the step with experts."""
    fastest: dict[str, float] = {}
    for case, texts in settings(pair, record.tiny).items():
        with record.case(case) as row:
            forget_peak_memory()
            config = load_checked(texts)
            with build_engine(config) as steps:
                time_step(steps, config, row, 1)
                fastest[case] = row["ms"]
                of_kernels: Row = {}
                kernels(steps, of_kernels, record, pair)
                row |= of_kernels
    with record.case("experts / dense") as row:
        row["ratio"] = fastest["experts"] / fastest["dense"]
