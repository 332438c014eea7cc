"""Loading a checkpoint's model and tokenizer for reading, on one process or on all processes that torchrun started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtron.architecture.attention import AttentionSpec, HeadsSpec, ReadingAttention
from hybridtron.architecture.rope import SelfExtendOptions
from hybridtron.architecture.table import architecture
from hybridtron.config.checks.parallel import uncuttable, unshareable
from hybridtron.config.layout import launched, stage_problems, world_problems
from hybridtron.config.schema import Config, ParallelConfig
from hybridtron.problems import ConfigError, Problem, Unusable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.model.generate import Reader
    from hybridtron.model.lm import LanguageModel

LAYOUT_KEYS = r"parallel\.(tensor|pipeline|context)=([1-9]\d*)"


@dataclass(frozen=True)
class Served:
    """A model that is ready to read, on one process or several.

    The layout may hold several model replicas, which take batches in turn; this process belongs to `replica`.
    """

    folder: Path
    config: Config
    step: int
    tokenizer: Tokenizer
    end: int | None  # token that ends a text
    read: Reader
    replica: int = 0
    replicas: int = 1
    first: bool = True  # True on the one process that prints and writes
    alone: bool = True  # True if there is only one process


def layout(settings: Sequence[str]) -> ParallelConfig:
    """Parse settings such as `parallel.tensor=2 parallel.context=2`. Raises Unusable for other keys."""
    sizes: dict[str, int] = {}
    for setting in settings:
        match = re.fullmatch(LAYOUT_KEYS, setting, re.ASCII)
        if match is None:
            known = "parallel.tensor=N, parallel.pipeline=N or parallel.context=N"
            raise Unusable(f"{setting}: is {known}, nothing else is set here", code="unknown-name")
        sizes[match[1]] = int(match[2])
    tensor, pipeline, context = (sizes.get(key, 1) for key in ("tensor", "pipeline", "context"))
    return ParallelConfig(tensor=tensor, pipeline=pipeline, context=context)


@contextmanager
def served(
    folder: Path,
    parallel: ParallelConfig | None = None,
    extend: SelfExtendOptions | None = None,
    attention: ReadingAttention | None = None,
) -> Iterator[Served]:
    """Yield a checkpoint's model, loaded until the block ends.

    Raises Unusable if checkpoint or tokenizer can't be used, and ConfigError if the layout does not fit.
    """
    parallel = parallel or ParallelConfig()
    checkpoint, config = opened(folder)
    if attention is not None:
        config = attending(config, attention)
    if extend is not None:
        config = self_extended(config, extend)
    tokenizer = tokenizer_of(checkpoint)
    require_layout(config, parallel)
    if launched().world_size == 1:
        model = whole_model(checkpoint, config)
        from hybridtron.model.generate import reader

        yield Served(folder, config, checkpoint.meta.step, tokenizer, end_of(checkpoint), reader(model))
    else:
        with _among_ranks(checkpoint, config, tokenizer, parallel) as staged:
            yield staged


def opened(folder: Path) -> tuple[Checkpoint, Config]:
    """Open a checkpoint with its adapters merged, and return it with its configuration. Raises Unusable."""
    from hybridtron.checkpoint.checkpoint import Checkpoint
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.checkpoint.merged import merged

    try:
        checkpoint = merged(Checkpoint.open(folder))
        return checkpoint, checkpoint.config
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error
    except ConfigError as error:
        raise Unusable(
            f"{folder} has a config.yaml that this version can't read.\n{error}", code="unreadable"
        ) from error


def attending(config: Config, how: ReadingAttention) -> Config:
    """Return the configuration with another attention for reading.

    With `full`, windows and spans read with full attention; with `trained`, all attention reads as in training.
    """
    specs = architecture(config.model).by_letter
    changed = {letter: dict(spec.reading[how]) for letter, spec in specs.items() if isinstance(spec, HeadsSpec)}
    if not changed:
        raise Unusable(f"--attention {how}: the model has no attention", code="no-effect")
    layers = {letter: options | changed.get(letter, {}) for letter, options in config.model.layers.items()}
    return replace(config, model=replace(config.model, layers=layers))


def self_extended(config: Config, by: SelfExtendOptions) -> Config:
    """Return the configuration with Self-Extend in all layers that have full attention with rotary positions."""
    extendable = {
        letter
        for letter, spec in architecture(config.model).by_letter.items()
        if isinstance(spec, AttentionSpec) and spec.window is None and spec.positions is not None
    }
    if not extendable:
        raise Unusable("--self-extend: the model has no full attention with rotary positions", code="no-effect")
    layers = {
        letter: options | ({"self_extend": asdict(by)} if letter in extendable else {})
        for letter, options in config.model.layers.items()
    }
    return replace(config, model=replace(config.model, layers=layers))


def whole_model(checkpoint: Checkpoint, config: Config) -> LanguageModel:
    """Load the full model on this process, in the dtype that it was trained in."""
    from hybridtron.device import DTYPES, compute_device
    from hybridtron.model.lm import LanguageModel

    model = LanguageModel(config.model).to(compute_device()).cast(DTYPES[config.precision.name]).eval()
    fill(checkpoint, model)
    return model


def fill(checkpoint: Checkpoint, model: LanguageModel) -> None:
    """Load weights into a model or one rank's part of it, in place. Raises Unusable if they are damaged."""
    from hybridtron.checkpoint.manifest import BrokenCheckpoint

    try:
        checkpoint.load_weights(model)
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error


