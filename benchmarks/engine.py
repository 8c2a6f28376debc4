"""The transfer engine against iperf3, gloo and memcpy: 16 MB messages between two processes.

    python benchmarks/engine.py [--size 16777216] [--messages 12] [--window 4] [--rounds 21]
                                [--pings 1000] [--json FILE] [--check]

What is counted. The bytes of the payloads, over the time from the moment the receiver says "go"
until the last message is delivered to it. *Delivered* means: in a torch tensor of the user's own.
The engine is received from as the trainer does on a CPU: into a slot, and with `copy_into` from
there into the tensor. gloo names that tensor ahead (`irecv`), and so do the rows called "posted"
(`post_receive`, which the trainer does not use); the rows called "view" stop at a zero-copy view of
the slot, from where a stage on a GPU copies to its device. The sender's tensors are the user's as
well: nobody gets to place or register them. Every payload byte over TCP carries a CRC32C, checked
on arrival; gloo has none. Rows called "mac" have a MAC in its place (AES-256-GCM), also in shared
memory, and "aead" is encrypted by it as well.

Streaming keeps up to `window` messages under way, on both sides and for every contender alike
(isend/irecv for gloo, slots for the engine). One at a time sends the next message when the
receiver has said (by an empty message; gloo: one byte) that it has the one before.

Latency is half of a round trip of 4 KiB messages, each in a tensor of the user's own when it
counts as here. Both ends sleep until a message is there, as the trainer does; "polled" asks for it
again and again instead, and yields the processor in between. "raw" is the least that two such
processes need: one blocking socket, from Python, without keys, acknowledgements or checksums.
"× raw" divides by it, for shared memory by the Unix socket. iperf3 sends for a second over as many
TCP streams as the engine has, and over one, since within a host the engine keeps the others in
reserve; it has no messages, no checksums, and nobody looks at what it received.

Handing over is one message at a time in shared memory, from the producer's last write to the
consumer's first read. "copied": from a tensor of the producer's into one of the consumer's.
"leased": the producer has written into memory that it asked the engine for (`lease`), and the
consumer reads there (`view`). Its CPU is what both processes take from then until the producer
knows that it has been read; to fill the memory costs the same in both. "trainer": through the
trainer's own ends of a delegated link on the CPU, which lease a slot, stage the tensor in it and
let the op read it there; from the last write of the staging copy on, and, in the row after it, from
the last write to the tensor on. Its CPU has the staging copy, which on a device costs none. "engine
copies" is how often the engine has moved each byte, by its own counters.

memcpy is one thread in one process copying as many bytes between as many tensors. Contenders
take turns in every round; a row is the median over the rounds, and a ratio the median of the
ratios within a round, so that a machine that gets slower in between slows both sides. "CPU" is
the processor time of both processes together: the figure to compare on a machine that has other
work to do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import engine_iperf
import numpy as np
import torch
import torch.distributed as dist

from pipemorph_trainer._engine import Engine, Link
from pipemorph_trainer.bench import transfers
from pipemorph_trainer.links.channels.arrival import PeerClock
from pipemorph_trainer.links.channels.delegated import DelegatedIncoming, DelegatedOutgoing
from pipemorph_trainer.links.faults import LinkFaults
from pipemorph_trainer.links.message import Batch, Direction, TensorMeta
from pipemorph_trainer.links.recorder import LinkRecorder

TIMEOUT = 120.0
LATENCY_BYTES = 4096
SOCKETS = 4
Times = dict[str, list[float]]
IPERF = {f"iperf3, {SOCKETS} streams": SOCKETS, "iperf3, 1 stream": 1}
THRESHOLDS = (
    *(("tcp", name, 0.95) for name in IPERF),
    ("tcp", "gloo", 1.3),
    ("shm", "gloo", 2.0),
    ("shm", "memcpy", 0.8),
)


HAND_OVER = 3.0
"""How many times as long as by the trainer's ends of a link it takes to hand a message over that is
copied at both ends."""
RAW = ("raw TCP", "raw Unix socket")
KEYED = ("tcp mac", "tcp aead", "shm mac")
"""Transports, and what proves their payloads. In shared memory, aead is the same as mac."""


def raw_unix(pid: int) -> str:
    """A name without a file."""
    return f"\0pipemorph-benchmark-{pid}"


class WatchedIncoming(DelegatedIncoming):
    """Also tells when the message that was taken last was given to the engine, and when the channel
    was given its tensor."""

    handed_at = given_at = 0.0

    def take(self, microbatch: int) -> list[torch.Tensor | None] | None:
        self.handed_at = self._here[microbatch][0].posted_at
        self.given_at = self._notes[microbatch].posted_at
        return super().take(microbatch)


class Side:
    """What both processes know: links, process group, tensors."""

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
            "gloo",
            init_method=f"tcp://127.0.0.1:{options.store_port}",
            rank=rank,
            world_size=2,
        )
        self.small = torch.zeros(LATENCY_BYTES, dtype=torch.uint8)
        if rank == 0:
            for link in self.links.values():
                link.reserve(transfers.BACKWARD, options.window, LATENCY_BYTES)
        self.round = 0
        meta = TensorMeta((options.size,), torch.uint8)
        self.batch = Batch(0, 0, options.messages, (meta,))
        link = self.links["shm"]
        if rank == 0:
            self.outgoing = DelegatedOutgoing(
                link=link,
                direction=Direction.FORWARD,
                hold=LinkFaults([], Direction.FORWARD).hold,
                queues=8,
                on_block=lambda iteration, microbatch: None,
                on_unblock=lambda: None,
            )
        else:
            self.incoming = WatchedIncoming(
                link=link,
                direction=Direction.FORWARD,
                peer_clock=PeerClock(),
                recorder=LinkRecorder(0, 0, Direction.FORWARD),
            )
            self.incoming.reserve(options.window, self.batch, 1)

    def copied(self) -> int:
        """Bytes that the engine has moved from memory to memory over shared memory, here."""
        stats = self.links["shm"].stats()
        return stats.bytes_copied_out + stats.bytes_copied_in

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        for raw in self.raw.values():
            raw.close()
        dist.destroy_process_group()

    # --- memcpy ---

    def memcpy(self, sources: list[torch.Tensor]) -> None:
        for i in range(self.count):
            np.copyto(self.tensors[i % self.window].numpy(), sources[i % self.window].numpy())


# Which transport, whether one at a time, and how a message is delivered.
CONTENDERS: dict[str, tuple[str, bool, Any]] = {
    "gloo": ("gloo", False, ""),
    "tcp": ("tcp", False, "copied"),
    "tcp, posted": ("tcp", False, "posted"),
    "tcp, view": ("tcp", False, "view"),
    "tcp, mac": ("tcp mac", False, "copied"),
    "tcp, aead": ("tcp aead", False, "copied"),
    "shm": ("shm", False, "copied"),
    "shm, posted": ("shm", False, "posted"),
    "shm, view": ("shm", False, "view"),
    "shm, mac": ("shm mac", False, "copied"),
    "gloo, one at a time": ("gloo", True, ""),
    "tcp, one at a time": ("tcp", True, "copied"),
    "shm, one at a time": ("shm", True, "copied"),
}


LATENCIES = ("gloo", "tcp", "shm", "tcp, polled", "shm, polled", *RAW)
RAW_OF = {"tcp": "raw TCP", "shm": "raw Unix socket"}
PING = "ping "
HANDOVERS = ("copied", "leased", "trainer")
FROM_TENSOR = "trainer, from its tensor on"
HAND = "hand over "


def play(side: Side, contender: str) -> None:
    kind, single, way = CONTENDERS[contender]
    window = 1 if single else side.window
    side.round += 1
    if kind == "gloo":
        act = transfers.gloo_send if side.rank == 0 else transfers.gloo_receive
        act(side.tensors, side.count, window, 1 - side.rank)
        return
    link = side.links[kind]
    if side.rank == 0:
        transfers.engine_send(link, side.round, side.tensors, side.count, window)
        return
    if way == "copied":
        transfers.engine_receive(link, side.round, side.tensors, side.count, window)
    else:
        receive_in_place(link, side.round, side.tensors, side.count, posted=way == "posted")


def receive_in_place(
    link: Link, run: int, tensors: list[torch.Tensor], count: int, *, posted: bool
) -> None:
    """The other end of ``transfers.engine_send``, without a copy by the receiver: ``posted``
    messages go straight into the tensor that was named ahead, others are left in their slot."""
    ahead = iter(range(count))

    def post() -> None:
        i = next(ahead, None)
        if posted and i is not None:
            into = transfers.memory(tensors[i % len(tensors)])
            link.post_receive((0, run, i, transfers.FORWARD, 0), into)

    for _ in tensors:
        post()
    for i in range(count):
        message = link.receive((0, run, i, transfers.FORWARD, 0), TIMEOUT)
        if len(message.view()) != message.nbytes:
            raise RuntimeError(f"message {i} shows {len(message.view())} of {message.nbytes} bytes")
        message.release()
        post()


def ping(side: Side, contender: str) -> list[float]:
    """One-way seconds of 4 KiB messages, half of each round trip; empty at the answering end."""
    side.round += 1
    kind, polled = contender.split(",", maxsplit=1)[0], "polled" in contender
    if kind == "gloo":
        if side.rank == 0:
            return transfers.gloo_ping(side.small, side.pings, 1)
        transfers.gloo_pong(side.small, side.pings, 0)
    elif kind in RAW:
        return ping_raw(side.raw[kind], side.pings, first=side.rank == 0)
    elif polled:
        return ping_polled(side.links[kind], side.round, side.small, side.pings, side.rank)
    elif side.rank == 0:
        return transfers.engine_ping(side.links[kind], side.round, side.small, side.pings)
    else:
        transfers.engine_pong(side.links[kind], side.round, side.small, side.pings)
    return []


def ping_raw(peer: socket.socket, count: int, *, first: bool) -> list[float]:
    """Like ``transfers.engine_ping`` and ``engine_pong``, over one blocking socket."""
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
    """Like ``transfers.engine_ping`` and ``engine_pong``, but neither end sleeps."""
    own = transfers.memory(tensor)
    times = []
    for i in range(count):
        began = time.perf_counter()
        if direction == transfers.FORWARD:
            link.send((0, run, i, direction, 0), own)
        while (message := link.try_receive((0, run, i, 1 - direction, 0))) is None:
            if time.perf_counter() - began > TIMEOUT:
                raise RuntimeError(f"4 KiB message {i} did not come within {TIMEOUT:g} s")
            os.sched_yield()
        message.copy_into(own)
        message.release()
        if direction == transfers.BACKWARD:
            link.send((0, run, i, direction, 0), own)
        times.append((time.perf_counter() - began) / 2)
    return times


def hand_over_by_trainer(side: Side) -> Times:
    """:func:`hand_over` by the trainer's own ends of a link."""
    side.round += 1
    link, bell = side.links["shm"], side.engines["shm"].bell_fd
    batch = replace(side.batch, iteration=side.round)
    times: Times = {"trainer": [], FROM_TENSOR: []}
    if side.rank == 0:
        side.outgoing.begin(batch)
    else:
        side.incoming.begin(batch)
    for i in range(side.count):
        back = (0, side.round, i, transfers.BACKWARD, 0)
        if side.rank == 0:
            tensor = side.tensors[i % side.window]
            tensor[-1] = i % side.window
            side.outgoing.send(i, [tensor])
            link.receive(back, TIMEOUT)
            continue
        deadline = time.monotonic() + TIMEOUT
        while side.incoming.ready_at(i) is None:
            if not select.select([bell], [], [], deadline - time.monotonic())[0]:
                raise RuntimeError(f"message {i} did not come within {TIMEOUT:g} s")
            os.read(bell, 8)
        tensors = side.incoming.take(i)
        assert tensors is not None and tensors[0] is not None
        read = int(tensors[0][-1])
        now = time.time()
        times["trainer"].append(now - side.incoming.handed_at)
        times[FROM_TENSOR].append(now - side.incoming.given_at)
        if read != i % side.window:
            raise RuntimeError(f"message {i} ends with {read}, not {i % side.window}")
        del tensors  # its slot is granted again
        link.send(back, b"")
    return times


