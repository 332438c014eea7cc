"""Checks of each phase's data before training, without reading tokens.

The checks find folders that are missing or damaged, sources that do not fit together, and sources that are too small.
`train` and `run.plan=true` refuse a configuration with such a problem. `inspect`, `rehearse` and a dry run of `submit`
do not check data, because they may run on a machine without the data. Two kinds of data are checked by
`content_problems` only when a phase opens them: data at a URL, and an embedded corpus that does not exist yet.

The embedded corpus (`data.source=embedded`) is the text of the Python installation, which needs no download.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Source
from hybridtron.config.units import parse_tokens, readable
from hybridtron.data.check_vocabulary import meaning_problems
from hybridtron.data.folder import MIN_VOCABULARY, FolderError, TokenFolder
from hybridtron.data.mixture_spec import MixtureSource, Opened, mixture_of, mixture_source, reading_plan
from hybridtron.data.prepare.corpus import sizes
from hybridtron.problems import Problem
from hybridtron.storage.remote import is_url

MAX_SENSIBLE_EPOCHS = 100  # if more epochs are needed, the message advises more text instead of a larger data.epochs
EMBEDDED_PATH = "data/embedded-{}"  # default path of the embedded corpus; {} is the vocabulary's size
# Default paths in configs/data, where a user prepares text. The embedded corpus must not be written there.
RECIPES_PATHS = ("data/tokens", "data/slimpajama", "data/phi", "data/language", "data/code", "data/pg19")


def data_problems(plan: RunPlan) -> list[Problem]:
    """List the problems in all phases' data. Data at a URL is not checked here, but only when a phase opens it."""
    opened: dict[str, TokenFolder] = {}

    def opened_once(path: str) -> TokenFolder:
        if path not in opened:
            opened[path] = TokenFolder.open(Path(path))
        return opened[path]

    problems: dict[str, Problem] = {}
    for phase in plan.phases:
        for problem in _phase_problems(phase, opened_once):
            # If several phases have the same problem, the messages differ only in the clause that names the phase.
            # Only the first of these problems is kept.
            problems.setdefault(problem.message.replace(_reader(phase), ""), problem)
    return list(problems.values())


def _reader(phase: ResolvedPhase) -> str:
    """Return the clause in a message that names the phase."""
    return f" (phase {phase.settings.name} reads it)"


def _phase_problems(phase: ResolvedPhase, opened: Opened) -> list[Problem]:
    data = phase.data
    key = phase.key("data.path")
    vocab_size = phase.model.vocab_size
    if data.source == Source.embedded and vocab_size < MIN_VOCABULARY:
        needs = f"data.source=embedded trains a byte-level vocabulary; set at least {MIN_VOCABULARY}"
        return [Problem("model.vocab_size", "out-of-range", f"is {vocab_size}, but {needs}")]
    paths = [entry.path or data.path for entry in data.mixture.values()] or [data.path]
    here = os.path.exists(data.path)  # noqa: PTH110 (False for a path too long for the system)
    if data.source == Source.embedded and not here:
        place = _place_problems(key, data.path, vocab_size)
        return meaning_problems(phase.config, phase.index, data.path) + place + _unmade_problems(phase)
    if faults := _folder_problems(phase, opened):
        return faults
    if any(is_url(path) for path in paths):
        return []
    mixture = mixture_of(data, opened)
    if data.source == Source.folder and (misplaced := [source for source in mixture if _is_misplaced(source.folder)]):
        where = misplaced[0].folder.path
        cure = f"move the folder to {EMBEDDED_PATH.format(vocab_size)}, and prepare the text that this recipe is for"
        return [
            Problem(key, "misplaced", f"is {where}, into which an earlier version wrote the embedded corpus; {cure}")
        ]
    return content_problems(key, phase, mixture)


