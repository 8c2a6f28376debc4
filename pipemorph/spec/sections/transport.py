"""``spec.transport``: data exchange between stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipemorph.spec.base import FieldError, SpecModel


class RdmaSettings(SpecModel):
    """Use of RDMA devices by the transfer engine."""

    devices: list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}(:\d{1,2})?$")]] = Field(
        default_factory=list,
        max_length=16,
        description="Devices to use, such as mlx5_0, or mlx5_0:2 for its second port. Empty: one "
        "active port of every card, or the rank's share of them if its host has several ranks.",
    )
    gid_index: int | None = Field(
        default=None,
        ge=0,
        le=255,
        description="Index in the port's GID table. Default: a routable RoCE v2 entry, chosen for "
        "every connection.",
    )
    traffic_class: int = Field(
        default=0, ge=0, le=255, description="Traffic class of the packets (DSCP × 4)."
    )
    service_level: int = Field(default=0, ge=0, le=15, description="Service level.")
    queue_pairs: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Queue pairs of a link over each pair of devices; the smaller number of both "
        "ends applies. More than 1 helps if the network spreads flows over several paths by their "
        "addresses: use the number of paths, usually 2 or 4.",
    )


class Transport(SpecModel):
    """Data exchange between stages."""

    route: Literal["auto", "direct", "delegated"] = Field(
        default="auto",
        description="auto: direct, but delegated to the engine while a link is slow; direct, "
        "delegated: fixed for all links.",
    )
    engine: Literal["auto", "tcp", "shm", "rdma"] = Field(
        default="auto",
        description="Transport of the transfer engine. auto: shm within a host, rdma if both "
        "ends have a device, else tcp; rdma falls back to tcp while no device works.",
    )
    require: Literal["rdma"] | None = Field(
        default=None, description="rdma: fail instead of falling back to tcp."
    )
    integrity: Literal["crc", "mac", "aead"] = Field(
        default="crc",
        description="Protection of the engine's payloads over TCP and shared memory; its control "
        "frames and headers are always authenticated. crc: detects errors of the network, not of "
        "shared memory. mac: also rejects altered or added payloads. aead: as mac, and encrypts "
        "between hosts. With mac and aead the engine uses no RDMA device, because such a device "
        "writes payloads by itself.",
    )
    rdma: RdmaSettings = Field(default_factory=RdmaSettings)
    deadline_seconds: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Longest wait for one message; then the rank fails.",
    )

    @model_validator(mode="after")
    def _check_integrity(self) -> Transport:
        if self.integrity != "crc" and self.engine == "rdma":
            raise FieldError(
                "integrity",
                f"is {self.integrity}, but engine is rdma, whose payloads have no MAC; use engine "
                "auto, tcp or shm, or integrity crc",
            )
        return self

    @model_validator(mode="after")
    def _check_requirement(self) -> Transport:
        if self.require is None:
            return self
        if self.integrity != "crc":
            raise FieldError(
                "require",
                f"is {self.require}, but integrity is {self.integrity}, with which the engine uses "
                "no RDMA device; use integrity crc",
            )
        if self.engine not in ("auto", "rdma"):
            raise FieldError(
                "require", f"is {self.require}, but engine is {self.engine}; use engine rdma"
            )
        if self.route == "direct":
            raise FieldError(
                "require",
                f"is {self.require}, but route is direct, which never uses the engine; use route "
                "auto or delegated",
            )
        return self
