"""Contenders of ``engine.py``: two processes, and the transfers of each in a round."""

from __future__ import annotations

import argparse
import os
import select
import socket
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipemorph_trainer._engine import Engine, Link
from pipemorph_trainer.bench import transfers
from pipemorph_trainer.transport.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.transport.fault_injection import LinkFaults
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock
from pipemorph_trainer.transport.message import Direction, MessageBatch, TensorMeta

TIMEOUT = 120.0
LATENCY_BYTES = 4096
SOCKETS = 4
Times = dict[str, list[float]]
RAW = ("raw TCP", "raw Unix socket")
KEYED = ("tcp mac", "tcp aead", "shm mac")
"""Transports and the integrity of their payloads. In shared memory, aead is the same as mac."""


def raw_unix(pid: int) -> str:
    """Name of an abstract Unix socket, which has no file."""
    return f"\0pipemorph-benchmark-{pid}"


class EngineSide:
    """State of one of the two processes: links, process group, tensors."""

    def __init__(self, rank: int, options: argparse.Namespace, ports: Any) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.count: int = options.messages
        self.window: int = options.window
        self.pings: int = options.pings
        self.tensors = [
            torch.full((options.size,), i, dtype=torch.uint8) for i in range(options.window)
        ]
        self.engines = {
            name: Engine(
                job="benchmark",
                rank=rank,
                secret=b"s",
                host="127.0.0.1",
                transport=name.partition(" ")[0],
                integrity=name.partition(" ")[2] or "crc",
                sockets=SOCKETS,
            )
            for name in ("tcp", "shm", *KEYED)
        }
        listeners: dict[str, socket.socket] = {}
        if rank == 1:
            listeners["raw TCP"] = socket.create_server(("127.0.0.1", 0))
            listeners["raw Unix socket"] = socket.socket(socket.AF_UNIX)
            listeners["raw Unix socket"].bind(raw_unix(os.getpid()))
            listeners["raw Unix socket"].listen()
        own = {name: e.port for name, e in self.engines.items()}
        if rank == 1:
            own["raw TCP"] = listeners["raw TCP"].getsockname()[1]
            own["raw Unix socket"] = os.getpid()
        theirs = ports(own)
        self.raw: dict[str, socket.socket] = {}
        for name in RAW:
            if rank == 1:
                with listeners[name] as listener:
                    self.raw[name] = listener.accept()[0]
            elif name == "raw TCP":
                self.raw[name] = socket.create_connection(("127.0.0.1", theirs[name]))
            else:
                self.raw[name] = socket.socket(socket.AF_UNIX)
                self.raw[name].connect(raw_unix(theirs[name]))
        self.raw["raw TCP"].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links: dict[str, Link] = {}
        for name, engine in self.engines.items():
            if rank == 0:
                self.links[name] = engine.connect(
                    peer_rank=1, link_id=0, host="127.0.0.1", port=theirs[name], timeout=TIMEOUT
                )
            else:
                self.links[name] = engine.accept(peer_rank=0, link_id=0, timeout=TIMEOUT)
                self.links[name].reserve(0, options.window, options.size)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{options.store_port}", rank=rank, world_size=2
        )
        self.small = torch.zeros(LATENCY_BYTES, dtype=torch.uint8)
        if rank == 0:
            for link in self.links.values():
                link.reserve(transfers.BACKWARD, options.window, LATENCY_BYTES)
        self.round = 0
        meta = TensorMeta((options.size,), torch.uint8)
        self.batch = MessageBatch(0, 0, options.messages, (meta,))
        self.outgoing: dict[str, DelegatedOutgoing] = {}
        self.incoming: dict[str, DelegatedIncoming] = {}
        for name, link in self.links.items():
            if rank == 0:
                self.outgoing[name] = DelegatedOutgoing(
                    link=link,
                    direction=Direction.FORWARD,
                    hold=LinkFaults([], Direction.FORWARD).hold_message,
                    queues=8,
                    on_block=lambda iteration, microbatch: None,
                    on_unblock=lambda: None,
                )
            else:
                self.incoming[name] = DelegatedIncoming(
                    link=link,
                    direction=Direction.FORWARD,
                    peer_clock=PeerClock(),
                    recorder=LinkRecorder(0, 0, Direction.FORWARD),
                )
                self.incoming[name].reserve_slots(max(1, options.window - 1), self.batch, 1)

    def read_copied_bytes(self) -> int:
        """Bytes that this process's engine has copied over shared memory."""
        stats = self.links["shm"].stats()
        return stats.bytes_copied_out + stats.bytes_copied_in

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        for raw in self.raw.values():
            raw.close()
        dist.destroy_process_group()

    def copy_messages(self, sources: list[torch.Tensor]) -> None:
        for i in range(self.count):
            np.copyto(self.tensors[i % self.window].numpy(), sources[i % self.window].numpy())


