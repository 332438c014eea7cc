"""Name of this machine's kind of GPU, as results and rehearsals use it."""

from __future__ import annotations

from hybridtron.device import compute_device, describe_device
from hybridtron.planning.rates import GPUS


def card_here() -> str | None:
    """Return the GPU's kind as `planning/rates` names it (`h100`), else the driver's name, or None without a GPU."""
    if compute_device().type == "cpu":
        return None
    name = describe_device().partition(",")[0]
    return next((kind for kind in GPUS if kind in name.lower()), name)
