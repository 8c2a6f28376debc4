"""Sending and receiving ends of transfers: streaming and ping-pong, over the engine and gloo.

A message counts as delivered when it is in a tensor of the receiver. All tensors are ``uint8`` on
the CPU, ``[size]``. Keys are (0, ``run``, message, direction, 0), so ``run`` must grow by one with
each transfer on a link.
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


def view_bytes(tensor: torch.Tensor) -> Any:
    """View a tensor's bytes, without a copy."""
    return tensor.numpy()


def compute_percentile(samples: Sequence[float], percent: float) -> float:
    """Compute a percentile: the least sample that ``percent`` of the samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


# --- The engine -----------------------------------------------------------------------------------


def send_over_engine(
    link: Link, run: int, tensors: Sequence[torch.Tensor], count: int, window: int
) -> None:
    """Send ``count`` messages, at most ``window`` of them unacknowledged. With a window of 1, wait
    after each for an empty message from the receiver."""
    tickets: list[int] = []
    for i in range(count):
        if len(tickets) == window:
            link.wait_sent(tickets.pop(0), TIMEOUT)
        tickets.append(link.send((0, run, i, FORWARD, 0), view_bytes(tensors[i % len(tensors)])))
        if window == 1:
            link.receive((0, run, i, BACKWARD, 0), TIMEOUT)
    for ticket in tickets:
        link.wait_sent(ticket, TIMEOUT)


def receive_over_engine(
    link: Link, run: int, tensors: Sequence[torch.Tensor], count: int, window: int
) -> None:
    """Receive the messages of :func:`send_over_engine`."""
    for i in range(count):
        message = link.receive((0, run, i, FORWARD, 0), TIMEOUT)
        message.copy_into(view_bytes(tensors[i % len(tensors)]))
        message.release()
        if window == 1:
            link.send((0, run, i, BACKWARD, 0), b"")


def ping_over_engine(link: Link, run: int, tensor: torch.Tensor, count: int) -> list[float]:
    """Send a message back and forth ``count`` times; return half of each round trip, seconds."""
    own = view_bytes(tensor)
    times = []
    for i in range(count):
        began = time.perf_counter()
        link.send((0, run, i, FORWARD, 0), own)
        message = link.receive((0, run, i, BACKWARD, 0), TIMEOUT)
        message.copy_into(own)
        message.release()
        times.append((time.perf_counter() - began) / 2)
    return times


def pong_over_engine(link: Link, run: int, tensor: torch.Tensor, count: int) -> None:
    """Return the messages of :func:`ping_over_engine`."""
    own = view_bytes(tensor)
    for i in range(count):
        message = link.receive((0, run, i, FORWARD, 0), TIMEOUT)
        message.copy_into(own)
        message.release()
        # The engine may read `own` until the peer has acknowledged it. All messages are the same.
        link.send((0, run, i, BACKWARD, 0), own)


# --- gloo -----------------------------------------------------------------------------------------


def send_over_gloo(tensors: Sequence[torch.Tensor], count: int, window: int, peer: int) -> None:
    """Send as :func:`send_over_engine`, by ``isend``; with a window of 1, a byte comes back."""
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


def receive_over_gloo(tensors: Sequence[torch.Tensor], count: int, window: int, peer: int) -> None:
    """Receive the messages of :func:`send_over_gloo`, by ``irecv``."""
    token = torch.zeros(1, dtype=torch.uint8)

    def post_receive(i: int) -> Any:
        return dist.irecv(tensors[i % len(tensors)], peer)

    work = [post_receive(i) for i in range(min(window, count))]
    for i in range(count):
        work.pop(0).wait()
        if i + window < count:
            work.append(post_receive(i + window))
        if window == 1:
            dist.send(token, peer)


def ping_over_gloo(tensor: torch.Tensor, count: int, peer: int) -> list[float]:
    """Send back and forth as :func:`ping_over_engine`."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
        times.append((time.perf_counter() - began) / 2)
    return times


def pong_over_gloo(tensor: torch.Tensor, count: int, peer: int) -> None:
    """Return the messages of :func:`ping_over_gloo`."""
    for _ in range(count):
        dist.recv(tensor, peer)
        dist.send(tensor, peer)
