"""The sources that a phase reads, with their folders and weights.

A source is a named part of a folder with prepared tokens. `data.mixture` gives the sources and weights. Without a
mixture, a phase reads all sources in the folder `data.path`, and each source's weight is its token count.
`problems.py` checks whether the sources fit the phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hybridtron.config.schema import DataConfig, IngredientConfig
from hybridtron.data.folder import FolderError, TokenFolder

# Minimum weight in a mixture, as a fraction of the sum of all weights. order/mixture.py computes the sources of up to
# 2 / MIN_SHARE rows at a time, in about 100 MB and some seconds. A smaller minimum would need more memory and time.
MIN_SHARE = 1e-7
Opened = Callable[[str], TokenFolder]


class MixtureSource(NamedTuple):
    """A source in a mixture.

    name: its name in the mixture
    source: its name in the folder
    """

    name: str
    folder: TokenFolder
    source: str
    weight: float

    @property
    def place(self) -> str:
        """The folder's name, for tables. The source's name in the folder is added if it differs from `name`."""
        return self.folder.name + (f", {self.source}" if self.source != self.name else "")

    def tokens(self, split: str) -> int:
        """Count the source's tokens in a split; 0 if the split does not contain the source."""
        of_source = self.folder.manifest.splits[split].get(self.source)
        if of_source is None:
            return 0
        return of_source.tokens

    def learned(self, split: str) -> int | None:
        """Return the number of the source's tokens in a split that count in the loss as labels.

        The result is None if there are no masks, so that all tokens count, or if the split does not contain the source.
        """
        of_source = self.folder.manifest.splits[split].get(self.source)
        if of_source is None:
            return None
        return of_source.learned


def mixture_of(data: DataConfig, opened: Opened) -> list[MixtureSource]:
    """Return the sources that a phase reads.

    opened: opens a folder by its path or URL

    Raises FolderError if sources differ in tokenizer or eos, if a weight is below MIN_SHARE, or if there is no source.
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
        if source.weight < MIN_SHARE * whole:
            fault = f"({source.name}) has {source.weight / whole:.1e} of the sum of all weights"
            cure = f"leave it out of data.mixture, or give it a weight of at least {MIN_SHARE:.0e} of the sum"
            raise FolderError(source.folder.name, f"{fault}: {cure}", code="out-of-range")
    return mixture


class NamedSource(NamedTuple):
    """A source as the configuration names it, before its folder is opened.

    name: its name in the mixture; empty for all sources of the folder
    place: its folder, followed by its name in the folder if this name differs from `name`
    share: fraction of the phase's tokens that are read from this source
    """

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
    """Return the source for a mixture's entry.

    Its name in the folder is `entry.source` if that is set. Otherwise it is `name`, or the name of the folder's only
    source. Raises FolderError if the folder has no source with this name.
    """
    folder = opened(entry.path or default_path)
    sources = folder.manifest.splits["train"]
    source = entry.source or (name if name in sources or len(sources) != 1 else next(iter(sources)))
    if source not in sources:
        names = ", ".join(sources) or "none"
        raise FolderError(
            folder.name,
            f"has no source {source!r} for mixture.{name}; its sources: {names}. Set mixture.{name}.source to one of "
            "these sources, or set mixture: null to read all sources",
            code="unknown-name",
        )
    return MixtureSource(name, folder, source, entry.weight)


def _check_alike(first: MixtureSource, other: MixtureSource) -> None:
    """Raise FolderError if two sources differ in tokenizer or eos token."""
    manifest = first.folder.manifest
    compared = other.folder.manifest
    if compared.tokenizer != manifest.tokenizer:
        raise FolderError(
            other.folder.name,
            f"({other.name}) was prepared with another tokenizer than {first.folder.name} ({first.name}), but a model "
            "has one vocabulary; prepare both folders with the same tokenizer",
            code="conflict",
        )
    if compared.eos != manifest.eos:
        raise FolderError(
            other.folder.name,
            f"({other.name}) ends documents with token {compared.eos}, but {first.folder.name} ({first.name}) with "
            f"token {manifest.eos}; prepare both folders with the same --eos",
            code="conflict",
        )


class Epochs(NamedTuple):
    """A line in the reading plan: how much a phase reads from one source.

    source: its name in the mixture
    share: fraction of the phase's tokens that are read from this source
    tokens: how many tokens are read from this source
    epochs: how many times the source is read; None if its size is not known
    learned: fraction of its tokens that count in the loss as labels; None if it has no masks, or if it was not opened
    place: its folder, followed by its name in the folder if this name differs from `source`
    """

    source: str
    share: float
    tokens: int
    epochs: float | None
    learned: float | None = None
    place: str = ""

    @property
    def shown_epochs(self) -> str:
        """The number of epochs, as text for tables."""
        if self.epochs is None:
            return "not here"
        return f"{self.epochs:.3g}"

    @property
    def shown_learned(self) -> str:
        """The fraction `learned`, as text for tables."""
        if self.learned is None:
            if self.epochs is None:
                return ""
            return "all"
        return f"{self.learned:.1%}"


def reading_plan(sources: Sequence[MixtureSource], tokens: int) -> list[Epochs]:
    """Divide `tokens` training tokens among the sources by weight, and count each source's epochs."""
    total_weight = sum(source.weight for source in sources)
    lines = []
    for source in sources:
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
