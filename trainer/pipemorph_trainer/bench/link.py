"""Both ends of `pipemorph bench link`: ``python -m pipemorph_trainer.bench.link OPTIONS`` (JSON).

The connecting end is in charge: it sends, pings, and prints. It controls the listening end over a
small engine link, which also proves that both know the secret. Every measured transport has its own
engine and port.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from pipemorph.commands.emit import emit
from pipemorph.discovery.host import memory_bytes
from pipemorph.errors import InputError, one_line
from pipemorph.streams import silence
from pipemorph.terminal import RenderableType, render, table
from pipemorph_trainer._engine import Engine, EngineError, EngineTimeout, Link, PathStats
from pipemorph_trainer.bench import transfers
from pipemorph_trainer.topology.addresses import in_url

JOB = "pipemorph bench link"
SECRET_VARIABLE = "PIPEMORPH_BENCH_SECRET"
WORD_BYTES = 64 << 10
GLOO_SECONDS = 30.0
REFUSED_SECONDS = 3.0
"""Time until a refusal of the other end is final."""
IDLE_SECONDS = 600.0
LATENCY_BYTES = 4096
LISTENER, CONNECTOR = 0, 1
# Errors that make one transport unavailable; the others are still measured.
TROUBLE = (EngineError, RuntimeError, OSError)


class BenchError(Exception):
    """An error of the benchmark, not of one transport."""


def buffer_of(options: dict[str, Any], rank: int) -> torch.Tensor:
    """A buffer for a window of the largest messages, ``uint8`` on the CPU, ``[window × size]``,
    with every page touched. Raises :class:`BenchError` if this host lacks the memory."""
    window, size = options["window"], max(options["sizes"])
    asked = f"--window and --sizes: {window} messages of {size} bytes"
    memory = memory_bytes()
    if 2 * window * size > memory:
        raise BenchError(
            f"{asked} do not fit twice, sent and received, into the {memory} bytes of memory of "
            f"{platform.node()}; connect with smaller ones"
        )
    try:
        buffer = torch.empty(window * size, dtype=torch.uint8)
    except RuntimeError as error:
        raise BenchError(
            f"{asked}: {platform.node()} has no memory for them ({first_line(error)}); connect "
            "with smaller ones"
        ) from None
    return buffer.fill_(rank)


class Words:
    """JSON messages between the two ends, over an engine link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent = self._received = 0
        # The connecting end has the higher rank and sends in direction 0.
        self._mine = 0 if link.peer_rank == LISTENER else 1
        link.reserve(1 - self._mine, 2, WORD_BYTES)

    def say(self, word: dict[str, Any]) -> None:
        self._link.send((1, 0, self._sent, self._mine, 0), json.dumps(word).encode())
        self._sent += 1

    def hear(self, timeout: float = transfers.TIMEOUT) -> dict[str, Any]:
        message = self._link.receive((1, 0, self._received, 1 - self._mine, 0), timeout)
        self._received += 1
        word: dict[str, Any] = json.loads(bytes(message.view()))
        message.release()
        return word

    def answer(self) -> dict[str, Any]:
        """Like :meth:`hear`. Raises EngineError if the other end reports an error."""
        word = self.hear()
        if "error" in word:
            raise EngineError(f"at the other end: {one_line(str(word['error']))}")
        return word

    def ask(self, word: dict[str, Any]) -> dict[str, Any]:
        self.say(word)
        return self.answer()


