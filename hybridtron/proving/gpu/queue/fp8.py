"""Times steps in bf16 and in every FP8 recipe, by Transformer Engine; a rehearsal emulates FP8."""

from __future__ import annotations

from hybridtron.device import forget_peak_memory
from hybridtron.proving.gpu.queue.rows import Recorder
from hybridtron.proving.gpu.queue.whole_step import built, settings, timed
from hybridtron.proving.steps import checked

PRECISIONS = ("bf16", "fp8_delayed", "fp8_current", "fp8_block")


def fp8(record: Recorder, recipe: str) -> None:
    """Time one micro-batch with the same rows in each precision; the losses show that all learn alike."""
    for precision in PRECISIONS:
        with record.case(precision) as row:
            forget_peak_memory()
            config = checked(settings(recipe, precision, record.tiny))
            with built(config) as steps:
                timed(steps, config, row, 1)
