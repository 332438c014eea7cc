"""What sub-layers beside each other keep together, as they read what one norm has made.

kept once     where several keep it as it is, it counts in the first of them. Under sequence parallelism each gathers it
              for itself and keeps what it has gathered, unless it gathers it again (`parallel.regather`)
in backward   its gradient by one waits for that by the one before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config
from hybridtron.planning.layer_use import LayerUse, normed_values


def with_beside(uses: Sequence[LayerUse], config: Config) -> tuple[LayerUse, ...]:
    """All sub-layers of a model."""
    arch = architecture(config.model)
    adjusted_uses = list[LayerUse]()
    is_kept = False
    for index, (use, spec) in enumerate(zip(uses, arch.specs, strict=True)):
        if spec.beside and is_kept:
            use = replace(use, kept=use.kept - use.read, twice=use.read)
        is_kept = use.read > 0 or (spec.beside and is_kept)
        waits = arch.next_is_beside(index)
        adjusted_uses.append(replace(use, back=use.back + normed_values(config)) if waits else use)
    return tuple(adjusted_uses)
