"""``spec.placement``: placement of the ranks on a cluster. Ignored on one machine.

Independent of vendors: users name the RDMA resource, the networks and the topology key. Three gang
schedulers are supported.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipemorph.spec.base import FieldError, SpecModel

ResourceName = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=253,
    ),
]
LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9][-A-Za-z0-9_.]*$")
]
NodeName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
Quantity = Annotated[
    str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$", max_length=32)
]


class RdmaDevices(SpecModel):
    """RDMA devices of every rank, from a device plugin."""

    resource_name: ResourceName = Field(
        description="Extended resource of the device plugin, such as rdma/hca_shared_devices_a."
    )
    count: int = Field(default=1, ge=1, le=64, description="Devices per rank.")
    ipc_lock: bool = Field(
        default=True, description="Add the capability IPC_LOCK, to lock memory without a limit."
    )


class Topology(SpecModel):
    """Keep the ranks together, or apart, by a label of the nodes."""

    key: LabelKey = Field(
        max_length=317, description="Node label, such as topology.kubernetes.io/zone."
    )
    mode: Literal["pack", "spread"] = Field(
        default="pack",
        description="pack: all ranks on nodes with one value; spread: evenly over values.",
    )
    per: Literal["job", "pipeline"] = Field(
        default="job",
        description="Unit that pack keeps together: the whole job, or each of its pipelines (all "
        "ranks of a replica), which may be on nodes with different values. Pipelines need "
        "gang.kueue or gang.volcano.tier.",
    )
    required: bool = Field(
        default=False, description="Whether ranks wait if this cannot be satisfied."
    )


class NodeExclusion(SpecModel):
    """Avoid nodes whose links were slow in several attempts."""

    enabled: bool = Field(default=True, description="Whether nodes are excluded at all.")


class KueueGang(SpecModel):
    """Admission of each attempt as a whole by Kueue."""

    queue: ObjectName = Field(description="LocalQueue in the job's namespace.")
    priority_class: ObjectName | None = Field(default=None, description="WorkloadPriorityClass.")


class VolcanoGang(SpecModel):
    """Scheduling of each attempt as a whole by Volcano."""

    queue: ObjectName = Field(default="default", description="Volcano queue.")
    priority_class: ObjectName | None = Field(default=None, description="PriorityClass.")
    tier: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Instead of topology.key: the highest tier of HyperNodes within which "
        "topology.mode pack keeps ranks.",
    )


class CoschedulingGang(SpecModel):
    """Scheduling of each attempt as a whole by the coscheduling plugin."""

    scheduler_name: ObjectName = Field(
        default="scheduler-plugins-scheduler", description="Scheduler that runs the plugin."
    )


class Gang(SpecModel):
    """Gang scheduler, which starts all ranks or none: exactly one of the three."""

    kueue: KueueGang | None = Field(default=None, description="Use Kueue.")
    volcano: VolcanoGang | None = Field(default=None, description="Use Volcano.")
    coscheduling: CoschedulingGang | None = Field(
        default=None, description="Use the coscheduling plugin of kubernetes-sigs."
    )

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Gang:
        chosen = [n for n in ("kueue", "volcano", "coscheduling") if getattr(self, n) is not None]
        if len(chosen) != 1:
            found = " and ".join(chosen) or "none"
            raise FieldError("", f"has {found}; give exactly one of kueue, volcano, coscheduling")
        return self


class PlacementSpec(SpecModel):
    """Placement of the ranks on a cluster; ignored on one machine."""

    rdma: RdmaDevices | None = Field(default=None, description="RDMA devices per rank.")
    networks: list[Annotated[str, Field(min_length=1, max_length=253)]] = Field(
        default_factory=list,
        max_length=16,
        description="Multus networks of every rank, as [namespace/]name[@interface].",
    )
    shared_memory: Quantity | None = Field(
        default=None,
        description="Size of a memory-backed /dev/shm, counted against the memory limit.",
    )
    one_pod_per_node: bool = Field(default=False, description="Whether ranks never share a node.")
    topology: Topology | None = Field(
        default=None, description="Keep ranks together or apart by a node label."
    )
    exclude_nodes: list[NodeName] = Field(
        default_factory=list, max_length=64, description="Nodes on which no rank may run."
    )
    node_exclusion: NodeExclusion = Field(
        default_factory=NodeExclusion,
        description="Avoid nodes whose links were slow in several attempts.",
    )
    gang: Gang | None = Field(default=None, description="Scheduler that starts all ranks at once.")

    @model_validator(mode="after")
    def _check_pipeline_topology(self) -> PlacementSpec:
        topology = self.topology
        if topology is None or topology.per == "job":
            return self
        where = "topology.per"
        if topology.mode != "pack":
            raise FieldError(where, f"is pipeline; mode {topology.mode} needs per job")
        kueue = self.gang is not None and self.gang.kueue is not None
        volcano = self.gang.volcano if self.gang is not None else None
        if not kueue and (volcano is None or volcano.tier is None):
            raise FieldError(where, "is pipeline; that needs gang.kueue, or gang.volcano with tier")
        if kueue and not topology.required:
            raise FieldError(
                "topology.required", "is false; Kueue keeps pipelines together only if it is true"
            )
        return self
