"""The sources that a phase reads: those that its mixture names, their folders, and their weights.

Without a mixture a phase reads all sources in `data.path`, weighted by their numbers of tokens. `problems.py` checks
whether they fit the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridtron.config.schema import DataConfig, IngredientConfig
from hybridtron.data.folder import FolderError, TokenFolder

SMALLEST_SHARE = 1e-7  # minimum weight in a mixture: a block of 2 / 1e-7 rows takes 100 MB, and seconds to lay out
Opened = Callable[[str], TokenFolder]


class MixtureSource(NamedTuple):
    """A source in a mixture: its name there, its folder, its name in that folder, and its weight."""

    name: str
    folder: TokenFolder
    source: str
    weight: float

    @property
    def place(self) -> str:
        """The source's folder. If its name there differs, that name is added."""
        return self.folder.name + (f", {self.source}" if self.source != self.name else "")

    def tokens(self, split: str) -> int:
        """Return the number of tokens in a split, 0 if the source is not in it."""
        of_source = self.folder.manifest.splits[split].get(self.source)
        if of_source is None:
            return 0
        return of_source.tokens

    def learned(self, split: str) -> int | None:
        """Return the number of learned tokens in a split; None if it has no masks, so that all tokens are learned."""
        of_source = self.folder.manifest.splits[split].get(self.source)
        if of_source is None:
            return None
        return of_source.learned


def mixture_of(data: DataConfig, opened: Opened) -> list[MixtureSource]:
    """Return the sources that a phase reads; raise FolderError if they don't fit together.

    opened: opens a folder by its path or URL
    """
    if data.mixture:
        mixture = [mixture_source(name, entry, data.path, opened) for name, entry in data.mixture.items()]
    else:
        folder = opened(data.path)
        sources = folder.manifest.splits["train"].items()
        mixture = [MixtureSource(name, folder, name, float(of_source.tokens)) for name, of_source in sources]
    if not mixture:
        raise FolderError(data.path, "has no tokens to train on", code="missing")
    whole = sum(source.weight for source in mixture)
    for source in mixture:
        _check_alike(mixture[0], source)
        if source.weight < SMALLEST_SHARE * whole:
            fault = f"({source.name}) is {source.weight / whole:.1e} of all that is read"
            cure = f"leave it out, or give it a weight in data.mixture of at least {SMALLEST_SHARE:.0e} of all weights"
            raise FolderError(source.folder.name, f"{fault}: {cure}", code="out-of-range")
    return mixture


class NamedSource(NamedTuple):
    """A source as the configuration names it, before its folder is opened. An empty name stands for all sources."""

    name: str
    place: str
    share: float

    def __str__(self) -> str:
        if self.name:
            return f"{self.name} {self.share:.1%} of {self.place}"
        return f"all of {self.place}"


def named_sources(data: DataConfig) -> list[NamedSource]:
    """List the sources that the configuration names, without opening folders."""
    whole = sum(entry.weight for entry in data.mixture.values())
    sources = []
    for name, entry in data.mixture.items():
        if entry.source and entry.source != name:
            suffix = f", {entry.source}"
        else:
            suffix = ""
        sources.append(NamedSource(name, f"{entry.path or data.path}{suffix}", entry.weight / whole))
    return sources or [NamedSource("", data.path, 1.0)]


def mixture_source(name: str, entry: IngredientConfig, default_path: str, opened: Opened) -> MixtureSource:
    """Find a mixture's entry in its folder: by `entry.source`, else by the entry's name, else the only source there.

    Raises FolderError if there is no such source.
    """
    folder = opened(entry.path or default_path)
    sources = folder.manifest.splits["train"]
    source = entry.source or (name if name in sources or len(sources) != 1 else next(iter(sources)))
    if source not in sources:
        names = ", ".join(sources) or "none"
        raise FolderError(
            folder.name,
            f"has no source {source!r} for mixture.{name}; its sources: {names}. Name one as mixture.{name}.source, "
            "or write mixture: null for all of them",
            code="unknown-name",
        )
    return MixtureSource(name, folder, source, entry.weight)


def _check_alike(first: MixtureSource, other: MixtureSource) -> None:
    """Check that two sources have the same tokenizer and the same eos; raise FolderError otherwise."""
    ours = first.folder.manifest
    theirs = other.folder.manifest
    if theirs.tokenizer != ours.tokenizer:
        raise FolderError(
            other.folder.name,
            f"({other.name}) was made with another tokenizer than {first.folder.name} ({first.name}): "
            "one model reads one vocabulary; prepare both with the same tokenizer",
            code="conflict",
        )
    if theirs.eos != ours.eos:
        raise FolderError(
            other.folder.name,
            f"({other.name}) ends documents with token {theirs.eos}, and {first.folder.name} ({first.name}) with token "
            f"{ours.eos}: one model learns one end; prepare both with the same --eos",
            code="conflict",
        )


class Epochs(NamedTuple):
    """A line in the reading plan: how much a phase reads from one source.

    share: fraction of the phase's tokens
    tokens: number of tokens that are read
    """

    source: str
    share: float
    tokens: int
    epochs: float | None  # times that the source is read; None where its size is not known
    learned: float | None = None  # fraction of its tokens that is learned; None without masks
    place: str = ""  # its folder, and its name there where that differs

    @property
    def shown_epochs(self) -> str:
        """The number of epochs, for tables."""
        if self.epochs is None:
            return "not here"
        return f"{self.epochs:.3g}"

    @property
    def shown_learned(self) -> str:
        """The learned fraction, for tables."""
        if self.learned is None:
            if self.epochs is None:
                return ""
            return "all"
        return f"{self.learned:.1%}"


def reading_plan(found: Sequence[MixtureSource], tokens: int) -> list[Epochs]:
    """Divide `tokens` training tokens among the sources by weight, and count each source's epochs."""
    total_weight = sum(source.weight for source in found)
    lines = []
    for source in found:
        share = source.weight / total_weight
        num_tokens = source.tokens("train")
        num_learned = source.learned("train")
        if num_learned is None:
            learned_share = None
        else:
            learned_share = num_learned / num_tokens
        lines.append(
            Epochs(source.name, share, round(share * tokens), share * tokens / num_tokens, learned_share, source.place)
        )
    return lines
