"""The list of parts that are measured on a GPU, the most valuable first.

A part is a function that gets a `Recorder` for its results. The part's field `code` lists files in the package. If a
file in `code` changes, earlier results are outdated (`digest`). The function's own file is always included, because it
defines the measurement.

To add a part, write its function and add it to PARTS. If the part launches Triton kernels, add its calls to
`rehearse/queue_model.py`, which compiles them in advance.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hybridtron.proving.gpu.queue.digest import digest
from hybridtron.proving.gpu.queue.rows import Recorder

PARTS_OF_STEPS = (
    *("engine/*.py", "mixers/*.py", "model/*.py", "parallel/*.py", "proving/steps.py"),
    *("ops/dispatch.py", "ops/kernel_launch.py", "ops/gate_kernels.py", "ops/sum_kernels.py"),
    *("ops/flex_tiles.py", "ops/recomputed_gate.py"),
    *(f"ops/{op}/*.py" for op in ("attention", "conv", "delta", "gated_norm", "gla", "loss", "norm", "product")),
    *(f"ops/{op}/*.py" for op in ("rope", "scan", "softmax", "ssd", "swiglu", "token_mix")),
)
RECIPES = {
    "mamba2_1.3b": (4, 2048),
    "gla_360m": (32, 512),
    "gdn_hybrid_412m": (8, 4096),
    "rwkv6_70m": (256, 256),
    "samba_421m": (8, 4096),
    "samba_1.3b": (4, 4096),
}
"""Recipe -> (sequences in one micro-batch, tokens in a sequence). benchmarks/gpu.md has these sizes.

Recipes for which the rehearsal's times were least accurate come first.
"""
FP8_RECIPE = "samba_1.7b_padded"
FP8_ROWS = (2, 4096)  # (sequences in one micro-batch, tokens in a sequence)
EXPERT_RECIPES = ("samba_moe_1.3b_a0.4b", "nemotron_3_nano_30b")
FLA = "fla-core"
MAMBA_SSM = "mamba-ssm"
CONV1D = "causal-conv1d"
TE = "transformer-engine"


@dataclass(frozen=True)
class QueuePart:
    """A part in the queue.

    name      the part's name
    about     text that describes the measurement
    run       function, as `file:function` in this folder
    limit_s   time limit in seconds
    code      measured files, as path patterns in the package
    argument  the function's second argument, if it takes one: a recipe, a contest or a kind of shapes
    needs     distributions that must be installed
    card      kind of GPU for which the part is planned
    """

    name: str
    about: str
    run: str
    limit_s: int
    code: tuple[str, ...] = ()
    argument: str = ""
    needs: tuple[str, ...] = ()
    card: str = "h100"

    @property
    def file(self) -> str:
        return f"proving/gpu/queue/{self.run.partition(':')[0]}.py"

    @cached_property
    def digest(self) -> str:
        """Digest of the measured code and recipe. Results with another digest are outdated."""
        return digest((self.file, *self.code), (self.recipe,) if self.recipe else ())

    @property
    def recipe(self) -> str:
        """Recipe whose training step is measured, or an empty string if the part measures something else."""
        if self.argument in (*RECIPES, *EXPERT_RECIPES, FP8_RECIPE):
            return self.argument
        return ""

    def function(self) -> Callable[[Recorder], None]:
        """Import the part's file, and return its function with `argument` filled in."""
        file, _, name = self.run.partition(":")
        function = getattr(importlib.import_module(f"{__package__}.{file}"), name)
        if self.argument:
            return lambda recorder: function(recorder, self.argument)
        return function


def _step(recipe: str, limit_s: int) -> QueuePart:
    about = "host or device: steps at R, R/2, R/4 rows and with few tokens, by kernel, replayed from a CUDA graph"
    return QueuePart(f"step {recipe}", about, "whole_step:whole_step", limit_s, PARTS_OF_STEPS, recipe)


