"""The agent finds the replica of the ingest that serves its job, and trusts no other with its
token."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from played_replica import Replica, certificate

from pipemorph_trainer.agent.uplinks.replicas import Replicas

PATIENCE = 20.0
TOKEN = {"Authorization": "Bearer secret"}


class Agent:
    def __init__(self, replicas: Replicas, session: aiohttp.ClientSession) -> None:
        self.replicas, self.session = replicas, session

    async def asks(self) -> int:
        async with self.replicas.request(
            self.session, "POST", "/v1/x", headers=TOKEN, seconds=5.0, data=b"{}"
        ) as answer:
            json.loads(await answer.read())
            return answer.status


def play(
    tmp_path: Path, test: Callable[[Agent, Replica, Replica], Awaitable[None]], scheme: str
) -> None:
    """``test`` gets an agent, the replica to which the Service leads, and another one. Their
    certificate is for the Service's name, and not for the address."""
    made = certificate(tmp_path, "localhost")

    async def run() -> None:
        first, second = (Replica(made if scheme == "https" else None) for _ in range(2))
        trust = ssl.create_default_context(cafile=str(made[0]))
        async with AsyncExitStack() as stack:
            for each in (first, second):
                await stack.enter_async_context(each.running())
            connector = aiohttp.TCPConnector(ssl=trust)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            first.serves, first.owner = False, f"127.0.0.1:{second.port}"
            url = f"{scheme}://localhost:{first.port}/"
            await test(Agent(Replicas(url), session), first, second)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_an_agent_goes_to_the_owner_that_a_replica_names_and_stays_there(tmp_path: Path) -> None:
    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        assert [await agent.asks() for _ in range(3)] == [200] * 3
        assert (len(first.asked), len(second.asked)) == (1, 3)
        # It does not serve the job any more, and knows who does.
        first.serves, second.serves, second.owner = True, False, f"127.0.0.1:{first.port}"
        assert await agent.asks() == 200
        assert (len(first.asked), len(second.asked)) == (2, 4)

    play(tmp_path, test, "https")


def test_an_agent_whose_owner_is_gone_goes_back_to_the_service(tmp_path: Path) -> None:
    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        gone = Replica(second.certificate)
        async with gone.running():
            first.owner = f"127.0.0.1:{gone.port}"
            assert await agent.asks() == 200
        first.owner = f"127.0.0.1:{second.port}"
        with pytest.raises(aiohttp.ClientError):
            await agent.asks()
        assert await agent.asks() == 200
        assert len(second.asked) == 1

    play(tmp_path, test, "https")


@pytest.mark.parametrize("status", [401, 404, 500, 503])
def test_an_owner_that_is_not_able_to_serve_is_left(status: int, tmp_path: Path) -> None:
    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        second.status = status
        assert await agent.asks() == status
        first.serves = True
        assert await agent.asks() == 200, "back at the Service"

    play(tmp_path, test, "https")


def test_replicas_that_name_each_other_are_asked_once_each(tmp_path: Path) -> None:
    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        second.serves, second.owner = False, f"127.0.0.1:{first.port}"
        for times in (1, 2, 3):
            assert await agent.asks() == 421
            assert (len(first.asked), len(second.asked)) == (times, times)
        second.owner = f"127.0.0.1:{second.port}"
        assert await agent.asks() == 421
        assert len(second.asked) == 4, "one that names itself is asked once"

    play(tmp_path, test, "https")


def test_the_token_is_sent_to_nobody_without_the_ingests_certificate(tmp_path: Path) -> None:
    """Neither to one of another authority, nor to one whose certificate is for another name."""

    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        (tmp_path / "stranger").mkdir()
        stranger = Replica(certificate(tmp_path / "stranger", "localhost"))
        plain = Replica(None)
        async with stranger.running(), plain.running():
            for each in (stranger, plain):
                first.owner = f"127.0.0.1:{each.port}"
                with pytest.raises(aiohttp.ClientError):
                    await agent.asks()
                assert each.asked == []
        first.owner = f"127.0.0.1:{second.port}"
        assert await agent.asks() == 200, "back at the Service"

    play(tmp_path, test, "https")


@pytest.mark.parametrize(
    "owner",
    [
        "localhost:{}",
        "evil.example:443",
        "127.0.0.1:0",
        "127.0.0.1:" + 5000 * "9",
        "127.0.0.1",
        "a@127.0.0.1:{}",
        "127.0.0.1:{}/x",
        "127.0.0.1:{}?",
        "",
        "[::1]",
    ],
)
def test_what_is_no_address_and_port_is_not_followed(owner: str, tmp_path: Path) -> None:
    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        first.owner = owner.format(second.port)
        assert await agent.asks() == 421
        assert second.asked == []

    play(tmp_path, test, "https")


def test_without_tls_no_owner_is_followed(tmp_path: Path) -> None:
    async def test(agent: Agent, first: Replica, second: Replica) -> None:
        assert await agent.asks() == 421
        assert second.asked == []

    play(tmp_path, test, "http")
