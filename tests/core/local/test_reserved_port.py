"""The port that `pipemorph run` keeps for rank 0's store."""

from __future__ import annotations

import socket

import pytest

from pipemorph.local.run import _reserve_port


def test_it_is_reserved_at_every_address_and_given_to_the_store() -> None:
    with _reserve_port() as holder:
        port = holder.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.2", port))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()
