"""A check of simulated rails: what is measured, and the report."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from simulated_rails import Plant, Way, rail, way

from pipemorph.commands.fabric import (
    build_measurement_rows,
    find_problems,
    result_to_json,
    summarize_result,
)
from pipemorph.fabric.measurement import measure_fabric, pair_rails, schedule_rounds


def test_every_direction_is_measured():
    plant = Plant(ways={way(0, 2): Way(rate=1e9, round_trip=90e-6)})
    result = measure_fabric(plant.all_hosts())
    assert find_problems(result) == [], "how slow is too slow, the reader says"
    assert len(result.measured) == 3 * 2 * 2
    assert {(m.mtu, m.path_mtu) for m in result.measured} == {(4096, 4096)}
    (slow,) = [m for m in result.measured if m.rate != 12e9]
    assert (slow.source, slow.target) == (("h0", "mlx5_0/1"), ("h2", "mlx5_0/1"))
    assert (slow.rate, slow.p50, slow.p99) == (1e9, 90e-6, 90e-6)
    assert plant.open == {}


@pytest.mark.parametrize(
    ("faulty", "line"),
    [
        (
            Way(mtu=1024),
            "packets of more than 1024 bytes do not arrive, and both ports have MTU 4096 or more",
        ),
        (Way(mtu=0), "nothing arrives: transport retry counter exceeded"),
        (Way(refuses="no memory can be registered"), "h0: no memory can be registered"),
    ],
)
def test_one_direction_has_a_problem(faulty: Way, line: str):
    plant = Plant(ways={way(0, 2): faulty})
    assert find_problems(measure_fabric(plant.all_hosts())) == [
        f"h0 mlx5_0/1 → h2 mlx5_0/1: {line}"
    ]
    assert plant.open == {}


def test_a_host_without_an_active_port_is_a_problem_and_a_second_port_that_is_down_is_none():
    hosts = Plant(hosts=2).all_hosts()
    first, second = hosts[0].rails
    half = replace(hosts[0], rails=(first, replace(second, active=False)))
    result = measure_fabric([half, hosts[1]])
    assert (find_problems(result), len(result.measured)) == ([], 2)
    none = replace(hosts[0], rails=())
    assert find_problems(measure_fabric([none, hosts[1]])) == ["h0: no active RDMA port"]


def test_a_port_of_unknown_mtu_is_measured_up_to_1024_bytes():
    hosts = [
        replace(host, rails=tuple(replace(each, mtu=None) for each in host.rails))
        for host in Plant(hosts=2, rails=1, ways={way(0, 1): Way(mtu=512)}).all_hosts()
    ]
    result = measure_fabric(hosts)
    assert [(m.mtu, m.path_mtu, m.problem) for m in result.measured] == [
        (None, 512, ""),
        (None, 1024, ""),
    ]


@pytest.mark.parametrize("count", range(8))
def test_every_pair_meets_once(count: int):
    met = [pair for each in schedule_rounds(count) for pair in each]
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for each in schedule_rounds(count):
        busy = [host for pair in each for host in pair]
        assert len(busy) == len(set(busy))


def test_ports_of_one_subnet_are_paired_whatever_their_order():
    ours = [rail(0, 0), rail(1, 0), rail(2, 0, active=False)]
    theirs = [replace(rail(1, 1), device="a"), replace(rail(0, 1), device="b")]
    assert [(a.device, b.device) for a, b in pair_rails(ours, theirs)] == [
        ("mlx5_0", "b"),
        ("mlx5_1", "a"),
    ]


def test_reports():
    plant = Plant(ways={way(0, 1): Way(mtu=0), way(0, 2): Way(rate=1e9, round_trip=2e-3)})
    result = measure_fabric(plant.all_hosts())
    assert summarize_result(result) == [
        "3 hosts, 12 directions between RDMA ports; problems: 1",
        "h0 mlx5_0/1 → h1 mlx5_0/1: nothing arrives: transport retry counter exceeded",
    ]
    cells = [" ".join(row) for row in build_measurement_rows(result)]
    assert cells[0] == "h0 mlx5_0/1 h1 mlx5_0/1 no - - - -"
    assert "h0 mlx5_0/1 h2 mlx5_0/1 yes 4096 2 ms 2 ms 8 Gb/s" in cells
    assert "h1 mlx5_0/1 h0 mlx5_0/1 yes 4096 4 µs 4 µs 96 Gb/s" in cells
    said = json.loads(json.dumps(result_to_json(result)))
    assert (said["ok"], len(said["problems"]), len(said["measured"])) == (False, 1, 12)
    (broken,) = [each for each in said["measured"] if not each["reachable"]]
    assert broken["source"] == {"host": "h0", "rail": "mlx5_0/1"}
    assert broken["problem"].startswith("nothing arrives")
    assert said["hosts"]["h0"][0]["device"] == "mlx5_0"
