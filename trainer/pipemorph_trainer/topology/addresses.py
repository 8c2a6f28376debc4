"""Addresses of machines, IPv4 or IPv6: a cluster may have either, or both."""

from __future__ import annotations

import socket

from pipemorph_trainer.errors import PipelineError


def own_address(master_addr: str) -> str:
    """The address this machine uses towards rank 0's: IPv4 where both have one, else IPv6.

    Raises :class:`PipelineError` if there is no way to rank 0's machine.
    """
    why = []
    for family, scheme in ((socket.AF_INET, "IPv4"), (socket.AF_INET6, "IPv6")):
        try:
            # The reserved port 9 is never sent to: a datagram socket only looks for the way.
            _, _, _, _, there = socket.getaddrinfo(master_addr, 9, family, socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)
                return str(probe.getsockname()[0])
        except OSError as error:
            why.append(f"{scheme}: {error.strerror}")
    raise PipelineError(
        f"MASTER_ADDR is {master_addr}, which is not to be reached over {', nor over '.join(why)}"
    )


def everywhere(address: str) -> str:
    """What to listen on for all who know this machine by ``address``, or by one of its kind."""
    return "::" if ":" in address else "0.0.0.0"


def in_url(address: str) -> str:
    """``address`` as a URL has it, before a colon and a port."""
    return f"[{address}]" if ":" in address else address
