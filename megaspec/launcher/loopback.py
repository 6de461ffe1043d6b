"""Ranks of one machine meet where no other machine reaches them: on its loopback interface.

gloo and NCCL listen on a port of their own in every rank. Left to themselves gloo takes the address that the host's
name resolves to, and NCCL the first network card: ports that the whole network reaches, though all ranks are here.
Torch-free.
"""

import errno
import socket
import sys
from collections.abc import MutableMapping

import psutil

from megaspec.core.errors import RecipeError, printable
from megaspec.launcher.run_secret import is_one_machine

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
_ADDRESS = "127.0.0.1"


def loopback_name() -> str:
    """The interface that has 127.0.0.1: `lo` on Linux. RecipeError: none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and address.address == _ADDRESS:
                return name
    text = f"no network interface has {_ADDRESS}, where the ranks of this machine meet; `ip link set lo up` makes one"
    raise RecipeError(text)


def loopback_variables() -> dict[str, str]:
    """What binds gloo and NCCL to it, whatever else the environment says: it may be meant for jobs on many machines."""
    name = loopback_name()
    # NCCL takes a name as the beginning of names, unless it stands behind an equals sign
    return {GLOO: name, NCCL: f"={name}"}


def bind_to_loopback(environ: MutableMapping[str, str], *, world_size: int) -> None:
    """The same for ranks that somebody else started, if all are on this machine; on several, the environment says
    which interface is meant."""
    if world_size > 1 and is_one_machine(environ, world_size):
        environ.update(loopback_variables())


def listen_at(host: str, port: int) -> int | None:
    """A descriptor of a socket that listens at the address that `host` has, and at no other: torch's store by itself
    listens on every interface. None, and a line that says so: the address is none of this machine's (a balancer's, a
    forwarded port), so the store has to listen on all of them.

    RecipeError: the port is taken, or the name has no address.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise RecipeError(f"MASTER_ADDR={host} has no address: {error.strerror}; name the host of rank 0") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            text = f"MASTER_PORT={port} is taken at {host}; choose another one, or end what listens there"
            raise RecipeError(text) from None
        text = f"megaspec: MASTER_ADDR={host} is no address of this machine: the store listens on all interfaces"
        print(printable(text), file=sys.stderr, flush=True)
        return None
    listening.listen(socket.SOMAXCONN)
    return listening.detach()
