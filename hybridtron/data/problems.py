"""Checks that each phase's data exists, fits together, and is enough, without reading tokens.

Training and its plan refuse a configuration with such problems. `inspect`, `rehearse` and a dry run of `submit` do not,
because they may run where the data is absent. A phase that opens data not visible before, such as a URL, calls
`content_problems` then.
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
from hybridtron.data.folder import SMALLEST_VOCABULARY, FolderError, TokenFolder
from hybridtron.data.mixture_spec import MixtureSource, Opened, mixture_of, mixture_source, reading_plan
from hybridtron.data.prepare.corpus import sizes
from hybridtron.problems import Problem
from hybridtron.storage.remote import is_url

MOST_SENSIBLE = 100  # epochs: above this, the advice is to use more text, not to allow more
EMBEDDED_PATH = "data/embedded-{}"  # with the vocabulary's size
# Folders where configs/data expects a user's own text.
RECIPES_PATHS = ("data/tokens", "data/slimpajama", "data/phi", "data/language", "data/code", "data/pg19")


def data_problems(plan: RunPlan) -> list[Problem]:
    """List problems in each phase's data, as far as this machine can see them without reading tokens.

    The content of a URL is checked when a phase opens it.
    """
    opened: dict[str, TokenFolder] = {}

    def opened_once(path: str) -> TokenFolder:
        if path not in opened:
            opened[path] = TokenFolder.open(Path(path))
        return opened[path]

    problems: dict[str, Problem] = {}
    for phase in plan.phases:
        for problem in _phase_problems(phase, opened_once):  # a problem that phases share names the first of them
            problems.setdefault(problem.message.replace(_reader(phase), ""), problem)
    return list(problems.values())


def _reader(phase: ResolvedPhase) -> str:
    """Return the clause that names a phase in a message. Messages of several phases are equal without it."""
    return f" (phase {phase.settings.name} reads it)"


def _phase_problems(phase: ResolvedPhase, opened: Opened) -> list[Problem]:
    data = phase.data
    key = phase.key("data.path")
    vocab_size = phase.model.vocab_size
    if data.source == Source.embedded and vocab_size < SMALLEST_VOCABULARY:
        needs = f"data.source=embedded makes a byte-level vocabulary, which needs at least {SMALLEST_VOCABULARY}"
        return [Problem("model.vocab_size", "out-of-range", f"is {vocab_size}; {needs}")]
    paths = [entry.path or data.path for entry in data.mixture.values()] or [data.path]
    here = os.path.exists(data.path)  # noqa: PTH110 (a path too long for the system is none)
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
        cure = f"move it to {EMBEDDED_PATH.format(vocab_size)}, and prepare the text that this recipe is for"
        return [
            Problem(key, "misplaced", f"is {where}, which an earlier version filled with Python's own texts; {cure}")
        ]
    return content_problems(key, phase, mixture)


def _folder_problems(phase: ResolvedPhase, opened: Opened) -> list[Problem]:
    """List a phase's unreadable folders, by the keys that name them, or else the reason why they form no mixture."""
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
    cure = "prepare it with hybridtron data prepare, or try data=embedded data.epochs=null run.max_steps=10"
    if data.source == Source.embedded:
        cure = f"delete {data.path}, and it is prepared again; or set another path"
    return [Problem(key, error.code, f"{error}{_reader(phase)}; {cure}") for key, error in faults.items()]


def _place_problems(key: str, path: str, vocab_size: int) -> list[Problem]:
    """Refuse to write the embedded corpus where recipes expect real text. They would read it without a warning."""
    if not _is_recipes_path(path):
        return []
    cure = f"use data=embedded, or {key}={EMBEDDED_PATH.format(vocab_size)}"
    return [
        Problem(
            key,
            "misplaced",
            f"is {path}, where recipes look for prepared text; Python's own is not written there: {cure}",
        )
    ]


def _is_misplaced(folder: TokenFolder) -> bool:
    return _is_recipes_path(str(folder.path)) and folder.manifest.origin.get("corpus") == Source.embedded.value


def _is_recipes_path(path: str) -> bool:
    return f"{os.path.normpath(path)}/".startswith(tuple(f"{known}/" for known in RECIPES_PATHS))


def _unmade_problems(phase: ResolvedPhase) -> list[Problem]:
    """Check that an embedded corpus will have enough text, before it is prepared.

    A token other than eos is at least one byte, so the text's bytes bound the tokens that any vocabulary makes.
    """
    data = phase.data
    try:
        tokens = parse_tokens(phase.settings.tokens)
    except ValueError:
        return []  # reported by the phase's own rules
    if data.epochs is None:
        return []
    most = sizes()
    weights: Mapping[str, float] = {name: entry.weight for name, entry in data.mixture.items()} or most
    if not set(weights) <= set(most):
        return []  # names of the mixture's own, which the folder resolves
    whole = sum(weights.values())
    return _epochs_problems(phase, {name: weights[name] / whole * tokens / most[name] for name in weights}, "null")


