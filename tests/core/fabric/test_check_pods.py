"""The check between the pods of a job: who leads, who is missing, and what status gets of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from fabric_plant import Plant, Way, rail, way
from pydantic import TypeAdapter

from pipemorph.fabric.check.end import Host
from pipemorph.fabric.check.job_view import view_of
from pipemorph.fabric.check.measure import Checked
from pipemorph.fabric.check.pods import NoCheck, Place, check_pods
from pipemorph.fabric.check.verdict import Finding, Measured, Port, Rail
from pipemorph.wire import MAX_REPORT_BYTES, SHOWN, FabricPair, FabricView
from pipemorph.wire.states import MOST_PAIRS, MOST_PORTS

SECRET = "0123456789abcdef"
SECONDS = 20.0


class PlantHost(Host):
    """A host of a plant, for others to ask."""

    def __init__(self, plant: Plant, number: int) -> None:
        self._plant, self._number = plant, number

    def rails(self) -> list[Rail]:
        return [rail(n, self._number) for n in range(self._plant.rails)]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "describe":
            return {"rails": [asdict(each) for each in self.rails()]}
        return self._plant.ask(f"h{self._number}", request)

    def close(self) -> None:
        return


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def checked(plant: Plant, count: int, *, seconds: float = SECONDS) -> Checked:
    """The result of a job with ``count`` pods, of which those of the plant come."""
    port = free_port()
    results: dict[int, Checked | None] = {}

    def pod(index: int) -> None:
        def host() -> Host:
            return PlantHost(plant, index)

        place = Place(index, count, "127.0.0.1", SECRET)
        results[index] = check_pods(place, seconds=seconds, port=port, make_host=host)

    threads = [threading.Thread(target=pod, args=(n,)) for n in range(plant.hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(results) == list(range(plant.hosts))
    found = results.pop(0)
    assert set(results.values()) <= {None}
    assert found is not None
    return found


def test_the_first_pod_leads_and_the_others_go_on():
    result = checked(Plant(ways={way(2, 1): Way(rate=1e9)}), 3)
    assert len(result.measured) == 12
    (finding,) = result.findings
    assert finding.line == "pod 2 mlx5_0/1 → pod 1 mlx5_0/1: carries 8 Gb/s; others carry 96 Gb/s"


def test_pods_that_do_not_come_are_named_and_the_others_are_checked():
    result = checked(Plant(hosts=2), 4, seconds=1.0)
    assert [f.line for f in result.findings] == [
        "pod 2 -: did not come within 1 s",
        "pod 3 -: did not come within 1 s",
    ]
    assert len(result.measured) == 4


def test_a_pod_meets_a_bounded_number_of_others():
    """Of 12 pods with 8 rails each meets 2: 12 pairs, both directions."""
    result = checked(Plant(hosts=12, rails=8), 12)
    assert len(result.measured) == 12 * 8 * 2


@pytest.mark.parametrize("secret", [SECRET, "another one, as of an attacker"])
def test_without_the_first_pod_there_is_no_check(secret: str):
    """It is not there, or knows another secret."""
    plant, port = Plant(), free_port()

    def host(number: int) -> Callable[[], Host]:
        return lambda: PlantHost(plant, number)

    leader = threading.Thread(
        target=lambda: check_pods(
            Place(0, 2, "", secret), seconds=1.5, port=port, make_host=host(0)
        )
    )
    if secret != SECRET:
        leader.start()
    with pytest.raises(NoCheck, match=r"^the first pod, 127\.0\.0\.1: "):
        check_pods(Place(1, 2, "127.0.0.1", SECRET), seconds=0.5, port=port, make_host=host(1))
    if secret != SECRET:
        leader.join(SECONDS)


def test_status_gets_a_bounded_part_with_what_is_sick_first():
    plant = Plant(hosts=6, rails=4, ways={way(4, 5): Way(mtu=0)})
    result = checked(plant, 6)
    view = view_of(result)
    assert (view.pods, view.sick_count) == (6, 1)
    assert view.directions == len(result.measured) > SHOWN
    assert (view.rate, view.round_trip) == (12e9, 4e-6)
    assert len(view.slowest) == SHOWN
    worst = view.slowest[0]
    assert (worst.source, worst.target) == ("pod 4 mlx5_0/1", "pod 5 mlx5_0/1")
    assert (worst.rate, worst.mtu) == (None, None)
    assert view.sick[0].startswith("pod 4 mlx5_0/1 → pod 5 mlx5_0/1: nothing arrives: ")


def test_pairs_of_ports_are_told_with_what_is_sick_first():
    ways = {way(1, 2): Way(rate=1e9), way(0, 1): Way(rate=9e9, round_trip=5e-6)}
    view = view_of(checked(Plant(hosts=4, rails=2, ways=ways), 4), ranks_per_pod=8, at=17.0)
    assert (view.ports, view.ranks_per_pod, view.at) == (("mlx5_0/1", "mlx5_1/1"), 8, 17.0)
    first, *others = view.pairs
    assert first == FabricPair(1, 2, (0, 0), True, 1e9, 4e-6)
    assert not any(pair.sick for pair in others)
    assert len(view.pairs) == 6 * 2, "both directions are one"
    near = [bool({pair.first, pair.second} & {1, 2}) for pair in others]
    assert near == sorted(near, reverse=True), "then those with the same pods"
    assert others[0] == FabricPair(0, 1, (0, 0), False, 9e9, 5e-6), "the worse of its directions"


def test_a_port_that_is_down_and_one_with_a_small_mtu_are_sick_pairs():
    rails = {f"pod {n}": [rail(0, n)] for n in range(7)}
    rails["pod 3"] = [rail(0, 3, active=False, state="DOWN")]
    both = [(a, b) for a in range(7) for b in range(7) if a != b and 3 not in (a, b)]
    measured = [
        Measured(*(Port(f"pod {n}", "mlx5_0/1") for n in ends), rate=1e9, p50=4e-6, path_mtu=4096)
        for ends in both
    ]
    small = Port("pod 6", "mlx5_0/1")
    findings = [
        Finding("down", Port("pod 3", "mlx5_0/1"), None, "is DOWN"),
        Finding("mtu", small, None, "has MTU 1024"),
        Finding("absent", Port("pod 9", "-"), None, "did not come"),
    ]
    view = view_of(Checked(rails, measured, findings))
    sick = {(pair.first, pair.second) for pair in view.pairs if pair.sick}
    down = {ends for ends in sick if 3 in ends}
    assert len(down) == 4, "enough to accuse the port, and none of the others"
    assert sick - down == {(n, 6) for n in range(6) if n != 3}


def test_a_pod_without_any_port_is_a_sick_pair_without_a_port():
    rails = {"pod 0": [rail(0, 0)], "pod 1": [], "pod 2": [rail(0, 2)]}
    view = view_of(Checked(rails, [], [Finding("down", Port("pod 1", "-"), None, "has none")]))
    assert {pair[:4] for pair in view.pairs} == {
        (0, 1, (None, None), True),
        (1, 2, (None, None), True),
    }


def test_the_largest_part_fits_into_a_report():
    ports = Port("pod 100000", "x" * 1000), Port("pod 100001", "x" * 1000)
    result = Checked(
        {},
        [
            Measured(
                Port(f"pod {100_000 + n}", "x" * 1000),
                Port("pod 200000", f"{n % 40:064}"),
                rate=1.2345e10,
                p50=1.2345e-6,
                path_mtu=4096,
                resent=1,
            )
            for n in range(1000)
        ],
        [Finding("slow", *ports, text="x" * 1000)] * 1000,
    )
    adapter = TypeAdapter(FabricView)
    body = adapter.dump_json(view_of(result))
    told = adapter.validate_json(body)
    assert (told.sick_count, len(told.pairs), len(told.ports)) == (1000, MOST_PAIRS, MOST_PORTS)
    assert len(body) < MAX_REPORT_BYTES
