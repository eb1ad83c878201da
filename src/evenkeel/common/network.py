"""This node on the network: its address for the others, and whether node 0 answers.

Torch uses the host name as the address. On many machines that resolves to 127.0.1.1, or only on the machine itself, and
then two nodes on a healthy network never meet. So the address comes from the kernel's routing table.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .display import say
from .errors import Refusal


class Unanswered(Refusal):
    """Node 0 did not answer in time. Who starts nodes again when there is a place for them may try once more."""


class Link(NamedTuple):
    """How the other nodes reach this one."""

    address: str
    interface: str | None = None


def find_link(master: str, port: int, *, is_master: bool) -> Link:
    """The address and interface by which this node sends to ``master``, from the kernel's routes. Sends nothing."""
    try:
        family, _, _, _, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        address = _source_address(family, target)
    except OSError as error:
        raise Refusal(f"--master {master}: cannot be reached from this node: {error.strerror}") from None
    if not is_master:
        return Link(address, _interface(address))
    if is_loopback(address) and not (master == "localhost" or is_loopback(master)):
        # Debian lists a machine's own name as 127.0.1.1. The others see its true address; take the interface of the
        # default route (192.0.2.1 is reserved for documentation).
        with contextlib.suppress(OSError):
            address = _source_address(socket.AF_INET, ("192.0.2.1", 9))
        if is_loopback(address):
            raise Refusal(f"--master {master}: is {address} on this node; give the address that the other nodes see")
    return Link(master, _interface(address))


def meet(master: str, port: int, *, is_master: bool, patience: float) -> None:
    """Wait until node 0 answers, `patience` seconds at most; on node 0, check that the port is free.

    Torch would print a stack trace in either case, on the other nodes after a minute.
    """
    if is_master:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise Refusal(
                    f"--master: port {port} of this node: {error.strerror}; give all nodes another one, HOST:PORT"
                ) from None
    elif reason := why_unreachable(master, port, patience, f"waiting for node 0 at {master} port {port}"):
        raise Unanswered(
            f"--master {master}: nothing answered on port {port} for {patience:.0f} s ({reason}); is node 0 started, "
            "and is this its address?"
        )


class Waiting:
    """Prints on stderr what this process waits for: after 3 seconds, and then every 20 seconds."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + 3

    def say(self, what: Callable[[], str]) -> None:
        """Print the text if it is time; `what` is called only then."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + 20
            say(f"evenkeel: {what()}, for {now - self._start:.0f} s now", to_stderr=True)


def why_unreachable(host: str, port: int, patience: float, what: str) -> str:
    """Wait until something listens on a TCP port; return "", or why nothing did for `patience` seconds.

    Prints `what` is being done on stderr.
    """
    deadline, waiting = time.monotonic() + patience, Waiting()
    while True:
        try:
            with socket.create_connection((host, port), timeout=1.5):
                return ""
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            return reason
        waiting.say(lambda: f"{what} ({reason})")  # noqa: B023
        time.sleep(0.25)


def _source_address(family: int, target: Any) -> str:
    """The address that this node would send from: connecting a UDP socket only looks up the route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address; False for a host name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def interfaces() -> dict[str, str]:
    """This node's interfaces and their IPv4 addresses."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def _interface(address: str) -> str | None:
    return next((name for name, its in interfaces().items() if its == address), None)