def _folder_problems(phase: ResolvedPhase, opened: Opened) -> list[Problem]:
    """List a problem for each key whose folder can't be used. If all can be used, report folders that do not match."""
    data = phase.data
    faults: dict[str, FolderError] = {}
    is_here = not is_url(data.path)
    for name, entry in data.mixture.items():
        if is_url(entry.path or data.path):
            is_here = False
            continue
        try:
            mixture_source(name, entry, data.path, opened)
        except FolderError as error:
            faults.setdefault(phase.key(f"data.mixture.{name}.path" if entry.path else "data.path"), error)
    if is_here and not faults:
        try:
            mixture_of(data, opened)
        except FolderError as error:
            faults[phase.key("data.path")] = error
            if data.mixture:
                return [Problem(phase.key("data.mixture"), error.code, f"{error}{_reader(phase)}")]
    cure = "prepare text with hybridtron data prepare, or try data=embedded data.epochs=null run.max_steps=10"
    if data.source == Source.embedded:
        cure = f"delete {data.path} to prepare the embedded corpus again, or set another data.path"
    return [Problem(key, error.code, f"{error}{_reader(phase)}; {cure}") for key, error in faults.items()]


def _place_problems(key: str, path: str, vocab_size: int) -> list[Problem]:
    """Return a problem if the embedded corpus would be written where recipes expect the user's own text.

    A later run of such a recipe would read the embedded corpus without a warning.
    """
    if not _is_recipes_path(path):
        return []
    cure = f"use data=embedded, or set {key}={EMBEDDED_PATH.format(vocab_size)}"
    return [
        Problem(
            key,
            "misplaced",
            f"is {path}, where recipes expect your own text, so the embedded corpus is not written there; {cure}",
        )
    ]


def _is_misplaced(folder: TokenFolder) -> bool:
    return _is_recipes_path(str(folder.path)) and folder.manifest.origin.get("corpus") == Source.embedded.value


def _is_recipes_path(path: str) -> bool:
    return f"{os.path.normpath(path)}/".startswith(tuple(f"{known}/" for known in RECIPES_PATHS))


def _unmade_problems(phase: ResolvedPhase) -> list[Problem]:
    """Return a problem if an embedded corpus that does not exist yet will be too small for `data.epochs`.

    The corpus's byte count serves as its token count. If eos tokens are not counted, the corpus has at most this number
    of tokens. So the phase needs at least the estimated number of epochs.
    """
    data = phase.data
    try:
        tokens = parse_tokens(phase.settings.tokens)
    except ValueError:
        return []  # reported by the phase's own rules
    if data.epochs is None:
        return []
    sizes_of = sizes()
    weights: Mapping[str, float] = {name: entry.weight for name, entry in data.mixture.items()} or sizes_of
    if not set(weights) <= set(sizes_of):
        return []  # the mixture gives the sources other names, which are resolved when the folder exists
    whole = sum(weights.values())
    read = {name: weights[name] / whole * tokens for name in weights}
    return _epochs_problems(phase, read, sizes_of, "null", are_limits=True)


def content_problems(key: str, phase: ResolvedPhase, sources: Sequence[MixtureSource]) -> list[Problem]:
    """List the problems in opened sources: vocabularies that don't fit the model, and sources that are too small."""
    folders = {source.folder.name: source.folder for source in sources}
    vocabulary = [p for folder in folders.values() for p in _vocabulary_problems(key, phase, folder)]
    vocabulary += meaning_problems(phase.config, phase.index, sources[0].folder)
    return vocabulary + _size_problems(key, phase, sources) + _amount_problems(phase, sources)


def _vocabulary_problems(key: str, phase: ResolvedPhase, folder: TokenFolder) -> list[Problem]:
    """Return a problem if a folder's vocabulary size does not fit `model.vocab_size`.

    An embedded corpus must have been prepared for exactly this size. Any other folder may have a smaller vocabulary.
    """
    folder_size = folder.manifest.vocab_size
    vocab_size = phase.model.vocab_size
    if phase.data.source == Source.embedded:
        made_for = folder.manifest.origin.get("asked_vocab_size", folder_size)
        if vocab_size in (folder_size, made_for):
            return []
        cure = f"set model.vocab_size={made_for}, or set {key} to a new folder for a vocabulary of {vocab_size} entries"
    elif folder_size <= vocab_size:
        return []
    else:
        cure = f"set model.vocab_size={folder_size} or more, or use data with a smaller vocabulary"
    return [
        Problem(
            key,
            "mismatch",
            f"{folder.name} has a vocabulary of {folder_size} entries, but model.vocab_size is {vocab_size}; {cure}",
        )
    ]


