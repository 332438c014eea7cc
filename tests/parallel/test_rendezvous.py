"""The store of ranks that are started by hand: two of them find each other, and no other address reaches it."""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from hybridtron.parallel.rendezvous import LOOPBACK, Rendezvous


def reaches(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of the machine")
def test_store_listens_on_the_loopback_alone() -> None:
    """Another address of this machine stands for the view of other machines. torch's own socket answers there."""
    open_to_all = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert reaches("127.0.0.2", open_to_all.port)
    kept = Rendezvous()
    port = int(kept.variables["MASTER_PORT"])
    assert reaches("127.0.0.1", port)
    assert not reaches("127.0.0.2", port)


def test_clients_read_values_that_others_wrote() -> None:
    kept = Rendezvous()
    address = kept.variables["MASTER_ADDR"]
    port = int(kept.variables["MASTER_PORT"])
    writer = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))
    reader = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20))
    writer.set("key", "value")
    assert reader.get("key") == b"value"


def test_gloo_uses_the_loopback() -> None:
    assert LOOPBACK in [name for _, name in socket.if_nameindex()]
    assert Rendezvous().variables["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_every_start_has_its_own_store() -> None:
    first = Rendezvous()
    second = Rendezvous()
    assert first.variables["MASTER_PORT"] != second.variables["MASTER_PORT"]
