"""Times a recipe's step with our kernels, and with mamba-ssm's and causal-conv1d's kernels for the ops in THEIRS."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtron.device import forget_peak_memory
from hybridtron.ops.dispatch import force
from hybridtron.ops.kernel_launch import TRITON
from hybridtron.proving.gpu.queue.rows import Recorder
from hybridtron.proving.gpu.queue.whole_step import settings, time_step
from hybridtron.proving.steps import Steps, load_checked, one_process, random_batches

THEIRS = {"ssd_scan": "mamba-ssm", "selective_scan": "mamba-ssm", "causal_conv": "causal-conv1d"}


def package_step(record: Recorder, recipe: str) -> None:
    """Time the step with our kernels, then with the other packages' kernels. Both times, a new engine is built.

    With tiny sizes, which also run on a CPU, both steps use the reference implementations.
    """
    forms: Mapping[str, Mapping[str, str]] = {"ours": dict.fromkeys(THEIRS, TRITON), "theirs": THEIRS}
    config = load_checked(settings(recipe, tiny=record.tiny))
    for name, implementations in forms.items():
        with record.case(name) as row:
            forget_peak_memory()
            if record.tiny:
                chosen = dict.fromkeys(implementations, "reference")
            else:
                chosen = implementations
            with force(**chosen), one_process(config) as groups:
                time_step(Steps(config, groups, random_batches(config)), config, row, 1)
