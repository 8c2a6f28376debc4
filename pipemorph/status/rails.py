"""Status of a job's rails and transports, and the condition ``RailsHealthy``. Pure."""

from __future__ import annotations

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ConditionStatus
from pipemorph.api.status_links import (
    FallenLink,
    RailsStatus,
    SickPort,
)
from pipemorph.control import JobView
from pipemorph.explain.story import link_name
from pipemorph.status import names
from pipemorph.wire import FallenLink as Fallen
from pipemorph.wire import RailHealth, RailsView

NAMED = 5
"""Most ports or links named in a message; status lists more."""
MESSAGE_LENGTH = 1024


def rails_status(view: RailsView) -> RailsStatus:
    """Counts of ports, and the ports with problems."""
    return RailsStatus(
        ports=view.ports,
        expected_ports=view.expected,
        sick_count=view.sick_count,
        sick_ports=[
            SickPort(
                stage=port.stage,
                replica=port.replica,
                device=port.device,
                port=port.port,
                state=port.state,
                message=port.what[:MESSAGE_LENGTH],
            )
            for port in view.sick
        ],
        congested_count=view.congested_count,
        unavailable_count=view.unreadable,
    )


def fallen_link(link: Fallen, mesh: MeshShape) -> FallenLink:
    """Status of a link that fell back from the agreed transport."""
    return FallenLink(
        name=link_name(link.link, mesh.column_name(link.replica)),
        link=link.link,
        replica=link.replica,
        direction=link.direction,
        agreed=link.agreed,
        transport=link.transport,
        fallbacks=link.fallbacks,
        message=link.trouble,
    )


def wants_rdma(spec: JobSpec) -> bool:
    """Whether the spec requests RDMA, as opposed to using it where available."""
    placed = spec.placement is not None and spec.placement.rdma is not None
    return placed or spec.transport.engine == "rdma" or spec.transport.require == "rdma"


def rails_healthy(spec: JobSpec, view: JobView) -> tuple[ConditionStatus, str, str]:
    """Status, reason and message, for a job with recent reports. Unknown, never True, if ports
    cannot be observed."""
    rails, fallen = view.rails, view.transports.fallen
    mesh = spec.parallelism.mesh
    sick = _list([port.text(mesh) for port in rails.sick], rails.sick_count)
    if fallen:
        # Both ends of a link report it: name the link once, preferably with the cause.
        ends = sorted(fallen, key=lambda end: bool(end.trouble))
        links = {(f.link, f.replica): f.text(mesh) for f in ends}
        told = _list([links[key] for key in sorted(links)], view.transports.fallen_count)
        return "False", names.R_FELL_BACK, _bounded(f"{told}; {sick}" if sick else told)
    match rails.health:
        case RailHealth.SICK:
            return "False", names.R_RAILS_SICK, _bounded(sick)
        case RailHealth.NONE if wants_rdma(spec):
            return (
                "False",
                names.R_NO_RDMA,
                "the spec requests RDMA, but no rank sees a device: check placement.rdma and the"
                " device plugin",
            )
        case RailHealth.NONE:
            return "True", names.R_NO_RDMA, "no rank sees an RDMA device, and none is requested"
        case RailHealth.UNKNOWN:
            return ("Unknown", *_unknown(rails))
        case RailHealth.CONGESTED:
            crowded = [port.text(mesh) for port in rails.congested]
            text = _list(crowded, rails.congested_count)
            return "True", names.R_RAILS_CONGESTED, _bounded(f"congestion: {text}")
        case RailHealth.HEALTHY:
            return "True", names.R_RAILS_OK, f"{rails.ports} ports, all healthy"


def _unknown(rails: RailsView) -> tuple[str, str]:
    if rails.expected is None:
        return names.R_PORTS_UNREPORTED, "not every rank has reported its ports"
    missing = rails.expected - rails.ports + rails.silent
    if missing > 0:
        return (
            names.R_PORTS_UNREPORTED,
            f"no recent reports of {missing} of {rails.expected} ports",
        )
    return (
        names.R_PORTS_UNSEEN,
        f"state or counters of {rails.unreadable} of {rails.ports} ports cannot be read in the"
        " pods",
    )


def _list(texts: list[str], count: int) -> str:
    shown = "; ".join(texts[:NAMED])
    more = count - min(len(texts), NAMED)
    return f"{shown}; and {more} more" if more > 0 else shown


def _bounded(text: str) -> str:
    return text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 1] + "…"
