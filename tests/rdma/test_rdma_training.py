"""Training over rails that break: it goes on, and every loss is that of an undisturbed run, to the
bit.

One training run goes through all the faults that it can survive, each made while an iteration is
under way, and each shown by a counter or a table of the kernel's. Three stages in two guests, so
that both links cross the cables.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guests import Fabric, Rail
from launchers import Launchers
from peers import PATIENCE, until, until_stopped
from training import MESSAGE_BYTES, Training, TrainingJob

pytestmark = [pytest.mark.rdma, pytest.mark.soak, pytest.mark.timeout(1800)]

# As many as the tests below make together.
ITERATIONS = 10
# The sockets come after the rails in a link's paths.
TCP = range(2, 6)
ANY = range(6)
SMALLEST_CHUNK = MESSAGE_BYTES % (1 << 20)
# How long a rank may take to notice: the engine's own deadline of 10 s, on a slow processor.
NOTICED = 45.0


@pytest.fixture(scope="module")
def runs() -> Iterator[list[Training]]:
    """The runs of the guests that are there now; none before the first test."""
    made: list[Training] = []
    yield made
    if made and made[0].fabric.running:
        made[0].give_up()


@pytest.fixture
def training(
    launchers: Launchers, runs: list[Training], request: pytest.FixtureRequest
) -> Iterator[Training]:
    """Both runs; after a test that failed the disturbed one begins anew."""
    if not runs or runs[0].fabric is not launchers.fabric:
        runs[:] = [Training(launchers, ITERATIONS)]
    before = request.session.testsfailed
    yield runs[0]
    if request.session.testsfailed > before and runs[0].fabric.running:
        runs[0].give_up()


@contextmanager
def slow_rails(*rails: Rail, rate: str = "20mbit") -> Iterator[None]:
    """Half a second for each chunk, so that what is done next happens in mid-message. Before the
    iteration begins: what its first stages send is else gone when the rails are slow."""
    for rail in rails:
        rail.slow(rate)
    try:
        yield
    finally:
        for rail in rails:
            rail.at_full_speed()


def pair(fabric: Fabric) -> list[Rail]:
    """The two rails over which ranks 0 and 2 send to rank 1."""
    return [fabric.rail(fabric.a, n) for n in (0, 1)]


def renewed(job: TrainingJob, rail: int, epochs: dict[tuple[int, int], int]) -> None:
    """Wait until every link has a rail up that is not the one of these epochs any more: that may
    be up as long as its loss has not been noticed."""
    until(
        f"a fresh queue pair on rail {rail} of every link",
        lambda: all(
            path["state"] == "UP" and path["epoch"] > epochs[end]
            for end, path in job.path(rail).items()
        ),
        PATIENCE,
        job.text,
    )


def epochs_of(job: TrainingJob, rail: int) -> dict[tuple[int, int], int]:
    return {end: path["epoch"] for end, path in job.path(rail).items()}


def times_lost(job: TrainingJob, rail: int) -> dict[tuple[int, int], int]:
    return {end: path["times_lost"] for end, path in job.path(rail).items()}


def until_lost(job: TrainingJob, rail: int, before: dict[tuple[int, int], int]) -> None:
    """Wait until every link has given up a rail once more, at both ends."""
    until(
        f"rail {rail} given up by every link",
        lambda: all(n > before[end] for end, n in times_lost(job, rail).items()),
        PATIENCE,
        job.text,
    )


def carries_alone(training: Training, rail: Rail, other: Rail) -> None:
    """A rail carries an iteration, at every end: it has to, without the other one."""
    job = training.job()
    lost = times_lost(job, other.number)
    other.unplug()
    until_lost(job, other.number, lost)
    sent = rail.counter("sent_pkts")
    with training.disturbed(hold=False) as block:
        pass
    assert block.carried(rail.number), job.text()
    assert block.chunks(TCP) == 0, job.text()
    assert rail.counter("sent_pkts") > sent
    other.plug()
    job.rail_up(other.number)


def test_a_cable_pulled_in_mid_message(training: Training, fabric: Fabric):
    job = training.job()
    rail, other = pair(fabric)
    job.rail_up(0)
    downed, resent = rail.counter("link_downed"), job.total("chunks_resent")
    lost = times_lost(job, 0)
    with (
        slow_rails(rail, rate="4mbit"),
        slow_rails(other),
        rail.unplugged_in_mid_chunk() as unplugged,
        training.disturbed() as block,
    ):
        assert unplugged.reap(PATIENCE) == 0
        block.assert_in_progress()
    assert rail.counter("link_downed") > downed
    until_lost(job, 0, lost)
    # It was in mid-message, and the other rail went on.
    assert job.total("chunks_resent") > resent
    assert block.chunks([1]) > 0, job.text()
    rail.plug()
    job.rail_up(0)
    carries_alone(training, rail, other)


def test_acknowledgements_lost(training: Training, fabric: Fabric):
    """What rank 0 sends over rail 0 arrives, and it cannot know."""
    job = training.job()
    rail, other = pair(fabric)
    job.rail_up(0)
    retries, received = rail.counter("completer_retry_err"), job.total("messages_received")
    with slow_rails(rail, other), training.disturbed() as block:
        block.until_chunks(1, paths=[0])
        rail.drop_incoming(only_acknowledgements=True)
        lost = times_lost(job, 0)[0, 0]
        block.assert_in_progress()
        until(
            "rank 0's queue pair given up",
            lambda: times_lost(job, 0)[0, 0] > lost,
            PATIENCE,
            job.text,
        )
        assert rail.dropped() > 0
        rail.deliver_again()
    assert rail.counter("completer_retry_err") > retries
    # Each once, though some chunks were sent twice.
    assert job.total("messages_received") == received + block.messages()


def test_all_rails_down_and_back(training: Training, fabric: Fabric):
    """Nothing of RoCE gets to rank 1 any more. Not by ports that are down there: rxe at the other
    end would take its packets, which nobody fetches, for a full queue, and starve its guest."""
    job = training.job()
    rails = [fabric.rail(fabric.b, n) for n in (0, 1)]
    for n in (0, 1):
        job.rail_up(n)
    fallbacks, failbacks = job.total("fallbacks"), job.total("failbacks")
    sent = sum(guest.sent_bytes("eth0") for guest in (fabric.a, fabric.b))
    with slow_rails(*pair(fabric)), training.disturbed() as block:
        block.until_chunks(1)
        for rail in rails:
            rail.drop_incoming()
        block.assert_in_progress()
    # An end that had nothing left to send notices a little later, by itself or from its peer.
    until(
        "every link on TCP, at both ends",
        lambda: all(end["transport"] == "tcp" for end in job.link_ends()),
        PATIENCE,
        job.text,
    )
    assert all(rail.dropped() > 0 for rail in rails)
    assert job.total("fallbacks") >= fallbacks + len(job.ends()), job.text()
    chunks = block.chunks(TCP)
    assert chunks > 0, job.text()
    now = sum(guest.sent_bytes("eth0") for guest in (fabric.a, fabric.b))
    assert now - sent >= chunks * SMALLEST_CHUNK
    for n, rail in enumerate(rails):
        rail.deliver_again()
        job.rail_up(n)
    assert all(end["transport"] == "rdma" for end in job.link_ends())
    assert job.total("failbacks") == failbacks + job.total("fallbacks") - fallbacks
    packets = [rail.counter("sent_pkts") for rail in rails]
    copied = job.total("bytes_copied_in")
    with training.disturbed(hold=False) as block:
        pass
    # The stages read where cards write.
    assert job.total("bytes_copied_in") == copied
    assert all(rail.counter("sent_pkts") > n for rail, n in zip(rails, packets, strict=True))
    assert block.chunks(TCP) == 0, job.text()


def test_a_rail_that_flaps_twice(training: Training, fabric: Fabric):
    job = training.job()
    rail = fabric.rail(fabric.b, 1)
    downed = rail.counter("link_downed")
    job.rail_up(1)
    for flap in (1, 2):
        epochs = epochs_of(job, 1)
        with slow_rails(*pair(fabric)), training.disturbed() as block:
            block.until_chunks(1, paths=[1])
            rail.flap()
            block.assert_in_progress()
        assert rail.counter("link_downed") >= downed + flap
        renewed(job, 1, epochs)


def test_a_gid_that_changes(training: Training, fabric: Fabric):
    job = training.job()
    rail, other = pair(fabric)
    job.rail_up(0)
    epochs = epochs_of(job, 0)
    with slow_rails(rail, other), training.disturbed() as block:
        block.until_chunks(1, paths=[0])
        rail.guest.run("ip", "-4", "address", "flush", "dev", rail.netdev)
        rail.guest.run("ip", "address", "add", "10.77.1.77/24", "dev", rail.netdev)
        block.assert_in_progress()
    rail.until_addressed("10.77.1.77")
    renewed(job, 0, epochs)
    carries_alone(training, rail, other)
    # There is no other address that these packets could have.
    assert rail.addresses_of_gids() == {"10.77.1.77"}
    epochs = epochs_of(job, 0)
    rail.guest.run("ip", "-4", "address", "flush", "dev", rail.netdev)
    rail.plug()
    rail.until_addressed()
    renewed(job, 0, epochs)


def test_a_rank_stopped_for_less_than_the_deadline(training: Training, fabric: Fabric):
    job = training.job()
    stopped = job.ranks[1]
    with slow_rails(*pair(fabric)), training.disturbed() as block:
        block.until_chunks(1)
        stopped.signal(signal.SIGSTOP)
        try:
            until_stopped(stopped.guest, stopped.pid)
            block.assert_in_progress(of=(0, 2))
            before = stopped.cpu_ticks()
            time.sleep(3)  # shorter than half of the engine's deadline: nothing to wait for
            assert (stopped.process_state(), stopped.cpu_ticks()) == ("T", before)
        finally:
            stopped.signal(signal.SIGCONT)


def test_a_killed_rank_ends_the_others_by_name(training: Training, fabric: Fabric):
    job = training.job()
    assert fabric.b.queue_pairs() > 0
    block = job.begin(1, hold=True)
    block.until_chunks(1, paths=ANY)
    job.ranks[1].signal(signal.SIGKILL)
    block.proceed()
    began = time.monotonic()
    for error in block.errors(of=(0, 2), deadline=NOTICED):
        assert error.startswith("PeerLostError: "), error
        assert "rank 1 (stage 1) is gone" in error
    assert time.monotonic() - began < NOTICED
    until("the end of all ranks", lambda: all(r.ended() is not None for r in job.ranks), PATIENCE)
    assert [rank.ended() for rank in job.ranks] == [1, -signal.SIGKILL, 1]
    # Nobody waits for an answer of a rank that has ended, asked before it did or after.
    ended = "the program has ended with "
    assert block.errors(of=(1,), deadline=5.0) == [f"{ended}{-signal.SIGKILL}"]
    assert job.ranks[0].error_of(job.ranks[0].start("state"), 5.0) == f"{ended}1"
    assert fabric.b.queue_pairs() == 0
    training.give_up()


def test_a_rank_stopped_for_ever_ends_the_others_by_name(training: Training, fabric: Fabric):
    job = training.job()
    job.rail_up(0)
    block = job.begin(1, hold=True)
    block.until_chunks(1, paths=ANY)
    job.ranks[1].signal(signal.SIGSTOP)
    block.proceed()
    began = time.monotonic()
    try:
        for error in block.errors(of=(0, 2), deadline=NOTICED):
            assert error.startswith("PeerLostError: "), error
            assert "rank 1" in error
        assert time.monotonic() - began < NOTICED
        # It is there all the same, with its queue pairs.
        assert job.ranks[1].process_state() == "T"
        assert fabric.b.queue_pairs() > 0
    finally:
        job.ranks[1].signal(signal.SIGCONT)
    training.give_up()
