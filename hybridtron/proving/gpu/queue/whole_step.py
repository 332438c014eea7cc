"""Measures a recipe's training step: whether the host or the device bounds it, and the time of its kernels.

A step bounded by the device takes half as long with half of the rows; one bounded by the host does not. With a
sixteenth of the tokens only the launches take time. Replayed from a CUDA graph, the passes of one micro-batch need no
host at all. The graph is captured last, because a failed capture can leave the process unable to compute.
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
from hybridtron.ops.registry import OPS, choices
from hybridtron.proving.gpu.queue.kernel_times import by_kernel, idle, labelled, model_ms, profiled
from hybridtron.proving.gpu.queue.parts import FP8_RECIPE, FP8_ROWS, RECIPES
from hybridtron.proving.gpu.queue.rows import Recorder, Row, reason
from hybridtron.proving.measuring import interleaved, now
from hybridtron.proving.steps import Steps, checked, one_process, random_batches, speed

ROUNDS = 4
SHARES = (1, 2, 4)
FEW = 16  # with 1 / 16 of a row's tokens only launches take time
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
"""Settings that make each recipe's step fast on a CPU."""


def settings(recipe: str, precision: str = "bf16", tiny: bool = False) -> list[str]:
    """Return the key=value settings of a step with one micro-batch in the recipe's own size; tiny ones for a CPU."""
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
def built(config: Config) -> Iterator[Steps]:
    """Build the recipe's engine until the block ends, with our kernels even if another package is installed."""
    foreign = dict.fromkeys(others(), TRITON)
    with force(**foreign), one_process(config) as groups:
        yield Steps(config, groups, random_batches(config))
    gc.collect()


def others() -> list[str]:
    """Return the ops that would run another package's kernel although we have one."""
    with_ours = [name for name, op in OPS.items() if any(form.name == TRITON for form in op.implementations)]
    device = compute_device().type
    return [name for name in with_ours if OPS[name].choice(device)[0] in ("mamba-ssm", "causal-conv1d")]


def whole_step(record: Recorder, recipe: str) -> None:
    """Measure all cases of a recipe on one engine."""
    config = checked(settings(recipe, tiny=record.tiny))
    with built(config) as steps:
        batches = steps.batches
        for share in SHARES:
            with record.case(f"rows/{share}") as row:
                steps.batches = random_batches(shrunk(config, rows=share))
                timed(steps, config, row, share)
        with record.case(f"tokens/{FEW}") as row:
            steps.batches = random_batches(shrunk(config, tokens=FEW))
            timed(steps, config, row, FEW)
        steps.batches = batches
        with record.case("kernels") as row:
            kernels(steps, row, record, recipe)
        with record.case("graph") as row:
            replayed(steps, row)


def shrunk(config: Config, rows: int = 1, tokens: int = 1) -> Config:
    """Return the configuration with 1 / `rows` of the rows, and 1 / `tokens` of each row's tokens."""
    phase = config.phases[0]
    fewer = phase.micro_batch // rows
    shorter = phase.seq_len // tokens
    changed = replace(phase, micro_batch=fewer, global_batch=fewer, seq_len=shorter)
    return replace(config, phases=[changed, *config.phases[1:]])


def timed(steps: Steps, config: Config, row: Row, share: int) -> None:
    """Record the time of the first step, which compiles, of the fastest step, and of the passes' launches."""
    start = now()
    steps()
    row["first_s"] = now() - start
    timing = interleaved({"": steps}, ROUNDS)[""]
    tokens, tflops = speed(config, timing.fastest * share)
    row |= {"ms": 1e3 * timing.fastest, "spread": timing.spread, "tokens_per_second": tokens, "tflops": tflops}
    row["launched_ms"] = 1e3 * min(launched(steps) for _ in range(2))
    row["loss"], row["gib"] = steps.losses[-1].item(), peak_memory_gib()


def launched(steps: Steps) -> float:
    """Return the seconds in which the host launches both passes of a micro-batch, without waiting for their results."""
    now()
    start = time.perf_counter()
    with megatron_context():
        steps.engine.forward_backward(steps.batches, len(steps.losses))
    seconds = time.perf_counter() - start
    now()
    return seconds


def kernels(steps: Steps, row: Row, record: Recorder, recipe: str) -> None:
    """Record the table by kernel with the model's times, and the implementation that runs each op."""
    spans, launches = profiled(steps)
    model = record.modelled.get("steps", {}).get(recipe, {})
    row |= idle(spans)
    row["model_busy_ms"] = model.get("device_ms")
    row["launches of ours"] = len(launches)
    row["by_kernel"] = by_kernel(labelled(spans, launches), model_ms(model.get("kernels", ())))
    row["ops"] = {name: chosen for name, chosen, _ in choices(compute_device().type)}


def replayed(steps: Steps, row: Row) -> None:
    """Time both passes of the micro-batch as a CUDA graph; if they can't be captured, record the reason."""
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
    row |= {"captured": True, "ms": 1e3 * interleaved({"": replay}, ROUNDS + 1)[""].fastest}
