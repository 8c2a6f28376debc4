"""Health of RDMA ports and of the engine: from reports to the controller's view."""

from __future__ import annotations

from typing import Any

import pytest
from observing import Agent, report, tell

from pipemorph.control import JobController
from pipemorph.control.job_state.reports import ReportMismatch
from pipemorph.detection.event_log import MOST_EVENTS
from pipemorph.detection.rail_monitor import (
    BREAK_SECONDS,
    ERROR_SECONDS,
    MOST_PORTS_PER_RANK,
    SILENT_SECONDS,
    RailMonitor,
)
from pipemorph.protocol import (
    MOST_LISTED,
    LinkSample,
    RailHealth,
    RailProblem,
    RailSample,
    RailsView,
    TransportFallback,
    TransportSample,
    TransportsView,
    WireTime,
)
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape

GOOD = {"link_downed": 0, "symbol_error": 3, "out_of_sequence": 7, "np_cnp_sent": 100}


ALONE = MeshShape(stages=3)


def rail(stage: int = 0, device: str = "mlx5_0", port: int = 1, **fields: Any) -> RailSample:
    counters = fields.pop("counters", GOOD)
    state = fields.pop("state", "ACTIVE")
    return RailSample(
        stage=stage, device=device, port=port, state=state, counters=counters, **fields
    )


class Book:
    """Rail monitor and its clock, with two ports by default."""

    def __init__(self, *first: RailSample, expected: int | None = 2, **options: Any) -> None:
        self.book = RailMonitor(**options)
        self.now = 1000.0
        self.expected = expected
        self.hear(*(first or (rail(0), rail(1))))

    def hear(self, *samples: RailSample, after: float = 0.0) -> None:
        self.now += after
        self.book.observe_ports(samples, self.expected, self.now, 5)

    def view(self, after: float = 0.0) -> Any:
        self.now += after
        return self.book.build_view(self.now)

    @property
    def health(self) -> RailHealth:
        found: RailHealth = self.view().health
        return found


def test_all_ports_active_and_quiet_is_healthy() -> None:
    book = Book()
    view = book.view()
    assert (view.health, view.ports, view.faulty, view.congested) == (
        RailHealth.HEALTHY, 2, (), (),
    )  # fmt: skip


def test_counters_of_before_the_job_are_no_trouble() -> None:
    assert Book(rail(counters=GOOD | {"link_downed": 200}), expected=1).health == "healthy"


@pytest.mark.parametrize("state", ["DOWN", "INIT", "ARMED"])
def test_a_port_that_was_active_and_is_not_any_more_is_named(state: str) -> None:
    book = Book()
    book.hear(rail(1, state=state), after=5)
    view = book.view()
    assert view.health is RailHealth.FAULTY
    (port,) = view.faulty
    assert port.format_text(ALONE) == f"stage 1 mlx5_0/1: is {state}"
    assert port.format_text(MeshShape(2, 2)) == f"stage 1 of replica 0 mlx5_0/1: is {state}"
    book.hear(rail(1), after=5)
    assert book.health == "healthy"


@pytest.mark.parametrize("counter", ["link_downed", "link_error_recovery", "retry_exceeded_err"])
def test_one_break_is_reported_for_a_while(counter: str) -> None:
    book = Book(rail(counters={counter: 4}), expected=1)
    book.hear(rail(counters={counter: 5}), after=5)
    view = book.view()
    assert view.health is RailHealth.FAULTY
    assert view.faulty[0].what == f"{counter} grew by 1 within {BREAK_SECONDS:g} s"
    book.hear(rail(counters={counter: 5}), after=60)
    assert book.view(BREAK_SECONDS - 70).health is RailHealth.FAULTY
    book.hear(rail(counters={counter: 5}))
    assert book.view(11).health is RailHealth.HEALTHY


