"""The store of ranks that are started by hand: two of them find each other, and no other address reaches it."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import Store, TCPStore

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.listening import interface_of
from hybridtron.parallel.rendezvous import LOOPBACK, TOKEN, Rendezvous, store_of_start
from hybridtron.problems import ConfigError


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


WAIT = timedelta(seconds=20)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])


def stores_of_start(place: dict[str, str]) -> list[Store]:
    """Open the store of a start as each of two ranks."""
    with ThreadPoolExecutor(2) as threads:
        ranks = [ProcessLaunch(rank, 2) for rank in range(2)]
        return list(threads.map(lambda launch: store_of_start(place, launch, WAIT), ranks))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address of the machine")
def test_store_of_a_start_listens_on_the_named_address_alone() -> None:
    place = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": free_port()}
    first, second = stores_of_start(place)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert not reaches("127.0.0.1", int(place["MASTER_PORT"]))


def test_keys_belong_to_the_start_with_their_token() -> None:
    """A rank with another token connects, as a rank of another job on a port by mistake, and finds nothing."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), TOKEN: "first"}
    first, second = stores_of_start(place)
    first.set("key", "value")
    assert second.get("key") == b"value"
    stranger = store_of_start({**place, TOKEN: "second"}, ProcessLaunch(1, 2), WAIT)
    assert not stranger.check(["key"])
    stranger.set("key", "other")
    assert second.get("key") == b"value"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        store_of_start({"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "20001"}, ProcessLaunch(0, 2), WAIT)
    assert [problem.key for problem in refused.value.problems] == ["MASTER_ADDR"]


def test_a_taken_port_is_no_fault_of_the_configuration() -> None:
    """A job with a fault of the configuration would not be requeued, but its next attempt draws another port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(RuntimeError, match="use another port"):
            store_of_start(place, ProcessLaunch(0, 2), WAIT)


def test_a_name_is_reached_on_all_interfaces() -> None:
    """A machine may know its own name by an address of the loopback interface, which no other machine reaches."""
    assert interface_of("node01") is None
    assert interface_of("localhost") == "127.0.0.1"
    assert interface_of("10.0.0.7") == "10.0.0.7"
    assert interface_of("fd00::7") == "fd00::7"
