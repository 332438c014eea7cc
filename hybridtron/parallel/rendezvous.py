"""Where processes that are started by hand find each other: a store kept by the process that starts them."""

from __future__ import annotations

import socket
import sys

from torch.distributed import TCPStore

HERE = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Rendezvous:
    """One start's store, as torchrun's agent keeps it: the ranks are all its clients.

    It listens on the loopback alone, where no other machine can reach it: a store that opens its socket by itself
    listens everywhere, and answers all who ask. The system picks the port when the socket is bound. A port that is
    picked first and given to rank 0 may be taken by the time rank 0 listens, for instance by a connection of another
    process. It serves one start: the next must not find what ranks have left in it.
    """

    def __init__(self) -> None:
        with socket.create_server((HERE, 0), backlog=socket.SOMAXCONN) as listening:
            port = listening.getsockname()[1]
            descriptor = listening.detach()  # the store closes it
        self._store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its ranks, without RANK and WORLD_SIZE; gloo's sockets are on the loopback too."""
        store = {"MASTER_ADDR": HERE, "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return store | {"GLOO_SOCKET_IFNAME": LOOPBACK}
