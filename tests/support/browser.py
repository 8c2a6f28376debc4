"""Drives a real headless browser: Chromium, by its DevTools protocol.

``PIPEMORPH_TEST_BROWSER`` names another program than the ``chromium`` of the path.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

START_SECONDS = 60.0
ANSWER_SECONDS = 120.0


def browser_program() -> str | None:
    """The browser to drive; None if there is none."""
    return shutil.which(os.environ.get("PIPEMORPH_TEST_BROWSER", "chromium"))


class Browser:
    """A context manager: one browser with one tab."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pipemorph-browser-")
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.errors: list[str] = []
        """Exceptions of pages, and what they tried to load and could not."""
        self.requests: list[str] = []
        """URLs that pages have asked for."""

    def __enter__(self) -> Browser:
        program = browser_program()
        assert program is not None, "no browser; see docs/testbeds.md"
        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"listening on (ws://\S+)", line):
                break
        else:
            raise RuntimeError(f"{program} ended with status {self._process.wait()}")
        self._call(self._open(found.group(1)))
        return self

    def __exit__(self, *_: Any) -> None:
        self._call(self._session.close())
        self._process.terminate()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.wait()
        self._loop.close()
        self._folder.cleanup()

    def look(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of this size, and wait until it is loaded."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self._call(self._event("Page.loadEventFired"))

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=width < 560,
        )  # fmt: skip

    def eval(self, code: str) -> Any:
        """The value of an expression, awaited. Raises AssertionError if it throws."""
        found = self.send("Runtime.evaluate", expression=code, returnByValue=True,
                          awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, code: str) -> Any:
        """Wait until an expression is true."""
        return self.eval(
            "new Promise((done, fail) => { const began = performance.now(); (function look() {"
            f" const found = ({code}); if (found) done(found);"
            f" else if (performance.now() - began > {0.9e3 * ANSWER_SECONDS}) fail('never so');"
            " else setTimeout(look, 30); })(); })"
        )

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save a picture of the page as PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(self._send(method, parameters))

    def _call(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(coroutine, ANSWER_SECONDS))

    async def _open(self, url: str) -> None:
        self._session = aiohttp.ClientSession()
        host = url.split("/")[2]
        async with self._session.get(f"http://{host}/json/list") as answer:
            tab = next(each for each in await answer.json() if each["type"] == "page")
        self._socket = await self._session.ws_connect(
            tab["webSocketDebuggerUrl"], max_msg_size=1 << 28
        )
        for domain in ("Page", "Runtime", "Network"):
            await self._send(f"{domain}.enable", {})

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    async def _event(self, name: str) -> None:
        while (await self._next()).get("method") != name:
            pass

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json()
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Network.loadingFailed":
                self.errors.append(message["params"]["errorText"])
        return message