def hand_over(side: Side, way: str) -> Times:
    """Seconds from the producer's last write of a message to the consumer's first read of it, over
    shared memory, one message at a time; nothing at the producer."""
    if way == "trainer":
        return hand_over_by_trainer(side)
    side.round += 1
    link = side.links["shm"]
    delays: list[float] = []
    for i in range(side.count):
        tensor = transfers.memory(side.tensors[i % side.window])
        there = (0, side.round, i, transfers.FORWARD, 0)
        back = (0, side.round, i, transfers.BACKWARD, 0)
        if side.rank == 0:
            if way == "leased":
                lease = link.lease(there, tensor.nbytes)
                if not lease.in_place and side.window > 1:  # a single slot is never leased
                    raise RuntimeError(f"message {i} is not written where it is read")
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


def sender(connection: Connection, options: argparse.Namespace) -> None:
    def ports(own: dict[str, int]) -> Any:
        connection.send(own)
        return connection.recv()

    side = Side(0, options, ports)
    while (contender := connection.recv()) is not None:
        start = time.process_time()
        if contender.startswith(PING):
            connection.send(ping(side, contender.removeprefix(PING)))
            continue
        if contender.startswith(HAND):
            before = side.copied()
            hand_over(side, contender.removeprefix(HAND))
            connection.send((time.process_time() - start, side.copied() - before))
            continue
        play(side, contender)
        connection.send(time.process_time() - start)
    side.close()


