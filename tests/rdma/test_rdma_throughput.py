"""The rail against ib_write_bw: the same guests, cable and run, one after the other in turns."""

import re
import threading

import pytest
from guests import Fabric
from peers import linked

pytestmark = [pytest.mark.rdma, pytest.mark.slow]

MIB = 1 << 20
# Message size, how many of them in a measurement, and measurements. perftest sends at least five.
SIZES = ((MIB, 8, 3), (8 * MIB, 5, 3), (32 * MIB, 5, 2))


def ib_write_bw(fabric: Fabric, size: int, count: int, port: int) -> float:
    """MiB/s of RDMA writes over rail 0, without immediate values, as perftest measures it."""
    command = ["ib_write_bw", "-d", "rxe0", "-x", "1", "-s", str(size), "-n",
               str(count), "-t", "8", "-p", str(port), "-F"]  # fmt: skip
    server = threading.Thread(target=lambda: fabric.b.try_run(*command, deadline=120))
    server.start()
    try:
        fabric.b.sh(f"until ss -ltn | grep -q :{port}; do sleep 0.1; done")
        said = fabric.a.run(*command, fabric.CONTROL["b"], deadline=120)
    finally:
        server.join()
    row = re.search(rf"^\s*{size}\s+\d+\s+\S+\s+(\S+)", said, re.MULTILINE)
    assert row is not None, said
    return float(row.group(1))


@pytest.mark.timeout(400)
def test_one_rail_is_as_fast_as_ib_write_bw(fabric: Fabric, record_property):
    for size, count, rounds in SIZES:
        ratios = []
        with linked(fabric, rdma_devices=["rxe0"], chunk_bytes=MIB) as link:
            link.reserve(4, size)
            link.rails_up(1)
            for number in range(rounds):
                taken = link.b.start("swallow", direction=0, first=0, count=count)
                seconds = link.a.do("measure", direction=0, size=size, count=count, first=0)
                link.b.result(taken)
                ours = count * size / MIB / seconds
                ratios.append(ours / ib_write_bw(fabric, size, count, 18515 + number))
        # Of the best turn: emulated processors share two real ones with all else that runs here.
        record_property(f"ratio at {size // MIB} MiB", max(ratios))
        assert max(ratios) >= 0.85, f"{size // MIB} MiB: {ratios} of ib_write_bw"
