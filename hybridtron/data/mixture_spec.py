"""What a phase reads: the sources that its mixture names, where they are, and how much of each.

Without a mixture these are all sources of `data.path`, each by its number of tokens. Whether they fit the phase is
asked in `problems.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridtron.config.schema import DataConfig, IngredientConfig
from hybridtron.data.folder import FolderError, TokenFolder

SMALLEST_SHARE = 1e-7  # of a mixture: a block of 2 / 1e-7 rows takes 100 MB and seconds to lay out
Opened = Callable[[str], TokenFolder]


class MixtureSource(NamedTuple):
    """A source in a mixture: its name there, the folder and the name under which that holds it, and its weight."""

    name: str
    folder: TokenFolder
    source: str
    weight: float

    @property
    def place(self) -> str:
        """Its folder, and its name there where that is another."""
        return self.folder.name + (f", {self.source}" if self.source != self.name else "")

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
        mixture = [mixture_source(name, entry, data.path, opened) for name, entry in data.mixture.items()]
    else:
        folder = opened(data.path)
        sources = folder.manifest.splits["train"].items()
        mixture = [MixtureSource(name, folder, name, float(of_source.tokens)) for name, of_source in sources]
    if not mixture:
        raise FolderError(data.path, "has no tokens to train on")
    whole = sum(source.weight for source in mixture)
    for source in mixture:
        _check_alike(mixture[0], source)
        if source.weight < SMALLEST_SHARE * whole:
            few = f"({source.name}) is {source.weight / whole:.1e} of all that is read"
            cure = f"leave it out, or give it a weight in data.mixture of at least {SMALLEST_SHARE:.0e} of all weights"
            raise FolderError(source.folder.name, f"{few}: {cure}")
    return mixture


class NamedSource(NamedTuple):
    """A source as a configuration names it, before its folder is opened; without a mixture, all that there is."""

    name: str
    place: str
    share: float

    def __str__(self) -> str:
        return f"{self.name} {self.share:.1%} of {self.place}" if self.name else f"all of {self.place}"


def named_sources(data: DataConfig) -> list[NamedSource]:
    """The sources that are read, as far as that can be said without opening them."""
    whole = sum(entry.weight for entry in data.mixture.values())
    sources = []
    for name, entry in data.mixture.items():
        inside = f", {entry.source}" if entry.source and entry.source != name else ""
        sources.append(NamedSource(name, f"{entry.path or data.path}{inside}", entry.weight / whole))
    return sources or [NamedSource("", data.path, 1.0)]


def mixture_source(name: str, entry: IngredientConfig, default_path: str, opened: Opened) -> MixtureSource:
    """A source by the name it has in its folder: as the entry says, or the entry's own, or the only one there."""
    folder = opened(entry.path or default_path)
    there = folder.manifest.splits["train"]
    source = entry.source or (name if name in there or len(there) != 1 else next(iter(there)))
    if source not in there:
        has = ", ".join(there) or "none"
        raise FolderError(
            folder.name,
            f"has no source {source!r} for mixture.{name}; its sources: {has}. Name one as mixture.{name}.source, "
            "or write mixture: null for all of them",
        )
    return MixtureSource(name, folder, source, entry.weight)


def _check_alike(first: MixtureSource, other: MixtureSource) -> None:
    """Require that two sources mean the same by a token, and end documents with the same one."""
    ours = first.folder.manifest
    theirs = other.folder.manifest
    if theirs.tokenizer != ours.tokenizer:
        raise FolderError(
            other.folder.name,
            f"({other.name}) was made with another tokenizer than {first.folder.name} ({first.name}): "
            "one model reads one vocabulary; prepare both with the same tokenizer",
        )
    if theirs.eos != ours.eos:
        raise FolderError(
            other.folder.name,
            f"({other.name}) ends documents with token {theirs.eos}, and {first.folder.name} ({first.name}) with token "
            f"{ours.eos}: one model learns one end; prepare both with the same --eos",
        )


class Epochs(NamedTuple):
    """One line of the plan: what a phase reads of a source, and which share of its tokens is learned."""

    source: str
    share: float
    tokens: int
    epochs: float | None  # None where it is not known how much there is
    learned: float | None = None  # where the source has masks
    place: str = ""  # its folder, and its name there where that is another

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
        lines.append(Epochs(one.name, share, round(share * tokens), share * tokens / has, of_all, one.place))
    return lines