def measure(
    options: argparse.Namespace,
) -> tuple[Times, Times, Times, Times, dict[str, list[int]]]:
    """Seconds per contender and round, of the clock and of both processors together, the latencies
    of small messages, how long it took to hand large ones over, and how many bytes the engine
    copied for that per round.

    This process receives; another one sends. :raises engine_iperf.IperfError: there is no iperf3.
    """
    iperf = engine_iperf.find()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()

    def ports(own: dict[str, int]) -> Any:
        ours.send(own)
        return ours.recv()

    with engine_iperf.held_port() as options.store_port:
        process = context.Process(target=sender, args=(theirs, options), daemon=True)
        process.start()
        side = Side(1, options, ports)
    sources = [t.clone() for t in side.tensors]

    def timed(run: Callable[[], None]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - wall, time.process_time() - cpu

    def contest(contender: str) -> tuple[float, float]:
        if contender == "memcpy":
            return timed(lambda: side.memcpy(sources))
        if contender in IPERF:
            return iperf.seconds(options.size * options.messages, IPERF[contender])

        def run() -> None:
            ours.send(contender)
            play(side, contender)

        seconds, cpu = timed(run)
        cpu += ours.recv()
        for i, tensor in enumerate(side.tensors):
            assert int(tensor[0]) == int(tensor[-1]) == i
        return seconds, cpu

    wanted = options.only.split("/") if options.only else [*CONTENDERS]
    names = ["memcpy", "gloo", *(name for name in wanted if name != "gloo"), *IPERF]
    latencies: Times = {name: [] for name in LATENCIES}
    for name in names:
        contest(name)  # warm-up: buffers, pages, congestion windows
    handovers: Times = {name: [] for name in (*HANDOVERS, FROM_TENSOR)}
    copied: dict[str, list[int]] = {name: [] for name in HANDOVERS}
    times: Times = {name: [] for name in names}
    cpu: Times = {name: [] for name in (*names, *(HAND + way for way in HANDOVERS))}
    for r in range(options.rounds):
        # Another order every round, so that nobody always runs after the same neighbour.
        for name in names[r % len(names) :] + names[: r % len(names)]:
            seconds, busy = contest(name)
            times[name].append(seconds)
            cpu[name].append(busy)
        for name in latencies:
            ours.send(PING + name)
            ping(side, name)
            heard = ours.recv()
            if r > 0:  # the first time warms up
                latencies[name] += heard
        for way in HANDOVERS:
            ours.send(HAND + way)
            began, before = time.process_time(), side.copied()
            delays = hand_over(side, way)
            busy, bytes_here = time.process_time() - began, side.copied() - before
            busy_there, bytes_there = ours.recv()
            if r > 0:
                for row, samples in delays.items():
                    handovers[row] += samples
                cpu[HAND + way].append(busy + busy_there)
                copied[way].append(bytes_here + bytes_there)
    ours.send(None)
    side.close()
    process.join(TIMEOUT)
    return times, cpu, latencies, handovers, copied


def ratio(times: Times, name: str, base: str) -> float:
    return median(b / t for t, b in zip(times[name], times[base], strict=True))


def base_of(name: str, times: Times) -> str:
    single = "gloo, one at a time"
    return single if "one at" in name and single in times else "gloo"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--size", type=int, default=16 << 20, help="bytes per message")
    parser.add_argument("--messages", type=int, default=12, help="per contender and round")
    parser.add_argument("--window", type=int, default=4, help="messages under way")
    parser.add_argument("--rounds", type=int, default=21, help="at least 2")
    parser.add_argument("--pings", type=int, default=1000, help="4 KiB messages per round")
    parser.add_argument("--only", help="contenders beside gloo, iperf3 and memcpy, separated by /")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 below the promised ratios")
    options = parser.parse_args()

    if options.rounds < 2 or min(options.size, options.messages, options.window, options.pings) < 1:
        parser.error("--rounds must be at least 2, the other numbers at least 1")
    if options.only and (unknown := set(options.only.split("/")) - set(CONTENDERS)):
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {'/'.join(CONTENDERS)}")
    try:
        times, cpu, latencies, handovers, copied = measure(options)
    except engine_iperf.IperfError as error:
        print(error, file=sys.stderr)
        return 1
    volume = options.size * options.messages
    rows: list[dict[str, Any]] = [
        {
            "contender": name,
            "gb_per_s": volume / median(seconds) / 1e9,
            "slowest": volume / max(seconds) / 1e9,
            "fastest": volume / min(seconds) / 1e9,
            "of_gloo": ratio(times, name, base_of(name, times)),
            "of_memcpy": ratio(times, name, "memcpy"),
            "cpu_ns_per_kb": median(cpu[name]) / volume * 1e12,
        }
        for name, seconds in times.items()
    ]
    print(
        f"{options.messages} messages of {options.size / 2**20:g} MiB, {options.window} under way,"
        f" two processes, {os.cpu_count()} cores, {options.rounds} rounds,"
        f" load {os.getloadavg()[0]:.1f}\n"
    )
    print("| contender | GB/s (median) | slowest – fastest | × gloo | × memcpy | CPU ns/kB |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            "| {contender} | {gb_per_s:.2f} | {slowest:.2f} – {fastest:.2f} "
            "| {of_gloo:.2f} | {of_memcpy:.2f} | {cpu_ns_per_kb:.0f} |".format(**row)
        )
    print()
    delays: list[dict[str, Any]] = [
        {
            "contender": name,
            "p50_us": transfers.percentile(samples, 50) * 1e6,
            "p99_us": transfers.percentile(samples, 99) * 1e6,
        }
        for name, samples in latencies.items()
    ]
    p50 = {delay["contender"]: delay["p50_us"] for delay in delays}
    print("| 4 KiB message, one way | p50 | p99 | × raw |\n|---|---:|---:|---:|")
    for delay in delays:
        raw = RAW_OF.get(delay["contender"].split(",", maxsplit=1)[0])
        delay["of_raw"] = delay["p50_us"] / p50[raw] if raw else None
        of_raw = f"{delay['of_raw']:.1f}" if raw else ""
        print(
            "| {contender} | {p50_us:.0f} µs | {p99_us:.0f} µs ".format(**delay) + f"| {of_raw} |"
        )
    print()
    handed: list[dict[str, Any]] = [
        {
            "way": way,
            "p50_us": transfers.percentile(samples, 50) * 1e6,
            "p99_us": transfers.percentile(samples, 99) * 1e6,
            "of_copied": median(samples) / median(handovers["copied"]),
            "cpu_s_per_gb": median(cpu[HAND + way.partition(",")[0]]) / volume * 1e9,
            "engine_copies": max(copied[way.partition(",")[0]]) / volume,
        }
        for way, samples in handovers.items()
    ]
    print(
        f"| {options.size / 2**20:g} MiB in shared memory, from last write to first read | p50 "
        "| p99 | × copied | CPU s/GB | engine copies |\n|---|---:|---:|---:|---:|---:|"
    )
    for row in handed:
        print(
            "| {way} | {p50_us:.0f} µs | {p99_us:.0f} µs | {of_copied:.3f} | {cpu_s_per_gb:.4f} "
            "| {engine_copies:.2f} |".format(**row)
        )
    print()
    checks: list[dict[str, Any]] = [
        {
            "contender": name,
            "base": base,
            "promised": least,
            "measured": (measured := ratio(times, name, base)),
            "holds": measured >= least,
        }
        for name, base, least in THRESHOLDS
        if name in times and base in times
    ]
    quicker = median(handovers["copied"]) / median(handovers["trainer"])
    checks.append(
        {
            "contender": "copied",
            "base": "trainer",
            "promised": HAND_OVER,
            "measured": quicker,
            "holds": quicker >= HAND_OVER,
        }
    )
    for c in checks:
        print(
            "{contender} ≥ {promised} × {base}: {measured:.2f} ".format(**c)
            + ("holds" if c["holds"] else "DOES NOT HOLD")
        )
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "size": options.size,
                    "messages": options.messages,
                    "window": options.window,
                    "rounds": options.rounds,
                    "cores": os.cpu_count(),
                    "machine": platform.platform(),
                    "torch": torch.__version__,
                    "rows": rows,
                    "latency": delays,
                    "handover": handed,
                    "checks": checks,
                    "seconds": times,
                    "cpu_seconds": cpu,
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    return 1 if options.check and not all(c["holds"] for c in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
