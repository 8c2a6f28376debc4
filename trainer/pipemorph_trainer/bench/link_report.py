"""The report of `pipemorph bench link`: records of data paths, and tables."""

from __future__ import annotations

from typing import Any

from pipemorph.commands.table import table
from pipemorph_trainer._engine import PathStats

LATENCY_BYTES = 4096


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


def _paths_table(transport: dict[str, Any]) -> list[str]:
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
        table(head, rows, numbers=2),
        *([transport["rails_trouble"]] if transport["rails_trouble"] else []),
    ]


def show(report: dict[str, Any]) -> str:
    """The report as tables: one with a row per size and a column per transport, one of rails."""
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
