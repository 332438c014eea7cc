"""Listening sockets of the ranks' store and of supervisors: on one interface for an IP address, else on all."""

from __future__ import annotations

import ipaddress
import socket

LOCALHOST = "127.0.0.1"


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an IP address, or on all interfaces if the address is a name.

    A name may mean another address on this machine than elsewhere, even one of the loopback interface.
    """
    interface = interface_of(address)
    if interface is None:
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    return socket.create_server((interface, port), family=family, backlog=socket.SOMAXCONN)


def interface_of(address: str) -> str | None:
    """Return the address of the only interface on which to listen; None for all interfaces."""
    if address == "localhost":
        return LOCALHOST
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return None