def content_problems(key: str, phase: ResolvedPhase, found: Sequence[MixtureSource]) -> list[Problem]:
    """List problems that make opened sources unfit for a phase's model and lengths."""
    folders = {source.folder.name: source.folder for source in found}
    vocabulary = [p for folder in folders.values() for p in _vocabulary_problems(key, phase, folder)]
    vocabulary += meaning_problems(phase.config, phase.index, found[0].folder)
    return vocabulary + _size_problems(key, phase, found) + _amount_problems(phase, found)


def _vocabulary_problems(key: str, phase: ResolvedPhase, folder: TokenFolder) -> list[Problem]:
    """Check a folder's vocabulary size against the model's.

    An embedded folder must have been made for exactly this size; any other may have a smaller vocabulary.
    """
    folder_size = folder.manifest.vocab_size
    vocab_size = phase.model.vocab_size
    if phase.data.source == Source.embedded:
        made_for = folder.manifest.origin.get("asked_vocab_size", folder_size)
        if vocab_size in (folder_size, made_for):
            return []
        cure = f"set model.vocab_size={made_for}, or a path where a vocabulary of {vocab_size} can be prepared"
    elif folder_size <= vocab_size:
        return []
    else:
        cure = f"set model.vocab_size={folder_size} or more, or use other tokens"
    return [
        Problem(
            key,
            "mismatch",
            f"{folder.name} has a vocabulary of {folder_size}, model.vocab_size is {vocab_size}; {cure}",
        )
    ]


def _amount_problems(phase: ResolvedPhase, found: Sequence[MixtureSource]) -> list[Problem]:
    """Check that a phase reads no source more often than data.epochs allows."""
    try:
        tokens = parse_tokens(phase.settings.tokens)
    except ValueError:
        return []  # reported by the phase's own rules
    reads = {entry.source: entry.epochs or 0.0 for entry in reading_plan(found, tokens)}
    problems = _epochs_problems(phase, reads, str(math.ceil(max(reads.values()))))
    vocab_size = min(entry.folder.manifest.vocab_size for entry in found)
    if problems and 2 * vocab_size <= phase.model.vocab_size:  # harmless alone, here a sign of the wrong folder
        other = f"its vocabulary of {vocab_size} is not that of model.vocab_size={phase.model.vocab_size} either"
        return [replace(problem, message=f"{problem.message}; {other}") for problem in problems]
    return problems


def _epochs_problems(phase: ResolvedPhase, reads: Mapping[str, float], enough: str) -> list[Problem]:
    """Report the source that a phase reads most often, if data.epochs does not allow it.

    enough: a value of data.epochs that would allow it
    """
    limit = phase.data.epochs
    source = max(reads, key=lambda name: reads[name])
    if limit is None or reads[source] <= limit:
        return []
    key = phase.key("data.epochs")
    cure = f"{key}={enough} allows it, {phase.own_key('tokens')} or more text makes it fewer"
    if reads[source] > MOST_SENSIBLE:
        fewer = readable(0.99 * parse_tokens(phase.settings.tokens) * limit / reads[source])  # rounded, still allowed
        cure = f"use more text, or {phase.own_key('tokens')}={fewer}, which reads it as often as that"
    times = f"{phase.settings.name} reads the source {source} {reads[source]:,.1f} times"
    return [Problem(key, "does-not-fit", f"allows {limit:g}, and {times}: {cure}")]


def _size_problems(key: str, phase: ResolvedPhase, found: Sequence[MixtureSource]) -> list[Problem]:
    """Check that every source has text for a training row, and some source held-out text for the longest row."""
    seq_len = phase.settings.seq_len
    reader = _reader(phase)
    longest = seq_len * max((1, *phase.config.run.eval_lengths))
    problems = []
    for source in found:
        if source.tokens("train") <= seq_len:
            message = f"has {source.tokens('train')} train tokens, and one row takes {seq_len + 1}"
            cure = f"a smaller seq_len or more text works{reader}"
            problems.append(Problem(key, "does-not-fit", f"{source.folder.name} ({source.name}) {message}; {cure}"))
    fullest = max(found, key=lambda source: source.tokens("validation"))
    if (num_tokens := fullest.tokens("validation")) <= longest:
        message = f"at most {num_tokens} validation tokens in a source, and one row takes {longest + 1}"
        cure = "smaller run.eval_lengths or seq_len works, or more of them: hybridtron data prepare --validation"
        where = f"{fullest.folder.name} ({fullest.name}) has the most{reader}"
        problems.append(Problem(key, "does-not-fit", f"{message}; {cure}; {where}"))
    return problems
