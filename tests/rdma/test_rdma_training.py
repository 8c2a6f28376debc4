"""Training over rails that break: it goes on, and every loss is that of an undisturbed run, to the
bit.

One training run loses all rails and gets them back in the middle of an iteration, then a rank.
Three stages in two guests, so that both links cross the cables. What one link does when a single
rail breaks is shown in `test_rdma_failover.py`.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from guests import Fabric, Rail
from launchers import Launchers
from peers import PATIENCE, until
from training import MESSAGE_BYTES, Training

pytestmark = [pytest.mark.rdma, pytest.mark.soak, pytest.mark.timeout(1800)]

# Total of the tests below.
ITERATIONS = 3
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
    """Training runs; after a test that failed the disturbed one begins anew."""
    if not runs or runs[0].fabric is not launchers.fabric:
        runs[:] = [Training(launchers, ITERATIONS)]
    before = request.session.testsfailed
    yield runs[0]
    if request.session.testsfailed > before and runs[0].fabric.running:
        runs[0].give_up()


@contextmanager
def slow_rails(*rails: Rail, rate: str = "20mbit") -> Iterator[None]:
    """Half a second for each chunk, so that the next action happens in mid-message. Before the
    iteration begins: otherwise its first stages have sent all when the rails are slow."""
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


def test_all_rails_down_and_back(training: Training, fabric: Fabric):
    """RoCE packets get to rank 1 no more. Its ports stay up: rxe at the other end would take its
    packets, which no process fetches, for a full queue, and starve its guest."""
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
    # An end that had nothing more to send notices a little later, by itself or from its peer.
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
    # No command waits for a rank that has ended, sent before its end or after.
    ended = "the program has ended with "
    assert block.errors(of=(1,), deadline=5.0) == [f"{ended}{-signal.SIGKILL}"]
    assert job.ranks[0].error_of(job.ranks[0].start("state"), 5.0) == f"{ended}1"
    assert fabric.b.queue_pairs() == 0
    training.give_up()