@pytest.mark.parametrize(
    "counter",
    [
        "symbol_error", "local_link_integrity_errors", "port_rcv_errors", "port_xmit_discards",
        "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
        "roce_adp_retrans", "completer_retry_err", "send_err",
    ],
)  # fmt: skip
def test_errors_have_to_grow_by_ten_in_a_minute(counter: str) -> None:
    book = Book(rail(counters={counter: 1000}), expected=1)
    book.hear(rail(counters={counter: 1009}), after=5)
    assert book.health == "healthy"
    book.hear(rail(counters={counter: 1010}), after=5)
    view = book.view()
    assert view.health is RailHealth.FAULTY
    assert view.faulty[0].what == f"{counter} grew by at least 10 within {ERROR_SECONDS:g} s"
    # The text does not change with every sample, or status would.
    book.hear(rail(counters={counter: 1040}), after=5)
    assert book.view().faulty == view.faulty
    book.hear(rail(counters={counter: 1040}), after=ERROR_SECONDS + 1)
    assert book.health == "healthy"


@pytest.mark.parametrize("counter", ["np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets"])
def test_congestion_is_reported_and_is_no_failure(counter: str) -> None:
    book = Book(rail(counters={counter: 0}), expected=1)
    book.hear(rail(counters={counter: 999}), after=5)
    assert book.health == "healthy"
    book.hear(rail(counters={counter: 5000}), after=5)
    view = book.view()
    assert (view.health, view.faulty) == (RailHealth.CONGESTED, ())
    assert view.congested[0].what == f"{counter} grew by at least 1000 within 60 s"


def test_a_counter_that_starts_over_is_no_growth() -> None:
    book = Book(rail(counters={"link_downed": 9, "symbol_error": 500}), expected=1)
    book.hear(rail(counters={"link_downed": 0, "symbol_error": 0}), after=5)
    assert book.health == "healthy"
    book.hear(rail(counters={"link_downed": 1, "symbol_error": 0}), after=5)
    assert book.health == "faulty"


def test_ticks_of_waiting_are_not_judged() -> None:
    book = Book(rail(counters={"port_xmit_wait": 0, "link_downed": 0}), expected=1)
    book.hear(rail(counters={"port_xmit_wait": 10**9, "link_downed": 0}), after=5)
    assert book.health == "healthy"


@pytest.mark.parametrize(
    "sample",
    [
        rail(state="unavailable"),
        rail(counters={"link_downed": "unavailable", "out_of_sequence": "unavailable"}),
        rail(counters={}),
        rail(counters={"port_xmit_wait": 4}),
    ],
    ids=["state", "unreadable", "none", "none that is judged"],
)
def test_unseen_ports_are_unknown_and_never_healthy(sample: RailSample) -> None:
    book = Book(sample, expected=1)
    view = book.view()
    assert (view.health, view.unreadable) == (RailHealth.UNKNOWN, 1)
    book.hear(rail())
    assert book.health == "healthy"


def test_a_spare_port_without_a_cable_is_not_missed() -> None:
    two = rail(), rail(port=2, state="DOWN")
    assert Book(*two).health == "healthy"
    for named in ("mlx5_0", "mlx5_0:2"):
        assert Book(*two, named=[named]).health == "faulty"
    assert Book(*two, named=["mlx5_1", "mlx5_0:1"]).health == "healthy"
    used = rail(used=True), rail(port=2, state="DOWN", used=True)
    assert Book(*used).health == "faulty"


def test_a_rank_without_any_active_port_is_reported() -> None:
    view = Book(rail(0), rail(1, state="DOWN")).view()
    assert [t.stage for t in view.faulty] == [1]


def test_before_all_have_checked_and_reported_it_is_unknown() -> None:
    book = Book(rail(0), expected=None)
    assert book.health == "unknown"
    book.expected = 2
    book.hear()
    assert book.health == "unknown"
    book.hear(rail(1))
    assert book.health == "healthy"
    # Bad news need not wait for the rest.
    book.expected = 3
    book.hear(rail(1, state="DOWN"))
    assert book.health == "faulty"


