"""How long a step of a layout takes, from its plan and the rates: a model that compares layouts, never a measurement.

    a micro-batch     products three times, attention's two products and the five of its backward pass, at their rates;
                      once more what is recomputed. Then what tensor-parallel ranks send; of it the sum of an input's
                      gradient, and the input gathered again, hide behind half of a pass's products each, where
                      `parallel/entered.py` sends them. Streams between stages, which interleaved stages hide. What
                      ranks hand over that share the rows, whose last one has the most keys to attend to. What
                      goes to the host and comes back, as far as passes of as many sub-layers don't hide it. No less
                      than the host needs to launch it, which counts where a micro-batch has few tokens.
    the step          all micro-batches of the slowest pipeline rank, and (p - 1) / v more that the pipeline waits for
    once              gradients and weights over the data-parallel ranks, as far as the last backward pass and the first
                      forward pass don't hide them; the optimizer's bytes

Left out is what all layouts do alike: scans, convolutions, norms and gates. So it is shorter than what
`hybridtron rehearse` finds, which counts them, and every launch.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.table import architecture
from hybridtron.config.layout import with_overlap
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, ModelConfig
from hybridtron.planning.count import VALUE_BYTES, LayerCount, ModelCount, count
from hybridtron.planning.layer_use import gathers_again, hides_traffic, is_recomputed
from hybridtron.planning.memory import Plan
from hybridtron.planning.rates import GPU, LAUNCH_S, LAUNCHES

# of the forward pass's, both passes together
PRODUCTS = 3
ATTENTION = 3.5


def step_seconds(made: Plan, phase: ResolvedPhase, gpu: GPU) -> float:
    """Of an optimizer step."""
    parallel = with_overlap(phase.config.parallel, made.data * phase.config.parallel.context)
    rest = 0.0
    passes = micro_batch_seconds(made, phase, gpu)
    slowest = max(passes)
    link = gpu.link(parallel.tensor * parallel.context * made.data)
    for rank, seconds in zip(made.ranks, passes, strict=True):
        behind = 2 / 3 * seconds * bool(parallel.overlap_grad_reduce), seconds / 3 * bool(parallel.overlap_param_gather)
        sent = rank.traffic.gradients / link, rank.traffic.parameters / link
        exposed = sum(max(0.0, needed - hidden) for needed, hidden in zip(sent, behind, strict=True))
        moved = 2 * rank.memory.optimizer + rank.memory.gradients + rank.memory.weights  # state is read and written
        rest = max(rest, exposed + moved / gpu.bandwidth)
    return (made.micro_batches + (parallel.pipeline - 1) / parallel.virtual_pipeline) * slowest + rest


def micro_batch_seconds(made: Plan, phase: ResolvedPhase, gpu: GPU) -> list[float]:
    """Of both passes of a micro-batch on every pipeline rank."""
    config = phase.config
    settings = phase.settings
    parallel = config.parallel
    counted = count_of_last_share(phase.model, settings.seq_len, config.parallel.context)
    arch = architecture(phase.model)
    again = [is_recomputed(spec, arch.sizes, parallel.recompute) for spec in arch.specs]
    of_layers = [layer_seconds(layer, runs, gpu) for layer, runs in zip(counted.layers, again, strict=True)]
    behind = [hidden_seconds(*layer, config, gpu) for layer in zip(counted.layers, arch.specs, strict=True)]
    tokens = phase.tokens_of_rank * phase.chunks_together / parallel.tensor
    found = []
    for rank in made.ranks:
        if rank is made.ranks[-1]:
            head = PRODUCTS * counted.head_flops / gpu.products
        else:
            head = 0.0
        token = head + sum(of_layers[layer] for chunk in rank.chunks for layer in chunk.layers)
        hidden = sum(behind[layer] for chunk in rank.chunks for layer in chunk.layers)
        inside = rank.traffic.tensor / gpu.link(parallel.tensor) - made.micro_batches * tokens * hidden
        if parallel.virtual_pipeline == 1:
            between = rank.traffic.pipeline / gpu.link(made.world_size)
        else:
            between = 0.0
        between += rank.traffic.context / gpu.link(parallel.tensor * parallel.context)
        first = [layer for chunk in rank.chunks for layer in chunk.layers[: parallel.offload]]
        copying = exposed_copies(
            rank.traffic.host / 2 / gpu.host / made.micro_batches, tokens * sum(of_layers[layer] for layer in first)
        )
        launches = LAUNCHES * sum(1 + again[layer] / 3 for chunk in rank.chunks for layer in chunk.layers)
        found.append(max(LAUNCH_S * launches, tokens * token) + (inside + between) / made.micro_batches + copying)
    return found


def count_of_last_share(model: ModelConfig, seq_len: int, shares: int) -> ModelCount:
    """The counts of a token in the last of a row's shares.

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
    """Of a token in a sub-layer."""
    products = layer.flops.get("projections", 0)
    attention = layer.flops.get("attention", 0)
    return (PRODUCTS + is_again) * products / gpu.products + (ATTENTION + is_again) * attention / gpu.attention


def exposed_copies(seconds: float, passes: float) -> float:
    """Of copies to the host, and of as many from it, as far as the two passes of as many sub-layers don't hide them."""
    return max(0.0, seconds - passes / 3) + max(0.0, seconds - 2 / 3 * passes)


def hidden_seconds(layer: LayerCount, spec: MixerSpec, config: Config, gpu: GPU) -> float:
    """Of what is sent for a token of a sub-layer, times the tensor-parallel ranks, beside products."""
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
