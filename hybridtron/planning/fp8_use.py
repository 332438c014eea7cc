"""What sub-layers keep where Transformer Engine multiplies in FP8, beside what they would keep in bf16.

an input          of each product is kept in FP8, a byte a value, once for every product that reads it; as bf16 it is
                  gone, unless an op keeps it for itself (`keeps_output`) or a product in bf16 reads it too
a weight          is kept in FP8 too, by every micro-batch, unless `precision.cache_weights` keeps it for a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import FP8_MULTIPLES
from hybridtron.config.layout import fp8_layers
from hybridtron.config.schema import Config
from hybridtron.planning.count import VALUE_BYTES
from hybridtron.planning.layer_use import LayerUse, shared
from hybridtron.planning.pipeline import local_size


def with_fp8(uses: Sequence[LayerUse], config: Config, tokens: int) -> tuple[LayerUse, ...]:
    """All sub-layers of a model; `tokens` of a micro-batch share what a weight takes."""
    precision = config.precision
    if precision.name not in FP8_MULTIPLES or precision.emulate:
        return tuple(uses)
    arch, layers = architecture(config.model), fp8_layers(config)
    return tuple(
        _in_fp8(use, arch.specs[index], arch.sizes, config, tokens) if index in layers else use
        for index, use in enumerate(uses)
    )


def _in_fp8(use: LayerUse, spec: MixerSpec, sizes: ModelSizes, config: Config, tokens: int) -> LayerUse:
    value = VALUE_BYTES[config.precision.name]
    products = [weight for weight in spec.parameters(sizes).values() if len(weight.shape) == 2]
    entering = [w for w in products if w.shape[1] == sizes.width and all(cut.axis != 1 for cut in w.cuts)]
    leaving = [w for w in products if w.fp8 and any(cut.axis == 1 for cut in w.cuts)]
    more = sizes.width * sum(w.fp8 for w in entering) // value
    if entering and all(w.fp8 for w in entering):
        more -= sizes.width
    for weight in leaving:
        own = shared(weight.shape[1], config.parallel.tensor)
        more += own // value - (0 if spec.keeps_output else own)
    if not config.precision.cache_weights:
        more += sum(local_size(w, config.parallel) for w in products if w.fp8) // (value * tokens)
    return replace(use, again=use.again + more) if use.again else replace(use, kept=use.kept + more)
