"""Times steps in bf16 and in every kind of FP8 scaling, by Transformer Engine; with tiny sizes FP8 is emulated."""

from __future__ import annotations

from hybridtron.device import forget_peak_memory
from hybridtron.proving.gpu.queue.rows import Recorder
from hybridtron.proving.gpu.queue.whole_step import build_engine, settings, time_step
from hybridtron.proving.steps import load_checked

PRECISIONS = ("bf16", "fp8_delayed", "fp8_current", "fp8_block")


def fp8(record: Recorder, recipe: str) -> None:
    """Time a step with one micro-batch in each precision. The recorded losses show whether precisions learn equally."""
    for precision in PRECISIONS:
        with record.case(precision) as row:
            forget_peak_memory()
            config = load_checked(settings(recipe, precision, record.tiny))
            with build_engine(config) as steps:
                time_step(steps, config, row, 1)