# Transport, True for one message at a time, and the way of delivery.
CONTENDERS: dict[str, tuple[str, bool, str]] = {
    "gloo": ("gloo", False, ""),
    "tcp": ("tcp", False, "trainer"),
    "tcp, copied": ("tcp", False, "copied"),
    "tcp, mac": ("tcp mac", False, "trainer"),
    "tcp, aead": ("tcp aead", False, "trainer"),
    "shm": ("shm", False, "trainer"),
    "shm, copied": ("shm", False, "copied"),
    "shm, mac": ("shm mac", False, "trainer"),
    "gloo, one at a time": ("gloo", True, ""),
    "tcp, one at a time": ("tcp", True, "trainer"),
    "shm, one at a time": ("shm", True, "trainer"),
}


LATENCIES = ("gloo", "tcp", "shm", "tcp, polled", "shm, polled", *RAW)
PING = "ping "
HANDOVERS = ("copied", "leased", "trainer")
HAND = "hand over "


def play_transfers(side: EngineSide, contender: str) -> None:
    kind, single, way = CONTENDERS[contender]
    window = 1 if single else side.window
    side.round += 1
    if kind == "gloo":
        act = transfers.send_over_gloo if side.rank == 0 else transfers.receive_over_gloo
        act(side.tensors, side.count, window, 1 - side.rank)
        return
    link = side.links[kind]
    if way == "trainer":
        play_by_trainer(side, kind, single=single)
    elif side.rank == 0:
        transfers.send_over_engine(link, side.round, side.tensors, side.count, window)
    else:
        transfers.receive_over_engine(link, side.round, side.tensors, side.count, window)


def play_by_trainer(side: EngineSide, kind: str, *, single: bool) -> Times:
    """Transfer messages between the trainer's own ends of a link; the receiver reads them in their
    slots. Sends do not wait; slots limit the messages in flight. Returns the seconds from each
    hand-over to the first read."""
    link, bell = side.links[kind], side.engines[kind].notifier_fd
    batch = replace(side.batch, iteration=side.round)
    times: list[float] = []
    (side.outgoing if side.rank == 0 else side.incoming)[kind].begin_batch(batch)
    for i in range(side.count):
        back = (0, side.round, i, transfers.BACKWARD, 0)
        if side.rank == 0:
            tensor = side.tensors[i % side.window]
            tensor[-1] = i % side.window
            side.outgoing[kind].send(i, [tensor])
            if single or i == side.count - 1:
                link.receive(back, TIMEOUT)
            continue
        incoming, deadline = side.incoming[kind], time.monotonic() + TIMEOUT
        while incoming.ready_at(i) is None:
            if not select.select([bell], [], [], deadline - time.monotonic())[0]:
                raise RuntimeError(f"message {i} did not arrive within {TIMEOUT:g} s")
            os.read(bell, 8)
        given_at = incoming._notes[i].posted_at
        tensors = incoming.pop_message(i)
        assert tensors is not None and tensors[0] is not None
        read = int(tensors[0][-1])
        times.append(time.time() - given_at)
        if read != i % side.window:
            raise RuntimeError(f"message {i} ends with {read}, not {i % side.window}")
        del tensors  # its slot is granted again
        if single or i == side.count - 1:
            link.send(back, b"")
    return {"trainer": times}


