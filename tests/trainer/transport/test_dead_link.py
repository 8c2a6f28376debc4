"""A rank whose neighbour has departed gets the trainer's own error, wherever it meets it."""

import threading
import time

import pytest
import torch

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.transport.channels.delegated import DelegatedIncoming
from pipemorph_trainer.transport.engine_setup import load_engine_module
from pipemorph_trainer.transport.link_recorder import LinkRecorder, PeerClock
from pipemorph_trainer.transport.message import Direction, MessageBatch, TensorMeta

pytestmark = pytest.mark.needs_engine


def test_slots_reserved_on_a_dead_link_name_the_peer():
    module = load_engine_module()
    assert module is not None
    ends = [
        module.Engine(job="j/0", rank=rank, secret=b"s", host="127.0.0.1", transport="tcp")
        for rank in (0, 1)
    ]
    accepting = threading.Thread(target=lambda: ends[1].accept(peer_rank=0, link_id=0, timeout=20))
    accepting.start()
    link = ends[0].connect(
        peer_rank=1, link_id=0, host="127.0.0.1", port=ends[1].port, timeout=20.0
    )
    accepting.join(20)
    incoming = DelegatedIncoming(
        link=link,
        direction=Direction.BACKWARD,
        peer_clock=PeerClock(),
        recorder=LinkRecorder(0, 0, Direction.BACKWARD),
    )
    batch = MessageBatch(0, 0, 1, (TensorMeta.from_tensor(torch.zeros(4)),))
    incoming.reserve_slots(1, batch)
    ends[1].close(20.0)
    try:
        deadline = time.monotonic() + 20
        while link.alive:
            assert time.monotonic() < deadline, "the other end closed, and the link is alive"
            time.sleep(0.01)
        with pytest.raises(PipelineError, match="rank 1 closed it"):
            incoming.reserve_slots(2, batch)
    finally:
        ends[0].close(0.2)
