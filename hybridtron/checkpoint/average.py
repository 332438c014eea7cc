"""Averages the weights of several checkpoints into a new checkpoint, which has weights but no optimizer state.

    weight = sum of share_i * weight_i        share_i = factor_i / sum of all factors

Each weight is read from its fp32 master if the checkpoint has one, or from its moving average (`run.ema`) if those are
averaged. Sums are computed in float64, one tensor at a time. If the last checkpoint has a master for a weight, and no
checkpoint has the weight only in bf16, the average has a master too. Runs and phases that start from the average, and a
further average, read the master. Adapters are refused: the product of two averaged matrices is not the average of the
products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hybridtron.checkpoint.checkpoint import MASTER, Checkpoint
from hybridtron.checkpoint.files import appearing, in_parts
from hybridtron.checkpoint.finite import is_finite
from hybridtron.checkpoint.manifest import BrokenCheckpoint
from hybridtron.checkpoint.moving_average import averaged_weights, moving_average
from hybridtron.checkpoint.rewrite import write_whole
from hybridtron.config.load import values_by_key
from hybridtron.data.same_vocabulary import difference, is_readable
from hybridtron.problems import Unusable

TOKENIZER = "tokenizer.json"
PART_BYTES = 2**32  # bytes of a tensor file, counted in fp32


@dataclass(frozen=True)
class Averaged:
    """A summary of a written average.

    weights: number of weights
    masters: number of weights with an fp32 master
    plain: number of weights that are a mean of weights although moving averages were to be averaged, since no
        checkpoint has a moving average of them; 0 for an average of weights
    """

    weights: int
    masters: int
    plain: int


def average(
    sources: Sequence[Checkpoint],
    factors: Sequence[float],
    target: Path,
    progress: Callable[[int, int], None],
    *,
    of_averages: bool = False,
) -> Averaged:
    """Write the weighted average of checkpoints into a new folder, which appears complete or not at all.

    With `of_averages`, the checkpoints' moving averages are averaged instead of their weights. A weight without a
    moving average, because it was not trained, is averaged as it is. The configuration, the tokenizer and the step are
    those of the last checkpoint. Before a file's tensors are read, `progress` is called with the number of finished
    files and the number of all files.

    Raises Unusable if the checkpoints do not fit each other, lack a moving average, or have moving averages of
    different weights. Raises BrokenCheckpoint if a checkpoint is damaged.
    """
    assert len(sources) == len(factors)
    last = sources[-1]
    _require_different(sources)
    for source in sources:
        _require_no_adapters(source)
        _require_same_model(source, last)
        _require_same_tokenizer(source, last)
    shares = shares_of(factors)
    shapes = weight_shapes(last)
    read = sources
    plain = 0
    layout = f"average of {len(sources)} checkpoints"
    if of_averages:
        read = [moving_average(source) for source in sources]
        for source in sources:
            _require_same_averages(source, last)
        plain = len(shapes.keys() - averaged_weights(last))
        layout = f"average of {len(sources)} moving averages"
    masters = [key for key in shapes if last.widest(key) != key and _is_unrounded(key, read)]
    files = _plan_files(shapes, masters)

    def tensors() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for number, (name, keys) in enumerate(files):
            progress(number, len(files))
            yield name, {key: _average_of(key, read, shares, last.dtype(key)) for key in keys}

    meta = replace(
        last.meta,
        layout=layout,
        torch_version=torch.__version__,
        validation=None,
        norms=[],
        refused=0,
        windows=[],
    )
    small = {name: last.verified(name) for name in ("config.yaml", TOKENIZER)}
    with appearing(target) as temporary:
        write_whole(temporary, meta, small, tensors())
    return Averaged(len(shapes), len(masters), plain)


def shares_of(factors: Sequence[float]) -> list[float]:
    """Divide positive factors by their sum. Even for the largest finite numbers the sum does not overflow."""
    largest = max(factors)
    scaled = [factor / largest for factor in factors]
    total = math.fsum(scaled)
    return [factor / total for factor in scaled]


def weight_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's weights by key, without masters, moments and states."""
    return {chunk.key: chunk.shape for chunk in checkpoint.manifest.chunks if chunk.file.startswith("model-")}


def _is_unrounded(key: str, sources: Sequence[Checkpoint]) -> bool:
    """Return True if no checkpoint has a weight in bf16 alone."""
    return all(source.dtype(source.widest(key)) != torch.bfloat16 for source in sources)