def end_of(checkpoint: Checkpoint) -> int | None:
    """Return the token that ended each document in training, or None if the checkpoint does not name one."""
    stored_id = checkpoint.meta.data.get("eos")
    if stored_id is None:
        return None
    return int(stored_id)


def require_layout(config: Config, parallel: ParallelConfig) -> None:
    """Raise ConfigError if the process count or the model does not fit the layout."""
    problems = world_problems(parallel, launched().world_size) or stage_problems(config.model, parallel)
    if parallel.tensor > 1 and (reasons := uncuttable(config.model, parallel.tensor)):
        problems.append(Problem("parallel.tensor", "not-divisible", f"is {parallel.tensor}, but {'; '.join(reasons)}"))
    problems += unshareable(architecture(config.model), parallel.context)
    if problems:
        raise ConfigError(problems)


@contextmanager
def _among_ranks(
    checkpoint: Checkpoint, config: Config, tokenizer: Tokenizer, parallel: ParallelConfig
) -> Iterator[Served]:
    """Load each rank's part of the model. The process groups are stopped after the block, and aborted on an error."""
    from hybridtron.device import DTYPES, megatron_context
    from hybridtron.engine.serving import slices, staged_reader
    from hybridtron.parallel import groups as process_groups

    dtype = DTYPES[config.precision.name]
    with megatron_context():
        groups = process_groups.start(parallel)
        try:
            parts = slices(config.model, parallel, groups, dtype)
            for part in parts:
                fill(checkpoint, part)
            yield Served(
                checkpoint.folder,
                config,
                checkpoint.meta.step,
                tokenizer,
                end_of(checkpoint),
                staged_reader(parts, config.model, groups, dtype),
                groups.data.rank,
                groups.data.size,
                groups.is_first,
                alone=False,
            )
        except BaseException:
            process_groups.abort()
            raise
        process_groups.stop()


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """Read a checkpoint's tokenizer. Raises Unusable."""
    from hybridtron.checkpoint.manifest import BrokenCheckpoint
    from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer

    try:
        return read_tokenizer(checkpoint.verified("tokenizer.json"))
    except BrokenCheckpoint as error:
        raise Unusable(str(error), code="unreadable") from error
    except BadTokenizer as error:
        raise Unusable(f"{checkpoint.folder / 'tokenizer.json'} can't be read: {error}", code="unreadable") from error
