"""Compare modelled steps with steps that were measured on a GPU, and write the page step_model.md.

    python -m benchmarks.step_model

`step_model.json` has the measured steps, and for each recipe the Triton kernels of its micro-batch with two modelled
times: by the model before it had latencies (`before_us`), and by today's model (`after_us`). All other operations of a
step are added up (`others_before_ms` and `others_after_ms`). `ssd` has SSD's kernels before and after they were
rewritten, both by today's model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.planning.rates import HOST_S, TRITON_S, occupied_seconds
from hybridtron.train.jsonl import write_whole

HERE = Path(__file__).parent
DATA, PAGE = HERE / "step_model.json", HERE / "step_model.md"
SHOWN = 30  # kernels in the table
INTRODUCTION = """# The modelled time of a step, compared with measured steps

Written by `python -m benchmarks.step_model` from [step_model.json](step_model.json). The measured steps are those in
[gpu.md](gpu.md): one NVIDIA H200, bf16, at commits `e546338` and (for `gdn_hybrid_412m`) `9c34092`. Every other time
on this page is modelled. [docs/rehearse.md](../docs/rehearse.md) describes the model. None of its numbers is fitted to
these steps.

The steps were rehearsed at the measured commits, with kernels compiled for `sm_90` by Triton 3.6.0 as on the GPU, and
with torch 2.13.0 instead of 2.11.0. Only the attention of `gdn_hybrid_412m` has its time from the rehearsal in gpu.md,
because torch 2.13.0 divided it into other operations. Both models have the same counts:

- **before**: the model of these commits, without latencies.
- **after**: today's model: latencies, resident warps capped by the grid, float64, a floor for each kernel and a gap
  between two kernels.
- **host**: 21.5 us per launch, and 16 us more per launch of a Triton kernel, beside the device's time.
- **fitted**: the model before, plus 29 us per launch. This number was fitted to these steps, and is no longer used.
"""
SSD = """## SSD's kernels before and after they were rewritten

A layer's forward and backward pass with the shapes of `mamba2_1.3b` (4 x 2048 tokens, 64 heads of 64 channels in one
group, 128 state entries, bf16), modelled for an H200. The kernels were compiled by Triton 3.7.1, and spill no
registers. No GPU has run the kernels after the change."""
REJECTED = """Variants of an earlier state of the new kernels were compiled and modelled too. By the model, none was
faster as a whole. Each line compares a variant with that state, so its numbers are not those of the table:

- **Chunks of 256 tokens**: `walk` takes 76 and 111 us and spills 112 and 224 bytes, `group_gradients` takes 541 and
  543 us and spills 536 and 336 bytes. `outputs` takes 94 us instead of 99.
- **C B^T computed by each head's programs**: `outputs` takes 161 us instead of 96, `token_gradients` 369 us
  instead of 366 (in that state, fewer than three of its programs ran on a multiprocessor).
