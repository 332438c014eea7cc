"""Loads a checkpoint's model and tokenizer for inference, on one process or on all processes of a torchrun launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.architecture.attention import AttentionSpec, HeadsSpec, ReadingAttention
from hybridtron.architecture.rope import SelfExtendOptions
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.checks.parallel import uncuttable, unshareable
from hybridtron.config.pipeline_layout import launched, stage_problems, world_problems
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.problems import ConfigError, Problem, Unusable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.inference.reader import Reader
    from hybridtron.model.lm import LanguageModel

LAYOUT_KEYS = r"parallel\.(tensor|pipeline|context)=([1-9]\d*)"


@dataclass(frozen=True)
class LoadedModel:
    """A model that is loaded for inference, on one process or several.

    If the parallel layout divides the model over fewer processes than were started, there are several model replicas,
    which read different batches. This process belongs to replica number `replica`.
    """

    folder: Path  # the checkpoint's folder
    plan: RunPlan  # configuration and phases of the run that trained the model
    config: Config
    arch: Architecture
    step: int
    tokenizer: Tokenizer
    end: int | None  # id of the end-of-text token
    read: Reader  # computes outputs and states from tokens
    replica: int = 0
    replicas: int = 1
    averaged: bool = False  # True if the weights are the moving average of `run.ema`
    first: bool = True  # True on rank 0, the only process that prints and writes
    alone: bool = True  # True if there is only one process


def layout(settings: Sequence[str]) -> ParallelConfig:
    """Parse settings such as `parallel.tensor=2 parallel.context=2`.

    Raises Unusable for a key other than tensor, pipeline and context, or a value that is not a positive whole number.
    """
    sizes: dict[str, int] = {}
    for setting in settings:
        match = re.fullmatch(LAYOUT_KEYS, setting, re.ASCII)
        if match is None:
            known = "parallel.tensor=N, parallel.pipeline=N and parallel.context=N"
            raise Unusable(f"{setting}: only {known} can be set here, with whole numbers N >= 1", code="unknown-name")
        sizes[match[1]] = int(match[2])
    tensor, pipeline, context = (sizes.get(key, 1) for key in ("tensor", "pipeline", "context"))
    return ParallelConfig(tensor=tensor, pipeline=pipeline, context=context)


@contextmanager
def load_model(
    folder: Path,
    parallel: ParallelConfig | None = None,
    extend: SelfExtendOptions | None = None,
    attention: ReadingAttention | None = None,
    averaged: bool = False,
) -> Iterator[LoadedModel]:
    """Load a checkpoint's model, and yield it. Process groups are stopped when the `with` body ends.

    extend: options for Self-Extend, to add it to full attention
    attention: the kind of attention to read with; None for the attention in the configuration
    averaged: whether to load the moving average of the weights (`run.ema`) instead of the weights

    Raises Unusable if the checkpoint or its tokenizer can't be read, or if there is no moving average. Raises
    ConfigError if the layout does not fit the model or the number of processes.
    """
    parallel = parallel or ParallelConfig()
    checkpoint = open_checkpoint(folder, averaged)
    arch = checkpoint.plan.arch
    if attention is not None:
        arch = with_attention(arch, attention)
    if extend is not None:
        arch = with_self_extend(arch, extend)
    tokenizer = tokenizer_of(checkpoint)
    require_layout(arch, parallel)
    if launched().world_size == 1:
        model = whole_model(checkpoint, arch)
        from hybridtron.inference.reader import reader

        config = replace(checkpoint.config, model=arch.model)
        yield LoadedModel(
            folder=folder,
            plan=checkpoint.plan,
            config=config,
            arch=arch,
            step=checkpoint.meta.step,
            tokenizer=tokenizer,
            end=end_of(checkpoint),
            read=reader(model),
            averaged=averaged,
        )
    else:
        with _divided_model(checkpoint, arch, tokenizer, parallel) as divided:
            yield replace(divided, averaged=averaged)


def open_checkpoint(folder: Path, averaged: bool = False) -> Checkpoint:
    """Open a checkpoint with its adapters merged. With `averaged`, open the moving average of its weights (`run.ema`).

    Raises Unusable if the checkpoint or its configuration is faulty, or if there is no average.
    """
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.checkpoint.merged import merge_adapters
    from hybridtron.checkpoint.moving_average import moving_average

    try:
        checkpoint = Checkpoint.open(folder)
        if averaged:
            checkpoint = moving_average(checkpoint)
        return merge_adapters(checkpoint)
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error
    except ConfigError as error:
        raise Unusable(
            f"{folder} has a config.yaml that this version can't read.\n{error}", code="unreadable"
        ) from error


def with_attention(arch: Architecture, how: ReadingAttention) -> Architecture:
    """Return the architecture with another kind of attention to read with.

    `how` is one of:
    - full: windowed attention and span attention are replaced by full attention
    - trained: all attention is as in training, even if the configuration sets another kind for evaluation

    Raises Unusable if the model has no attention.
    """
    specs = arch.by_letter
    changed = {letter: dict(spec.reading[how]) for letter, spec in specs.items() if isinstance(spec, HeadsSpec)}
    if not changed:
        raise Unusable(f"--attention {how}: the model has no attention", code="no-effect")
    layers = {letter: options | changed.get(letter, {}) for letter, options in arch.model.layers.items()}
    return architecture(replace(arch.model, layers=layers))


def with_self_extend(arch: Architecture, by: SelfExtendOptions) -> Architecture:
    """Return the architecture with Self-Extend in all layers that have full attention with rotary positions.

    Raises Unusable if the model has no such layer.
    """
    extendable = {
        letter
        for letter, spec in arch.by_letter.items()
        if isinstance(spec, AttentionSpec) and spec.window is None and spec.positions is not None
    }
    if not extendable:
        raise Unusable("--self-extend: the model has no full attention with rotary positions", code="no-effect")
    layers = {
        letter: options | ({"self_extend": asdict(by)} if letter in extendable else {})
        for letter, options in arch.model.layers.items()
    }
    return architecture(replace(arch.model, layers=layers))


def whole_model(checkpoint: Checkpoint, arch: Architecture) -> LanguageModel:
    """Load the full model on this process, in the dtype that the model was trained in."""
    from hybridtron.device import DTYPES, compute_device
    from hybridtron.model.lm import LanguageModel

    dtype = DTYPES[checkpoint.config.precision.name]
    model = LanguageModel(arch).to(compute_device()).cast(dtype).eval()
    fill(checkpoint, model)
    return model


def fill(checkpoint: Checkpoint, model: LanguageModel) -> None:
    """Read weights from a checkpoint into a model, or into one rank's part of a model.

    Raises Unusable if the weights are damaged or do not fit the model.
    """
    from hybridtron.checkpoint.manifest import BrokenCheckpoint

    try:
        checkpoint.load_weights(model)
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error


def end_of(checkpoint: Checkpoint) -> int | None:
    """Return the id of the token that ended each document in training, or None if the checkpoint stores no such id."""
    stored_id = checkpoint.meta.data.get("eos")
    if stored_id is None:
        return None
    return int(stored_id)


def require_layout(arch: Architecture, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the layout does not fit the process count or the model."""
    problems = world_problems(parallel, launched().world_size) or stage_problems(arch, parallel)
    if parallel.tensor > 1 and (reasons := uncuttable(arch, parallel.tensor)):
        problems.append(Problem("parallel.tensor", "not-divisible", f"is {parallel.tensor}, but {'; '.join(reasons)}"))
    problems += unshareable(arch, parallel.context)
    if problems:
        raise ConfigError(problems)


