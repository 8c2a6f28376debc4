"""Makes the transfer engine of a rank, and connects its links to other ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipemorph.spec.mesh import Coordinate
from pipemorph.spec.sections.transport import RdmaSettings
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.gpu_affinity import find_numa_option

if TYPE_CHECKING:
    import pipemorph_trainer._engine as _engine

log = logging.getLogger("pipemorph.trainer")


@dataclass(frozen=True)
class EngineOptions:
    """Options of the engine. ``transport``: auto, tcp, shm or rdma. The other fields are those of
    :class:`pipemorph.spec.sections.transport.Transport`."""

    job: str
    transport: str = "auto"
    queues: int = 8
    require: str | None = None
    integrity: str = "crc"
    rdma: RdmaSettings = field(default_factory=RdmaSettings)


def load_engine_module() -> Any | None:
    """Import the compiled engine; None if it is not built."""
    try:
        import pipemorph_trainer._engine as _engine
    except ImportError:
        return None
    return _engine


def make_engine(
    options: EngineOptions | None,
    coordinate: Coordinate,
    *,
    secret: bytes,
    host: str,
    device: torch.device,
) -> _engine.Engine | None:
    """Make a rank's engine, listening at ``host``; None without options or if it is not built."""
    module = load_engine_module() if options is not None else None
    if module is None or options is None:
        return None
    rdma = options.rdma
    engine: _engine.Engine = module.Engine(
        job=f"{options.job}/{coordinate.column}",
        rank=coordinate.rank,
        secret=secret,
        host=host,
        queues=options.queues,
        transport=options.transport,
        require=options.require,
        integrity=options.integrity,
        rdma_devices=rdma.devices,
        gid_index=-1 if rdma.gid_index is None else rdma.gid_index,
        traffic_class=rdma.traffic_class,
        service_level=rdma.service_level,
        queue_pairs=rdma.queue_pairs,
        **find_numa_option(device),
    )
    if engine.rails_error is not None:
        log.log(
            logging.WARNING if options.transport == "rdma" else logging.DEBUG,
            "%s: RDMA rails in use: %s; %s",
            coordinate,
            ", ".join(engine.rails) or "none",
            engine.rails_error,
        )
    return engine


def connect_engine_link(
    engine: _engine.Engine, link: int, peer: int, host: str, port: int,
    *, dials: bool, timeout: float,
) -> _engine.Link:  # fmt: skip
    """Connect one link to rank ``peer``. Raises :class:`PipelineError`, which names both."""
    try:
        if dials:
            return engine.connect(
                peer_rank=peer, link_id=link, host=host, port=port, timeout=timeout
            )
        return engine.accept(peer_rank=peer, link_id=link, timeout=timeout)
    except RuntimeError as error:
        raise PipelineError(f"engine link {link} to rank {peer}: {error}") from error
