"""Binding of the C++ transfer engine (sources in ``csrc/``).

Moves messages between the ranks at the two ends of a link, from and to host memory, without the GIL
and without calling Python. Times are seconds; timestamps are wall-clock seconds (``time.time()``).
"""

from typing import Literal, final

from typing_extensions import Buffer

class EngineError(RuntimeError):
    """Dead or refused link, or a wait that timed out. The message names the link and the reason."""

class EngineTimeout(EngineError):
    """Passed deadline. The message names the link, the key and the missing item."""

version: str
"""Version of the package that it was built for; empty if CMake built it by itself."""

def crypto_library() -> str:
    """Version of the OpenSSL in use, such as ``OpenSSL 3.0.17 1 Jul 2025``.

    Raises :class:`EngineError` without one, as :class:`Engine` does; it names what to install.
    """

@final
class Message(Buffer):
    """Complete message that has arrived. It occupies a slot until it is released.

    ``torch.frombuffer(message)`` and ``memoryview(message)`` show its ``nbytes`` writable bytes in
    the slot and hold the message: without :meth:`release`, the slot is granted to the sender again
    when the last view is gone. After :meth:`release` there are no new views.
    """

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
        """Sender's clock when the first byte exited the queue: ``posted_at`` plus queueing time."""
    @property
    def arrived_at(self) -> float:
        """Receiver's clock when the last byte was in the slot."""
    def view(self) -> memoryview:
        """Show the payload in the slot, without a copy. Invalid after :meth:`release`."""
    def copy_into(self, destination: Buffer) -> None:
        """Copy the payload (without the GIL). Raises if sizes differ."""
    def move_to(self, address: int, nbytes: int, at_once: bool) -> tuple[float, float]:
        """Copy the payload to the ``nbytes`` bytes at ``address``, then release it. Returns
        ``started_at`` and ``arrived_at``. Raises if sizes differ.

        ``at_once``: grant the slot now. Otherwise the grant goes with the next frame to the sender,
        usually the acknowledgement of its next message, at no cost for this thread. At most two
        grants of a link wait.
        """
    def release(self) -> None:
        """Grant the slot to the sender again. Idempotent."""

@final
class Lease(Buffer):
    """Memory of the engine for one message: fill it, then :meth:`send` it.

    ``numpy.frombuffer(lease)`` and ``memoryview(lease)`` show its ``nbytes`` writable bytes, whose
    content is undefined at first. After :meth:`send` or :meth:`release` there are no new views, and
    nothing may be written through old ones: the memory may show another message.
    """

    @property
    def nbytes(self) -> int: ...
    def send(self, note: bytes = b"") -> int:
        """Send the content under the lease's key. Returns a ticket, as :meth:`Link.send`."""
    def release(self) -> None:
        """Return the memory unsent. Idempotent; the deletion of the lease does the same."""

@final
class PathStats:
    """Current state of one data path of a link."""

    kind: str
    """``tcp``, ``shm`` or ``rdma``."""
    rail: str
    """Device and port, such as ``rxe0 port 1``; empty for other kinds."""
    state: str
    """``INIT``, ``CONNECTING``, ``UP``, ``SUSPECT``, ``FENCING``, ``DOWN`` or ``COOLDOWN``."""
    last_error: str
    """Reason of the last loss or failed connection; empty once anything got through again."""
    epoch: int
    chunks: int
    """Chunks assigned to it, including chunks that were lost with it."""
    bytes: int
    times_lost: int
    bytes_per_second: float | None
    """Rate while busy: exponential mean, weight 0.3 for the newest sample. Rails only."""
    window: int
    """Bytes that may be under way: twice the measured bandwidth × delay. 0 if the kernel
    decides."""
    rtt_min: float | None
    """Round trip of the newest 1,024 probes without other traffic on this path."""
    rtt_mean: float | None
    rtt_p99: float | None

