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
from peers import until, until_stopped
from training import MESSAGE_BYTES, Training, TrainingJob

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(900)]

# As many as the tests below make together.
ITERATIONS = 10
# The sockets come after the rails in a link's paths.
TCP = range(2, 6)
SMALLEST_CHUNK = MESSAGE_BYTES % (1 << 20)
# How long a rank may take to notice: the engine's own deadline of 10 s, on a slow processor.
NOTICED = 45.0


@pytest.fixture(scope="module")
def runs(launchers: Launchers) -> Iterator[Training]:
    made = Training(launchers, ITERATIONS)
    yield made
    made.give_up()


@pytest.fixture
def training(runs: Training, request: pytest.FixtureRequest) -> Iterator[Training]:
    """Both runs; after a test that failed the disturbed one begins anew."""
    before = request.session.testsfailed
    yield runs
    if request.session.testsfailed > before:
        runs.give_up()


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
        40.0,
        job.text,
    )


def epochs_of(job: TrainingJob, rail: int) -> dict[tuple[int, int], int]:
    return {end: path["epoch"] for end, path in job.path(rail).items()}


def carries_alone(training: Training, rail: Rail, other: Rail) -> None:
    """A rail carries an iteration, at every end: it has to, without the other one."""
    job = training.job()
    lost = {end: path["times_lost"] for end, path in job.path(other.number).items()}
    other.unplug()
    until(
        f"rail {other.number} given up by every link",
        lambda: all(p["times_lost"] > lost[end] for end, p in job.path(other.number).items()),
        30.0,
        job.text,
    )
    sent = rail.counter("sent_pkts")
    with training.disturbed() as block:
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
    with (
        slow_rails(rail, rate="4mbit"),
        slow_rails(other),
        training.disturbed() as block,
    ):
        rail.unplug_in_mid_chunk()
        block.assert_in_progress()
    assert rail.counter("link_downed") > downed
    assert all(path["times_lost"] >= 1 for path in job.path(0).values()), job.text()
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
    lost = job.ranks[0].link(0)["paths"][0]["times_lost"]
    with slow_rails(rail, other), training.disturbed() as block:
        block.until_chunks(1, paths=[0])
        rail.drop_incoming(only_acknowledgements=True)
        block.assert_in_progress()
        until(
            "rank 0's queue pair given up",
            lambda: job.ranks[0].link(0)["paths"][0]["times_lost"] > lost,
            30.0,
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
        30.0,
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
    with training.disturbed() as block:
        pass
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
            rail.unplug()
            rail.plug()
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
    # The kernel renews the table in the background.
    until(
        "the new address among the GIDs, and no other",
        lambda: rail.addresses_of_gids() == {"10.77.1.77"},
        10.0,
        lambda: str(rail.gids()),
    )
    renewed(job, 0, epochs)
    carries_alone(training, rail, other)
    # There is no other address that these packets could have.
    assert rail.addresses_of_gids() == {"10.77.1.77"}
    epochs = epochs_of(job, 0)
    rail.guest.run("ip", "-4", "address", "flush", "dev", rail.netdev)
    rail.plug()
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
    block = job.begin(1)
    block.until_chunks(1)
    job.ranks[1].signal(signal.SIGKILL)
    began = time.monotonic()
    for error in block.errors(of=(0, 2), deadline=NOTICED):
        assert error.startswith("PeerLostError: "), error
        assert "rank 1 (stage 1) is gone" in error
    assert time.monotonic() - began < NOTICED
    until("the end of all ranks", lambda: all(r.ended() is not None for r in job.ranks), 20.0)
    assert [rank.ended() for rank in job.ranks] == [1, -signal.SIGKILL, 1]
    # Nobody waits for an answer of a rank that has ended, asked before it did or after.
    ended = "the program has ended with "
    assert block.errors(of=(1,), deadline=5.0) == [f"{ended}{-signal.SIGKILL}"]
    assert job.ranks[0].error_of(job.ranks[0].start("state"), 5.0) == f"{ended}1"
    assert fabric.b.queue_pairs() == 0
    training.give_up()


def test_a_rank_stopped_for_ever_ends_the_others_by_name(training: Training, fabric: Fabric):
    job = training.job()
    job.train(1)
    block = job.begin(1)
    block.until_chunks(1)
    job.ranks[1].signal(signal.SIGSTOP)
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
