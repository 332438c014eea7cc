"""Measures a recipe's training step: whether the host or the device bounds it, and the time of its kernels.

The cases in a measurement, in this order:

- steps with all, half and a quarter of the micro-batch's sequences: if the device bounds a step, half the sequences
  take half the time; if the host bounds the step, half the sequences take as long as all sequences
- a step whose sequences are a sixteenth as long: the device has so little to do that the step takes only as long as
  launching its kernels
- a profile: each kernel's time
- both passes of a micro-batch, replayed from a CUDA graph without launches by the host: the time of the device alone

The CUDA graph is captured last, because after a failed capture the process may be unable to compute.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from hybridtron.config.schema import Config
from hybridtron.device import compute_device, graph_of, megatron_context, peak_memory_gib
from hybridtron.ops.dispatch import force
from hybridtron.ops.kernel_launch import TRITON
from hybridtron.ops.registry import OPS, choices_by_case
from hybridtron.proving.gpu.queue.kernel_times import by_kernel, idle, label_spans, model_ms, profile_call
from hybridtron.proving.gpu.queue.parts import FP8_RECIPE, FP8_ROWS, RECIPES
from hybridtron.proving.gpu.queue.rows import Recorder, Row, reason
from hybridtron.proving.measuring import now, time_in_turns
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches, speed
from hybridtron.train.attention_cases import attention_cases

ROUNDS = 4
SHARES = (1, 2, 4)  # divisors of the number of sequences
FEW = 16  # divisor of the tokens in a sequence, for a step that takes only as long as launching its kernels
NARROW = ("model.width=128", "model.vocab_size=384")
MLP = "model.layers.-.hidden=128"
WINDOWS = ("model.layers.W.heads=2", "model.layers.W.kv_heads=2", "model.layers.W.window=64", MLP)
TINY = {
    "mamba2_1.3b": ("model.pattern=M", "model.layers.M.state=16"),
    "gla_360m": ("model.pattern=G-", "model.layers.G.heads=2", MLP),
    "gdn_hybrid_412m": ("model.pattern=D-A-", "model.layers.D.heads=2", "model.layers.A.heads=2", MLP),
    "rwkv6_70m": ("model.pattern=RC",),
    "samba_421m": ("model.pattern=M-W-", *WINDOWS),
    "samba_1.3b": ("model.pattern=M-W-", *WINDOWS),
    FP8_RECIPE: ("model.pattern=M-W-", *WINDOWS),
}
"""Recipe -> settings for a tiny model whose steps are fast on a CPU."""


def settings(recipe: str, precision: str = "bf16", tiny: bool = False) -> list[str]:
    """Return key=value settings for a step with one micro-batch, in the recipe's size or in a tiny size for a CPU."""
    if recipe == FP8_RECIPE:
        rows, length = FP8_ROWS
    else:
        rows, length = RECIPES[recipe]
    small: tuple[str, ...] = ()
    if tiny:
        rows = 4
        length = 128
        small = (*NARROW, *TINY[recipe], f"precision.emulate={str(precision.startswith('fp8')).lower()}")
    sizes = (f"phases.0.micro_batch={rows}", f"phases.0.global_batch={rows}", f"phases.0.seq_len={length}")
    return [f"recipe={recipe}", f"precision={precision}", "cluster=h100", *sizes, *small]


@contextmanager
def build_engine(config: Config) -> Iterator[Steps]:
    """Yield training steps whose ops use our kernels, even if mamba-ssm or causal-conv1d is installed."""
    foreign = dict.fromkeys(others(), TRITON)
    with force(**foreign), one_process(config) as groups:
        yield Steps(config, groups, random_batches(config))
    gc.collect()


def others() -> list[str]:
    """Return the ops that have Triton kernels of our own, but use another package's kernels by default."""
    with_ours = [name for name, op in OPS.items() if any(form.name == TRITON for form in op.implementations)]
    device = compute_device().type
    return [name for name in with_ours if OPS[name].choice(device)[0] in ("mamba-ssm", "causal-conv1d")]


def whole_step(record: Recorder, recipe: str) -> None:
    """Measure all cases of a recipe with one engine."""
    config = load_checked(settings(recipe, tiny=record.tiny))
    with build_engine(config) as steps:
        batches = steps.batches
        for share in SHARES:
            with record.case(f"rows/{share}") as row:
                steps.batches = random_batches(shrunk(config, rows=share))
                time_step(steps, config, row, share)
        with record.case(f"tokens/{FEW}") as row:
            steps.batches = random_batches(shrunk(config, tokens=FEW))
            time_step(steps, config, row, FEW)
        steps.batches = batches
        with record.case("kernels") as row:
            kernels(steps, row, record, recipe)
        with record.case("graph") as row:
            time_replay(steps, row)


def shrunk(config: Config, rows: int = 1, tokens: int = 1) -> Config:
    """Return the configuration with its sequence count divided by `rows` and its sequence length by `tokens`."""
    phase = config.phases[0]
    fewer = phase.micro_batch // rows
    shorter = phase.seq_len // tokens
    changed = replace(phase, micro_batch=fewer, global_batch=fewer, seq_len=shorter)
    return replace(config, phases=[changed, *config.phases[1:]])


def time_step(steps: Steps, config: Config, row: Row, share: int) -> None:
    """Record how long the first step (which compiles), the fastest step, and launching the passes take.

    `row` gets the times. The configuration's step has `share` times as many tokens as the measured step.
    """
    start = now()
    steps()
    row["first_s"] = now() - start
    timing = time_in_turns({"": steps}, ROUNDS)[""]
    tokens, tflops = speed(config, timing.fastest * share)
    row |= {"ms": 1e3 * timing.fastest, "spread": timing.spread, "tokens_per_second": tokens, "tflops": tflops}
    row["launched_ms"] = 1e3 * min(launch_seconds(steps) for _ in range(2))
    row["loss"], row["gib"] = steps.losses[-1].item(), peak_memory_gib()


def launch_seconds(steps: Steps) -> float:
    """Return the seconds that the host takes to launch the passes of all micro-batches, without waiting for results."""
    now()
    start = time.perf_counter()
    with megatron_context():
        steps.engine.forward_backward(steps.batches, len(steps.losses))
    seconds = time.perf_counter() - start
    now()
    return seconds


def kernels(steps: Steps, row: Row, record: Recorder, recipe: str) -> None:
    """Profile a step. Record its kernels with measured and modelled times, and each op's implementation."""
    spans, launches = profile_call(steps)
    model = record.modelled.get("steps", {}).get(recipe, {})
    row |= idle(spans)
    row["model_busy_ms"] = model.get("device_ms")
    row["launches of ours"] = len(launches)
    row["by_kernel"] = by_kernel(label_spans(spans, launches), model_ms(model.get("kernels", ())))
    cases = attention_cases(steps.engine.phase)
    row["ops"] = {name: chosen for name, chosen, _ in choices_by_case(compute_device().type, cases)}


def time_replay(steps: Steps, row: Row) -> None:
    """Record the time for the micro-batch's two passes, replayed from a CUDA graph.

    If the passes can't be captured in a graph, record the reason.
    """
    device = compute_device()

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    batches = [batch.moved(there) for batch in steps.batches]
    try:
        with megatron_context():
            replay = graph_of(partial(steps.engine.forward_backward, batches))
    except (RuntimeError, AssertionError) as error:
        row |= {"captured": False, "why": reason(error)}
        return
    row |= {"captured": True, "ms": 1e3 * time_in_turns({"": replay}, ROUNDS + 1)[""].fastest}
