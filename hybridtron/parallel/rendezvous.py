"""TCP stores through which ranks find each other, on one machine or on several, without torchrun."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.listening import LOCALHOST, listen_at
from hybridtron.problems import ConfigError, Problem

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TOKEN = "HYBRIDTRON_RUN_TOKEN"
"""Environment variable with a random text that all ranks of one start share."""


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


def store_of_start(environment: Mapping[str, str], launch: ProcessLaunch, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, through which the ranks of one start find each other.

    Rank 0 holds the store. If MASTER_ADDR is an IP address, the store listens only on the interface with this address,
    so that machines on other networks cannot reach it. If it is a host name, rank 0 may resolve the name to another
    address than other ranks do, even to a loopback address. So for a name the store listens on all interfaces. If TOKEN
    is set, the ranks' keys begin with its value. A rank of another start has another TOKEN, so it neither
    reads nor changes these keys if it connects by mistake. A client that lists all keys on purpose still sees them.

    Raises ConfigError if MASTER_ADDR is an IP address of another machine, and RuntimeError if the port is taken.
    """
    address = environment["MASTER_ADDR"]
    port = int(environment["MASTER_PORT"])
    if launch.rank == 0:
        with _listening(address, port) as listening:
            descriptor = listening.detach()  # the store closes it
        store = TCPStore(address, port, launch.world_size, True, timeout, master_listen_fd=descriptor)
    else:
        store = TCPStore(address, port, launch.world_size, False, timeout)
    token = environment.get(TOKEN)
    if token is None:
        return store
    return PrefixStore(token, store)


def _listening(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an IP address, or on all interfaces if the address is a name."""
    try:
        return listen_at(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            why = f"is {address}, which is no address of the machine with rank 0"
            cure = "export an address of that machine"
            raise ConfigError([Problem("MASTER_ADDR", "unavailable", f"{why}: {cure}")]) from error
        # no ConfigError: another start, which draws another port, may succeed
        raise RuntimeError(f"rank 0 can't listen at {address}:{port} ({error.strerror}): use another port") from error
