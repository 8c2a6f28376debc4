"""Local links, between two stages of one rank. A message is passed on without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from pipemorph.planning import Route
from pipemorph_trainer.transport.control_socket import ControlSocket, StepToken
from pipemorph_trainer.transport.link import LinkEnd
from pipemorph_trainer.transport.message import Direction, MessageBatch, MessageContents


def _ignore_held_versions() -> None:
    """Do nothing, since a local link has no agreement to wake."""


class LocalChannel:
    """Direction of a local link: a message arrives when it is sent."""

    receiving = False

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor | None] | None] = {}

    def begin_batch(self, batch: MessageBatch) -> None:
        """Does nothing: no receives are posted."""

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        self._held[microbatch] = (
            None if tensors is None else [None if t is None else t.detach() for t in tensors]
        )

    def record_sent(self, messages: int) -> None:
        """Does nothing: no receives are posted."""

    def record_ops(self, ops: int) -> None:
        """Does nothing: no receives are posted."""

    def ready_at(self, microbatch: int) -> float | None:
        return 0.0 if microbatch in self._held else None

    def pop_message(self, microbatch: int) -> list[Tensor | None] | None:
        return self._held.pop(microbatch)

    def close(self, *, abandon: bool = False) -> None:
        self._held.clear()


class LocalControlSocket:
    """Control socket of a local link, for both ends. Tokens and shapes only go down, held versions
    only up, so that one object is enough."""

    lost: str | None = None

    def __init__(self, rank: int) -> None:
        self.peer_rank = rank
        self.shapes: deque[MessageContents | None] = deque()
        self.tokens: deque[StepToken] = deque()
        self.held: frozenset[int] = frozenset()
        self.on_held: Callable[[], None] = _ignore_held_versions

    def send_shapes(self, contents: MessageContents | None) -> None:
        self.shapes.append(contents)

    def send_token(self, token: StepToken) -> None:
        self.tokens.append(token)

    def send_held(self, versions: frozenset[int]) -> None:
        self.held = versions
        self.on_held()

    def read_arrived(self) -> None:
        """Does nothing: there is no connection."""

    def wait_for_end(self, seconds: float) -> bool:
        return False

    def close(self, *, goodbye: bool) -> None:
        self.shapes.clear()


def make_local_link(link: int, rank: int) -> tuple[LinkEnd, LinkEnd]:
    """Make both ends of a link between two stages of ``rank``: the lower stage's, which sends
    forward, and the upper stage's. Plans run over it with any route."""
    control = cast(ControlSocket, LocalControlSocket(rank))
    forward, backward = LocalChannel(), LocalChannel()
    sends, receives = (
        LinkEnd(link, way, control) for way in (Direction.BACKWARD, Direction.FORWARD)
    )
    for route in Route:
        sends.add_route(route, backward, forward)
        receives.add_route(route, forward, backward)
    sends.select_route(Route.DIRECT)
    receives.select_route(Route.DIRECT)
    return sends, receives