def _amount_problems(phase: ResolvedPhase, sources: Sequence[MixtureSource]) -> list[Problem]:
    """Return a problem if a phase reads a source more often than `data.epochs` allows."""
    try:
        tokens = parse_tokens(phase.settings.tokens)
    except ValueError:
        return []  # reported by the phase's own rules
    plan = reading_plan(sources, tokens)
    read = {entry.source: entry.share * tokens for entry in plan}
    sizes_of = {source.name: source.tokens("train") for source in sources}
    problems = _epochs_problems(phase, read, sizes_of, str(math.ceil(max(entry.epochs or 0.0 for entry in plan))))
    vocab_size = min(entry.folder.manifest.vocab_size for entry in sources)
    if problems and 2 * vocab_size <= phase.model.vocab_size:  # a hint that the path may lead to the wrong folder
        other = f"the data's vocabulary has only {vocab_size} entries, and model.vocab_size={phase.model.vocab_size}"
        return [replace(problem, message=f"{problem.message}; {other}") for problem in problems]
    return problems


def _epochs_problems(
    phase: ResolvedPhase, read: Mapping[str, float], sizes_of: Mapping[str, int], enough: str, are_limits: bool = False
) -> list[Problem]:
    """Return a problem for the source that a phase reads most often, if this is more often than `data.epochs` allows.

    read: source -> how many tokens the phase reads from it
    sizes_of: source -> its number of training tokens
    enough: value for `data.epochs` that the message suggests; with it, the phase can read all its tokens
    are_limits: True if sources have at most `sizes_of` tokens, so that the number of missing tokens is not known
    """
    limit = phase.data.epochs
    reads = {name: tokens / sizes_of[name] for name, tokens in read.items()}
    source = max(reads, key=lambda name: reads[name])
    if limit is None or reads[source] <= limit:
        return []
    key = phase.key("data.epochs")
    cure = f"set {key}={enough}, lower {phase.own_key('tokens')}, or prepare more text"
    if reads[source] > MAX_SENSIBLE_EPOCHS:
        # one percent less, so that the number is allowed although `readable` rounds it
        fewer = readable(0.99 * parse_tokens(phase.settings.tokens) * limit / reads[source])
        cure = f"prepare more text, or set {phase.own_key('tokens')}={fewer}"
    size = sizes_of[source]
    times = f"{reads[source]:,.1f} times"
    lacks = f"it has {readable(size)} tokens, and needs {readable(read[source] / limit - size)} more"
    if are_limits:
        times = f"at least {times}"
        lacks = f"it has at most {readable(size)} tokens"
    times = f"{phase.settings.name} reads the source {source} {times}"
    return [Problem(key, "does-not-fit", f"allows {limit:g} epochs, but {times}: {lacks}; {cure}")]


def _size_problems(key: str, phase: ResolvedPhase, sources: Sequence[MixtureSource]) -> list[Problem]:
    """List sources that are too small for a training row.

    Adds a problem if no source has held-out text for the longest row in an evaluation.
    """
    seq_len = phase.settings.seq_len
    reader = _reader(phase)
    longest = seq_len * max((1, *phase.config.run.eval_lengths))
    problems = []
    for source in sources:
        if source.tokens("train") <= seq_len:
            message = f"has {source.tokens('train')} train tokens, but one row takes {seq_len + 1}"
            cure = f"set a smaller seq_len, or prepare more text{reader}"
            problems.append(Problem(key, "does-not-fit", f"{source.folder.name} ({source.name}) {message}; {cure}"))
    fullest = max(sources, key=lambda source: source.tokens("validation"))
    if (num_tokens := fullest.tokens("validation")) <= longest:
        message = f"no source has {longest + 1} validation tokens, which one row takes"
        cure = "set smaller run.eval_lengths or seq_len, or a larger share in hybridtron data prepare --validation"
        where = f"{fullest.folder.name} ({fullest.name}) has the most validation tokens, {num_tokens}{reader}"
        problems.append(Problem(key, "does-not-fit", f"{message}; {where}; {cure}"))
    return problems
