"""The plain port of metrics and probes, at the addresses a pod may have."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from pipemorph_operator import health_server


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.ipv6)])
async def test_every_address_of_the_pod_is_served(address: str) -> None:
    """Kubernetes probes the pod's own address, which is IPv6 in a cluster of IPv6."""
    missing = ["Jobs of namespace b: 403 Forbidden", ""]
    # No other process gets a port that is held, and a listener there requests to share it.
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        http = await health_server.start(None, port, lambda: missing.pop(0))
    answers = []
    try:
        async with aiohttp.ClientSession() as session:
            for path in ("healthz", "readyz", "readyz", "metrics"):
                async with session.get(f"http://{address}:{port}/{path}") as answer:
                    answers.append((answer.status, await answer.text()))
    finally:
        await http.stop()
    unready = (503, "Jobs of namespace b: 403 Forbidden\n")
    assert answers[:3] == [(200, "ok\n"), unready, (200, "ok\n")] and answers[3][0] == 200


async def test_who_says_nothing_or_stays_keeps_no_probe_out() -> None:
    http = await health_server.start("127.0.0.1", 0, str)
    silent = []
    try:
        for _ in range(2 * health_server.LIMITS.total):
            silent.append(await asyncio.open_connection("127.0.0.1", http.port))
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: pod\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        # Connections that made room, by the end of their stream.
        await asyncio.gather(*(reader.read() for reader, _ in silent[: health_server.LIMITS.total]))
    finally:
        for _, writer in silent:
            writer.close()
        await http.stop()