@contextmanager
def _divided_model(
    checkpoint: Checkpoint, arch: Architecture, tokenizer: Tokenizer, parallel: ParallelConfig
) -> Iterator[LoadedModel]:
    """Start process groups, load this rank's parts of the model, and yield the model.

    The process groups are stopped when the `with` body ends, and aborted if the body raises an error.
    """
    from hybridtron.device import DTYPES, megatron_context
    from hybridtron.inference.parallel_reader import build_parts, staged_reader
    from hybridtron.parallel import groups as process_groups

    dtype = DTYPES[checkpoint.config.precision.name]
    with megatron_context():
        groups = process_groups.start(parallel)
        try:
            parts = build_parts(arch, parallel, groups, dtype)
            for part in parts:
                fill(checkpoint, part)
            yield LoadedModel(
                folder=checkpoint.folder,
                plan=checkpoint.plan,
                config=replace(checkpoint.config, model=arch.model),
                arch=arch,
                step=checkpoint.meta.step,
                tokenizer=tokenizer,
                end=end_of(checkpoint),
                read=staged_reader(parts, groups, dtype),
                replica=groups.data.rank,
                replicas=groups.data.size,
                first=groups.is_first,
                alone=False,
            )
        except BaseException:
            process_groups.abort()
            raise
        process_groups.stop()


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Return a checkpoint's tokenizer. Raises Unusable if the file tokenizer.json can't be read."""
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer

    try:
        return read_tokenizer(checkpoint.verified("tokenizer.json"))
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error
    except BadTokenizer as error:
        raise Unusable(f"{checkpoint.folder / 'tokenizer.json'} can't be read: {error}", code="unreadable") from error
