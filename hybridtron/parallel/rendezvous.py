"""Where processes that are started by hand find each other: a store kept by the process that starts them."""

from __future__ import annotations

from torch.distributed import TCPStore

HERE = "127.0.0.1"


class Rendezvous:
    """One start's store, as torchrun's agent keeps it: the ranks are all its clients.

    The system picks the port when the store begins to listen. A port that is picked first and given to rank 0 may be
    taken by the time rank 0 listens, for instance by a connection of another process. It serves one start: the next
    must not find what ranks have left in it.
    """

    def __init__(self) -> None:
        self._store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)

    @property
    def variables(self) -> dict[str, str]:
        """What a rank's environment says of it, beside RANK and WORLD_SIZE."""
        return {"MASTER_ADDR": HERE, "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