def test_no_device_anywhere_differs_from_no_report() -> None:
    book = RailMonitor()
    assert book.build_view(0.0).health is RailHealth.UNKNOWN
    book.observe_ports([], 0, 1.0, 0)
    assert book.build_view(1.0).health is RailHealth.NONE


def test_a_port_without_recent_reports_is_unknown() -> None:
    book = Book()
    book.hear(rail(0), after=SILENT_SECONDS)
    assert book.health == "healthy"
    view = book.view(1.0)
    assert (view.health, view.silent) == (RailHealth.UNKNOWN, 1)
    book.hear(rail(1))
    assert book.health == "healthy"


def test_it_stays_bounded() -> None:
    many = [rail(device=f"vf{i}", state="DOWN") for i in range(MOST_PORTS_PER_RANK + 10)]
    view = Book(*many, rail(1), expected=len(many) + 1).view()
    assert view.ports == MOST_PORTS_PER_RANK + 1
    assert (view.faulty_count, len(view.faulty)) == (MOST_PORTS_PER_RANK, MOST_LISTED)
    healthy = [rail(device=f"vf{i}") for i in range(MOST_PORTS_PER_RANK + 10)]
    assert Book(*healthy, expected=len(healthy)).health == "unknown"


# --- what the controller makes of it ---------------------------------------------------------


def spec(stages: int = 3) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": stages},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "x", "iterations": 100},
        }
    )


def end(link: int = 1, **fields: Any) -> TransportSample:
    said: dict[str, Any] = {
        "link": link, "direction": "forward", "agreed": "rdma", "transport": "rdma",
        "fallbacks": 0, "failbacks": 0, "reconnects": 0,
    }  # fmt: skip
    return TransportSample(**said | fields)


def window(link: int, transport: str, direction: str = "forward") -> LinkSample:
    wire = WireTime(count=1, exact=1, min=0.01, p50=0.01, p99=0.01, mean=0.01)
    return LinkSample.model_validate(
        {
            "link": link, "direction": direction, "route": "direct", "transport": transport,
            "iteration": 1, "bytes": 1, "wire": wire, "queue_p50": 0.0,
        }
    )  # fmt: skip


def test_a_fallback_is_reported_with_its_reason_and_so_is_the_return() -> None:
    controller = JobController(spec())
    tell(controller, 1.0, iteration=1, transports=[end(0), end(1)])
    assert controller.get_job_view(0.0).transports.fallen_count == 0
    fell = end(1, transport="tcp", fallbacks=1, trouble="rxe0 port 1: port error")
    tell(controller, 2.0, iteration=2, transports=[fell])
    view = controller.get_job_view(2.0).transports
    assert (view.fallen_count, view.fallbacks, view.failbacks) == (1, 1, 0)
    assert view.fallen[0].format_text(ALONE) == (
        "link 1 fell back from rdma to tcp (rxe0 port 1: port error)"
    )
    tell(controller, 3.0, iteration=3, transports=[end(1, fallbacks=1, failbacks=1)])
    view = controller.get_job_view(0.0).transports
    assert (view.fallen_count, view.fallbacks, view.failbacks) == (0, 1, 1)
    assert [e.text for e in controller.events] == [
        "link 1 fell back from rdma to tcp (rxe0 port 1: port error)",
        "link 1 is back on rdma (forward)",
    ]
    assert [e.iteration for e in controller.events] == [2, 3]


def test_sockets_that_are_lost_are_an_event_once() -> None:
    controller = JobController(spec())
    over_tcp = {"agreed": "tcp", "transport": "tcp"}
    lost = "tcp: receiving: Connection timed out"
    for now, trouble in enumerate(["", lost, f"{lost}; tcp: cut", "", lost], 1):
        sample = end(1, trouble=trouble, **over_tcp)
        tell(controller, float(now), iteration=now, transports=[sample])
    assert [(e.iteration, e.text) for e in controller.events] == [
        (at, f"link 1 loses data connections ({lost})") for at in (2, 5)
    ]


