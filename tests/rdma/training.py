"""A training job across the guests, from the test's side: rank 0 and 2 in guest a, 1 in b.

Both of its links run between the guests.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gate import same_bits
from guests import Fabric
from launchers import Launchers
from peers import PATIENCE, paths_text, until

STAGES = 3
MICROBATCHES = 4
# Rows of 8 floats: messages of 1.25 MiB, which is two chunks.
ROWS = 40960
MESSAGE_BYTES = ROWS * 8 * 4
# An emulated processor that shares two real ones with much else.
TRAIN_DEADLINE = 400.0

SPEC: dict[str, Any] = {
    "parallelism": {"stages": STAGES},
    "schedule": {"microbatches": MICROBATCHES, "policy": "pipemorph"},
    "transport": {"engine": "rdma", "route": "delegated", "deadlineSeconds": 300.0},
    # The test sets the number, not the job.
    "trainer": {"module": "none", "threads": 1, "iterations": 1000},
}


class RankOf:
    """Rank of a job."""

    def __init__(self, job: "TrainingJob", rank: int) -> None:
        self.job, self.rank = job, rank
        self.guest = job.fabric.b if rank % 2 else job.fabric.a
        self._launcher = job.launchers[self.guest]
        self._name = f"job {job.port} rank {rank}"
        self.pid = 0

    def start(self, op: str, **arguments: Any) -> int:
        return self._launcher.start(op, name=self._name, **arguments)

    def result(self, number: int, deadline: float = TRAIN_DEADLINE) -> Any:
        return self._launcher.result(number, deadline)

    def error_of(self, number: int, deadline: float) -> str:
        return self._launcher.error_of(number, deadline)

    def do(self, op: str, **arguments: Any) -> Any:
        return self.result(self.start(op, **arguments))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.do("state")
        return found

    def link(self, link: int) -> dict[str, Any]:
        """The counters of this rank's end of a link."""
        found: dict[str, Any] = self.state()["links"][str(link)]
        return found

    def signal(self, number: signal.Signals) -> None:
        self.guest.run("kill", f"-{int(number)}", str(self.pid))

    def ended(self) -> int | None:
        found: int | None = self.do("ended")
        return found


class TrainingJob:
    """A job that trains on command, in one run from its start to its end."""

    def __init__(self, launchers: Launchers) -> None:
        self.launchers, self.fabric = launchers, launchers.fabric
        self.port = next(launchers.ports)
        self.iteration = 0
        # After an iteration: each rank's weights, as a hash.
        self.weights: dict[int, list[str]] = {}
        self.ranks = [RankOf(self, rank) for rank in range(STAGES)]
        started = []
        for rank in self.ranks:
            seat = {
                "rank": rank.rank, "world_size": STAGES, "local_rank": 0,
                "master_addr": Fabric.CONTROL["a"], "master_port": self.port,
            }  # fmt: skip
            started.append(
                rank.start("launch", module="training_rank", seat=seat, spec=SPEC, rows=ROWS)
            )
        for rank, number in zip(self.ranks, started, strict=True):
            rank.pid = rank.result(number)

    def begin(self, iterations: int, *, hold: bool = False) -> "Block":
        return Block(self, iterations, hold)

    def train(self, iterations: int) -> list[str]:
        return self.begin(iterations).finish()

    def ends(self) -> list[tuple[RankOf, int]]:
        """List the ends of all links."""
        return [(self.ranks[r], link) for link in range(STAGES - 1) for r in (link, link + 1)]

    def link_ends(self) -> list[dict[str, Any]]:
        """The counters of every end of every link."""
        return [rank.link(link) for rank, link in self.ends()]

    def path(self, path: int) -> dict[tuple[int, int], dict[str, Any]]:
        """The counters of a path at every end of every link, by rank and link."""
        return {(rank.rank, link): rank.link(link)["paths"][path] for rank, link in self.ends()}

    def total(self, counter: str) -> int:
        """A counter, summed over all ends of all links."""
        return sum(int(end[counter]) for end in self.link_ends())

    def rail_up(self, rail: int, deadline: float = PATIENCE) -> None:
        """Wait until every link uses a rail, at both ends."""
        until(
            f"rail {rail} up on every link",
            lambda: all(rank.link(k)["paths"][rail]["state"] == "UP" for rank, k in self.ends()),
            deadline,
            self.text,
        )

    def text(self) -> str:
        return " | ".join(
            f"rank {rank.rank} link {link}: {paths_text(rank.link(link))}"
            for rank, link in self.ends()
        )

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.pid and rank.ended() is None:
                rank.signal(signal.SIGKILL)

    def finish(self) -> None:
        closing = [rank.start("finish") for rank in self.ranks]
        for rank, number in zip(self.ranks, closing, strict=True):
            rank.result(number, PATIENCE)


