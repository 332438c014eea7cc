"""Times a recipe's step with passes that the host launches, and with passes from a CUDA graph (`run.cuda_graph`).

Both steps use one engine and the same micro-batch, in turns. Before they are timed, both compute the loss and the
gradient's norm with the same weights. `loss_apart` and `norm_apart` are the relative differences.
"""

from __future__ import annotations

from hybridtron.device import megatron_context, peak_memory_gib
from hybridtron.engine.graphed import WARM_UP
from hybridtron.problems import ConfigError
from hybridtron.proving.gpu.queue.rows import Recorder, Row, reason
from hybridtron.proving.gpu.queue.whole_step import ROUNDS, build_engine, launch_seconds, settings
from hybridtron.proving.measuring import time_in_turns
from hybridtron.proving.steps import Steps, load_checked, speed


def graph_step(record: Recorder, recipe: str) -> None:
    """Capture the passes of a micro-batch, compare their results with plain passes, and time both."""
    config = load_checked([*settings(recipe, tiny=record.tiny), "run.cuda_graph=true"])
    with build_engine(config) as steps, record.case("graph") as row:
        steps()  # compiles kernels
        plain = results(steps)
        row["gib"] = peak_memory_gib()
        try:
            steps.engine.use_graphs()
            for _ in range(WARM_UP):
                results(steps)
            replayed = results(steps)
        except (ConfigError, RuntimeError, AssertionError) as error:
            row |= {"captured": False, "why": reason(error)}
            return
        row |= {"captured": True, "loss_apart": apart(plain, replayed, 0), "norm_apart": apart(plain, replayed, 1)}
        time_both(steps, row)
        row["tokens_per_second"], row["tflops"] = speed(config, row["graph_ms"] / 1e3)


def results(steps: Steps) -> tuple[float, float]:
    """Return the loss and the gradient's norm, without changing the weights."""
    engine = steps.engine
    with megatron_context():
        engine.forward_backward(steps.batches, 0)
        norm, _ = engine.step(0.0)  # clears the gradients; the learning rate is 0
    return engine.mean_loss, norm


def apart(first: tuple[float, float], second: tuple[float, float], index: int) -> float:
    """Return the relative difference of two results."""
    return abs(second[index] / first[index] - 1)


def time_both(steps: Steps, row: Row) -> None:
    """Record the time of a step with and without the graph, and the time in which the host launches the passes."""
    engine = steps.engine
    graphed = engine.graphed

    def plain() -> None:
        engine.graphed = None
        steps()

    def graph() -> None:
        engine.graphed = graphed
        steps()

    timings = time_in_turns({"plain": plain, "graph": graph}, ROUNDS)
    for name, timing in timings.items():
        row |= {f"{name}_ms": 1e3 * timing.fastest, f"{name}_spread": timing.spread}
    engine.graphed = None
    row["plain_launched_ms"] = 1e3 * launch_seconds(steps)
    engine.graphed = graphed
    row |= {"graph_launched_ms": 1e3 * launch_seconds(steps), "graph_gib": peak_memory_gib()}
