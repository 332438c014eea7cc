"""The registry of optimizers: the names that `optim.name` can have."""

from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import UpdateRule

OPTIMIZERS: dict[str, type[UpdateRule]] = {
    "adamw": AdamW,
}
