"""A program that makes reliable connections and measures them: JSON lines in, JSON lines out.

It needs only pyverbs and Python 3.8, not this package: if pyverbs is not built for the running
Python, the distribution's Python runs it. Each request has an ``op``; each answer is the
result, or has ``error``.

====== ======================================= =================================================
op     needs                                   result
====== ======================================= =================================================
ports                                          active MTU in bytes of each port, by device/number
open   device, port, gid_index, bytes          id, qpn, psn, gid, lid, key, address
join   id, mtu, peer: the other end's ``open``
write  id, bytes, count, seconds, window       bytes and seconds in all; each: seconds of every
                                               write if window is 1; failed: the status of the
                                               first write that did not succeed
close  id
====== ======================================= =================================================

Writes are RDMA writes into the peer's memory, which its device acknowledges without its processor:
with a window of 1, each takes a round trip. ``write`` ends after ``count`` writes, or once
``seconds`` have passed.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from contextlib import suppress
from typing import Any

DISTRIBUTION = "/usr/lib/python3/dist-packages"
"""Folder in which Debian and its kin install pyverbs. Virtual environments exclude it."""
ACK_TIMEOUT, RETRIES = 16, 6
"""Retries of a packet: after 4.096 µs × 2^16 = 268 ms, six times. 7 is no limit for Soft-RoCE."""
COMPLETION_SECONDS = 20.0
"""Longest wait for a completion. A device gives up after a few seconds and reports it."""
PSN_BITS = 24
HOP_LIMIT = 64
MODULES = ("device", "pd", "mr", "cq", "qp", "addr", "wr", "enums", "pyverbs_error")


class RequestError(Exception):
    """A request that cannot be carried out."""


def load_pyverbs() -> dict[str, Any]:
    """The modules of pyverbs. Raises ImportError."""
    try:
        importlib.import_module("pyverbs.device")
    except ImportError:
        sys.path.append(DISTRIBUTION)
        importlib.invalidate_caches()
    return {name: importlib.import_module("pyverbs." + name) for name in MODULES}


def read_port_mtus(verbs: dict[str, Any]) -> dict[str, Any]:
    """Active MTU in bytes of each port that can be read."""
    found: dict[str, Any] = {}
    for device in verbs["device"].get_device_list():
        name = device.name.decode()
        with suppress(verbs["pyverbs_error"].PyverbsError):
            context = verbs["device"].Context(name=name)
            for number in range(1, context.query_device().phys_port_cnt + 1):
                port = context.query_port(number)
                # 256 bytes are IBV_MTU_256 = 1; each next value doubles it.
                found["%s/%d" % (name, number)] = 128 << int(port.active_mtu)  # noqa: UP031
            context.close()
    return found


class QueuePair:
    """Queue pair with its own memory."""

    def __init__(self, verbs: dict[str, Any], request: dict[str, Any]) -> None:
        self._verbs, self._e = verbs, verbs["enums"]
        self._port, self._gid_index = int(request["port"]), int(request["gid_index"])
        self._context = verbs["device"].Context(name=request["device"])
        self._pd = verbs["pd"].PD(self._context)
        access = self._e.IBV_ACCESS_LOCAL_WRITE | self._e.IBV_ACCESS_REMOTE_WRITE
        self._mr = verbs["mr"].MR(self._pd, int(request["bytes"]), access)
        self._cq = verbs["cq"].CQ(self._context, 256)
        init = verbs["qp"].QPInitAttr(
            qp_type=self._e.IBV_QPT_RC,
            scq=self._cq,
            rcq=self._cq,
            cap=verbs["qp"].QPCap(max_send_wr=128, max_recv_wr=1),
        )
        attr = verbs["qp"].QPAttr(port_num=self._port)
        attr.qp_access_flags = access
        self._qp = verbs["qp"].QP(self._pd, init, attr)
        self._psn = random.getrandbits(PSN_BITS)
        self._peer: dict[str, Any] = {}

    def describe_endpoint(self) -> dict[str, Any]:
        """Fields that the other end needs to connect."""
        return {
            "qpn": self._qp.qp_num,
            "psn": self._psn,
            "gid": str(self._context.query_gid(self._port, self._gid_index)),
            "lid": self._context.query_port(self._port).lid,
            "key": self._mr.rkey,
            "address": self._mr.buf,
        }

    def connect_peer(self, peer: dict[str, Any], mtu: int) -> None:
        """Connect to the other end."""
        addr, qp = self._verbs["addr"], self._verbs["qp"]
        route = addr.GlobalRoute(
            dgid=addr.GID(peer["gid"]), sgid_index=self._gid_index, hop_limit=HOP_LIMIT
        )
        attr = qp.QPAttr(port_num=self._port)
        attr.ah_attr = addr.AHAttr(
            gr=route, is_global=1, port_num=self._port, dlid=int(peer["lid"])
        )
        attr.path_mtu = mtu.bit_length() - 8
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qpn"], peer["psn"], self._psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.rnr_retry = 12, 6
        attr.timeout, attr.retry_cnt = ACK_TIMEOUT, RETRIES
        self._qp.to_rts(attr)
        self._peer = peer

    def measure_writes(self, size: int, count: int, seconds: float, window: int) -> dict[str, Any]:
        """Write ``size`` bytes repeatedly, ``window`` writes at a time."""
        wr = self._verbs["wr"]
        request = wr.SendWR(
            opcode=self._e.IBV_WR_RDMA_WRITE,
            num_sge=1,
            sg=[wr.SGE(self._mr.buf, size, self._mr.lkey)],
            send_flags=self._e.IBV_SEND_SIGNALED,
        )
        request.set_wr_rdma(self._peer["key"], self._peer["address"])
        posted = done = 0
        each: list[float] = []
        began = sent = now = time.perf_counter()
        while done < posted or (posted < count and now - began < seconds):
            while posted < count and posted - done < window and now - began < seconds:
                sent = time.perf_counter()
                self._qp.post_send(request)
                posted += 1
            for completion in self._poll_completions():
                if completion.status != self._e.IBV_WC_SUCCESS:
                    status = self._verbs["cq"].cqe_status_to_str(completion.status)
                    return {"failed": status, "bytes": done * size, "each": each}
                done += 1
            now = time.perf_counter()
            if window == 1:
                each.append(now - sent)
        return {"bytes": done * size, "seconds": now - began, "each": each}

    def _poll_completions(self) -> list[Any]:
        deadline = time.perf_counter() + COMPLETION_SECONDS
        while True:
            number, found = self._cq.poll(16)
            if number:
                return list(found)
            if time.perf_counter() > deadline:
                raise RequestError("the device completed no write within %g s" % COMPLETION_SECONDS)  # noqa: UP031

    def close(self) -> None:
        for each in (self._qp, self._cq, self._mr, self._pd, self._context):
            each.close()


def execute_request(
    verbs: dict[str, Any], connections: dict[int, QueuePair], request: dict[str, Any]
) -> dict[str, Any]:
    """Carry out one request."""
    op = request["op"]
    if op == "ports":
        return {"ports": read_port_mtus(verbs)}
    if op == "open":
        number = max(connections, default=0) + 1
        connections[number] = QueuePair(verbs, request)
        return {"id": number, **connections[number].describe_endpoint()}
    if op == "join":
        connections[request["id"]].connect_peer(request["peer"], request["mtu"])
        return {}
    if op == "write":
        return connections[request["id"]].measure_writes(
            request["bytes"], request["count"], request["seconds"], request["window"]
        )
    if op == "close":
        connections.pop(request["id"]).close()
        return {}
    raise RequestError("op is %r; expected ports, open, join, write or close" % (op,))  # noqa: UP031


def main() -> int:
    try:
        verbs = load_pyverbs()
    except ImportError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"ready": True}), flush=True)
    failures = (verbs["pyverbs_error"].PyverbsError, RequestError, OSError, ValueError)
    connections: dict[int, QueuePair] = {}
    for line in sys.stdin:
        try:
            out = execute_request(verbs, connections, json.loads(line))
        except failures as error:
            out = {"error": " ".join(str(error).split()) or type(error).__name__}
        print(json.dumps(out), flush=True)
    for each in connections.values():
        with suppress(*failures):
            each.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