def _plan_files(shapes: dict[str, tuple[int, ...]], masters: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each tensor file to write: its name and its tensors' keys. Masters are in files named `optimizer-`."""
    files = []
    for kind, prefix, keys in (("model", "", list(shapes)), ("optimizer", MASTER, masters)):
        for number, part in enumerate(in_parts(keys, lambda key: 4 * math.prod(shapes[key]), PART_BYTES)):
            files.append((f"{kind}-{number:05}.safetensors", [f"{prefix}{key}" for key in part]))
    return files


def _average_of(key: str, sources: Sequence[Checkpoint], shares: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the weighted average of a weight, or of its master, in `dtype`.

    A weight in bf16 is rounded from the average in fp32, as in training.
    """
    total = torch.zeros(sources[-1].shapes[key.removeprefix(MASTER)], dtype=torch.float64)
    for source, share in zip(sources, shares, strict=True):
        weight = source.whole(source.widest(key))
        if not is_finite(weight):
            raise BrokenCheckpoint(f"{source.folder}: {key} contains NaN or infinity", code="out-of-range")
        total.add_(weight, alpha=share)
    return total.to(torch.promote_types(dtype, torch.float32)).to(dtype)


def _require_different(sources: Sequence[Checkpoint]) -> None:
    """Raise Unusable if a checkpoint is named twice, for example as RUN and as RUN@best."""
    folders = set()
    for source in sources:
        folder = source.folder.resolve()
        if folder in folders:
            raise Unusable(
                f"{source.folder} is named twice: name different checkpoints, and give it a larger factor in --weights",
                code="duplicate",
            )
        folders.add(folder)


def _require_no_adapters(source: Checkpoint) -> None:
    if source.config.model.adapters is not None:
        raise Unusable(
            f"{source.folder} has adapters, and averaged adapters are not the average of the adapted weights: merge "
            f"them with `hybridtron export {source.folder} --output HF` and `hybridtron import HF --output DIR`, then "
            "average DIR",
            code="unsupported",
        )


def _require_same_model(source: Checkpoint, last: Checkpoint) -> None:
    """Raise Unusable if the section `model`, or a weight's name or shape, differs between two checkpoints."""
    settings = values_by_key(source.config)
    last_settings = values_by_key(last.config)
    for key in {**settings, **last_settings}:
        if key.startswith("model.") and settings.get(key) != last_settings.get(key):
            raise Unusable(
                f"{source.folder} has {key}={settings.get(key)}, but {last.folder} has {last_settings.get(key)}: name "
                "checkpoints of one architecture",
                code="mismatch",
            )
    shapes = weight_shapes(source)
    last_shapes = weight_shapes(last)
    for key in sorted(shapes.keys() | last_shapes.keys()):
        if shapes.get(key) != last_shapes.get(key):
            raise Unusable(
                f"{key} has the shape {shapes.get(key, 'none')} in {source.folder}, but {last_shapes.get(key, 'none')} "
                f"in {last.folder}: name checkpoints whose weights have the same names and shapes",
                code="mismatch",
            )


def _require_same_averages(source: Checkpoint, last: Checkpoint) -> None:
    """Raise Unusable if two checkpoints have moving averages of different weights, since their phases differ."""
    averaged = averaged_weights(source)
    last_averaged = averaged_weights(last)
    if differing := sorted(averaged ^ last_averaged):
        having = source.folder
        lacking = last.folder
        if differing[0] not in averaged:
            having = last.folder
            lacking = source.folder
        raise Unusable(
            f"{having} has a moving average of {differing[0]}, but {lacking} has none (in all {len(differing)} such "
            "weights): name checkpoints of phases that train the same weights, or leave out --ema",
            code="mismatch",
        )


def _require_same_tokenizer(source: Checkpoint, last: Checkpoint) -> None:
    """Raise Unusable if equal token ids mean different text in two checkpoints."""
    stored = source.verified(TOKENIZER)
    last_stored = last.verified(TOKENIZER)
    if stored == last_stored:
        return
    if is_readable(stored) and is_readable(last_stored):
        differs = difference(last_stored, stored)
    else:
        differs = "their files differ, and at least one can't be read"
    if differs is not None:
        raise Unusable(
            f"{source.folder} has another tokenizer than {last.folder}: {differs}; name checkpoints of one vocabulary",
            code="mismatch",
        )
