"""What a phase reads: the sources that its mixture names, where they are, and how much of each.

Without a mixture these are all sources of `data.path`, each by its number of tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hybridtron.config.resolve import ResolvedPhase, resolve
from hybridtron.config.schema import Config, DataConfig, IngredientConfig, Source
from hybridtron.config.units import parse_tokens
from hybridtron.data.check_vocabulary import meaning_problems
from hybridtron.data.folder import SMALLEST_VOCABULARY, FolderError, TokenFolder
from hybridtron.data.prepare.corpus import sizes
from hybridtron.problems import Problem
from hybridtron.storage.remote import is_url

EMBEDDED_PATH = "data/embedded-{}"  # by the vocabulary's size
# Where configs/data looks for text of one's own.
RECIPES_PATHS = ("data/tokens", "data/slimpajama", "data/phi", "data/language", "data/code", "data/pg19")
Opened = Callable[[str], TokenFolder]


class MixtureSource(NamedTuple):
    """A source in a mixture: its name there, the folder and the name under which that holds it, and its weight."""

    name: str
    folder: TokenFolder
    source: str
    weight: float

    def tokens(self, split: str) -> int:
        of_source = self.folder.manifest.splits[split].get(self.source)
        return 0 if of_source is None else of_source.tokens

    def learned(self, split: str) -> int | None:
        """Tokens of a split that are learned; None where it has no masks, and all of them are."""
        of_source = self.folder.manifest.splits[split].get(self.source)
        return None if of_source is None else of_source.learned


def mixture_of(data: DataConfig, opened: Opened) -> list[MixtureSource]:
    """The sources that are read, from folders as `opened` gives them; FolderError where they don't fit together."""
    if data.mixture:
        found = [_mixture_source(name, entry, data.path, opened) for name, entry in data.mixture.items()]
    else:
        folder = opened(data.path)
        sources = folder.manifest.splits["train"].items()
        found = [MixtureSource(name, folder, name, float(of_source.tokens)) for name, of_source in sources]
    if not found:
        raise FolderError(data.path, "has no tokens to train on")
    for source in found:
        _check_same_tokenizer(found[0], source)
    return found


def _mixture_source(name: str, entry: IngredientConfig, default_path: str, opened: Opened) -> MixtureSource:
    """A source by the name it has in its folder: as the entry says, or the entry's own, or the only one there."""
    folder = opened(entry.path or default_path)
    there = folder.manifest.splits["train"]
    source = entry.source or (name if name in there or len(there) != 1 else next(iter(there)))
    if source not in there:
        has = ", ".join(there) or "none"
        raise FolderError(
            folder.name,
            f"has no source {source!r} for mixture.{name}; its sources: {has}. Name one as mixture.{name}.source",
        )
    return MixtureSource(name, folder, source, entry.weight)


def _check_same_tokenizer(first: MixtureSource, other: MixtureSource) -> None:
    if other.folder.manifest.tokenizer != first.folder.manifest.tokenizer:
        raise FolderError(
            other.folder.name,
            f"({other.name}) was made with another tokenizer than {first.folder.name} ({first.name}): "
            "one model reads one vocabulary; prepare both with the same tokenizer",
        )


class Epochs(NamedTuple):
    """One line of the plan: what a phase reads of a source, and which share of its tokens is learned."""

    source: str
    share: float
    tokens: int
    epochs: float | None  # None where it is not known how much there is
    learned: float | None = None  # where the source has masks

    @property
    def shown_epochs(self) -> str:
        """How often it is read, in tables."""
        return "not here" if self.epochs is None else f"{self.epochs:.3g}"

    @property
    def shown_learned(self) -> str:
        """The learned share, in tables."""
        if self.learned is None:
            return "" if self.epochs is None else "all"
        return f"{self.learned:.1%}"


def reading_plan(found: Sequence[MixtureSource], tokens: int) -> list[Epochs]:
    """Of `tokens` training tokens, how many come from each source, and how often that reads it."""
    whole = sum(one.weight for one in found)
    lines = []
    for one in found:
        share, has, learned = one.weight / whole, one.tokens("train"), one.learned("train")
        of_all = None if learned is None else learned / has
        lines.append(Epochs(one.name, share, round(share * tokens), share * tokens / has, of_all))
    return lines


def problems(config: Config) -> list[Problem]:
    """What is wrong with the data of each phase, as far as it can be seen on this machine without reading tokens.

    What a URL holds is looked at when a phase opens it.
    """
    opened: dict[str, TokenFolder] = {}

    def opened_once(path: str) -> TokenFolder:
        if path not in opened:
            opened[path] = TokenFolder.open(Path(path))
        return opened[path]

    found = [p for phase in resolve(config) for p in _phase_problems(phase, opened_once)]
    return list(dict.fromkeys(found))


