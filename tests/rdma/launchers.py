"""Process with torch in each guest, which forks programs: see training_launcher.py."""

import itertools
from pathlib import Path

from guests import Fabric, Guest
from peers import Remote

LAUNCHER = Path(__file__).with_name("training_launcher.py")
IMPORT_DEADLINE = 1200.0


class Launchers:
    """The launcher of each guest, by the guest."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._of = {
            guest.name: Remote(f"launcher {guest.name}", guest.python(str(LAUNCHER), env=env))
            for guest in (fabric.a, fabric.b)
        }
        # The two import at the same time.
        for launcher in self._of.values():
            launcher.await_ready(IMPORT_DEADLINE)
        # A port for every job and benchmark, so that none meets leftovers of another.
        self.ports = itertools.count(29500)

    def __getitem__(self, guest: Guest) -> Remote:
        return self._of[guest.name]

    def kill(self) -> None:
        # The agent made a session for each, so this takes what they forked, too.
        for launcher in self._of.values():
            launcher.task.kill()
