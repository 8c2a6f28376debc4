"""RDMA ports and their counters on the way into link health reports."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
from set_clock import Clock

from pipemorph.detection.job_observer import JobObserver
from pipemorph.protocol import RailSample
from pipemorph.protocol.rank_messages import RankReport
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.telemetry.rail_sampler import REFRESH_SECONDS, RailSampler, read_rails

DEADLINE = 60.0


def put(path: Path, text: object) -> None:
    """Write a file at once, as a driver does: one being written would be read as empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.parent.parent / f".{path.name}"
    fresh.write_text(f"{text}\n")
    fresh.replace(path)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    for device in ("mlx5_0", "mlx5_1"):
        port = tmp_path / device / "ports" / "1"
        put(port / "state", "4: ACTIVE")
        put(port / "counters" / "link_downed", 0)
        # A folder cannot be read as a file, also not by root.
        (port / "hw_counters" / "out_of_sequence").mkdir(parents=True)
    return tmp_path


def until(watch: RailSampler, least: int) -> list[RailSample]:
    deadline = time.monotonic() + DEADLINE
    while len(found := watch.take_changed()) < least:
        assert time.monotonic() < deadline, f"no {least} changed ports within {DEADLINE} s"
        time.sleep(0.01)
    return found


def test_what_cannot_be_read_says_so(sysfs: Path, tmp_path: Path) -> None:
    (first, second) = read_rails(2, 1, sysfs)
    assert first == RailSample(
        stage=2, replica=1, device="mlx5_0", port=1, state="ACTIVE",
        counters={"link_downed": 0, "out_of_sequence": "unavailable"}, used=None,
    )  # fmt: skip
    assert second.device == "mlx5_1"
    (sysfs / "mlx5_1/ports/1/state").unlink()
    assert read_rails(2, 1, sysfs)[1].state == "unavailable"
    assert read_rails(0, 0, tmp_path / "nowhere") == []


def test_only_ports_that_have_changed_are_taken(sysfs: Path) -> None:
    watch = RailSampler(0, 0, sysfs=sysfs, interval=0.02)
    assert [r.device for r in until(watch, 2)] == ["mlx5_0", "mlx5_1"]
    assert watch.take_changed() == []
    put(sysfs / "mlx5_1/ports/1/counters/link_downed", 1)
    (changed,) = until(watch, 1)
    assert (changed.device, changed.counters["link_downed"]) == ("mlx5_1", 1)


def test_every_minute_all_ports_are_reported_again(sysfs: Path) -> None:
    clock = Clock()
    watch = RailSampler(0, 0, sysfs=sysfs, interval=3600.0, clock=clock)
    until(watch, 2)
    clock.now += REFRESH_SECONDS - 1
    assert watch.take_changed() == []
    clock.now += 1
    assert len(watch.take_changed()) == 2
    assert watch.take_changed() == []


def test_how_many_ports_there_are_is_known_after_a_look(sysfs: Path, tmp_path: Path) -> None:
    assert RailSampler(0, 0, sysfs=tmp_path / "nowhere").port_count == 0
    watch = RailSampler(0, 0, sysfs=sysfs, interval=3600.0)
    until(watch, 2)
    assert watch.port_count == 2


def test_which_ports_the_engine_uses(sysfs: Path) -> None:
    assert [r.used for r in read_rails(0, 0, sysfs)] == [None, None]
    assert [r.used for r in read_rails(0, 0, sysfs, ["mlx5_1 port 1"])] == [False, True]
    watch = RailSampler(0, 0, sysfs=sysfs, interval=3600.0, used=[])
    assert [r.used for r in until(watch, 2)] == [False, False]


def test_the_thread_ends_with_its_watch_and_there_is_none_without_a_device(
    sysfs: Path, tmp_path: Path
) -> None:
    # Watches of other tests may end meanwhile.
    others = set(threading.enumerate())

    def watchers() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "pm-rails" and t not in others]

    idle = RailSampler(0, 0, sysfs=tmp_path / "nowhere")
    assert watchers() == []
    assert idle.take_changed() == []
    watch = RailSampler(0, 0, sysfs=sysfs, interval=3600.0)
    until(watch, 2)
    (thread,) = watchers()
    del watch
    gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive(), "the thread outlives its watch"


def test_ports_are_counted_when_every_rank_has_looked() -> None:
    observer = JobObserver(MeshShape(2), job="j", namespace="n", attempt=0)

    def ports_reported(rank: int, ports: int | None) -> int | None:
        report = RankReport(
            rank=rank, state="training", iteration=0, applied_plan_version=0, ports=ports
        )
        observer.process_report(report, 1.0)
        return observer._rails.build_view(1.0).expected

    assert ports_reported(0, 2) is None, "rank 1 has not reported"
    assert ports_reported(1, None) is None, "rank 1 has not looked"
    assert ports_reported(1, 0) == 2