class Block:
    """Iterations under way on all ranks.

    Held, the first of them cannot end before :meth:`proceed`, however fast the guests are and
    however slow this process is: the last stage waits with its first forward. What the others send
    before that is on its way meanwhile.
    """

    def __init__(self, job: TrainingJob, iterations: int, hold: bool) -> None:
        self.job = job
        self._held = job.ranks[-1] if hold else None
        self.first, self.until = job.iteration, job.iteration + iterations
        self._before = {
            (rank.rank, link): [p["chunks"] for p in rank.link(link)["paths"]]
            for rank, link in job.ends()
        }
        self._running = [
            rank.start("train", until=self.until, hold=rank is self._held) for rank in job.ranks
        ]

    def until_chunks(self, more: int, paths: Sequence[int] = (0, 1)) -> None:
        """Wait until rank 0 has given a number of chunks of these iterations to some paths."""
        before = self._before[0, 0]

        def given() -> int:
            now = self.job.ranks[0].link(0)["paths"]
            return sum(now[path]["chunks"] - before[path] for path in paths)

        until(
            f"{more} chunks from rank 0 on paths {paths} of link 0",
            lambda: given() >= more,
            PATIENCE,
            self.job.text,
        )

    def chunks(self, paths: Sequence[int]) -> int:
        """Number of chunks of these iterations that these paths got, at all ends together."""
        return sum(
            rank.link(link)["paths"][path]["chunks"] - self._before[rank.rank, link][path]
            for rank, link in self.job.ends()
            for path in paths
        )

    def carried(self, path: int) -> bool:
        """True if every end of every link has given a path chunks of these iterations."""
        return all(
            rank.link(link)["paths"][path]["chunks"] > self._before[rank.rank, link][path]
            for rank, link in self.job.ends()
        )

    def messages(self) -> int:
        """Number of messages of these iterations, on all links."""
        return (self.until - self.first) * 2 * (STAGES - 1) * MICROBATCHES

    def assert_in_progress(self, of: Sequence[int] = range(STAGES)) -> None:
        """Assert that these iterations still run: what came before was in their middle."""
        states = [self.job.ranks[r].state() for r in of]
        assert any(s["inside"] and s["iteration"] < self.until for s in states), states

    def proceed(self) -> None:
        if self._held is not None:
            self._held.do("proceed")
            self._held = None

    def finish(self) -> list[str]:
        """The losses, of every iteration; all ranks have the same."""
        self.proceed()
        said = [
            rank.result(number) for rank, number in zip(self.job.ranks, self._running, strict=True)
        ]
        self.job.iteration = self.until
        losses: list[str] = said[0]["losses"]
        assert len(losses) == self.until - self.first
        for rank, of_rank in enumerate(said):
            same_bits(of_rank["losses"], losses, f"losses of rank {rank}")
        self.job.weights[self.until] = [s["weights"] for s in said]
        return losses

    def errors(self, of: Sequence[int], deadline: float) -> list[str]:
        """Errors of these ranks."""
        return [self.job.ranks[r].error_of(self._running[r], deadline) for r in of]


class Training:
    """An undisturbed run, and one that goes through every fault and must equal it."""

    def __init__(self, launchers: Launchers, iterations: int) -> None:
        self.fabric = launchers.fabric
        self.launchers = launchers
        undisturbed = TrainingJob(self.launchers)
        # Single iterations, since the weights are compared after any of them.
        self.losses = [undisturbed.train(1)[0] for _ in range(iterations)]
        self.weights = undisturbed.weights
        undisturbed.finish()
        self._job: TrainingJob | None = None

    def job(self) -> TrainingJob:
        """The run that is disturbed, in the state after the last test."""
        if self._job is None:
            self._job = TrainingJob(self.launchers)
        return self._job

    @contextmanager
    def disturbed(self, iterations: int = 1, *, hold: bool = True) -> Iterator[Block]:
        """Iterations to make a fault in. They must end, and equal those of the other run."""
        job = self.job()
        assert job.iteration + iterations <= len(self.losses), "the undisturbed run is too short"
        pids = [rank.pid for rank in job.ranks]
        block = job.begin(iterations, hold=hold)
        yield block
        same_bits(block.finish(), self.losses[block.first : block.until], "losses")
        same_bits(job.weights[block.until], self.weights[block.until], "hashes of weights")
        # No restart: the same processes, in the same job.
        assert [rank.pid for rank in job.ranks] == pids
        assert all(rank.ended() is None for rank in job.ranks)

    def give_up(self) -> None:
        """End the disturbed run, and undo changes of the guests."""
        if self._job is not None:
            self._job.kill()
            self._job = None
        self.fabric.restore()
