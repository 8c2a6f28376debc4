"""Stands for the process of the live page: reads what an agent sends it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from pipemorph.protocol.page_messages import OpsWanted, PageFeed
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.page_feed import SOCKET_VARIABLE


class PageClient:
    """Connects to an agent's socket once there is one. ``feed``: the messages so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environ = {SOCKET_VARIABLE: str(path), "PIPEMORPH_JOB_FILE": os.devnull}
        """Variables by which agents find it."""
        self._socket: socket.socket | None = None
        self._reader = frames.FrameReader()
        self.feed: list[PageFeed] = []

    def connect(self) -> None:
        def reached() -> bool:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(str(self._path))
            except OSError:
                made.close()
                return False
            made.setblocking(False)
            self._socket = made
            return True

        until(reached, "the agent's socket of the page")

    def want(self, column: int, seconds: float) -> None:
        self._socket.send(frames.encode_frame(OpsWanted(column=column, seconds=seconds)))

    def read(self) -> list[PageFeed]:
        """Feeds that have come since the last call."""
        assert self._socket is not None
        before = len(self.feed)
        with contextlib.suppress(BlockingIOError):
            while data := self._socket.recv(1 << 20):
                self._reader.feed(data)
        while (payload := self._reader.next_frame()) is not None:
            self.feed.append(frames.decode_message(PageFeed, payload))
        return self.feed[before:]

    @property
    def ops(self) -> list[PageFeed]:
        """Feeds with ops, of all that have come."""
        self.read()
        return [each for each in self.feed if each.ops]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


@contextlib.contextmanager
def page_of_agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageClient]:
    """A page for the agents that start meanwhile. Its socket has a short path, as it must."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        page = PageClient(Path(folder) / "agent")
        for name, value in page.environ.items():
            monkeypatch.setenv(name, value)
        try:
            yield page
        finally:
            page.close()