def make_engine(
    rank: int,
    secret: str,
    host: str,
    transport: str,
    port: int = 0,
    *,
    rdma: dict[str, Any] | None = None,
) -> Engine:
    """Create an engine. ``rdma``: its options for rails. Raises EngineError if this build or this
    host does not support the transport."""
    more: dict[str, Any] = {}
    if transport == "rdma":
        # Otherwise a link that fell back to TCP could be measured.
        more = {"require": "rdma"} | (rdma or {})
    try:
        return Engine(
            job=JOB, rank=rank, secret=secret.encode(), host=host, port=port,
            transport=transport, **more,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise EngineError(f"this engine cannot do {transport}: {error}") from None


class Bench:
    """State of either end: the link of the current transport, tensors, and a counter of runs."""

    def __init__(
        self, options: dict[str, Any], rank: int, words: Words, buffer: torch.Tensor
    ) -> None:
        self.options, self.rank, self.words, self.buffer = options, rank, words, buffer
        self.engine: Engine | None = None
        self.link: Link | None = None
        self.run = 0
        self.small = torch.zeros(LATENCY_BYTES, dtype=torch.uint8)

    def tensors(self, size: int) -> list[torch.Tensor]:
        return [self.buffer[i * size : (i + 1) * size] for i in range(self.options["window"])]

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.engine = self.link = None

    def join_gloo(self, host: str, port: int) -> None:
        if host == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{in_url(host)}:{port}",
            rank=self.rank,
            world_size=2,
            timeout=timedelta(seconds=GLOO_SECONDS),
        )


def first_line(error: Exception) -> str:
    """First line of an error, without the stack that torch appends; its type if it is empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def name_of_this_host(listens_on: str) -> str:
    """Name for the other host to connect to: the address, if this end listens at only one."""
    return socket.gethostname() if listens_on in ("0.0.0.0", "::") else listens_on


# --- The listening end ----------------------------------------------------------------------------


def listen(options: dict[str, Any], secret: str) -> int:
    """Serve one benchmark. Prints how to reach this end."""
    host = options["listen"]
    alone = not options["announce"]  # No other process on this host prints it.
    if alone and options["rdma"]["rdma_devices"]:
        # Report a missing device at once, and not after a connection.
        make_engine(LISTENER, secret, host, "rdma", rdma=options["rdma"]).close()
    meeting = make_engine(LISTENER, secret, host, "tcp", options["port"])
    if not alone:
        print(json.dumps({"port": meeting.port}), flush=True)
    else:
        print(
            f"on the other host run:\n\n  {SECRET_VARIABLE}={secret} pipemorph bench link "
            f"--connect {name_of_this_host(host)} --port {meeting.port}\n",
            flush=True,
        )
    link = meeting.accept(peer_rank=CONNECTOR, link_id=0, timeout=options["wait"])
    words = Words(link)
    agreed = words.hear()
    asked = {*options["asked"], *agreed.pop("asked", ())}
    options = options | agreed
    try:
        # The connecting end has only checked its own memory.
        buffer = buffer_of(options, LISTENER)
    except BenchError as error:
        words.say({"error": str(error)})
        meeting.close()
        raise
    bench = Bench(options, LISTENER, words, buffer)
    words.say({"host": platform.node(), "torch": torch.__version__})
    acts = {"open": _open, "gloo": _gloo, "stream": _stream, "ping": _ping}
    transport, status = "", 0
    while (word := words.hear(IDLE_SECONDS))["do"] != "end":
        if word["do"] == "close":
            bench.close()
            words.say({"closed": True})
            continue
        transport = word.get("transport", transport)
        try:
            acts[word["do"]](bench, word, secret)
        except TROUBLE as error:
            bench.close()
            words.say({"error": first_line(error)})
            if alone:
                text = f"pipemorph bench link: {transport}: unavailable: {first_line(error)}"
                print(text, file=sys.stderr, flush=True)
            status |= transport in asked
    bench.close()
    meeting.close()
    return status


def _open(bench: Bench, word: dict[str, Any], secret: str) -> None:
    options = bench.options
    bench.engine = make_engine(
        LISTENER, secret, options["listen"], word["transport"], rdma=options["rdma"]
    )
    bench.words.say({"port": bench.engine.port})
    bench.link = bench.engine.accept(peer_rank=CONNECTOR, link_id=1, timeout=GLOO_SECONDS)
    bench.run = 0
    for size in options["sizes"]:
        bench.link.reserve(transfers.FORWARD, options["window"], size)
    bench.words.say({"rails": bench.engine.rails})


def _gloo(bench: Bench, word: dict[str, Any], _: str) -> None:
    with socket.socket() as s:
        s.bind((bench.options["listen"], 0))
        port = s.getsockname()[1]
    bench.words.say({"port": port})
    bench.join_gloo("127.0.0.1" if word["local"] else bench.options["listen"], port)
    bench.words.say({"joined": True})


def _stream(bench: Bench, word: dict[str, Any], _: str) -> None:
    size, count, window = word["size"], word["count"], bench.options["window"]
    tensors = bench.tensors(size)
    bench.run += 1
    for tensor in tensors:
        tensor[0] = tensor[-1] = LISTENER
    began = time.perf_counter()
    bench.words.say({"go": True})
    if bench.link is not None:
        transfers.engine_receive(bench.link, bench.run, tensors, count, window)
    else:
        transfers.gloo_receive(tensors, count, window, CONNECTOR)
    seconds = time.perf_counter() - began
    whole = all(int(t[0]) == int(t[-1]) == CONNECTOR for t in tensors[: min(count, window)])
    bench.words.say({"seconds": seconds, "whole": whole})


def _ping(bench: Bench, word: dict[str, Any], _: str) -> None:
    bench.run += 1
    bench.words.say({"go": True})
    if bench.link is not None:
        transfers.engine_pong(bench.link, bench.run, bench.small, word["count"])
    else:
        transfers.gloo_pong(bench.small, word["count"], CONNECTOR)


# --- The connecting end ---------------------------------------------------------------------------


def _reach_listener(meeting: Engine, host: str, port: int, seconds: float) -> Link:
    """Connect to the other end. Raises EngineError if it has another secret, which no waiting
    changes, and EngineTimeout if nobody is there within ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        left = max(end - time.monotonic(), 0.0)
        try:
            # An engine would try again after a refusal, since it may be of another job's engine.
            return meeting.connect(
                peer_rank=LISTENER,
                link_id=0,
                host=host,
                port=port,
                timeout=min(REFUSED_SECONDS, left),
            )
        except EngineTimeout:
            if time.monotonic() >= end:
                raise