@final
class LinkStats:
    """Counters since the link was made; round trips of the newest 1,024 echoes."""

    state: str
    transport: Literal["tcp", "shm", "rdma"]
    """Current transport: ``tcp`` on a link that fell back from its rails."""
    paths: list[PathStats]
    fallbacks: int
    """Number of times that the last rail was lost and TCP took over."""
    failbacks: int
    """Number of times that a rail took over again."""
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    bytes_copied_out: int
    """Bytes of payloads that the engine copied from memory to memory before sending: into a slot
    (``shm``), into memory of a rail (``rdma``), or to encrypt them. Copies by the kernel or a
    device do not count, nor writes of the application into a :class:`Lease`."""
    bytes_copied_in: int
    """Bytes copied after arrival: those that were read ahead of their header, and those of
    :meth:`Message.copy_into` and :meth:`Message.move_to`."""
    chunks_resent: int
    duplicate_chunks: int
    stale_chunks: int
    reconnects: int
    frames_refused: int
    """Control frames and chunk headers with a wrong MAC: they were altered, added, repeated or
    omitted on the way. Each ended its connection, and was dropped."""
    last_error: str
    """Reason of the last lost connection of the link; empty if none was lost."""
    path_errors: str
    """Errors of the data paths, now or in the last 30 seconds: paths that are down or were lost,
    and a message without any delivery. Errors of waits contain it. Empty without errors."""
    rtt_min: float | None
    rtt_mean: float | None
    rtt_p99: float | None
    clock_offset: float | None
    """Seconds to add to the peer's clock for ours, from the echo with the least round trip."""
    sends_in_flight: int
    slots_granted: int
    slots_in_use: int

