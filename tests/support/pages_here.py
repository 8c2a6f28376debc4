"""The process that makes pages, in the test's own process: its limits can be set, and what it keeps
can be seen. All that is told, asked and answered goes through the same pickles as over the pipe."""

from __future__ import annotations

import pickle
from typing import Any

from pipemorph.ingest import WatchProcess
from pipemorph.ingest.watch.messages import Look, Sight
from pipemorph.ingest.watch.worker import Viewing


def _sent(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


class PagesHere(WatchProcess):
    def __init__(self) -> None:
        super().__init__()
        self.viewing = Viewing(self._look)

    @property
    def pid(self) -> int | None:
        return 1 if self.life else None

    async def _look(self, question: Look) -> Sight | None:
        sight: Sight | None = _sent(self.on_look(_sent(question)))
        return sight

    async def start(self) -> None:
        self.life = 1

    async def ask(self, question: object) -> Any:
        await self.start()
        return _sent(await self.viewing.asked(_sent(question)))

    def tell(self, message: object, *, always: bool = False) -> bool:
        self.viewing.told(_sent(message))
        return True