def connect(options: dict[str, Any], secret: str, host: str, port: int) -> dict[str, Any]:
    """Measure everything. Raises EngineError if the other end is missing, has another secret or
    lacks the memory, and :class:`BenchError` if this end lacks the memory."""
    buffer = buffer_of(options, CONNECTOR)
    meeting = make_engine(CONNECTOR, secret, "0.0.0.0", "tcp")
    try:
        words = Words(_reach_listener(meeting, host, port, options["wait"]))
        agreed = {name: options[name] for name in ("sizes", "window", "asked")}
        peer = words.ask(agreed)
        bench = Bench(options, CONNECTOR, words, buffer)
        results = []
        for transport in options["transports"]:
            results.append(_measure(bench, transport, secret, host))
        words.say({"do": "end"})
    finally:
        meeting.close()
    return {
        "hosts": [platform.node(), peer["host"]],
        "window": options["window"],
        "volume": options["volume"],
        "rounds": options["rounds"],
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "transports": results,
    }


def _measure(bench: Bench, transport: str, secret: str, host: str) -> dict[str, Any]:
    """Measure one transport. "unavailable" in the result says why there are no figures."""
    result: dict[str, Any] = {"transport": transport, "unavailable": None}
    trouble = ""
    try:
        theirs = _meet(bench, transport, secret, host)
        if bench.engine is not None and transport == "rdma":
            result["rails"] = [bench.engine.rails, theirs["rails"]]
            result["rails_trouble"] = bench.engine.rails_trouble
        result["throughput"] = [_throughput(bench, size) for size in bench.options["sizes"]]
        result["latency"] = _latency(bench)
        if bench.link is not None:
            result["paths"] = [path_record(path) for path in bench.link.stats().paths]
    except TROUBLE as error:
        trouble = first_line(error)
    # Closed first, so that the other end does not wait in vain. Its earlier messages are read here:
    # they would be taken for answers to the next request.
    bench.close()
    bench.words.say({"do": "close"})
    while "closed" not in (said := bench.words.hear()):
        if "error" in said:
            trouble = "; ".join(filter(None, [trouble, f"at the other end: {said['error']}"]))
    if trouble:
        return {"transport": transport, "unavailable": trouble}
    return result