- **Pipelined loads in `token_gradients`**: 478 us instead of 366, as the loop needs more registers.
- **Three pipeline stages** instead of two in `walk`: 74 us instead of 45.
- **Float64 in `decays`**: 4.6 us, as long as with pairs of fp32 numbers, but with 96 registers instead of 69."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step with its modelled times. Times are in milliseconds.

    before    modelled device time of the step, before the model had latencies
    after     modelled device time by today's model
    launches  launches in the step; `kernels` of them are launches of Triton kernels
    """

    recipe: str
    micro_batches: int
    measured: float
    before: float
    after: float
    launches: int
    kernels: int

    @property
    def host(self) -> float:
        """Modelled time that the host takes to launch everything."""
        return 1e3 * (HOST_S * self.launches + TRITON_S * self.kernels)

    @property
    def modelled(self) -> float:
        """Modelled time of the step: that of the device or of the host, whichever is longer."""
        return max(self.after, self.host)

    @property
    def bound(self) -> str:
        return "host-bound" if self.host > self.after else "device-bound"


def read() -> tuple[list[MeasuredStep], dict[str, list[dict[str, Any]]]]:
    """Return the measured steps, and the kernels in one micro-batch of each recipe."""
    stored = json.loads(DATA.read_text())
    return [_step(record, stored["kernels"][record["recipe"]]) for record in stored["steps"]], stored["kernels"]


def _step(record: dict[str, Any], kernels: Sequence[dict[str, Any]]) -> MeasuredStep:
    times = record["micro_batches"]
    tokens = record["rows"] * record["tokens"] * times
    before = sum(kernel["launches"] * kernel["before_us"] for kernel in kernels) / 1e3
    after = 1e3 * sum(kernel["launches"] * occupied_seconds(1e-6 * kernel["after_us"]) for kernel in kernels)
    return MeasuredStep(
        record["recipe"],
        times,
        measured=1e3 * tokens / record["measured"],
        before=record["others_before_ms"] + times * before,
        after=record["others_after_ms"] + times * after,
        launches=record["launches"],
        kernels=times * sum(kernel["launches"] for kernel in kernels),
    )


def mean_error(modelled: Sequence[float], measured: Sequence[float]) -> float:
    """Return the mean of |modelled / measured - 1|."""
    pairs = zip(modelled, measured, strict=True)
    return sum(abs(one / other - 1) for one, other in pairs) / len(measured)


def page() -> str:
    """Return the page as Markdown."""
    steps, kernels = read()
    return "\n".join([INTRODUCTION, *_steps(steps), "", *_kernels(kernels), "", *_ssd()]) + "\n"


def _steps(steps: Sequence[MeasuredStep]) -> Iterator[str]:
    measured = [step.measured for step in steps]
    columns = {
        "before": [step.before for step in steps],
        "after": [step.modelled for step in steps],
        "fitted": [step.before + 29e-3 * step.launches for step in steps],
    }
    yield "## Steps"
    yield ""
    yield (
        "| recipe | micro-batches | measured ms | before: modelled ms | error | after: device ms | after: host ms | "
        "after: binds | error | fitted: error |"
    )
    yield f"|---|{'---|' * 9}"
    for number, step in enumerate(steps):
        errors = {name: times[number] / step.measured - 1 for name, times in columns.items()}
        yield (
            f"| `{step.recipe}` | {step.micro_batches} | {step.measured:.1f} | {step.before:.1f} | "
            f"{errors['before']:+.1%} | {step.after:.1f} | {step.host:.1f} | {step.bound} | {errors['after']:+.1%} | "
            f"{errors['fitted']:+.1%} |"
        )
    means = {name: mean_error(times, measured) for name, times in columns.items()}
    yield ""
    yield (
        f"Mean error (without signs): {means['before']:.1%} before, {means['after']:.1%} after, "
        f"{means['fitted']:.1%} with the fitted number."
    )


def _kernels(kernels: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "## Kernels"
    yield ""
    yield f"The {SHOWN} kernels whose modelled time has grown most in a micro-batch, of all recipes."
    yield ""
    yield "| recipe | kernel | grid | launches | warps | rounds | before: us | after: us | after: bound by |"
    yield f"|---|---|---|{'---|' * 6}"
    rows = [(recipe, kernel) for recipe, several in kernels.items() for kernel in several]
    rows.sort(key=lambda row: row[1]["launches"] * (row[1]["before_us"] - row[1]["after_us"]))
    for recipe, kernel in rows[:SHOWN]:
        grid = " x ".join(map(str, kernel["grid"]))
        yield (
            f"| `{recipe}` | {kernel['name']} | {grid} | {kernel['launches']} | {kernel['warps']} | "
            f"{kernel['rounds']} | {kernel['before_us']:.0f} | {kernel['after_us']:.0f} | {kernel['bound']} |"
        )


def _ssd() -> Iterator[str]:
    yield SSD
    yield ""
    yield "| | kernel | launches | warps | registers | shared bytes | us | bound by |"
    yield f"|---|---|{'---|' * 6}"
    for when, kernels in json.loads(DATA.read_text())["ssd"].items():
        for kernel in kernels:
            yield (
                f"| {when} | {kernel['name']} | {kernel['launches']} | {kernel['warps']} | {kernel['registers']} | "
                f"{kernel['shared']} | {kernel['us']:.1f} | {kernel['bound']} |"
            )
        total = sum(kernel["launches"] * kernel["us"] for kernel in kernels)
        yield f"| **{when}** | all | {sum(kernel['launches'] for kernel in kernels)} | | | | {total:.0f} | |"
    yield ""
    yield "`warps` are those that run on a multiprocessor at a time, and `us` is the modelled time of one launch."
    yield ""
    yield REJECTED


if __name__ == "__main__":
    write_whole(PAGE, page())
