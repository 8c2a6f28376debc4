"""What the transfer engine costs while nothing moves: processor time and memory of open links.

    python benchmarks/engine_idle.py [--seconds 5] [--links 8] [--slots 8]
                                     [--slot-bytes 1048576] [--json FILE] [--check]

Two processes without torch hold one link, then --links of them, over TCP and over shared memory.
*Busy* is the processor time of a process over the time that passed, of the busier of the two, and
*wakeups* how often a thread of it went to sleep in a second. Memory is the growth of the resident
set (anonymous and shared): "link" for a link without slots, "receiver" and "sender" for the slots
of one link at either end. Over shared memory the sender maps the receiver's slots, so they count in
both processes and exist once. What the kernel keeps for sockets is not in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipemorph_trainer._engine import Engine, Link

TIMEOUT = 60.0
PAGE = 4096
HUGE_PAGE = 2 << 20
MOST_BUSY_ONE = 0.01
"""Of a core, by an idle process with one link."""
MOST_BUSY_MORE = 0.002
"""More for each further link."""
SLACK = 64 << 10
"""Resident bytes per link beyond the formula: bitmaps, tables, the allocator's pages."""


@dataclass(frozen=True)
class Case:
    transport: str
    links: int
    slots: int
    slot_bytes: int
    seconds: float


