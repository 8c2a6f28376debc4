"""Ends of `pipemorph bench link`; run as ``python -m pipemorph_trainer.bench.link OPTIONS`` (JSON).

The connecting end is in charge: it sends, pings, and prints. It controls the listening end over an
engine link, which also proves that both have the secret. Each measured transport has its own engine
and port.
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

from pipemorph.commands.output_file import write_output
from pipemorph.doctor.host import usable_memory_bytes
from pipemorph.errors import InputError, one_line
from pipemorph.standard_streams import silence_stream
from pipemorph.terminal import RenderableType, make_table, render_parts
from pipemorph_trainer._engine import Engine, EngineError, EngineTimeout, Link, PathStats
from pipemorph_trainer.bench import transfers
from pipemorph_trainer.topology.addresses import format_for_url

JOB = "pipemorph bench link"
SECRET_VARIABLE = "PIPEMORPH_BENCH_SECRET"
MESSAGE_BYTES = 64 << 10
GLOO_SECONDS = 30.0
REFUSED_SECONDS = 3.0
"""Seconds until a refusal by the other end is final."""
IDLE_SECONDS = 600.0
LATENCY_BYTES = 4096
LISTENER, CONNECTOR = 0, 1
# Errors that make a transport unavailable; the others are still measured.
TRANSPORT_ERRORS = (EngineError, RuntimeError, OSError)


class BenchError(Exception):
    """Error of the benchmark as a whole, not of a single transport."""


def allocate_buffer(options: dict[str, Any], rank: int) -> torch.Tensor:
    """Allocate a buffer for a window of the largest messages, ``uint8`` on the CPU,
    ``[window × size]``, and touch every page. Raises :class:`BenchError` if this host lacks the
    memory."""
    window, size = options["window"], max(options["sizes"])
    request = f"--window and --sizes: {window} messages of {size} bytes"
    memory = usable_memory_bytes()
    if 2 * window * size > memory:
        raise BenchError(
            f"{request} do not fit twice, sent and received, into the {memory} bytes of memory of "
            f"{platform.node()}; connect with smaller ones"
        )
    try:
        buffer = torch.empty(window * size, dtype=torch.uint8)
    except RuntimeError as error:
        raise BenchError(
            f"{request}: {platform.node()} has no memory for them ({first_line(error)}); connect "
            "with smaller ones"
        ) from None
    return buffer.fill_(rank)


class ControlChannel:
    """Channel for JSON messages between the two ends, over an engine link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sent = self._received = 0
        # The connecting end has the higher rank and sends in direction 0.
        self._mine = 0 if link.peer_rank == LISTENER else 1
        link.reserve(1 - self._mine, 2, MESSAGE_BYTES)

    def send_message(self, content: dict[str, Any]) -> None:
        self._link.send((1, 0, self._sent, self._mine, 0), json.dumps(content).encode())
        self._sent += 1

    def receive_message(self, timeout: float = transfers.TIMEOUT) -> dict[str, Any]:
        message = self._link.receive((1, 0, self._received, 1 - self._mine, 0), timeout)
        self._received += 1
        content: dict[str, Any] = json.loads(bytes(message.view()))
        message.release()
        return content

    def receive_answer(self) -> dict[str, Any]:
        """Receive a message. Raises EngineError if the other end reports an error."""
        content = self.receive_message()
        if "error" in content:
            raise EngineError(f"at the other end: {one_line(str(content['error']))}")
        return content

    def send_request(self, content: dict[str, Any]) -> dict[str, Any]:
        self.send_message(content)
        return self.receive_answer()


