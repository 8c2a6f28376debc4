"""Compares the transfer engine with gloo, memcpy and raw sockets: 16 MB messages, two processes.

    python benchmarks/engine.py [--size 16777216] [--messages 12] [--window 4] [--rounds 21]
                                [--pings 1000] [--json FILE] [--check]

Throughput is the bytes of the payloads over the time from the receiver's "go" until the last
message is delivered to it. *Delivered* means: in a torch tensor of the user. The engine is used as
in the trainer on a CPU: through the ends of a delegated link, whose receiver has a tensor in the
slot, where ops read it. The rows called "copied" copy it from there into the user's tensor
(`copy_into`). gloo gets that tensor in advance (`irecv`). The sender's tensors are the user's, too:
no contender may place or register them. Every payload byte over TCP has a CRC32C, checked on
arrival; gloo has none. Rows called "mac" have a MAC instead (AES-256-GCM), also in shared memory;
"aead" also encrypts.

Streaming has up to `window` messages in flight, on both sides and for every contender (isend/irecv
for gloo, slots for the engine). "One at a time" sends a message when the receiver has acknowledged
the one before (by an empty message; gloo: one byte).

Latency is half of a round trip of 4 KiB messages, each counted when it is in a tensor of the user.
Both ends sleep until a message arrives, as in the trainer; "polled" checks for it repeatedly
instead, and yields the processor in between. "raw" is the least that two such processes need: one
blocking socket, from Python, without keys, acknowledgements or checksums. "× raw" divides by it,
for shared memory by the Unix socket.

Handing over is one message at a time in shared memory, from the producer's last write to the
consumer's first read. "copied": from a tensor of the producer into one of the consumer. "leased":
the producer writes into memory of the engine (`lease`), as a device does, and the consumer reads
there (`view`). "trainer": through the trainer's ends on the CPU, from a tensor of the producer,
which the consumer reads in its slot. CPU is the processor time of both processes until the producer
has the acknowledgement. "engine copies" is the number of times that the engine has moved each byte,
by its own counters.

memcpy is one thread in one process that copies as many bytes between as many tensors. Contenders
take turns in every round. A row is the median over the rounds, and a ratio the median of the ratios
within a round, so that a slowdown of the machine affects both sides. "CPU" is the processor time of
both processes together: the figure to compare on a machine with other work.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from engine_side import (
    CONTENDERS,
    HAND,
    HANDOVERS,
    LATENCIES,
    PING,
    TIMEOUT,
    EngineSide,
    Times,
    measure_hand_over,
    ping_engine,
    play_transfers,
    run_sender,
)
from goals import finish_benchmark, make_parser
from ranks import hold_port

from pipemorph_trainer.bench import transfers

THRESHOLDS = (("tcp", "gloo", 1.1), ("shm", "gloo", 2.0), ("shm", "memcpy", 0.8))
HAND_OVER = 3.0
"""Goal: time to hand over a message that is copied at both ends, over that of a leased one."""
RAW_OF = {"tcp": "raw TCP", "shm": "raw Unix socket"}


def measure_contenders(
    options: argparse.Namespace,
) -> tuple[Times, Times, Times, Times, dict[str, list[int]]]:
    """Seconds of each contender and round, by the clock and of both processors together; latencies
    of small messages; times to hand over large ones; and bytes that the engine copied for that per
    round.

    This process receives; another one sends.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()

    def draw_ports(own: dict[str, int]) -> Any:
        ours.send(own)
        return ours.recv()

    with hold_port() as options.store_port:
        process = context.Process(target=run_sender, args=(theirs, options), daemon=True)
        process.start()
        side = EngineSide(1, options, draw_ports)
    sources = [t.clone() for t in side.tensors]

    def time_contender(run: Callable[[], None]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        return time.perf_counter() - wall, time.process_time() - cpu

    def run_contest(contender: str) -> tuple[float, float]:
        if contender == "memcpy":
            return time_contender(lambda: side.copy_messages(sources))

        def run() -> None:
            ours.send(contender)
            play_transfers(side, contender)

        seconds, cpu = time_contender(run)
        cpu += ours.recv()
        for i, tensor in enumerate(side.tensors):
            assert int(tensor[0]) == int(tensor[-1]) == i
        return seconds, cpu

    wanted = options.only.split("/") if options.only else [*CONTENDERS]
    names = ["memcpy", "gloo", *(name for name in wanted if name != "gloo")]
    latencies: Times = {name: [] for name in LATENCIES}
    for name in names:
        run_contest(name)  # warm-up: buffers, pages, congestion windows
    handovers: Times = {name: [] for name in HANDOVERS}
    copied: dict[str, list[int]] = {name: [] for name in HANDOVERS}
    times: Times = {name: [] for name in names}
    cpu: Times = {name: [] for name in (*names, *(HAND + way for way in HANDOVERS))}
    for r in range(options.rounds):
        # The order changes every round, so that no contender always runs after the same one.
        for name in names[r % len(names) :] + names[: r % len(names)]:
            seconds, busy = run_contest(name)
            times[name].append(seconds)
            cpu[name].append(busy)
        for name in latencies:
            ours.send(PING + name)
            ping_engine(side, name)
            received = ours.recv()
            if r > 0:  # the first time warms up
                latencies[name] += received
        for way in HANDOVERS:
            ours.send(HAND + way)
            began, before = time.process_time(), side.read_copied_bytes()
            delays = measure_hand_over(side, way)
            busy, bytes_here = time.process_time() - began, side.read_copied_bytes() - before
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


def format_ratio(times: Times, name: str, base: str) -> float:
    return median(b / t for t, b in zip(times[name], times[base], strict=True))


def base_of(name: str, times: Times) -> str:
    single = "gloo, one at a time"
    return single if "one at" in name and single in times else "gloo"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--size", type=int, default=16 << 20, help="bytes per message")
    parser.add_argument("--messages", type=int, default=12, help="per contender and round")
    parser.add_argument("--window", type=int, default=4, help="messages under way")
    parser.add_argument("--rounds", type=int, default=21, help="at least 2")
    parser.add_argument("--pings", type=int, default=1000, help="4 KiB messages per round")
    parser.add_argument("--only", help="contenders besides gloo and memcpy, separated by /")
    parser.add_argument("--check", action="store_true", help="exit 1 below the promised ratios")
    options = parser.parse_args()

    if options.rounds < 2 or min(options.size, options.messages, options.window, options.pings) < 1:
        parser.error("--rounds must be at least 2, the other numbers at least 1")
    if options.only and (unknown := set(options.only.split("/")) - set(CONTENDERS)):
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {'/'.join(CONTENDERS)}")
    times, cpu, latencies, handovers, copied = measure_contenders(options)
    volume = options.size * options.messages
    rows: list[dict[str, Any]] = [
        {
            "contender": name,
            "gb_per_s": volume / median(seconds) / 1e9,
            "slowest": volume / max(seconds) / 1e9,
            "fastest": volume / min(seconds) / 1e9,
            "of_gloo": format_ratio(times, name, base_of(name, times)),
            "of_memcpy": format_ratio(times, name, "memcpy"),
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
            "p50_us": transfers.compute_percentile(samples, 50) * 1e6,
            "p99_us": transfers.compute_percentile(samples, 99) * 1e6,
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
            "p50_us": transfers.compute_percentile(samples, 50) * 1e6,
            "p99_us": transfers.compute_percentile(samples, 99) * 1e6,
            "of_copied": median(samples) / median(handovers["copied"]),
            "cpu_s_per_gb": median(cpu[HAND + way]) / volume * 1e9,
            "engine_copies": max(copied[way]) / volume,
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
    quicker = median(handovers["copied"]) / median(handovers["leased"])
    found = [
        (name, base, least, format_ratio(times, name, base))
        for name, base, least in THRESHOLDS
        if name in times and base in times
    ]
    checks, goals = [], []
    for name, base, least, measured in [*found, ("copied", "leased", HAND_OVER, quicker)]:
        holds = measured >= least
        check = {"contender": name, "base": base, "promised": least, "measured": measured}
        checks.append(check | {"holds": holds})
        goals.append((f"{name} ≥ {least} × {base}: {measured:.2f}", holds))
    figures = {
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
    }
    return 1 if not finish_benchmark(goals, options.json, figures) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
