"""`pipemorph bench link` between two hosts that have rails.

What carried is the kernel's word: the counters of each RDMA device and of the network device under
it, at both ends.
"""

import json
import re
from typing import Any

import pytest
from guests import Fabric, Guest, Rail
from launchers import Launchers
from peers import until

pytestmark = [pytest.mark.rdma, pytest.mark.soak, pytest.mark.timeout(1800)]

KIB, MIB = 1 << 10, 1 << 20
QUICK = ("--sizes", "64K,1M", "--rounds", "1", "--volume", "2M", "--pings", "20")
# Streamed sizes: a warm-up each and one round of `QUICK`.
STREAMED = 2 * (32 * 64 * KIB + 8 * MIB)
PACKET = 4096
# Much longer than the engine waits for a rail, 10 s, and for a link of another transport, 30 s.
DEADLINE = 300.0


class End:
    """End of a link, as `pipemorph bench link ARGV` in a guest."""

    def __init__(
        self, launchers: Launchers, guest: Guest, *argv: str, env: dict[str, str] | None = None
    ) -> None:
        name = f"bench {next(launchers.ports)}"
        self._guest, self._launcher = guest, launchers[guest]
        self._files = {kind: f"/run/{name}.{kind}" for kind in ("out", "err")}
        self._launcher.do(
            "launch", name=name, module="bench_end", argv=argv, env=env or {}, **self._files
        )
        self._end = self._launcher.start("wait", name=name)

    def said(self, where: str = "out") -> str:
        return self._guest.read(self._files[where])

    def finish(self) -> tuple[int, str, str]:
        """Wait for the exit status and output, without torch's warnings that it finds no name for
        an address: there is no name service here."""
        status = self._launcher.result(self._end, DEADLINE)
        err = re.sub(r"^\[W.*\[c10d\].*\n", "", self.said("err"), flags=re.MULTILINE)
        return status, self.said(), err


class Listener(End):
    """End in guest b, which has printed its address."""

    def __init__(self, launchers: Launchers, *argv: str) -> None:
        fabric = launchers.fabric
        where = ("--listen", fabric.CONTROL["b"], "--port", str(next(launchers.ports)))
        super().__init__(launchers, fabric.b, *where, *argv)
        # Match the end of its line: the program may still be writing it.
        how = re.compile(r"^ +(\w+)=(\w+) pipemorph bench link (.+)\n", re.MULTILINE)
        until("how to connect", lambda: bool(how.search(self.said())), DEADLINE, self._both)
        found = how.search(self.said())
        assert found is not None
        self._launchers = launchers
        self._env = {found[1]: found[2]}
        self._connect = found[3].split()

    def _both(self) -> str:
        return f"out: {self.said()!r}, err: {self.said('err')!r}"

    def connected(self, *argv: str) -> End:
        """End in guest a, with the arguments that the listener printed."""
        guest = self._launchers.fabric.a
        return End(self._launchers, guest, *self._connect, *argv, *QUICK, env=self._env)


def counted(rail: Rail) -> dict[str, int]:
    return {name: rail.counter(name) for name in ("sent_pkts", "rcvd_pkts")}


def only_line(said: str) -> str:
    (line,) = said.splitlines()
    return line


def test_the_rail_that_is_named_carries_all_of_it(fabric: Fabric, launchers: Launchers):
    idle, used = ([fabric.rail(guest, n) for guest in (fabric.a, fabric.b)] for n in (0, 1))
    idle_before = [counted(rail) for rail in idle]
    before = [counted(rail) for rail in used]
    sent = [rail.guest.sent_bytes(rail.netdev) for rail in used]
    over_control = fabric.a.sent_bytes("eth0")
    listener = Listener(launchers, "--device", "rxe1")
    connector = listener.connected(
        *("--transports", "rdma", "--device", "rxe1", "--output", "json")
    )
    status, out, err = connector.finish()
    assert (status, err) == (0, ""), out
    report: dict[str, Any] = json.loads(out)
    assert report["hosts"] == ["a", "b"]
    (rdma,) = report["transports"]
    assert rdma["unavailable"] is None
    assert rdma["rails"] == [["rxe1 port 1"], ["rxe1 port 1"]]
    assert rdma["rails_error"] is None
    assert [(p["size"], p["messages"]) for p in rdma["throughput"]] == [(64 * KIB, 32), (MIB, 8)]
    for point in rdma["throughput"]:
        assert 0 < point["slowest"] <= point["gb_per_s"] <= point["fastest"]
    assert 0 < rdma["latency"]["p50"] <= rdma["latency"]["p99"]
    # A single path, and so none over TCP.
    (path,) = rdma["paths"]
    assert (path["kind"], path["rail"], path["state"]) == ("rdma", "rxe1 port 1", "UP")
    assert path["times_lost"] == 0
    assert path["bytes"] >= STREAMED
    assert path["gb_per_s_busy"] > 0
    assert 0 < path["rtt_min"] <= path["rtt_mean"] <= path["rtt_p99"]

    now = [counted(rail) for rail in used]
    assert now[0]["sent_pkts"] - before[0]["sent_pkts"] >= path["bytes"] // PACKET
    assert now[1]["rcvd_pkts"] - before[1]["rcvd_pkts"] >= path["bytes"] // PACKET
    grown = [rail.guest.sent_bytes(rail.netdev) - n for rail, n in zip(used, sent, strict=True)]
    assert grown[0] >= path["bytes"]
    # Pings came back the same way.
    assert grown[1] >= 20 * 4 * KIB
    assert fabric.a.sent_bytes("eth0") - over_control < path["bytes"] // 20
    assert [counted(rail) for rail in idle] == idle_before
    assert listener.finish()[::2] == (0, "")


def test_a_rail_that_leads_nowhere_is_one_line(launchers: Launchers):
    """A GID that is not there, at either end. The other rails are measured."""
    first, wrong = ("--device", "rxe0"), ("--gid-index", "200")
    pairs = [((*first, *wrong), first), (first, (*first, *wrong))]
    listeners = [Listener(launchers, *theirs) for _, theirs in pairs]
    # The two run at once, since each waits until the engine gives up.
    connectors = [
        listener.connected("--transports", "rdma,tcp", *ours)
        for (ours, _), listener in zip(pairs, listeners, strict=True)
    ]
    for connector, listener in zip(connectors, listeners, strict=True):
        status, out, err = connector.finish()
        assert (status, err) == (1, ""), out
        line = out.splitlines()[-1]
        assert line.startswith("rdma: unavailable: ")
        assert "no rail to rank 0 has been up" in line
        assert "rxe0 port 1 has no GID with index 200" in line
        assert re.search(r"^\| message +\| +tcp \|$", out, re.MULTILINE), out
        status, _, err = listener.finish()
        assert status == 1
        assert only_line(err).startswith("pipemorph bench link: rdma: unavailable: ")