def _contest(op: str, needs: str, limit_s: int, code: str) -> QueuePart:
    about = f"our kernels of the op, compared with those of {needs} on the same tensors"
    files = (f"ops/{code}/*.py", "ops/kernel_launch.py", "proving/gpu/queue/fla.py")
    return QueuePart(f"{op} beside {needs}", about, "contests:contest", limit_s, files, f"{op}, {needs}", (needs,))


def _attention(kind: str, limit_s: int) -> QueuePart:
    about = "every row of attention's table side by side, and whether the table chooses the fastest"
    code = ("ops/attention/*.py", "ops/flex_tiles.py")
    return QueuePart(f"attention, {kind}", about, "attention:attention", limit_s, code, kind)


def _package_step(recipe: str, limit_s: int) -> QueuePart:
    about = "the step with our scan and convolution, and with those of mamba-ssm and causal-conv1d"
    name = f"step {recipe} beside mamba-ssm"
    needs = (MAMBA_SSM, CONV1D)
    return QueuePart(name, about, "package_step:package_step", limit_s, PARTS_OF_STEPS, recipe, needs)


def _graph(recipe: str, limit_s: int) -> QueuePart:
    about = "the step with kernels that the host launches, and with both passes from a CUDA graph (run.cuda_graph)"
    code = (*PARTS_OF_STEPS, "device.py", "data/batch.py")
    return QueuePart(f"graph {recipe}", about, "graph_step:graph_step", limit_s, code, recipe)


def _experts(recipe: str, about: str) -> QueuePart:
    code = (*PARTS_OF_STEPS, "ops/experts/*.py")
    return QueuePart(f"experts {recipe}", about, "experts_step:experts_step", 60, code, recipe)


_SAMBA_MOE = "a step with experts, and one of its dense sibling samba_421m with as many FLOPs a token"
_NEMOTRON = "a layer of Mamba-2 and a layer of 128 experts, beside a dense MLP with as many FLOPs a token"
_NORMS = "the norm's backward pass with several numbers of Triton programs, compared with torch's"
_FP8 = "steps in bf16 and in FP8 by Transformer Engine"
PARTS = (
    QueuePart("machine", "other load, settings, and the speed of copies, matmuls and launches", "machine:machine", 25),
    _step("mamba2_1.3b", 60),
    _step("gla_360m", 40),
    QueuePart("norms", _NORMS, "norms:norms", 25, ("ops/norm/*.py", "ops/kernel_launch.py")),
    _step("gdn_hybrid_412m", 45),
    _step("rwkv6_70m", 45),
    _contest("gla", FLA, 40, "gla"),
    _step("samba_421m", 60),  # compiles FlexAttention's kernels
    _step("samba_1.3b", 60),
    _experts("samba_moe_1.3b_a0.4b", _SAMBA_MOE),
    _experts("nemotron_3_nano_30b", _NEMOTRON),
    _graph("mamba2_1.3b", 30),
    _graph("samba_421m", 30),
    _contest("delta", FLA, 55, "delta"),
    _contest("rwkv6", FLA, 40, "gla"),
    _contest("ssd", FLA, 25, "ssd"),
    _contest("conv", FLA, 20, "conv"),
    _contest("gated_rms_norm", FLA, 20, "gated_norm"),
    _attention("windows and documents", 75),  # compiles FlexAttention's kernels
    _attention("full", 45),
    _contest("ssd", MAMBA_SSM, 60, "ssd"),
    _contest("selective_scan", MAMBA_SSM, 30, "scan"),
    _contest("conv", CONV1D, 20, "conv"),
    _package_step("mamba2_1.3b", 90),
    _package_step("samba_421m", 75),
    QueuePart("fp8", _FP8, "fp8:fp8", 120, PARTS_OF_STEPS, FP8_RECIPE, (TE,)),
)
"""The parts in order. First comes `machine`. Parts that show how a step's time is spent come before most other parts.

The parts that need no compiled package (mamba-ssm, causal-conv1d, transformer-engine) together take fourteen minutes.
"""


def named(name: str) -> QueuePart:
    return next(part for part in PARTS if part.name == name)
