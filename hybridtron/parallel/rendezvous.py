"""TCP store for ranks that a process on this machine launches itself, without torchrun."""

from __future__ import annotations

import socket
import sys

from torch.distributed import TCPStore

HERE = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Rendezvous:
    """TCP store for one launch, kept by the launching process as torchrun's agent does; all ranks are clients.

    The store listens on the loopback interface only, so that other machines cannot reach it. A store that opens its
    socket itself would listen on all interfaces. The system picks the port when the socket is bound; a port picked
    earlier and passed to rank 0 might be taken before rank 0 listens. Each launch needs its own store, because ranks
    leave keys in it.
    """

    def __init__(self) -> None:
        with socket.create_server((HERE, 0), backlog=socket.SOMAXCONN) as listening:
            port = listening.getsockname()[1]
            descriptor = listening.detach()  # the store closes it
        self._store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for the ranks, except RANK and WORLD_SIZE. They also put gloo's sockets on the
        loopback.
        """
        store = {"MASTER_ADDR": HERE, "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return store | {"GLOO_SOCKET_IFNAME": LOOPBACK}
