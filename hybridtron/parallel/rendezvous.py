"""TCP store for ranks that a process on this machine launches itself, without torchrun."""

from __future__ import annotations

import socket
import sys

from torch.distributed import TCPStore

LOCALHOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Rendezvous:
    """TCP store through which the ranks of one launch find each other.

    The launching process hosts the store, and all ranks are clients of the store. The store listens only on the
    loopback interface, so that other machines cannot reach it. Therefore the launching process opens the socket and
    passes it to the store: a socket that the store opens listens on all interfaces. The operating system picks a free
    port when the socket is bound, so no other process can take the port before the store listens. Each launch needs a
    new store, because ranks leave keys in the store.
    """

    def __init__(self) -> None:
        with socket.create_server((LOCALHOST, 0), backlog=socket.SOMAXCONN) as listening:
            port = listening.getsockname()[1]
            descriptor = listening.detach()  # the store closes it
        self._store = TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for all ranks; RANK and WORLD_SIZE must be added for each rank.

        GLOO_SOCKET_IFNAME makes gloo use the loopback interface as well.
        """
        store = {"MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return store | {"GLOO_SOCKET_IFNAME": LOOPBACK}
