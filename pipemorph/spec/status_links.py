"""Links, reductions, ports and slow stages in the status of a job."""

from __future__ import annotations

from pydantic import Field

from pipemorph.spec.status_base import (
    MAX_SLOW_LINKS,
    StatusModel,
    Text,
    Timestamp,
    link_name_field,
    list_field,
    number_field,
)

MAX_FAULTY_PORTS = 32


class SlowLink(StatusModel):
    """Slow link, with its measurements."""

    name: str = link_name_field()
    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = number_field(
        "Pipeline column where it is slowest; with replicas alone, the replica."
    )
    direction: str = Field(max_length=16, description="The slower direction: forward or backward.")
    delay_ms: float = Field(ge=0, description="One-way time above normal, milliseconds.")
    wire_time_ms: float = Field(ge=0, description="One-way time now, milliseconds.")
    confidence: float = Field(ge=0, le=1, description="Probability that it is slow, 0 to 1.")
    since: Timestamp | None = Field(default=None, description="Time at which it was found slow.")


class SlowReduction(StatusModel):
    """Data-parallel group that reduces its gradients slowly, with its measurements."""

    stage: int = Field(ge=0, description="Stage whose gradients it reduces.")
    replica: int = number_field("First pipeline column of the group.")
    time_ms: float = Field(ge=0, description="Time of a reduction now, milliseconds.")
    normal_ms: float = Field(ge=0, description="Usual time, milliseconds.")
    exposed_ms: float = Field(
        ge=0, description="Time after the last op of the stage, milliseconds."
    )
    bytes: int = number_field("Gradients of each rank.")


class LinkNodes(StatusModel):
    """Nodes of a link's two ends."""

    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = number_field("Replica of the link.")
    nodes: list[str] = Field(
        max_length=2, description="Nodes of the ends; fewer than two if one is unknown."
    )


class AttemptNodes(StatusModel):
    """Nodes of the attempt in progress, noted while a link is slow: when an attempt ends, its pods
    may be gone before the operator can read their nodes."""

    links: list[LinkNodes] = list_field(MAX_SLOW_LINKS, "Links that are or were slow.")
    count: int = number_field("Nodes on which the attempt runs.")
    others: int = number_field("Nodes among these that neither links nor status.nodes names.")


class FallenLinkStatus(StatusModel):
    """Link that fell back from the agreed transport, as reported by one of its ends."""

    name: str = link_name_field()
    link: int = Field(ge=0, description="Between stage link and stage link + 1.")
    replica: int = number_field("Pipeline column of the link; with replicas alone, the replica.")
    direction: str = Field(
        max_length=16, description="Direction in which that end sends: forward or backward."
    )
    agreed: str = Field(max_length=16, description="Transport agreed on, such as rdma.")
    transport: str = Field(max_length=16, description="Transport in use now, such as tcp.")
    fallbacks: int = number_field("Number of fallbacks.")
    message: Text = Field(default="", description="The engine's reason.")


class SlowStage(StatusModel):
    """Stage that computes slower than its peers, or than before."""

    stage: int = Field(ge=0, description="Number of the stage.")
    replica: int | None = Field(
        default=None,
        ge=0,
        description="Pipeline column of the slow rank; with replicas alone, the replica. None: the"
        " stage is slow in all columns.",
    )
    microbatch_ms: float = Field(ge=0, description="Milliseconds of F, B and W of one microbatch.")
    usual_ms: float = Field(ge=0, description="That time of its peers, or of its best iterations.")


class FaultyPort(StatusModel):
    """RDMA port with a problem, on the host of a rank."""

    stage: int = Field(ge=0, description="Stage of the rank that reports it.")
    replica: int = number_field("Pipeline column of that rank; with replicas alone, the replica.")
    device: str = Field(max_length=64, description="RDMA device, such as mlx5_0.")
    port: int = Field(ge=1, description="Port of the device.")
    state: str = Field(max_length=32, description="State of the port, such as ACTIVE or DOWN.")
    message: Text = Field(description="The problem, for people.")


class RailsStatus(StatusModel):
    """Health of the ranks' RDMA ports, by state and counters."""

    ports: int = number_field("Ports reported.")
    expected_ports: int | None = Field(
        default=None, ge=0, description="Ports of all ranks, once every rank has reported."
    )
    faulty_count: int = number_field("Ports with a problem.")
    faulty_ports: list[FaultyPort] = list_field(MAX_FAULTY_PORTS, "Some of them, by stage.")
    congested_count: int = number_field("Ports with a high rate of congestion notifications.")
    unavailable_count: int = number_field(
        "Ports whose state or counters cannot be read in the pod."
    )
