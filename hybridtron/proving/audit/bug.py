"""What a planted bug is, and a kind of which there are many: a mark on a weight that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridtron.engine.stage import mark_for_megatron
from hybridtron.model.lm import LanguageModel

Replaced = dict[str, Any]  # where an attribute stands -> what stands there instead


@dataclass(frozen=True)
class Bug:
    """What goes wrong, what is replaced for it, and where it shows: an architecture and a layout of the table."""

    effect: str
    replaced: Replaced
    architecture: str
    layout: str


def marked(names: str, mark: str, value: bool) -> Replaced:
    """Another mark on the weights that have this in their names, after all have theirs."""

    def set_mark(model: LanguageModel, copied: Mapping[str, bool]) -> None:
        mark_for_megatron(model, copied)
        for name, weight in model.named_parameters():
            if names in name:
                setattr(weight, mark, value)

    return {"hybridtron.engine.stage.mark_for_megatron": set_mark}