def _meet(bench: Bench, transport: str, secret: str, host: str) -> dict[str, Any]:
    """Open a transport at both ends; returns the other end's answer. Raises one of TROUBLE."""
    if transport == "gloo":
        local = host == "127.0.0.1"
        said = bench.words.ask({"do": "gloo", "transport": transport, "local": local})
        bench.join_gloo(host, said["port"])
    else:
        rdma = bench.options["rdma"]
        bench.engine = make_engine(CONNECTOR, secret, "0.0.0.0", transport, rdma=rdma)
        said = bench.words.ask({"do": "open", "transport": transport})
        bench.link = bench.engine.connect(
            peer_rank=LISTENER, link_id=1, host=host, port=said["port"], timeout=GLOO_SECONDS
        )
        bench.link.reserve(transfers.BACKWARD, 2, LATENCY_BYTES)
        bench.run = 0
    return bench.words.answer()


def _throughput(bench: Bench, size: int) -> dict[str, Any]:
    options, window = bench.options, bench.options["window"]
    count = max(2 * window, min(options["volume"] // size, options["most"]))
    times = []
    for _ in range(options["rounds"] + 1):
        bench.words.ask({"do": "stream", "size": size, "count": count})
        bench.run += 1
        tensors = bench.tensors(size)
        if bench.link is not None:
            transfers.engine_send(bench.link, bench.run, tensors, count, window)
        else:
            transfers.gloo_send(tensors, count, window, LISTENER)
        said = bench.words.answer()
        if not said["whole"]:
            raise BenchError(f"messages of {size} bytes arrived with wrong content")
        times.append(said["seconds"])
    times = times[1:]  # The first one warms up buffers, pages and congestion windows.
    rate = size * count / 1e9
    return {
        "size": size,
        "messages": count,
        "gb_per_s": rate / median(times),
        "slowest": rate / max(times),
        "fastest": rate / min(times),
    }


def _latency(bench: Bench) -> dict[str, Any]:
    count = bench.options["pings"]
    for n in (count // 10 + 1, count):
        bench.words.ask({"do": "ping", "count": n})
        bench.run += 1
        if bench.link is not None:
            times = transfers.engine_ping(bench.link, bench.run, bench.small, n)
        else:
            times = transfers.gloo_ping(bench.small, n, LISTENER)
    return {
        "size": LATENCY_BYTES,
        "pings": count,
        "p50": transfers.percentile(times, 50),
        "p99": transfers.percentile(times, 99),
    }


def locally(options: dict[str, Any], secret: str) -> dict[str, Any]:
    """Run both ends on this host, the listening one in another process."""
    theirs = options | {"role": "listen", "listen": "127.0.0.1", "port": 0, "announce": True}
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(theirs)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {SECRET_VARIABLE: secret}
    ) as other:
        try:
            assert other.stdout is not None
            said = other.stdout.readline()
            if not said:
                raise EngineError(f"the listening process ended with {other.wait()}")
            return connect(options, secret, "127.0.0.1", json.loads(said)["port"])
        finally:
            other.terminate()


# --- The report -----------------------------------------------------------------------------------


def path_record(path: PathStats) -> dict[str, Any]:
    """Record of one data path after the measurement. Rates and round trips are only for rails, else
    None; the round trips are those of probes on the idle path."""
    return {
        "kind": path.kind,
        "rail": path.rail,
        "state": path.state,
        "bytes": path.bytes,
        "gb_per_s_busy": path.bytes_per_second and path.bytes_per_second / 1e9,
        "rtt_min": path.rtt_min,
        "rtt_mean": path.rtt_mean,
        "rtt_p99": path.rtt_p99,
        "times_lost": path.times_lost,
    }


def _paths_table(transport: dict[str, Any]) -> list[RenderableType]:
    """A table with a row per rail, below the transport's figures."""
    rails = [path for path in transport.get("paths", ()) if path["kind"] == "rdma"]
    if not rails:
        return []

    def micro(seconds: float | None) -> str:
        return "unavailable" if seconds is None else f"{seconds * 1e6:.0f} µs"

    rows = [
        [
            path["rail"],
            path["state"],
            f"{path['bytes'] / 1e9:.3g}",
            "unavailable" if path["gb_per_s_busy"] is None else f"{path['gb_per_s_busy']:.3g}",
            *(micro(path[f"rtt_{which}"]) for which in ("min", "mean", "p99")),
            str(path["times_lost"]),
        ]
        for path in rails
    ]
    head = ["rail", "state", "GB", "GB/s busy", "RTT min", "mean", "p99", "times lost"]
    here, there = transport["rails"]
    return [
        f"\n{transport['transport']}: rails {', '.join(here)} → {', '.join(there)}",
        table(head, rows, right=head[2:]),
        *([transport["rails_trouble"]] if transport["rails_trouble"] else []),
    ]


def page(report: dict[str, Any]) -> list[RenderableType]:
    """The report as tables: one with a row per size and a column per transport, one of rails."""
    measured = [t for t in report["transports"] if t["unavailable"] is None]
    lines: list[RenderableType] = [
        f"{report['hosts'][0]} → {report['hosts'][1]}, {report['window']} messages under way, "
        f"median of {report['rounds']} rounds, {report['cores']} cores, load {report['load']:.1f}; "
        "GB/s, delivered into the receiver's tensors",
        "",
    ]
    head = ["message", *(t["transport"] for t in measured)]
    rows = [
        [_size(p["size"]), *(f"{t['throughput'][i]['gb_per_s']:.3g}" for t in measured)]
        for i, p in enumerate(measured[0]["throughput"] if measured else [])
    ]
    for which in ("p50", "p99"):
        rows.append(
            [
                f"{_size(LATENCY_BYTES)} one way, {which}",
                *(f"{t['latency'][which] * 1e6:.0f} µs" for t in measured),
            ]
        )
    lines = [*lines, table(head, rows, right=head[1:])] if measured else []
    for transport in measured:
        lines += _paths_table(transport)
    lines += [
        f"{t['transport']}: unavailable: {t['unavailable']}"
        for t in report["transports"]
        if t["unavailable"] is not None
    ]
    return lines


def _size(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


# --- The program ----------------------------------------------------------------------------------


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    torch.set_num_threads(1)
    try:
        if options["role"] == "listen":
            return listen(options, secret)
        if options["role"] == "connect":
            report = connect(options, secret, options["connect"], options["port"])
        else:
            report = locally(options, secret)
    except (EngineError, BenchError) as error:
        print(f"pipemorph bench link: {one_line(str(error), 1000)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    as_json = options["output"] == "json"
    text = json.dumps(report, indent=1) + "\n" if as_json else render(*page(report))
    try:
        emit(text.encode(), None)
    except InputError as error:
        print(f"pipemorph bench link: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        silence(sys.stdout)
        return 1
    # An unavailable transport is a failure if it was named.
    asked = options["asked"]
    return int(any(t["unavailable"] and t["transport"] in asked for t in report["transports"]))


if __name__ == "__main__":
    sys.exit(main())
