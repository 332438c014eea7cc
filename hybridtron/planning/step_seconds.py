"""Modelled time of an optimizer step, from a layout's plan and the rates: it compares layouts, and measures nothing.

    a micro-batch     products three times, attention's two products and the five of its backward pass, at their rates;
                      once more if recomputed. Traffic between tensor-parallel ranks; the sum of an input's gradient and
                      the input gathered again hide behind half of a pass's products each, if `parallel/entered.py`
                      sends them. Streams between stages, which interleaved stages hide. Traffic between
                      context-parallel ranks, of which the last has the most keys to attend to. Activations to the host
                      and back, as far as passes of as many sub-layers don't hide them. No less than the host needs to
                      launch it, which counts if a micro-batch has few tokens.
    the step          all micro-batches of the slowest pipeline rank, and (p - 1) / v more that the pipeline waits for
    once              gradients and weights over the data-parallel ranks, as far as the last backward pass and the first
                      forward pass don't hide them; the optimizer's bytes

Scans, convolutions, norms and gates are left out: all layouts compute them alike. So the time is shorter than that of
`hybridtron rehearse`, which counts them and every launch.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.table import architecture
from hybridtron.config.layout import with_overlap
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, ModelConfig
from hybridtron.planning.activations import gathers_again, hides_traffic, is_recomputed
from hybridtron.planning.count import VALUE_BYTES, LayerCount, ModelCount, count
from hybridtron.planning.memory import Plan
from hybridtron.planning.rates import GPU, LAUNCH_S, LAUNCHES

PRODUCTS = 3
ATTENTION = 3.5
"""Ratio of the FLOPs of a step to those of its forward pass, for products and for attention."""


def step_seconds(layout_plan: Plan, phase: ResolvedPhase, gpu: GPU) -> float:
    """Return the seconds of an optimizer step."""
    parallel = with_overlap(phase.config.parallel, layout_plan.data * phase.config.parallel.context)
    rest = 0.0
    passes = micro_batch_seconds(layout_plan, phase, gpu)
    slowest = max(passes)
    link = gpu.link(parallel.tensor * parallel.context * layout_plan.data)
    for rank, seconds in zip(layout_plan.ranks, passes, strict=True):
        backward = 2 / 3 * seconds * bool(parallel.overlap_grad_reduce)
        forward = seconds / 3 * bool(parallel.overlap_param_gather)
        exposed = max(0.0, rank.traffic.gradients / link - backward)
        exposed += max(0.0, rank.traffic.parameters / link - forward)
        moved = 2 * rank.memory.optimizer + rank.memory.gradients + rank.memory.weights  # state is read and written
        rest = max(rest, exposed + moved / gpu.bandwidth)
    return (layout_plan.micro_batches + (parallel.pipeline - 1) / parallel.virtual_pipeline) * slowest + rest


def micro_batch_seconds(layout_plan: Plan, phase: ResolvedPhase, gpu: GPU) -> list[float]:
    """Return the seconds of both passes of a micro-batch, for every pipeline rank."""
    config = phase.config
    settings = phase.settings
    parallel = config.parallel
    counted = count_of_last_share(phase.model, settings.seq_len, config.parallel.context)
    arch = architecture(phase.model)
    again = [is_recomputed(spec, arch.sizes, parallel.recompute) for spec in arch.specs]
    of_layers = [layer_seconds(layer, runs, gpu) for layer, runs in zip(counted.layers, again, strict=True)]
    behind = [
        hidden_seconds(layer, spec, config=config, gpu=gpu)
        for layer, spec in zip(counted.layers, arch.specs, strict=True)
    ]
    tokens = phase.tokens_of_rank * phase.chunks_together / parallel.tensor
    seconds_of_ranks = []
    for rank in layout_plan.ranks:
        if rank is layout_plan.ranks[-1]:
            head = PRODUCTS * counted.head_flops / gpu.products
        else:
            head = 0.0
        token = head + sum(of_layers[layer] for chunk in rank.chunks for layer in chunk.layers)
        hidden = sum(behind[layer] for chunk in rank.chunks for layer in chunk.layers)
        inside = rank.traffic.tensor / gpu.link(parallel.tensor) - layout_plan.micro_batches * tokens * hidden
        if parallel.virtual_pipeline == 1:
            between = rank.traffic.pipeline / gpu.link(layout_plan.world_size)
        else:
            between = 0.0
        between += rank.traffic.context / gpu.link(parallel.tensor * parallel.context)
        first = [layer for chunk in rank.chunks for layer in chunk.layers[: parallel.offload]]
        copying = exposed_copies(
            rank.traffic.host / 2 / gpu.host / layout_plan.micro_batches,
            tokens * sum(of_layers[layer] for layer in first),
        )
        launches = LAUNCHES * sum(1 + again[layer] / 3 for chunk in rank.chunks for layer in chunk.layers)
        seconds_of_ranks.append(
            max(LAUNCH_S * launches, tokens * token) + (inside + between) / layout_plan.micro_batches + copying
        )
    return seconds_of_ranks


def count_of_last_share(model: ModelConfig, seq_len: int, shares: int) -> ModelCount:
    """Count the FLOPs of a token in the last of a row's shares.

    A token costs f(L) on average over a row of L, so those of the last share cost L f(L) - L' f(L') together, where
    L' = L (N - 1) / N is what stands before it: N f(L) - (N - 1) f(L') each.
    """
    whole = count(model, seq_len)
    if shares == 1:
        return whole
    before = count(model, seq_len - seq_len // shares)
    return replace(
        whole,
        layers=tuple(
            replace(of, flops={p: shares * n - (shares - 1) * less.flops.get(p, 0.0) for p, n in of.flops.items()})
            for of, less in zip(whole.layers, before.layers, strict=True)
        ),
    )


def layer_seconds(layer: LayerCount, is_again: bool, gpu: GPU) -> float:
    """Return the seconds of a token in a sub-layer."""
    products = layer.flops.get("projections", 0)
    attention = layer.flops.get("attention", 0)
    return (PRODUCTS + is_again) * products / gpu.products + (ATTENTION + is_again) * attention / gpu.attention


def exposed_copies(seconds: float, passes: float) -> float:
    """Return the seconds of copies to the host and back that the passes of as many sub-layers don't hide."""
    return max(0.0, seconds - passes / 3) + max(0.0, seconds - 2 / 3 * passes)


def hidden_seconds(layer: LayerCount, spec: MixerSpec, *, config: Config, gpu: GPU) -> float:
    """Return the seconds of a sub-layer's traffic hidden by products: of a token, times the tensor-parallel ranks."""
    parallel = config.parallel
    if not hides_traffic(spec, config):
        return 0.0
    sent = (parallel.tensor - 1) * VALUE_BYTES[config.precision.name] * config.model.width / gpu.link(parallel.tensor)
    products = layer.flops.get("projections", 0) / 2 / gpu.products
    if gathers_again(spec, config):
        again = min(sent, products)
    else:
        again = 0.0
    return min(sent if parallel.sequence else 2 * sent, products) + again
