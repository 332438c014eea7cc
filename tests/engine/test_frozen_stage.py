"""A pipeline stage whose weights are all frozen."""

from __future__ import annotations

from dataclasses import replace

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Documents, ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.parallel import groups as process_groups
from hybridtron.proving.audit.cases import Layout, small, small_model


def test_a_frozen_stage_is_built_with_fake_process_groups() -> None:
    """Megatron's distributed optimizer has no buffers there: fake groups do not send it the weights of other stages."""
    config = small(
        small_model("M-W-", tied=True, heads={}), Layout(pipeline=2).on(ParallelConfig()), Documents.isolate, data=1
    )
    config = replace(
        config,
        phases=[replace(config.phases[0], train=["layers.0.*"])],
        parallel=replace(config.parallel, distributed_optimizer=True),
    )
    with megatron_context():
        groups = process_groups.start(config.parallel, launch=ProcessLaunch(1, 2), fake=True)
        try:
            engine = Engine(resolve(config)[0], groups)
            shards = list(engine.optimizer.shards.values())
        finally:
            process_groups.stop()
    assert shards
    assert all(shard.master is None for shard in shards)
