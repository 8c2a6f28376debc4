"""Drives a real headless browser: Chromium, by its DevTools protocol.

``PIPEMORPH_TEST_BROWSER`` names another program than the ``chromium`` of the path.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import aiohttp
from testbed import catalog

ANSWER_SECONDS = 60.0
MAX_EVENTS = 200

CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}
"""Codes of keys that the browser itself acts upon."""


class Browser:
    """A context manager: one browser with one tab."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pipemorph-browser-")
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        """Newest events that no wait has matched yet."""
        self.errors: list[str] = []
        """Exceptions of pages, and what they tried to load and could not."""
        self.requests: list[str] = []
        """URLs that pages have requested."""

    def __enter__(self) -> Browser:
        program = catalog.find_browser()
        if program is None:
            catalog.check(["browser"])  # raises TestbedError
            raise AssertionError("a browser that is ready and cannot be found")
        self._process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage",
             "--remote-debugging-port=0", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
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
        self._process.stderr.close()
        self._process.wait()
        self._loop.close()
        self._folder.cleanup()

    def look(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a page in a window of this size, and wait until it is loaded."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
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
        text: dict[str, Any] = {"text": key} if len(key) == 1 else {}
        if key in CODES:
            text["windowsVirtualKeyCode"] = CODES[key]
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def click(self, selector: str) -> None:
        """Click into the middle of an element, as a user does."""
        x, y = self.eval(
            f"(async () => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);"
            " const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        self.send("Input.dispatchMouseEvent", type="mouseReleased", **at)

    def download(self, selector: str, folder: Path) -> Path:
        """Click an element, and wait until the file that it offers is in ``folder``."""
        self.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder),
                  eventsEnabled=True)  # fmt: skip
        self._events.clear()
        self.click(selector)
        begun = self._call(self._event("Browser.downloadWillBegin"))
        while self._call(self._event("Browser.downloadProgress"))["state"] != "completed":
            pass
        return folder / str(begun["suggestedFilename"])

    def picture(self, path: Path) -> None:
        """Save a picture of the whole page as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True,
                          clip={**size, "scale": 1})  # fmt: skip
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
                return message["result"]

    async def _event(self, name: str) -> dict[str, Any]:
        """Wait for an event, which may have come with an answer before; its parameters."""
        while True:
            while self._events:
                message = self._events.popleft()
                if message["method"] == name:
                    return dict(message["params"])
            await self._next()

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self._socket.receive_json()
        if "method" in message:
            self._events.append(message)
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Network.loadingFailed":
                self.errors.append(message["params"]["errorText"])
        return message
