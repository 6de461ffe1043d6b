"""Where the ranks of one attempt meet, as plain data. Torch-free; the runtime makes the store."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FileRendezvous:
    """A file on this machine, in a folder that only its user can enter; every attempt has its own."""

    path: str


@dataclass(frozen=True)
class TcpRendezvous:
    """A TCP store whose keys begin with `prefix`, so that an attempt never reads what an earlier one wrote.

    The job's network has to be private: the store asks nobody who they are.
    """

    host: str
    port: int
    prefix: str
    is_open: bool
    """Whoever started the ranks serves the store already; otherwise rank 0 opens it."""


Rendezvous = FileRendezvous | TcpRendezvous
