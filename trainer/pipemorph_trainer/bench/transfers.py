"""Both ends of transfers: streaming and ping-pong, over the engine and over gloo.

A message counts as delivered when it is in a tensor of the receiver's own. All tensors are
``uint8`` on the CPU, ``[size]``. Keys are (0, ``run``, message, direction, 0), so ``run`` has to
rise by one with every transfer on a link.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pipemorph_trainer._engine import Link

TIMEOUT = 120.0
FORWARD, BACKWARD = 0, 1


def memory(tensor: torch.Tensor) -> Any:
    """A tensor's bytes, without a copy."""
    return tensor.numpy()


def percentile(samples: Sequence[float], percent: float) -> float:
    """Percentile by nearest rank: the least sample that ``percent`` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


# --- The engine -----------------------------------------------------------------------------------


def engine_send(
    link: Link, run: int, tensors: Sequence[torch.Tensor], count: int, window: int
) -> None:
    """Send ``count`` messages, at most ``window`` of them unacknowledged. With a window of one,
    wait after each message for an empty message from the receiver."""
    tickets: list[int] = []
    for i in range(count):
        if len(tickets) == window:
            link.wait_sent(tickets.pop(0), TIMEOUT)
        tickets.append(link.send((0, run, i, FORWARD, 0), memory(tensors[i % len(tensors)])))
        if window == 1:
            link.receive((0, run, i, BACKWARD, 0), TIMEOUT)
    for ticket in tickets:
        link.wait_sent(ticket, TIMEOUT)


def engine_receive(
    link: Link, run: int, tensors: Sequence[torch.Tensor], count: int, window: int
) -> None:
    """The other end of :func:`engine_send`."""
    for i in range(count):
        message = link.receive((0, run, i, FORWARD, 0), TIMEOUT)
        message.copy_into(memory(tensors[i % len(tensors)]))
        message.release()
        if window == 1:
            link.send((0, run, i, BACKWARD, 0), b"")


def engine_ping(link: Link, run: int, tensor: torch.Tensor, count: int) -> list[float]:
    """Send a message back and forth ``count`` times. Returns half of each round trip, seconds."""
    own = memory(tensor)
    times = []
    for i in range(count):
        began = time.perf_counter()
        link.send((0, run, i, FORWARD, 0), own)
        message = link.receive((0, run, i, BACKWARD, 0), TIMEOUT)
        message.copy_into(own)
        message.release()
        times.append((time.perf_counter() - began) / 2)
    return times


def engine_pong(link: Link, run: int, tensor: torch.Tensor, count: int) -> None:
    """The other end of :func:`engine_ping`."""
    own = memory(tensor)
    for i in range(count):
        message = link.receive((0, run, i, FORWARD, 0), TIMEOUT)
        message.copy_into(own)
        message.release()
        # The engine may read `own` until the peer has acknowledged it. All messages are the same.
        link.send((0, run, i, BACKWARD, 0), own)


# --- gloo -----------------------------------------------------------------------------------------


def gloo_send(tensors: Sequence[torch.Tensor], count: int, window: int, peer: int) -> None:
    """Like :func:`engine_send`, with ``isend``; with a window of one, one byte comes back."""
    token = torch.zeros(1, dtype=torch.uint8)
    work: list[Any] = []
    for i in range(count):
        if len(work) == window:
            work.pop(0).wait()
        work.append(dist.isend(tensors[i % len(tensors)], peer))
        if window == 1:
            dist.recv(token, peer)
    for w in work:
        w.wait()


def gloo_receive(tensors: Sequence[torch.Tensor], count: int, window: int, peer: int) -> None:
    """The other end of :func:`gloo_send`, with ``irecv``."""
    token = torch.zeros(1, dtype=torch.uint8)

    def post(i: int) -> Any:
        return dist.irecv(tensors[i % len(tensors)], peer)

    work = [post(i) for i in range(min(window, count))]
    for i in range(count):
        work.pop(0).wait()
        if i + window < count:
            work.append(post(i + window))
        if window == 1:
            dist.send(token, peer)


def gloo_ping(tensor: torch.Tensor, count: int, peer: int) -> list[float]:
    """Like :func:`engine_ping`."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
        times.append((time.perf_counter() - began) / 2)
    return times


def gloo_pong(tensor: torch.Tensor, count: int, peer: int) -> None:
    """The other end of :func:`gloo_ping`."""
    for _ in range(count):
        dist.recv(tensor, peer)
        dist.send(tensor, peer)
