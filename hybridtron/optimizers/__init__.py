"""The registry of optimizers, by the names that `optim.name` accepts."""

from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import UpdateRule

OPTIMIZERS: dict[str, type[UpdateRule]] = {
    "adamw": AdamW,
}