@final
class Link:
    """Link to a neighbour: both directions, with one control connection and data paths."""

    @property
    def peer_rank(self) -> int: ...
    @property
    def link_id(self) -> int: ...
    @property
    def transport(self) -> str:
        """``tcp``, ``shm`` or ``rdma``, as agreed when the link was made."""
    @property
    def alive(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    def reserve(self, direction: int, slots: int, slot_bytes: int) -> None:
        """Grant at least ``slots`` receive slots of ``slot_bytes`` bytes for one direction.

        Slots are never removed. If sizes change repeatedly, slots use less than four times the
        memory for the largest reservation. The pools of the directions are separate, since a shared
        pool can deadlock.
        """
    def send(self, key: tuple[int, int, int, int, int], payload: Buffer, note: bytes = b"") -> int:
        """Send a message. Returns a ticket at once.

        ``key``: (generation, iteration, microbatch, direction, tensor). The engine holds
        ``payload`` until the receiver has acknowledged it. ``note`` (at most 64 bytes) is delivered
        with the message. Messages use the K queues in turn.
        """
    def lease(self, key: tuple[int, int, int, int, int], nbytes: int) -> Lease | None:
        """Lease memory for a message of ``nbytes`` bytes, which is sent without a copy. None if
        none is free, or if the link has none (TCP, ``mac`` and ``aead``).

        Over shared memory the lease is a slot of the receiver, where ``Message.view`` shows it. It
        takes the slot until it is sent or released, but never the last free slot of its size, so
        that other messages still go through. Over RDMA it is memory of the link that its rails
        read; a lease without free memory makes the link register more. That memory is in use until
        the lease and its views are gone and a sent message is acknowledged.
        """
    def send_memory(
        self,
        key: tuple[int, int, int, int, int],
        address: int,
        nbytes: int,
        owner: object,
        note: bytes,
    ) -> int:
        """Send, as :meth:`send`, the ``nbytes`` bytes at ``address``, which are valid as long as
        ``owner`` lives. The engine holds ``owner`` as it holds a payload."""
    def sent(self, ticket: int) -> bool:
        """True if the receiver has acknowledged the message. Raises EngineError if the link is
        dead."""
    def wait_sent(self, ticket: int, timeout: float) -> None: ...
    def try_receive(self, key: tuple[int, int, int, int, int]) -> Message | None:
        """Take the message with this key, or None. Raises EngineError if the link is dead."""
    def receive(self, key: tuple[int, int, int, int, int], timeout: float) -> Message: ...
    def arrived(self, key: tuple[int, int, int, int, int]) -> bool: ...
    def send_slots(self, direction: int) -> int:
        """Slots that the peer has granted for ``direction`` and that no message uses yet."""
    def slot_memory(self) -> list[tuple[int, int]]:
        """Address and bytes of each memory block with receive slots, for example for
        ``cudaHostRegister``. The memory stays mapped as long as this object lives."""
    def lease_memory(self) -> list[tuple[int, int]]:
        """Address and bytes of each memory block with leases. Over shared memory these are the
        peer's slots, and the list grows some time after the peer has reserved slots. Over RDMA it
        is memory of the link, and the list grows some time after a lease found none free."""
    def stats(self) -> LinkStats: ...
    def sever_data_path(self, index: int = 0) -> None:
        """Fault injection: cut one data connection (TCP) as a broken cable would."""
    def sever_control(self) -> None:
        """Fault injection: cut the control connection."""
    def close(self) -> None: ...

@final
class Engine:
    """Engine of a process. Listens for links, and owns the threads and the memory."""

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
        integrity: str = "crc",
        queue_pairs: int = 1,
        flight_bytes: int = 512 << 20,
    ) -> None:
        """``transport``: auto (shm on one host, else rdma if both ends have a rail, else tcp) | tcp
        | shm | rdma. ``job``: name of job and attempt; a peer with another one is refused.
        ``peer_deadline``: seconds for which a control connection may be down before the link is
        dead.

        ``require="rdma"``: never fall back to TCP. EngineError if one of the ends has no usable
        rail; the link is dead when none was up for ``peer_deadline``. ``rdma_devices``: such as
        ``mlx5_0`` or ``mlx5_0:2`` (port); empty: one active port of every card. ``gid_index``: -1
        for the best one, determined at every connection. ``numa_node``: of the GPU with the
        tensors; -1 if unknown.

        ``integrity``: of payloads over TCP and in shared memory, crc (checksums, over TCP) | mac
        (altered or added ones are refused, ``frames_refused``, and sent again) | aead (as mac, and
        encrypted over TCP). Both ends must have the same. Rails need crc.

        ``queue_pairs``: of a link over each pair of rails; the smaller number of both ends counts,
        and a link has at most 16 in all. ``flight_bytes``: limit of a link's memory for messages
        under way: staging memory of its rails, and receive slots that it adds to a direction. It is
        used if bandwidth × delay needs it.
        """
    @property
    def rails(self) -> list[str]:
        """RDMA ports in use, such as ``rxe0 port 1``."""
    @property
    def rails_error(self) -> str | None:
        """Reason for no rails, or fewer than possible; for logs."""
    @property
    def memory_node(self) -> int | None:
        """NUMA node of the slots: ``numa_node``, else that of all rails' cards; None if both are
        unknown."""
    @property
    def port(self) -> int: ...
    @property
    def notifier_fd(self) -> int:
        """Eventfd that is readable after a message arrived, a send completed or a link changed its
        state. Read 8 bytes to reset it. One poll() can wait for several links with it. The first
        access makes it readable, since earlier events were not signalled."""
    def connect(
        self, *, peer_rank: int, link_id: int, host: str, port: int, timeout: float
    ) -> Link:
        """Connect to the peer's engine; the lower stage does this. Retries until ``timeout``."""
    def accept(self, *, peer_rank: int, link_id: int, timeout: float) -> Link:
        """Wait for the peer to connect. Raises EngineTimeout, which names the missing peer."""
    def refused(self) -> list[str]:
        """Reasons of refused connections so far (wrong secret, wrong job, …); for logs."""
    def close(self, timeout: float = 5.0) -> None:
        """Close links and threads. No shared-memory object remains. Idempotent."""
