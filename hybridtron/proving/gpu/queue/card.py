"""Name for this machine's kind of GPU, as results and rehearsals use it."""

from __future__ import annotations

from hybridtron.device import compute_device, describe_device
from hybridtron.planning.rates import GPUS


def card_here() -> str | None:
    """Return the name of the GPU's kind in `planning/rates`, such as `h100`, or None on a machine without a GPU.

    For a kind that `planning/rates` does not have, return the name that the driver reports.
    """
    if compute_device().type == "cpu":
        return None
    name = describe_device().partition(",")[0]
    return next((kind for kind in GPUS if kind in name.lower()), name)
