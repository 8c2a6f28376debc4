"""Both ends of `pipemorph bench link`: ``python -m pipemorph_trainer.bench.link OPTIONS`` (JSON).

The end that connects is in charge: it sends, pings, and prints. It tells the end that listens what
comes next over a small engine link of their own, which also proves that both know the secret; every
transport that is measured gets an engine and a port of its own.
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

from pipemorph.commands.table import table
from pipemorph_trainer._engine import Engine, EngineError, Link, PathStats
from pipemorph_trainer.bench import transfers

JOB = "pipemorph bench link"
LATENCY_BYTES = 4096
SECRET_VARIABLE = "PIPEMORPH_BENCH_SECRET"
WORD_BYTES = 64 << 10
GLOO_SECONDS = 30.0
IDLE_SECONDS = 600.0
LISTENER, CONNECTOR = 0, 1


class Words:
    """JSON messages between the two ends, over an engine link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent = self._received = 0
        # The dialler's rank is the higher one here; direction 0 is its own.
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

    def ask(self, word: dict[str, Any]) -> dict[str, Any]:
        self.say(word)
        return self.hear()


def make_engine(
    rank: int,
    secret: str,
    host: str,
    transport: str,
    port: int = 0,
    *,
    rdma: dict[str, Any] | None = None,
) -> Engine:
    """``rdma``: the engine's options for rails. Raises EngineError where this build or this host
    cannot do that transport."""
    more: dict[str, Any] = {}
    if transport == "rdma":
        # Without it, a link of rails could be measured that has fallen back to TCP.
        more = {"require": "rdma"} | (rdma or {})
    try:
        return Engine(
            job=JOB, rank=rank, secret=secret.encode(), host=host, port=port,
            transport=transport, **more,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise EngineError(f"this engine cannot do {transport}: {error}") from None


class Bench:
    """What both ends have: the present transport's link, tensors, and a running number."""

    def __init__(self, options: dict[str, Any], rank: int, words: Words) -> None:
        self.options, self.rank, self.words = options, rank, words
        self.engine: Engine | None = None
        self.link: Link | None = None
        self.run = 0
        window = options["window"]
        self.buffer = torch.empty(window * max(options["sizes"]), dtype=torch.uint8)
        self.buffer.fill_(rank)
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
            init_method=f"tcp://{host}:{port}",
            rank=self.rank,
            world_size=2,
            timeout=timedelta(seconds=GLOO_SECONDS),
        )


# --- The end that listens -------------------------------------------------------------------------


def listen(options: dict[str, Any], secret: str) -> int:
    """Serve one benchmark. Says on stdout how to reach it."""
    host = options["listen"]
    meeting = make_engine(LISTENER, secret, host, "tcp", options["port"])
    if options["announce"]:
        print(json.dumps({"port": meeting.port}), flush=True)
    else:
        print(
            f"on the other host run:\n\n  {SECRET_VARIABLE}={secret} pipemorph bench link "
            f"--connect {socket.gethostname()} --port {meeting.port}\n",
            flush=True,
        )
    link = meeting.accept(peer_rank=CONNECTOR, link_id=0, timeout=options["wait"])
    words = Words(link)
    agreed = words.hear()
    bench = Bench(options | agreed, LISTENER, words)
    words.say({"host": platform.node(), "torch": torch.__version__})
    acts = {"open": _open, "gloo": _gloo, "stream": _stream, "ping": _ping}
    while (word := words.hear(IDLE_SECONDS))["do"] != "end":
        if word["do"] == "close":
            bench.close()
        else:
            acts[word["do"]](bench, word, secret)
    bench.close()
    meeting.close()
    return 0


def _open(bench: Bench, word: dict[str, Any], secret: str) -> None:
    try:
        options = bench.options
        engine = make_engine(
            LISTENER, secret, options["listen"], word["transport"], rdma=options["rdma"]
        )
        bench.engine = engine
        bench.words.say({"port": engine.port})
        bench.link = engine.accept(peer_rank=CONNECTOR, link_id=1, timeout=GLOO_SECONDS)
        bench.run = 0
        for size in bench.options["sizes"]:
            bench.link.reserve(transfers.FORWARD, bench.options["window"], size)
        bench.words.say({"transport": bench.link.transport, "rails": engine.rails})
    except EngineError as error:
        bench.close()
        bench.words.say({"error": str(error)})


def _gloo(bench: Bench, word: dict[str, Any], secret: str) -> None:
    with socket.socket() as s:
        s.bind((bench.options["listen"], 0))
        port = s.getsockname()[1]
    bench.words.say({"port": port})
    try:
        bench.join_gloo("127.0.0.1" if word["local"] else bench.options["listen"], port)
        bench.words.say({"transport": "gloo"})
    except (RuntimeError, OSError) as error:
        bench.words.say({"error": str(error).splitlines()[0]})