def create_engine(
    rank: int,
    secret: str,
    host: str,
    transport: str,
    port: int = 0,
    *,
    rdma: dict[str, Any] | None = None,
) -> Engine:
    """Create an engine. ``rdma``: its options for rails. Raises EngineError if this build or host
    does not support the transport."""
    more: dict[str, Any] = {}
    if transport == "rdma":
        # Without this, a link that fell back to TCP could be measured.
        more = {"require": "rdma"} | (rdma or {})
    try:
        return Engine(
            job=JOB, rank=rank, secret=secret.encode(), host=host, port=port,
            transport=transport, **more,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise EngineError(f"this engine does not support {transport}: {error}") from None


class LinkBenchmark:
    """State of either end: the link of the current transport, tensors, and a counter of runs."""

    def __init__(
        self, options: dict[str, Any], rank: int, control: ControlChannel, buffer: torch.Tensor
    ) -> None:
        self.options, self.rank, self.control, self.buffer = options, rank, control, buffer
        self.engine: Engine | None = None
        self.link: Link | None = None
        self.run = 0
        self.small = torch.zeros(LATENCY_BYTES, dtype=torch.uint8)

    def slice_buffer(self, size: int) -> list[torch.Tensor]:
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
            init_method=f"tcp://{format_for_url(host)}:{port}",
            rank=self.rank,
            world_size=2,
            timeout=timedelta(seconds=GLOO_SECONDS),
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error, without torch's appended stack; its type if empty."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def name_this_host(listens_on: str) -> str:
    """Name this host for the other end: the address, if this end listens at only one."""
    return socket.gethostname() if listens_on in ("0.0.0.0", "::") else listens_on


# --- The listening end ----------------------------------------------------------------------------


def run_listener(options: dict[str, Any], secret: str) -> int:
    """Serve a benchmark. Prints the command that connects to this end."""
    host = options["listen"]
    alone = not options["announce"]  # No other process on this host prints the command.
    if alone and options["rdma"]["rdma_devices"]:
        # Reports a missing device now, and not after a connection.
        create_engine(LISTENER, secret, host, "rdma", rdma=options["rdma"]).close()
    control_engine = create_engine(LISTENER, secret, host, "tcp", options["port"])
    if not alone:
        print(json.dumps({"port": control_engine.port}), flush=True)
    else:
        print(
            f"on the other host run:\n\n  {SECRET_VARIABLE}={secret} pipemorph bench link "
            f"--connect {name_this_host(host)} --port {control_engine.port}\n",
            flush=True,
        )
    link = control_engine.accept(peer_rank=CONNECTOR, link_id=0, timeout=options["wait"])
    control = ControlChannel(link)
    agreed = control.receive_message()
    required = {*options["required"], *agreed.pop("required", ())}
    options = options | agreed
    try:
        # The connecting end has only checked its own memory.
        buffer = allocate_buffer(options, LISTENER)
    except BenchError as error:
        control.send_message({"error": str(error)})
        control_engine.close()
        raise
    bench = LinkBenchmark(options, LISTENER, control, buffer)
    control.send_message({"host": platform.node(), "torch": torch.__version__})
    actions = {
        "open": _open_transport,
        "gloo": _open_gloo,
        "stream": _receive_stream,
        "ping": _answer_pings,
    }
    transport, status = "", 0
    while (request := control.receive_message(IDLE_SECONDS))["do"] != "end":
        if request["do"] == "close":
            bench.close()
            control.send_message({"closed": True})
            continue
        transport = request.get("transport", transport)
        try:
            actions[request["do"]](bench, request, secret)
        except TRANSPORT_ERRORS as error:
            bench.close()
            control.send_message({"error": first_line(error)})
            if alone:
                text = f"pipemorph bench link: {transport}: unavailable: {first_line(error)}"
                print(text, file=sys.stderr, flush=True)
            status |= transport in required
    bench.close()
    control_engine.close()
    return status


def _open_transport(bench: LinkBenchmark, request: dict[str, Any], secret: str) -> None:
    options = bench.options
    bench.engine = create_engine(
        LISTENER, secret, options["listen"], request["transport"], rdma=options["rdma"]
    )
    bench.control.send_message({"port": bench.engine.port})
    bench.link = bench.engine.accept(peer_rank=CONNECTOR, link_id=1, timeout=GLOO_SECONDS)
    bench.run = 0
    for size in options["sizes"]:
        bench.link.reserve(transfers.FORWARD, options["window"], size)
    bench.control.send_message({"rails": bench.engine.rails})


def _open_gloo(bench: LinkBenchmark, request: dict[str, Any], _: str) -> None:
    with socket.socket() as s:
        s.bind((bench.options["listen"], 0))
        port = s.getsockname()[1]
    bench.control.send_message({"port": port})
    bench.join_gloo("127.0.0.1" if request["local"] else bench.options["listen"], port)
    bench.control.send_message({"joined": True})


def _receive_stream(bench: LinkBenchmark, request: dict[str, Any], _: str) -> None:
    """Receive a stream of messages; report the seconds and whether contents are right."""
    size, count, window = request["size"], request["count"], bench.options["window"]
    tensors = bench.slice_buffer(size)
    bench.run += 1
    for tensor in tensors:
        tensor[0] = tensor[-1] = LISTENER
    began = time.perf_counter()
    bench.control.send_message({"go": True})
    if bench.link is not None:
        transfers.receive_over_engine(bench.link, bench.run, tensors, count, window)
    else:
        transfers.receive_over_gloo(tensors, count, window, CONNECTOR)
    seconds = time.perf_counter() - began
    whole = all(int(t[0]) == int(t[-1]) == CONNECTOR for t in tensors[: min(count, window)])
    bench.control.send_message({"seconds": seconds, "whole": whole})


def _answer_pings(bench: LinkBenchmark, request: dict[str, Any], _: str) -> None:
    bench.run += 1
    bench.control.send_message({"go": True})
    if bench.link is not None:
        transfers.pong_over_engine(bench.link, bench.run, bench.small, request["count"])
    else:
        transfers.pong_over_gloo(bench.small, request["count"], CONNECTOR)


# --- The connecting end ---------------------------------------------------------------------------


def _connect_to_listener(control_engine: Engine, host: str, port: int, seconds: float) -> Link:
    """Connect to the other end. Raises EngineError at once if it has another secret, and
    EngineTimeout if no end listens within ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        remaining = max(end - time.monotonic(), 0.0)
        try:
            # An engine retries after a refusal, which may come from the engine of another job.
            return control_engine.connect(
                peer_rank=LISTENER,
                link_id=0,
                host=host,
                port=port,
                timeout=min(REFUSED_SECONDS, remaining),
            )
        except EngineTimeout:
            if time.monotonic() >= end:
                raise


def run_connector(options: dict[str, Any], secret: str, host: str, port: int) -> dict[str, Any]:
    """Measure all transports. Raises EngineError if the other end is missing, has another secret or
    lacks memory, and :class:`BenchError` if this end lacks memory."""
    buffer = allocate_buffer(options, CONNECTOR)
    control_engine = create_engine(CONNECTOR, secret, "0.0.0.0", "tcp")
    try:
        control = ControlChannel(_connect_to_listener(control_engine, host, port, options["wait"]))
        agreed = {name: options[name] for name in ("sizes", "window", "required")}
        peer = control.send_request(agreed)
        bench = LinkBenchmark(options, CONNECTOR, control, buffer)
        results = []
        for transport in options["transports"]:
            results.append(_measure_transport(bench, transport, secret, host))
        control.send_message({"do": "end"})
    finally:
        control_engine.close()
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


def _measure_transport(
    bench: LinkBenchmark, transport: str, secret: str, host: str
) -> dict[str, Any]:
    """Measure a transport. "unavailable" in the result says why there are no figures."""
    result: dict[str, Any] = {"transport": transport, "unavailable": None}
    trouble = ""
    try:
        theirs = _open_both_ends(bench, transport, secret, host)
        if bench.engine is not None and transport == "rdma":
            result["rails"] = [bench.engine.rails, theirs["rails"]]
            result["rails_error"] = bench.engine.rails_error
        result["throughput"] = [_measure_throughput(bench, size) for size in bench.options["sizes"]]
        result["latency"] = _measure_latency(bench)
        if bench.link is not None:
            result["paths"] = [make_path_record(path) for path in bench.link.stats().paths]
    except TRANSPORT_ERRORS as error:
        trouble = first_line(error)
    # Closed first, so that the other end does not wait in vain. Its earlier messages are read here,
    # since they would look like answers to the next request.
    bench.close()
    bench.control.send_message({"do": "close"})
    while "closed" not in (answer := bench.control.receive_message()):
        if "error" in answer:
            trouble = "; ".join(filter(None, [trouble, f"at the other end: {answer['error']}"]))
    if trouble:
        return {"transport": transport, "unavailable": trouble}
    return result


def _open_both_ends(bench: LinkBenchmark, transport: str, secret: str, host: str) -> dict[str, Any]:
    """Open a transport at both ends; return the other end's answer. Raises TRANSPORT_ERRORS."""
    if transport == "gloo":
        local = host == "127.0.0.1"
        answer = bench.control.send_request({"do": "gloo", "transport": transport, "local": local})
        bench.join_gloo(host, answer["port"])
    else:
        rdma = bench.options["rdma"]
        bench.engine = create_engine(CONNECTOR, secret, "0.0.0.0", transport, rdma=rdma)
        answer = bench.control.send_request({"do": "open", "transport": transport})
        bench.link = bench.engine.connect(
            peer_rank=LISTENER, link_id=1, host=host, port=answer["port"], timeout=GLOO_SECONDS
        )
        bench.link.reserve(transfers.BACKWARD, 2, LATENCY_BYTES)
        bench.run = 0
    return bench.control.receive_answer()


def _measure_throughput(bench: LinkBenchmark, size: int) -> dict[str, Any]:
    options, window = bench.options, bench.options["window"]
    count = max(2 * window, min(options["volume"] // size, options["most"]))
    times = []
    for _ in range(options["rounds"] + 1):
        bench.control.send_request({"do": "stream", "size": size, "count": count})
        bench.run += 1
        tensors = bench.slice_buffer(size)
        if bench.link is not None:
            transfers.send_over_engine(bench.link, bench.run, tensors, count, window)
        else:
            transfers.send_over_gloo(tensors, count, window, LISTENER)
        answer = bench.control.receive_answer()
        if not answer["whole"]:
            raise BenchError(f"messages of {size} bytes arrived with wrong content")
        times.append(answer["seconds"])
    times = times[1:]  # The first one warms up buffers, pages and congestion windows.
    rate = size * count / 1e9
    return {
        "size": size,
        "messages": count,
        "gb_per_s": rate / median(times),
        "slowest": rate / max(times),
        "fastest": rate / min(times),
    }


def _measure_latency(bench: LinkBenchmark) -> dict[str, Any]:
    count = bench.options["pings"]
    for n in (count // 10 + 1, count):
        bench.control.send_request({"do": "ping", "count": n})
        bench.run += 1
        if bench.link is not None:
            times = transfers.ping_over_engine(bench.link, bench.run, bench.small, n)
        else:
            times = transfers.ping_over_gloo(bench.small, n, LISTENER)
    return {
        "size": LATENCY_BYTES,
        "pings": count,
        "p50": transfers.compute_percentile(times, 50),
        "p99": transfers.compute_percentile(times, 99),
    }


def run_locally(options: dict[str, Any], secret: str) -> dict[str, Any]:
    """Run both ends on this host, the listening one in another process."""
    theirs = options | {"role": "listen", "listen": "127.0.0.1", "port": 0, "announce": True}
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(theirs)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {SECRET_VARIABLE: secret}
    ) as other:
        try:
            assert other.stdout is not None
            answer = other.stdout.readline()
            if not answer:
                raise EngineError(f"the listening process ended with {other.wait()}")
            return run_connector(options, secret, "127.0.0.1", json.loads(answer)["port"])
        finally:
            other.terminate()


# --- The report -----------------------------------------------------------------------------------


def make_path_record(path: PathStats) -> dict[str, Any]:
    """Make the record of a data path after the measurement. Rates and round trips, of probes on the
    idle path, are only for rails, else None."""
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


def _make_paths_table(transport: dict[str, Any]) -> list[RenderableType]:
    """Make a table with a row per rail, below the transport's figures."""
    rails = [path for path in transport.get("paths", ()) if path["kind"] == "rdma"]
    if not rails:
        return []

    def format_microseconds(seconds: float | None) -> str:
        return "unavailable" if seconds is None else f"{seconds * 1e6:.0f} µs"

    rows = [
        [
            path["rail"],
            path["state"],
            f"{path['bytes'] / 1e9:.3g}",
            "unavailable" if path["gb_per_s_busy"] is None else f"{path['gb_per_s_busy']:.3g}",
            *(format_microseconds(path[f"rtt_{which}"]) for which in ("min", "mean", "p99")),
            str(path["times_lost"]),
        ]
        for path in rails
    ]
    head = ["rail", "state", "GB", "GB/s busy", "RTT min", "mean", "p99", "times lost"]
    here, there = transport["rails"]
    return [
        f"\n{transport['transport']}: rails {', '.join(here)} → {', '.join(there)}",
        make_table(head, rows, right=head[2:]),
        *([transport["rails_error"]] if transport["rails_error"] else []),
    ]


def make_report(report: dict[str, Any]) -> list[RenderableType]:
    """Make the report's tables: sizes (rows) by transports (columns), and a table of rails."""
    measured = [t for t in report["transports"] if t["unavailable"] is None]
    lines: list[RenderableType] = [
        f"{report['hosts'][0]} → {report['hosts'][1]}, {report['window']} messages in flight, "
        f"median of {report['rounds']} rounds, {report['cores']} cores, load {report['load']:.1f}; "
        "GB/s, delivered into the receiver's tensors",
        "",
    ]
    head = ["message", *(t["transport"] for t in measured)]
    rows = [
        [_format_size(p["size"]), *(f"{t['throughput'][i]['gb_per_s']:.3g}" for t in measured)]
        for i, p in enumerate(measured[0]["throughput"] if measured else [])
    ]
    for which in ("p50", "p99"):
        rows.append(
            [
                f"{_format_size(LATENCY_BYTES)} one way, {which}",
                *(f"{t['latency'][which] * 1e6:.0f} µs" for t in measured),
            ]
        )
    lines = [*lines, make_table(head, rows, right=head[1:])] if measured else []
    for transport in measured:
        lines += _make_paths_table(transport)
    lines += [
        f"{t['transport']}: unavailable: {t['unavailable']}"
        for t in report["transports"]
        if t["unavailable"] is not None
    ]
    return lines


def _format_size(n: int) -> str:
    return f"{n >> 20} MiB" if n >= 1 << 20 else f"{n >> 10} KiB"


# --- The program ----------------------------------------------------------------------------------


def main() -> int:
    options: dict[str, Any] = json.loads(sys.argv[1])
    secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(16)
    torch.set_num_threads(1)
    try:
        if options["role"] == "listen":
            return run_listener(options, secret)
        if options["role"] == "connect":
            report = run_connector(options, secret, options["connect"], options["port"])
        else:
            report = run_locally(options, secret)
    except (EngineError, BenchError) as error:
        print(f"pipemorph bench link: {one_line(str(error), 1000)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    as_json = options["output"] == "json"
    text = json.dumps(report, indent=1) + "\n" if as_json else render_parts(*make_report(report))
    try:
        write_output(text.encode(), None)
    except InputError as error:
        print(f"pipemorph bench link: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        silence_stream(sys.stdout)
        return 1
    # An unavailable transport is a failure if it was named.
    required = options["required"]
    return int(any(t["unavailable"] and t["transport"] in required for t in report["transports"]))


if __name__ == "__main__":
    sys.exit(main())