def _phase_problems(phase: ResolvedPhase, opened: Opened) -> list[Problem]:
    data, key, vocab_size = phase.data, phase.key("data.path"), phase.model.vocab_size
    if data.source == Source.embedded and vocab_size < SMALLEST_VOCABULARY:
        needs = f"data.source=embedded makes a byte-level vocabulary, which needs at least {SMALLEST_VOCABULARY}"
        return [Problem("model.vocab_size", f"is {vocab_size}; {needs}")]
    paths = [entry.path or data.path for entry in data.mixture.values()] or [data.path]
    here = os.path.exists(data.path)  # noqa: PTH110 (a path too long for the system is none)
    if data.source == Source.embedded and not here:
        place = _place_problems(key, data.path, vocab_size)
        return meaning_problems(phase.config, phase.index, data.path) + place + _unmade_problems(phase)
    if any(is_url(path) for path in paths):
        return []
    try:
        found = mixture_of(data, opened)
    except FolderError as error:
        cure = (
            f"delete {data.path}, and it is prepared again; or set another path"
            if data.source == Source.embedded
            else "prepare it with hybridtron data prepare; or, to try some steps on text that Python brings along, "
            "use data=embedded data.epochs=null run.max_steps=10"
        )
        return [Problem(key, f"{error}; {cure}")]
    if data.source == Source.folder and (misplaced := [one for one in found if _is_misplaced(one.folder)]):
        where = misplaced[0].folder.path
        cure = f"move it to {EMBEDDED_PATH.format(vocab_size)}, and prepare the text that this recipe is for"
        return [Problem(key, f"is {where}, which an earlier version filled with Python's own texts; {cure}")]
    return content_problems(key, phase, found)


def _place_problems(key: str, path: str, vocab_size: int) -> list[Problem]:
    """The embedded corpus is not written where recipes look for real text: they would read it without a word."""
    if not _is_recipes_path(path):
        return []
    cure = f"use data=embedded, or {key}={EMBEDDED_PATH.format(vocab_size)}"
    return [Problem(key, f"is {path}, where recipes look for prepared text; Python's own is not written there: {cure}")]


def _is_misplaced(folder: TokenFolder) -> bool:
    return _is_recipes_path(str(folder.path)) and folder.manifest.origin.get("corpus") == Source.embedded.value


def _is_recipes_path(path: str) -> bool:
    return f"{os.path.normpath(path)}/".startswith(tuple(f"{known}/" for known in RECIPES_PATHS))


def _unmade_problems(phase: ResolvedPhase) -> list[Problem]:
    """What an embedded corpus will lack whatever its vocabulary is: a token is a byte of the text at least."""
    data = phase.data
    try:
        tokens = parse_tokens(phase.settings.tokens)
    except ValueError:
        return []  # reported by the phase's own rules
    if data.epochs is None:
        return []
    most = sizes()
    weights: Mapping[str, float] = {name: one.weight for name, one in data.mixture.items()} or most
    if not set(weights) <= set(most):
        return []  # names of the mixture's own, which the folder resolves
    whole = sum(weights.values())
    return _epochs_problems(phase, {name: weights[name] / whole * tokens / most[name] for name in weights}, "null")


def content_problems(key: str, phase: ResolvedPhase, found: Sequence[MixtureSource]) -> list[Problem]:
    """What makes opened sources unfit for the model and the lengths of a phase."""
    folders = {source.folder.name: source.folder for source in found}
    vocabulary = [p for folder in folders.values() for p in _vocabulary_problems(key, phase, folder)]
    vocabulary += meaning_problems(phase.config, phase.index, found[0].folder)
    return vocabulary + _size_problems(key, phase, found) + _amount_problems(phase, found)


def _vocabulary_problems(key: str, phase: ResolvedPhase, folder: TokenFolder) -> list[Problem]:
    """An embedded folder must have been made for this vocabulary size; any other may be smaller than the model's."""
    has, vocab_size = folder.manifest.vocab_size, phase.model.vocab_size
    if phase.data.source == Source.embedded:
        made_for = folder.manifest.origin.get("asked_vocab_size", has)
        if vocab_size in (has, made_for):
            return []
        cure = f"set model.vocab_size={made_for}, or a path where a vocabulary of {vocab_size} can be prepared"
    elif has <= vocab_size:
        return []
    else:
        cure = f"set model.vocab_size={has} or more, or use other tokens"
    return [Problem(key, f"{folder.name} has a vocabulary of {has}, model.vocab_size is {vocab_size}; {cure}")]


def _amount_problems(phase: ResolvedPhase, found: Sequence[MixtureSource]) -> list[Problem]:
    """A phase reads no source more often than data.epochs allows."""
    try:
        tokens = parse_tokens(phase.settings.tokens)
    except ValueError:
        return []  # reported by the phase's own rules
    reads = {one.source: one.epochs or 0.0 for one in reading_plan(found, tokens)}
    return _epochs_problems(phase, reads, str(math.ceil(max(reads.values()))))


def _epochs_problems(phase: ResolvedPhase, reads: Mapping[str, float], enough: str) -> list[Problem]:
    """Of the sources that a phase reads too often, the one that it reads most often."""
    most = phase.data.epochs
    source = max(reads, key=lambda name: reads[name])
    if most is None or reads[source] <= most:
        return []
    key = phase.key("data.epochs")
    cure = f"{key}={enough} allows it, {phase.own_key('tokens')} or more text makes it fewer"
    times = f"{phase.settings.name} reads the source {source} {reads[source]:,.1f} times"
    return [Problem(key, f"allows {most:g}, and {times}: {cure}")]


def _size_problems(key: str, phase: ResolvedPhase, found: Sequence[MixtureSource]) -> list[Problem]:
    seq_len = phase.settings.seq_len
    longest = seq_len * max((1, *phase.config.run.eval_lengths))
    problems = []
    for one in found:
        if one.tokens("train") <= seq_len:
            message = f"has {one.tokens('train')} train tokens, and one row takes {seq_len + 1}"
            problems.append(
                Problem(key, f"{one.folder.name} ({one.name}) {message}; a smaller seq_len or more text works")
            )
    most = max(one.tokens("validation") for one in found)
    if most <= longest:
        message = f"at most {most} validation tokens in a source, and one row takes {longest + 1}"
        problems.append(Problem(key, f"{message}; smaller run.eval_lengths or seq_len or more text works"))
    return problems
