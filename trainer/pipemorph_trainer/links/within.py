"""Links within a rank, between two of its stages. A message is passed on without a copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from pipemorph.planning import Route
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import Batch, Contents, Direction
from pipemorph_trainer.links.peer_socket import PeerSocket, StepToken


def _nobody() -> None:
    """Does nothing: nobody waits for what is held."""


class LocalLane:
    """One direction of a link within a rank: a message arrives when it is sent."""

    receiving = False

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor | None] | None] = {}

    def begin(self, batch: Batch) -> None:
        """Does nothing: no receives are posted."""

    def slot_free_at(self) -> float:
        return 0.0

    def send(self, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        self._held[microbatch] = (
            None if tensors is None else [None if t is None else t.detach() for t in tensors]
        )

    def sent(self, messages: int) -> None:
        """Does nothing: no receives are posted."""

    def ran(self, ops: int) -> None:
        """Does nothing: no receives are posted."""

    def ready_at(self, microbatch: int) -> float | None:
        return 0.0 if microbatch in self._held else None

    def take(self, microbatch: int) -> list[Tensor | None] | None:
        return self._held.pop(microbatch)

    def close(self, *, abandon: bool = False) -> None:
        self._held.clear()


class LocalPeerSocket:
    """Stands for both ends of the control socket of a link within a rank. Tokens and shapes only
    go down, what is held only up, so that one object is enough."""

    lost: str | None = None

    def __init__(self, rank: int) -> None:
        self.peer_rank = rank
        self.shapes: deque[Contents | None] = deque()
        self.tokens: deque[StepToken] = deque()
        self.held: frozenset[int] = frozenset()
        self.on_held: Callable[[], None] = _nobody

    def send_shapes(self, contents: Contents | None) -> None:
        self.shapes.append(contents)

    def send_token(self, token: StepToken) -> None:
        self.tokens.append(token)

    def send_held(self, versions: frozenset[int]) -> None:
        self.held = versions
        self.on_held()

    def pump(self) -> None:
        """Does nothing: there is no connection."""

    def ends_within(self, seconds: float) -> bool:
        return False

    def close(self, *, goodbye: bool) -> None:
        self.shapes.clear()


def join_within(link: int, rank: int) -> tuple[LinkEnd, LinkEnd]:
    """Both ends of a link between two stages of ``rank``: that of the upper part of the model,
    which sends forward, and the other one. Every plan runs over it, whatever its route."""
    control = cast(PeerSocket, LocalPeerSocket(rank))
    forward, backward = LocalLane(), LocalLane()
    sends, receives = (
        LinkEnd(link, way, control) for way in (Direction.BACKWARD, Direction.FORWARD)
    )
    for route in Route:
        sends.add(route, backward, forward)
        receives.add(route, forward, backward)
    sends.select(Route.DIRECT)
    receives.select(Route.DIRECT)
    return sends, receives
