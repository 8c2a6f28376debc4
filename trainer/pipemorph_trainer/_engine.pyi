"""Binding of the C++ transfer engine (sources in ``csrc/``).

Moves messages between the ranks at the two ends of a link, from and to host memory,
without the GIL and without calling Python. All times are seconds; timestamps are
wall-clock seconds (``time.time()``).
"""

from typing import Literal, final

from typing_extensions import Buffer

class EngineError(RuntimeError):
    """A link is dead, refused, or a wait ran out; the message says which and why."""

class EngineTimeout(EngineError):
    """A deadline passed. The message names the link, the key and what was missing."""

@final
class Message:
    """A whole message that has arrived. It occupies a slot until it is released."""

    @property
    def key(self) -> tuple[int, int, int, int, int]: ...
    @property
    def note(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def posted_at(self) -> float:
        """Sender's clock when ``send`` was called."""
    @property
    def started_at(self) -> float:
        """Sender's clock when the first byte left the queue (posted_at + queueing)."""
    @property
    def arrived_at(self) -> float:
        """Receiver's clock when the last byte was in the slot."""
    def view(self) -> memoryview:
        """The payload in the slot, without a copy. Invalid after :meth:`release`."""
    def copy_into(self, destination: Buffer) -> None:
        """Copy the payload (without the GIL). Raises if sizes differ."""
    def release(self) -> None:
        """Give the slot back to the sender as a credit. Idempotent."""

@final
class PathStats:
    """One data path of a link, as it is now."""

    kind: str
    """``tcp``, ``shm`` or ``rdma``."""
    rail: str
    """Device and port, as in ``rxe0 port 1``; empty for other kinds."""
    state: str
    """``INIT``, ``CONNECTING``, ``UP``, ``SUSPECT``, ``FENCING``, ``DOWN`` or ``COOLDOWN``."""
    trouble: str
    """Why it was lost or could not be made the last time; empty for a rail that is up."""
    epoch: int
    chunks: int
    """Chunks entrusted to it, some perhaps in vain."""
    bytes: int
    times_lost: int
    bytes_per_second: float | None
    """While busy; exponential mean whose newest sample weighs 0.3. Rails only."""
    rtt_min: float | None
    """Of probes on this path that met no traffic, since the last ``drain_telemetry``."""
    rtt_mean: float | None
    rtt_p99: float | None

@final
class LinkStats:
    """Counters since the link was made; telemetry since the last ``drain_telemetry``."""

    state: str
    transport: Literal["tcp", "shm", "rdma"]
    """What carries now: ``tcp`` on a link of rails that fell back."""
    paths: list[PathStats]
    fallbacks: int
    """Times that the last rail was lost and TCP took over."""
    failbacks: int
    """Times that a rail took over again."""
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    chunks_resent: int
    duplicate_chunks: int
    stale_chunks: int
    reconnects: int
    rtt_min: float | None
    rtt_mean: float | None
    rtt_p99: float | None
    clock_offset: float | None
    """Seconds to add to the peer's clock to get ours, from the echo with the least RTT."""
    sends_in_flight: int
    slots_granted: int
    slots_in_use: int

@final
class Link:
    """One link to a neighbour: both directions, one control connection, data paths beside it."""

    @property
    def peer_rank(self) -> int: ...
    @property
    def link_id(self) -> int: ...
    @property
    def transport(self) -> str:
        """``tcp``, ``shm`` or ``rdma`` (what was agreed in the hello)."""
    @property
    def alive(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    def reserve(self, direction: int, slots: int, slot_bytes: int) -> None:
        """Make sure ``slots`` receive slots of ``slot_bytes`` are granted for one direction.

        Never shrinks, but however often sizes change, slots have less than four times the memory
        that would do for every reservation so far. Separate pools per direction: one shared pool
        deadlocks.
        """
    def send(self, key: tuple[int, int, int, int, int], payload: Buffer, note: bytes = b"") -> int:
        """Hand a message over and return a ticket at once.

        ``key`` is (generation, iteration, microbatch, direction, tensor). The engine holds
        ``payload`` until the receiver acknowledged it. ``note`` (at most 64 bytes) is
        delivered with the message. Messages take the K queues in turn.
        """
    def sent(self, ticket: int) -> bool:
        """Whether the receiver has acknowledged it. Raises EngineError if the link is dead."""
    def wait_sent(self, ticket: int, timeout: float) -> None: ...
    def try_receive(self, key: tuple[int, int, int, int, int]) -> Message | None:
        """The message with this key if it has arrived. Raises EngineError if the link is dead."""
    def receive(self, key: tuple[int, int, int, int, int], timeout: float) -> Message: ...
    def post_receive(self, key: tuple[int, int, int, int, int], destination: Buffer) -> None:
        """Say ahead where a message is to be put; ask for it with ``receive`` as usual.

        Then it is received straight into ``destination`` (over shared memory: copied chunk by
        chunk as it comes), which its :class:`Message` refers to, and its slot is free again as
        soon as it is whole. Posted after its first chunk has come, it is copied by ``receive``.
        A key has one destination at a time: it is for the oldest message with that key that has
        not been received, and EngineError is raised for another one until that has been.
        The engine holds ``destination`` until the message is released or the link is dead;
        ``receive`` raises EngineError if the sizes differ.
        """
    def arrived(self, key: tuple[int, int, int, int, int]) -> bool: ...
    def send_slots(self, direction: int) -> int:
        """Slots that the peer has granted for ``direction`` and no message has taken yet."""
    def slot_memory(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece of memory that receive slots lie in, so that a device
        can be told of it (``cudaHostRegister``). It stays mapped as long as this object lives."""
    def drain_telemetry(self) -> list[tuple[tuple[int, int, int, int, int], int, float, float]]:
        """Per message sent and acknowledged since the last call: (key, bytes, queue_seconds,
        wire_seconds); wire is first byte out → acknowledgement in, so queueing is left out."""
    def stats(self) -> LinkStats: ...
    def sever_data_path(self, index: int = 0) -> None:
        """Fault injection: cut one data connection (TCP) as a broken cable would."""
    def sever_control(self) -> None:
        """Fault injection: cut the control connection."""
    def close(self) -> None: ...

@final
class Engine:
    """One per process. Listens for links and owns the progress threads and the pool."""

    def __init__(
        self,
        *,
        job: str,
        rank: int,
        secret: bytes,
        host: str = "0.0.0.0",
        port: int = 0,
        queues: int = 8,
        sockets: int = 4,
        chunk_bytes: int = 1 << 20,
        transport: str = "auto",
        peer_deadline: float = 10.0,
        require: str | None = None,
        rdma_devices: list[str] = ...,
        gid_index: int = -1,
        traffic_class: int = 0,
        service_level: int = 0,
        numa_node: int = -1,
    ) -> None:
        """``transport``: auto (shm on one host, else rdma where both ends have a rail, else tcp)
        | tcp | shm | rdma. ``job`` names job and attempt: a peer of another attempt is refused.
        ``peer_deadline``: seconds a control connection may stay down before the link is dead.

        ``require="rdma"`` never falls back to TCP: EngineError if this end or the other has no
        usable rail, and the link is dead when none was up for ``peer_deadline``.
        ``rdma_devices``: such as ``mlx5_0`` or ``mlx5_0:2`` (port); empty for one active port of
        every card. ``gid_index``: -1 for the best, looked up anew at every connection.
        ``numa_node``: of the GPU whose tensors travel; -1 if that is not known.
        """
    @property
    def rails(self) -> list[str]:
        """The RDMA ports in use, as in ``rxe0 port 1``."""
    @property
    def rails_trouble(self) -> str | None:
        """Why there are no rails, or fewer than there could be: to be logged."""
    @property
    def memory_node(self) -> int | None:
        """NUMA node that slots come from: ``numa_node``, else the one that all rails' cards are
        on; None where neither is known."""
    @property
    def port(self) -> int: ...
    @property
    def bell_fd(self) -> int:
        """eventfd: readable when a message arrived, a send completed or a link changed state.
        Read it (8 bytes) to reset. Lets one poll() wait for several links at once."""
    def connect(
        self, *, peer_rank: int, link_id: int, host: str, port: int, timeout: float
    ) -> Link:
        """Dial the peer's engine (the lower stage dials). Retries until ``timeout``."""
    def accept(self, *, peer_rank: int, link_id: int, timeout: float) -> Link:
        """Wait for the peer to dial. Raises EngineTimeout naming who did not come."""
    def refused(self) -> list[str]:
        """Why connections were refused so far (wrong secret, wrong job, ...): to be logged."""
    def close(self, timeout: float = 5.0) -> None:
        """Close links and threads; leaves no shared-memory object behind. Idempotent."""
