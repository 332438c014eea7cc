"""Which kind of GPU this machine has, by the name that results and rehearsals have for it."""

from __future__ import annotations

from hybridtron.device import compute_device, describe_device
from hybridtron.planning.rates import GPUS


def card_here() -> str | None:
    """`h100`, as `planning/rates` names it, or what the driver says of another kind; None without one."""
    if compute_device().type == "cpu":
        return None
    name = describe_device().partition(",")[0]
    return next((kind for kind in GPUS if kind in name.lower()), name)
