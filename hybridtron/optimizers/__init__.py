"""The registry of optimizers, by the names that `optim.name` accepts."""

from hybridtron.optimizers.adamw import AdamW
from hybridtron.optimizers.base import UpdateRule
from hybridtron.optimizers.muon import Muon

OPTIMIZERS: dict[str, type[UpdateRule]] = {
    "adamw": AdamW,
    "muon": Muon,
}
