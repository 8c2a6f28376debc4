"""A check of simulated rails: what is measured, and what is found sick."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fabric_plant import Plant, Way, rail, way

from pipemorph.commands import fabric as command
from pipemorph.fabric.check.measure import check, paired, rounds
from pipemorph.fabric.check.report import record
from pipemorph.fabric.check.verdict import Finding, Measured, Port, better, judge
from pipemorph.pictures.matrix import render_matrix


def lines(found: Sequence[Finding]) -> list[str]:
    return [finding.line for finding in found]


def test_rails_that_are_alike_are_well():
    plant = Plant()
    result = check(plant.members())
    assert lines(result.findings) == []
    assert len(result.measured) == 3 * 2 * 2
    assert {m.path_mtu for m in result.measured} == {4096}
    assert plant.open == {}


@pytest.mark.parametrize(
    ("sick", "line"),
    [
        (Way(rate=1e9), "carries 8 Gb/s; others carry 96 Gb/s"),
        (Way(round_trip=90e-6), "round trips take 90 µs; those of others 4 µs"),
        (Way(resent=7), "7 packets were sent again"),
        (
            Way(mtu=1024),
            "packets of more than 1024 bytes do not arrive, and both ports have MTU 4096 or more",
        ),
        (Way(mtu=0), "nothing arrives: transport retry counter exceeded"),
        (Way(refuses="no memory can be registered"), "h0: no memory can be registered"),
    ],
)
def test_one_direction_is_sick(sick: Way, line: str):
    plant = Plant(ways={way(0, 2): sick})
    found = lines(check(plant.members()).findings)
    assert found == [f"h0 mlx5_0/1 → h2 mlx5_0/1: {line}"]
    assert plant.open == {}


def test_of_two_hosts_with_one_rail_the_other_direction_is_the_measure():
    plant = Plant(hosts=2, rails=1, ways={way(1, 0): Way(rate=1e9)})
    assert lines(check(plant.members()).findings) == [
        "h1 mlx5_0/1 → h0 mlx5_0/1: carries 8 Gb/s; others carry 96 Gb/s"
    ]


@pytest.mark.parametrize("burst", [Way(rate=1e9), Way(resent=9), Way(round_trip=1e-3)])
def test_what_passes_is_not_sick(burst: Way):
    plant = Plant(ways={way(0, 1): burst}, bursts=[burst])
    assert lines(check(plant.members()).findings) == []


def test_rates_are_compared_among_ports_of_one_rate():
    """A port of 25 Gb/s among ports of 100 Gb/s is no slow one."""
    plant = Plant(rails=2)
    plant.ways = {way(a, b, 1): Way(rate=3e9) for a in range(3) for b in range(3) if a != b}
    members = [
        replace(m, rails=(m.rails[0], replace(m.rails[1], rate="25 Gb/sec (1X EDR)")))
        for m in plant.members()
    ]
    assert lines(check(members).findings) == []


def test_ports_that_are_down_small_or_missing():
    rails = {
        "h0": [rail(0, 0), rail(1, 0, state="DOWN", active=False)],
        "h1": [rail(0, 1, mtu=1024), rail(1, 1)],
        "h2": [rail(0, 2), rail(1, 2, gid=None, active=False)],
        "h3": [rail(0, 3), rail(1, 3)],
        "h4": [],
    }
    assert lines(judge(rails, [])) == [
        "h4 -: has no active RDMA port",
        "h1 mlx5_0/1: has MTU 1024; on other hosts this port has 4096",
        "h0 mlx5_1/1: is DOWN; it is in use on 2 hosts",
        "h2 mlx5_1/1: has no usable GID; it is in use on 2 hosts",
    ]


def test_a_second_port_that_no_host_uses_is_fine():
    rails = {f"h{n}": [rail(0, n), rail(1, n, state="DOWN", active=False)] for n in range(3)}
    assert judge(rails, []) == []


@pytest.mark.parametrize("count", range(8))
def test_everybody_meets_everybody_once(count: int):
    met = [pair for each in rounds(count) for pair in each]
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for each in rounds(count):
        busy = [host for pair in each for host in pair]
        assert len(busy) == len(set(busy))


def test_ports_of_one_subnet_are_paired_whatever_their_order():
    ours = [rail(0, 0), rail(1, 0), rail(2, 0, active=False)]
    theirs = [replace(rail(1, 1), device="a"), replace(rail(0, 1), device="b")]
    assert [(a.device, b.device) for a, b in paired(ours, theirs)] == [
        ("mlx5_0", "b"),
        ("mlx5_1", "a"),
    ]


def test_the_better_of_two_measurements():
    ports = Port("a", "x"), Port("b", "x")
    first = Measured(*ports, path_mtu=1024, p50=3.0, p99=9.0, rate=5.0, resent=4)
    again = Measured(*ports, path_mtu=1024, p50=4.0, p99=8.0, rate=6.0, resent=None)
    assert better(first, again) == Measured(
        *ports, path_mtu=1024, p50=3.0, p99=8.0, rate=6.0, resent=None
    )
    assert better(first, replace(again, resent=5)).resent == 4
    assert better(first, replace(again, resent=0)).resent == 0
    lost = replace(first, trouble="the host is gone")
    assert better(first, lost) == lost
    assert better(lost, first) == lost


def test_reports():
    plant = Plant(ways={way(0, 1): Way(rate=1e9)})
    members = plant.members()
    result = check([replace(members[0], name="<b>"), *members[1:]])
    text = command._rendered(result, "text")
    assert text.startswith(
        "3 hosts, 12 directions between RDMA ports: 1 is sick\n"
        "  <b> mlx5_0/1 → h1 mlx5_0/1: carries 8 Gb/s; others carry 96 Gb/s\n"
    )
    rows = [row.replace(" ", "") for row in text.splitlines()]
    assert "|<b>mlx5_0/1||8Gb/s|96Gb/s|" in rows
    said = json.loads(command._rendered(result, "json"))
    assert said == json.loads(json.dumps(record(result)))
    assert said["ok"] is False
    (finding,) = said["findings"]
    assert finding["source"] == {"host": "<b>", "rail": "mlx5_0/1"}
    assert len(said["measured"]) == 12
    page = render_matrix(result)
    assert "<b>" not in page and "<script" not in page
    assert page.count('class="sick"') == 4  # in the table of each quantity