def _stream(bench: Bench, word: dict[str, Any], _: str) -> None:
    size, count, window = word["size"], word["count"], bench.options["window"]
    tensors = bench.tensors(size)
    bench.run += 1
    for tensor in tensors:
        tensor[0] = tensor[-1] = LISTENER
    if bench.link is not None:
        transfers.engine_post(bench.link, bench.run, tensors, count, window)
    began = time.perf_counter()
    bench.words.say({"go": True})
    if bench.link is not None:
        transfers.engine_receive(bench.link, bench.run, tensors, count, window, way="posted")
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


# --- The end that connects ------------------------------------------------------------------------


def connect(options: dict[str, Any], secret: str, host: str, port: int) -> dict[str, Any]:
    """Measure everything. Raises EngineError if the other end is not there or another secret's."""
    meeting = make_engine(CONNECTOR, secret, "0.0.0.0", "tcp")
    try:
        link = meeting.connect(
            peer_rank=LISTENER, link_id=0, host=host, port=port, timeout=options["wait"]
        )
        words = Words(link)
        peer = words.ask({"sizes": options["sizes"], "window": options["window"]})
        bench = Bench(options, CONNECTOR, words)
        results = []
        for transport in options["transports"]:
            results.append(_measure(bench, transport, secret, host))
            bench.close()
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
    result: dict[str, Any] = {"transport": transport, "unavailable": None}
    try:
        if transport == "gloo":
            local = host == "127.0.0.1"
            port = bench.words.ask({"do": "gloo", "local": local})["port"]
            bench.join_gloo(host, port)
        else:
            rdma = bench.options["rdma"]
            bench.engine = make_engine(CONNECTOR, secret, "0.0.0.0", transport, rdma=rdma)
            answer = bench.words.ask({"do": "open", "transport": transport})
            if "error" in answer:
                raise EngineError(f"at {host}: {answer['error']}")
            bench.link = bench.engine.connect(
                peer_rank=LISTENER, link_id=1, host=host, port=answer["port"], timeout=GLOO_SECONDS
            )
            bench.link.reserve(transfers.BACKWARD, 2, LATENCY_BYTES)
            bench.run = 0
        ready = bench.words.hear()
        if "error" in ready:
            raise EngineError(f"at {host}: {ready['error']}")
    except (EngineError, RuntimeError, OSError) as error:
        return result | {"unavailable": str(error).splitlines()[0]}
    if bench.engine is not None and transport == "rdma":
        result["rails"] = [bench.engine.rails, ready["rails"]]
        result["rails_trouble"] = bench.engine.rails_trouble
    result["throughput"] = [_throughput(bench, size) for size in bench.options["sizes"]]
    result["latency"] = _latency(bench)
    if bench.link is not None:
        result["paths"] = [path_record(path) for path in bench.link.stats().paths]
    bench.words.say({"do": "close"})
    return result


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
        said = bench.words.hear()
        if not said["whole"]:
            raise EngineError(f"messages of {size} bytes arrived with another content")
        times.append(said["seconds"])
    times = times[1:]  # the first one warms up buffers, pages and congestion windows
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


def path_record(path: PathStats) -> dict[str, Any]:
    """One data path after all is measured. Rates and round trips are of rails only, None
    elsewhere; the round trip is that of a probe on the path while it was idle."""
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


def _paths_table(transport: dict[str, Any]) -> list[str]:
    """What each rail carried: a row per path, under the transport's own numbers."""
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
        table(head, rows, numbers=2),
        *([transport["rails_trouble"]] if transport["rails_trouble"] else []),
    ]


def show(report: dict[str, Any]) -> str:
    """The report as one table, a row per size and a column per transport, and one of rails."""
    measured = [t for t in report["transports"] if t["unavailable"] is None]
    lines = [
        f"{report['hosts'][0]} → {report['hosts'][1]}, {report['window']} messages under way, "
        f"median of {report['rounds']} rounds, {report['cores']} cores, load {report['load']:.1f}; "
        "GB/s, delivered into the receiver's tensors\n"
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
    lines = [*lines, table(head, rows, numbers=1)] if measured else []
    for transport in measured:
        lines += _paths_table(transport)
    lines += [
        f"{t['transport']}: unavailable: {t['unavailable']}"
        for t in report["transports"]
        if t["unavailable"] is not None
    ]
    return "\n".join(lines)


def _size(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


def locally(options: dict[str, Any], secret: str) -> dict[str, Any]:
    """Both ends on this host, the listening one in a process of its own."""
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
    except EngineError as error:
        print(f"pipemorph bench link: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(report, indent=1) if options["output"] == "json" else show(report))
    # A transport that was asked for by name and is not there is a failure.
    asked = options["asked"]
    return int(any(t["unavailable"] and t["transport"] in asked for t in report["transports"]))


if __name__ == "__main__":
    sys.exit(main())