def ping_engine(side: EngineSide, contender: str) -> list[float]:
    """Measure one-way seconds of 4 KiB messages (half a round trip); empty at the responder."""
    side.round += 1
    kind, polled = contender.split(",", maxsplit=1)[0], "polled" in contender
    if kind == "gloo":
        if side.rank == 0:
            return transfers.ping_over_gloo(side.small, side.pings, 1)
        transfers.pong_over_gloo(side.small, side.pings, 0)
    elif kind in RAW:
        return ping_raw(side.raw[kind], side.pings, first=side.rank == 0)
    elif polled:
        return ping_polled(side.links[kind], side.round, side.small, side.pings, side.rank)
    elif side.rank == 0:
        return transfers.ping_over_engine(side.links[kind], side.round, side.small, side.pings)
    else:
        transfers.pong_over_engine(side.links[kind], side.round, side.small, side.pings)
    return []


def ping_raw(peer: socket.socket, count: int, *, first: bool) -> list[float]:
    """Variant of ``transfers.ping_over_engine`` and ``pong_over_engine`` over a socket."""
    own = memoryview(bytearray(LATENCY_BYTES))
    peer.settimeout(None)

    def receive() -> None:
        if peer.recv_into(own, LATENCY_BYTES, socket.MSG_WAITALL) != LATENCY_BYTES:
            raise RuntimeError("the other process closed its socket")

    times = []
    for _ in range(count):
        began = time.perf_counter()
        if first:
            peer.sendall(own)
            receive()
            times.append((time.perf_counter() - began) / 2)
        else:
            receive()
            peer.sendall(own)
    return times


def ping_polled(
    link: Link, run: int, tensor: torch.Tensor, count: int, direction: int
) -> list[float]:
    """Variant of ``transfers.ping_over_engine`` and ``pong_over_engine`` without sleep."""
    own = transfers.view_bytes(tensor)
    times = []
    for i in range(count):
        began = time.perf_counter()
        if direction == transfers.FORWARD:
            link.send((0, run, i, direction, 0), own)
        while (message := link.try_receive((0, run, i, 1 - direction, 0))) is None:
            if time.perf_counter() - began > TIMEOUT:
                raise RuntimeError(f"4 KiB message {i} did not arrive within {TIMEOUT:g} s")
            os.sched_yield()
        message.copy_into(own)
        message.release()
        if direction == transfers.BACKWARD:
            link.send((0, run, i, direction, 0), own)
        times.append((time.perf_counter() - began) / 2)
    return times


def measure_hand_over(side: EngineSide, way: str) -> Times:
    """Measure seconds from the producer's last write of a message to the consumer's first read,
    over shared memory, one message at a time; empty at the producer."""
    side.round += 1
    if way == "trainer":
        return play_by_trainer(side, "shm", single=True)
    link = side.links["shm"]
    delays: list[float] = []
    for i in range(side.count):
        tensor = transfers.view_bytes(side.tensors[i % side.window])
        there = (0, side.round, i, transfers.FORWARD, 0)
        back = (0, side.round, i, transfers.BACKWARD, 0)
        if side.rank == 0:
            if way == "leased":
                lease = link.lease(there, tensor.nbytes)
                if lease is None:
                    raise RuntimeError(f"message {i}: no slot is free for a lease")
                np.frombuffer(memoryview(lease), np.uint8)[-1] = i % side.window
                ticket = lease.send()
            else:
                tensor[-1] = i % side.window
                ticket = link.send(there, tensor)
            link.receive(back, TIMEOUT)
            link.wait_sent(ticket, TIMEOUT)
            continue
        message = link.receive(there, TIMEOUT)
        if way == "copied":
            message.copy_into(tensor)
        read = int((message.view() if way == "leased" else tensor)[-1])
        delays.append(time.time() - message.posted_at)
        if read != i % side.window:
            raise RuntimeError(f"message {i} ends with {read}, not {i % side.window}")
        message.release()
        link.send(back, b"")
    return {way: delays}


def run_sender(connection: Connection, options: argparse.Namespace) -> None:
    def send_ports(own: dict[str, int]) -> Any:
        connection.send(own)
        return connection.recv()

    side = EngineSide(0, options, send_ports)
    while (contender := connection.recv()) is not None:
        start = time.process_time()
        if contender.startswith(PING):
            connection.send(ping_engine(side, contender.removeprefix(PING)))
            continue
        if contender.startswith(HAND):
            before = side.read_copied_bytes()
            measure_hand_over(side, contender.removeprefix(HAND))
            connection.send((time.process_time() - start, side.read_copied_bytes() - before))
            continue
        play_transfers(side, contender)
        connection.send(time.process_time() - start)
    side.close()