def slot_memory(slots: int, slot_bytes: int) -> int:
    """Bytes that ``reserve`` maps: whole pages per slot, whole huge ones if it is one or more."""
    total = slots * -(-slot_bytes // PAGE) * PAGE
    unit = HUGE_PAGE if total >= HUGE_PAGE else PAGE
    return -(-total // unit) * unit


def resident() -> int:
    """Anonymous and shared memory of this process, bytes."""
    fields = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.split()
    return sum(int(fields[name][0]) * 1024 for name in ("RssAnon", "RssShmem"))


def end(rank: int, connection: Connection, case: Case) -> None:
    engine = Engine(job="idle", rank=rank, secret=b"s", host="127.0.0.1", transport=case.transport)
    connection.send(engine.port)
    port = connection.recv()
    empty = resident()
    links: list[Link] = []
    for i in range(case.links):
        if rank == 0:
            link = engine.connect(
                peer_rank=1, link_id=i, host="127.0.0.1", port=port, timeout=TIMEOUT
            )
        else:
            link = engine.accept(peer_rank=0, link_id=i, timeout=TIMEOUT)
        links.append(link)
    # One message through each: all paths exist.
    for link in links:
        if rank == 1:
            link.reserve(0, 1, 1)
            link.receive((0, 0, 0, 0, 0), TIMEOUT).release()
        else:
            link.wait_sent(link.send((0, 0, 0, 0, 0), b"x"), TIMEOUT)
    linked = resident()
    connection.send("linked")
    connection.recv()
    if rank == 1:
        for link in links:
            link.reserve(0, case.slots, case.slot_bytes)
    else:
        for link in links:
            wait_for_slots(link, case.slots + 1)
    reserved = resident()
    connection.send("reserved")
    connection.recv()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    time.sleep(case.seconds)
    after, passed = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    alive = all(link.alive for link in links)
    connection.send(
        {
            "busy": busy / passed,
            "wakeups": (after.ru_nvcsw - before.ru_nvcsw) / passed,
            "link_bytes": (linked - empty) / case.links,
            "slot_bytes": (reserved - linked) / case.links,
            "alive": alive,
        }
    )
    connection.recv()
    engine.close()


def wait_for_slots(link: Link, slots: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while (here := link.send_slots(0)) < slots:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{here} of {slots} slots were granted within {TIMEOUT:g} s")
        time.sleep(0.005)


def measure(case: Case) -> dict[str, Any]:
    """:raises RuntimeError: an end died, or a link did while it was idle."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    ends = [
        context.Process(target=end, args=(rank, pipes[rank][1], case), daemon=True)
        for rank in range(2)
    ]
    for process in ends:
        process.start()
    ours = [pipe[0] for pipe in pipes]

    def hear(rank: int) -> Any:
        if not ours[rank].poll(2 * TIMEOUT + case.seconds):
            raise RuntimeError(f"rank {rank} ({case}) said nothing; {ends[rank].exitcode=}")
        return ours[rank].recv()

    ports = [hear(rank) for rank in range(2)]
    for rank in range(2):
        ours[rank].send(ports[1 - rank])
    for step in ("reserve", "idle"):
        for rank in range(2):
            hear(rank)
        for connection in ours:
            connection.send(step)
    sender, receiver = (hear(rank) for rank in range(2))
    for connection in ours:
        connection.send("enough")
    for process in ends:
        process.join(TIMEOUT)
    if not (sender["alive"] and receiver["alive"]):
        raise RuntimeError(f"a link died while it was idle: {case}")
    return {
        "transport": case.transport,
        "links": case.links,
        "busy": max(sender["busy"], receiver["busy"]),
        "wakeups": max(sender["wakeups"], receiver["wakeups"]),
        "link_bytes": max(sender["link_bytes"], receiver["link_bytes"]),
        "receiver_slot_bytes": receiver["slot_bytes"],
        "sender_slot_bytes": sender["slot_bytes"],
    }


def checks(rows: list[dict[str, Any]], mapped: int) -> list[tuple[str, bool]]:
    out = []
    for row in rows:
        what = f"{row['links']} × {row['transport']}"
        most = MOST_BUSY_ONE + (row["links"] - 1) * MOST_BUSY_MORE
        out.append((f"{what}: {row['busy']:.2%} of a core ≤ {most:.1%}", row["busy"] <= most))
        for role in ("receiver", "sender"):
            here = role == "receiver" or row["transport"] == "shm"
            least, most = (mapped, mapped + SLACK) if here else (0, SLACK)
            found = row[f"{role}_slot_bytes"]
            # The allocator may hand back a page or two at the same time.
            out.append(
                (
                    f"{what}: {found / 2**20:.2f} MiB for a link's slots at the {role}, "
                    f"{least / 2**20:.2f} by the formula",
                    least - SLACK <= found <= most,
                )
            )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of idleness per case")
    parser.add_argument("--links", type=int, default=8, help="in the cases with several")
    parser.add_argument("--slots", type=int, default=8, help="per link")
    parser.add_argument("--slot-bytes", type=int, default=1 << 20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 above the promised costs")
    options = parser.parse_args()
    if options.seconds <= 0 or min(options.links, options.slots, options.slot_bytes) < 1:
        parser.error("all numbers must be at least 1, --seconds more than 0")

    rows = [
        measure(Case(transport, links, options.slots, options.slot_bytes, options.seconds))
        for transport in ("tcp", "shm")
        for links in sorted({1, options.links})
    ]
    mapped = slot_memory(options.slots, options.slot_bytes)
    print(
        f"{options.slots} slots of {options.slot_bytes} bytes per link: {mapped / 2**20:.2f} MiB "
        f"by the formula; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| links | busy | wakeups/s | link, KiB | receiver, MiB | sender, MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['links']} × {row['transport']} | {row['busy']:.2%} | {row['wakeups']:.0f} "
            f"| {row['link_bytes'] / 1024:.0f} | {row['receiver_slot_bytes'] / 2**20:.2f} "
            f"| {row['sender_slot_bytes'] / 2**20:.2f} |"
        )
    print()
    found = checks(rows, mapped)
    for text, holds in found:
        print(f"{text}: {'holds' if holds else 'DOES NOT HOLD'}")
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "slots": options.slots,
                    "slot_bytes": options.slot_bytes,
                    "mapped_bytes": mapped,
                    "seconds": options.seconds,
                    "machine": platform.platform(),
                    "rows": rows,
                    "checks": [{"what": text, "holds": holds} for text, holds in found],
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    return 1 if options.check and not all(holds for _, holds in found) else 0


if __name__ == "__main__":
    sys.exit(main())