def test_a_fallback_between_two_reports_is_not_missed() -> None:
    controller = JobController(spec())
    tell(controller, 1.0, iteration=1, transports=[end(1)])
    tell(controller, 2.0, iteration=2, transports=[end(1, fallbacks=2, failbacks=2)])
    (event,) = controller.events
    assert event.text == "link 1 fell back from rdma to tcp, and is back"
    assert controller.get_job_view(0.0).transports.fallbacks == 2


def test_the_carrier_of_each_link() -> None:
    """Carriers are known before the states of the links are, as in a short run."""
    controller = JobController(spec())
    tell(controller, 1.0, iteration=1, links=[window(0, "gloo"), window(1, "rdma")])
    assert controller.get_job_view(0.0).transports.links == ("gloo", "rdma")
    tell(controller, 2.0, iteration=2, links=[window(1, "tcp", "backward")])
    assert controller.get_job_view(0.0).transports.links == ("gloo", "rdma+tcp")
    assert JobController(spec()).get_job_view(0.0).transports.links == ("", "")


def test_ports_and_ends_of_no_rank_of_the_job_are_refused() -> None:
    controller = JobController(spec())

    def port(stage: int = 0, replica: int = 0) -> RailsView:
        trouble = RailProblem(stage, replica, "mlx5_0", 1, "DOWN", "is DOWN")
        return RailsView(RailHealth.FAULTY, 1, 1, 1, (trouble,))

    def fallen(link: int = 0, replica: int = 0) -> TransportsView:
        return TransportsView(
            fallen=(TransportFallback(link, replica, "forward", "rdma", "tcp", 1, ""),),
            fallen_count=1,
        )

    for wrong, field in (
        ({"rails": port(stage=3)}, "rails[0].stage"),
        ({"rails": port(replica=1)}, "rails[0].replica"),
        ({"transports": fallen(link=2)}, "transports.fallen[0].link"),
        ({"transports": fallen(replica=1)}, "transports.fallen[0].replica"),
        ({"transports": TransportsView(links=("tcp",))}, "transports.links"),
    ):
        with pytest.raises(ReportMismatch) as refused:
            controller.process_report(report(1, **wrong), 1.0)
        assert refused.value.field == field
    assert controller.get_job_view(1.0).rails.ports == 0


def test_events_of_ports_are_stored_and_bounded() -> None:
    controller = JobController(spec())
    tell(controller, 1.0, iteration=1, rails=[rail()], ports=1)
    tell(controller, 2.0, iteration=2, rails=[rail(state="DOWN")], ports=1)
    tell(controller, 3.0, iteration=3, rails=[rail(counters=GOOD | {"link_downed": 1})], ports=1)
    assert [e.text for e in controller.events] == [
        "RDMA port mlx5_0/1 of stage 0: is DOWN",
        "RDMA port mlx5_0/1 of stage 0: link_downed +1",
        "RDMA port mlx5_0/1 of stage 0: is ACTIVE",
    ]
    for n in range(MOST_EVENTS):
        counters = GOOD | {"link_downed": n + 2}
        tell(controller, 4.0 + n, iteration=n + 4, rails=[rail(counters=counters)], ports=1)
    assert len(controller.events) == MOST_EVENTS
    assert controller.events[-1].number == MOST_EVENTS + 2


def test_a_new_attempt_starts_without_and_an_edited_job_goes_on_with_them() -> None:
    controller = JobController(spec())
    agent = Agent(controller.spec)
    agent.tell(controller, 1.0, iteration=1, rails=[rail()], ports=1, transports=[end(1)])
    edited = JobController.from_snapshot(spec(), controller.take_snapshot())
    assert edited.get_job_view(1.0).rails.health is RailHealth.UNKNOWN
    edited.take_over_from(controller)
    assert edited.get_job_view(1.0).rails.health is RailHealth.HEALTHY
    controller.begin_attempt(1)
    assert controller.get_job_view(1.0).rails.ports == 0
    edited.begin_attempt(2)
    edited.take_over_from(controller)
    assert edited.get_job_view(1.0).rails.ports == 0
