"""A planted bug, and a helper for the most common kind: a wrong mark on a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridtron.engine.stage import mark_for_megatron
from hybridtron.model.lm import LanguageModel

Replaced = dict[str, Any]  # dotted path of an attribute -> its replacement


@dataclass(frozen=True)
class Bug:
    """A planted bug: its effect, the replaced attributes, and the architecture and layout that reveal it."""

    effect: str
    replaced: Replaced
    architecture: str
    layout: str


def marked(names: str, mark: str, value: bool) -> Replaced:
    """Set a mark to another value on all weights with `names` in their name, after the marks were set."""

    def set_mark(model: LanguageModel, copied: Mapping[str, bool]) -> None:
        mark_for_megatron(model, copied)
        for name, weight in model.named_parameters():
            if names in name:
                setattr(weight, mark, value)

    return {"hybridtron.engine.stage.mark_for_megatron": set_mark}
