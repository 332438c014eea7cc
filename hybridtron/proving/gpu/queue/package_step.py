"""Times a recipe's step with our kernels, and with another package's kernels for the ops that it has."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtron.device import forget_peak_memory
from hybridtron.ops.dispatch import force
from hybridtron.ops.kernel_launch import TRITON
from hybridtron.proving.gpu.queue.rows import Recorder
from hybridtron.proving.gpu.queue.whole_step import settings, timed
from hybridtron.proving.steps import Steps, checked, one_process, random_batches

THEIRS = {"ssd_scan": "mamba-ssm", "selective_scan": "mamba-ssm", "causal_conv": "causal-conv1d"}


def package_step(record: Recorder, recipe: str) -> None:
    """Time the step with each package on its own engine; on a CPU, which has neither, both run the reference."""
    forms: Mapping[str, Mapping[str, str]] = {"ours": dict.fromkeys(THEIRS, TRITON), "theirs": THEIRS}
    config = checked(settings(recipe, tiny=record.tiny))
    for name, implementations in forms.items():
        with record.case(name) as row:
            forget_peak_memory()
            if record.tiny:
                chosen = dict.fromkeys(implementations, "reference")
            else:
                chosen = implementations
            with force(**chosen), one_process(config) as groups:
                timed(Steps(config, groups, random_batches(config)), config, row, 1)
