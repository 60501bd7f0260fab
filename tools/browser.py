"""A headless Chromium over its DevTools pipe: size, errors and screenshots of a page."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded")


class Browser:
    """One tab.

    `errors` collects uncaught exceptions, console errors and failed loads since the last `visit`.
    """

    def __init__(self, chromium: str, limit: float = 120) -> None:
        self.limit = limit
        self.errors: list[str] = []
        self.events: list[dict] = []
        self.number = 0
        self.buffer = b""
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        (theirs, self.to), (self.back, ours) = os.pipe(), os.pipe()
        # the browser reads commands from descriptor 3 and writes answers to 4
        plumbing = f'exec 3<&{theirs} 4>&{ours}; exec "$@"'
        words = [
            "bash",
            "-c",
            plumbing,
            "chromium",
            chromium,
            *OPTIONS,
            f"--user-data-dir={self.profile}",
        ]
        self.process = subprocess.Popen(
            [*words, "about:blank"], pass_fds=(theirs, ours), stderr=subprocess.DEVNULL
        )
        os.close(theirs)
        os.close(ours)
        self.session: str | None = None
        targets = self.until(
            lambda: [
                t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
            ]
        )
        attached = self.call("Target.attachToTarget", targetId=targets[0]["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(Exception):
            self.call("Browser.close")
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.back)
        shutil.rmtree(self.profile, ignore_errors=True)

    def until(self, condition: Callable[[], Any]) -> Any:
        end = time.monotonic() + self.limit
        while not (found := condition()):
            assert time.monotonic() < end, "the browser did not get ready"
            time.sleep(0.05)
        return found

    def call(self, method: str, **params: Any) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            self.keep(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def receive(self) -> dict:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], self.limit)
            read = os.read(self.back, 1 << 20) if ready else b""
            assert read, "the browser gave no answer"
            self.buffer += read
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def keep(self, event: dict) -> None:
        self.events.append(event)
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(
                str(params["exceptionDetails"].get("exception", {}).get("description", params))[
                    :300
                ]
            )
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        if event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str([argument.get("value") for argument in params["args"]]))

    def visit(self, url: str) -> None:
        self.errors, self.events = [], []
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.keep(self.receive())

    def screen(
        self,
        width: int,
        height: int = 900,
        *,
        dark: bool = False,
        media: str = "",
        mobile: bool = False,
    ) -> None:
        """Sizes in CSS pixels; `media` is `print` or empty."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def value(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than the screen."""
        element = "document.scrollingElement"
        return self.value(f"{element}.scrollWidth - {element}.clientWidth")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))
