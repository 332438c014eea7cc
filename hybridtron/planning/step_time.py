"""Estimate of an optimizer step's time, computed from a layout's plan and a GPU's rates, to compare layouts.

For each micro-batch, the time on a pipeline rank is a sum of these parts:

    computation   matrix multiplications. A projection has one in the forward pass and two in the backward pass.
                  Attention has two in the forward pass and five in the backward pass. Recomputation repeats the
                  multiplications of the forward pass. If the host needs longer to launch the kernels than the GPU needs
                  to compute, the host's time counts instead. With context parallelism, the time on the last shard's
                  rank counts, because the last tokens attend to the most keys.
    tensor        traffic between tensor-parallel ranks. `parallel/overlapped_linear.py` overlaps two transfers with
                  matrix multiplications: reducing an input's gradient, and gathering the input a second time. Each can
                  be hidden behind half of the multiplications in a forward pass.
    pipeline      sending the residual stream between stages; 0 with virtual stages, whose schedule hides this traffic
    context       traffic between context-parallel ranks
    experts       traffic between ranks that divide the experts
    offloading    copies to the host and back, minus the parts that the offloaded sub-layers' passes hide

With m micro-batches, p pipeline ranks and v virtual stages per rank, a step takes m + (p - 1) / v times as long as a
micro-batch on the slowest pipeline rank. In addition, each step needs time for:

- the exchange of gradients and weights between data-parallel ranks, minus the parts that the last backward pass and the
  first forward pass hide
- the optimizer, which reads and writes its state, reads the gradients, and writes the weights

Scans, convolutions, norms and gates are left out, because they cost the same in all layouts. `hybridtron rehearse`
includes them and every kernel launch, and therefore gives a longer time than this estimate.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtron.architecture.table import Architecture
from hybridtron.config.pipeline_layout import with_overlap
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.planning.activations import gathers_in_backward, hides_traffic, is_recomputed
from hybridtron.planning.count import VALUE_BYTES, LayerCount, ModelCount, count
from hybridtron.planning.memory import Plan
from hybridtron.planning.rates import GPU, HOST_S, LAUNCHES

PRODUCTS = 3
ATTENTION = 3.5
"""FLOPs of forward and backward pass together, divided by FLOPs of the forward pass.

PRODUCTS holds for projections, and ATTENTION for attention.
"""


def step_seconds(layout_plan: Plan, phase: ResolvedPhase, gpu: GPU) -> float:
    """Return the estimated seconds for an optimizer step."""
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
        # bytes that the optimizer moves: its state is read and written, gradients are read, and weights are written
        moved = 2 * rank.memory.optimizer + rank.memory.gradients + rank.memory.weights
        rest = max(rest, exposed + moved / gpu.bandwidth)
    return (layout_plan.micro_batches + (parallel.pipeline - 1) / parallel.virtual_pipeline) * slowest + rest


def micro_batch_seconds(layout_plan: Plan, phase: ResolvedPhase, gpu: GPU) -> list[float]:
    """Return the seconds for a micro-batch's forward and backward pass together, for each pipeline rank."""
    config = phase.config
    settings = phase.settings
    parallel = config.parallel
    arch = phase.arch
    counted = count_of_last_shard(arch, settings.seq_len, config.parallel.context)
    again = [is_recomputed(spec, arch.sizes, parallel.recompute) for spec in arch.specs]
    of_layers = [layer_seconds(layer, runs, gpu) for layer, runs in zip(counted.layers, again, strict=True)]
    behind = [hidden_seconds(layer, index, phase=phase, gpu=gpu) for index, layer in enumerate(counted.layers)]
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
        between += rank.traffic.experts / gpu.link(parallel.expert * parallel.expert_tensor_ranks)
        first = [layer for chunk in rank.chunks for layer in chunk.layers[: parallel.offload]]
        copying = exposed_copies(
            rank.traffic.host / 2 / gpu.host / layout_plan.micro_batches,
            tokens * sum(of_layers[layer] for layer in first),
        )
        launches = LAUNCHES * sum(1 + again[layer] / 3 for chunk in rank.chunks for layer in chunk.layers)
        seconds_of_ranks.append(
            max(HOST_S * launches, tokens * token) + (inside + between) / layout_plan.micro_batches + copying
        )
    return seconds_of_ranks


def count_of_last_shard(arch: Architecture, seq_len: int, shards: int) -> ModelCount:
    """Return the model's counts, with the FLOPs per token in a row's last sequence shard.

    arch: the model
    shards: number of sequence shards N, into which context-parallel ranks divide a row with L tokens

    Let f(L) be the mean FLOPs per token in a row with L tokens. The row costs L f(L). The first N - 1 shards have
    L' = L (N - 1) / N tokens, and cost L' f(L'). So the L / N tokens in the last shard cost L f(L) - L' f(L'), which is
    N f(L) - (N - 1) f(L') per token.
    """
    whole = count(arch, seq_len)
    if shards == 1:
        return whole
    before = count(arch, seq_len - seq_len // shards)
    return replace(
        whole,
        layers=tuple(
            replace(of, flops={p: shards * n - (shards - 1) * less.flops.get(p, 0.0) for p, n in of.flops.items()})
            for of, less in zip(whole.layers, before.layers, strict=True)
        ),
    )


def layer_seconds(layer: LayerCount, is_again: bool, gpu: GPU) -> float:
    """Return the seconds per token for a sub-layer's forward and backward pass.

    is_again: whether the backward pass recomputes the forward pass
    """
    products = layer.flops.get("projections", 0)
    attention = layer.flops.get("attention", 0)
    return (PRODUCTS + is_again) * products / gpu.products + (ATTENTION + is_again) * attention / gpu.attention


def exposed_copies(seconds: float, passes: float) -> float:
    """Return the seconds of offloading that computation does not hide.

    seconds: time for the copies in one direction
    passes: time for the offloaded sub-layers' forward and backward pass. The forward pass takes a third of this time,
        and hides the copies to the host. The backward pass hides the copies back.
    """
    return max(0.0, seconds - passes / 3) + max(0.0, seconds - 2 / 3 * passes)


def hidden_seconds(layer: LayerCount, index: int, *, phase: ResolvedPhase, gpu: GPU) -> float:
    """Return the seconds of a sub-layer's tensor-parallel traffic that matrix multiplications hide.

    The result is the time per token, for the tokens that one tensor-parallel rank holds.
    """
    config = phase.config
    parallel = config.parallel
    if not hides_traffic(phase.arch.specs[index], config):
        return 0.0
    transfer = (
        (parallel.tensor - 1) * VALUE_BYTES[config.precision.name] * config.model.width / gpu.link(parallel.tensor)
    )
    products = layer.flops.get("projections", 0) / 2 / gpu.products
    if gathers_in_backward(index, phase):
        again = min(transfer, products)
    else:
        again = 0.0
    return min(transfer if parallel.sequence else 2 * transfer, products) + again
