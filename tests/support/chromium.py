"""A headless Chromium that opens a page, runs a script in it and returns the result."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=4000",
    "--enable-logging=stderr",
    "--v=0",
)
_RESULT = "result-of-the-test"
_HELPERS = """
    const card = (title) =>
        [...document.querySelectorAll(".card")].find((one) => one.textContent.startsWith(title));
    const ground = () => getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number);
    const wide = () => [...document.querySelectorAll("main *")]
        .filter((one) =>
            one.getBoundingClientRect().right > innerWidth + 1 && !one.closest(".scroll, .tabs, .spoken"))
        .map((one) => one.className || one.tagName);
    const inked = (canvas) => {
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        const seen = new Set();
        for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join());
        return seen;
    };
"""
"""What a test's script may call: a card by its title, the colors that are there, what is too wide."""
_WINDOW = """<!doctype html>
<meta name="color-scheme" content="light dark">
<pre id="{result}"></pre>
<script>
  addEventListener("message", (event) => {{ document.querySelector("pre").textContent = event.data; }});
</script>
<iframe src="page.html" style="border: 0; width: {width}px; height: 900px"></iframe>
"""


@dataclass(frozen=True)
class Visit:
    """The result of opening a page.

    Attributes:
        console: lines that were written to the console, errors and refusals among them.
        result: what the test's script returned.
    """

    console: list[str]
    result: Any


class Chromium:
    """Opens pages from files, with no network at all."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder

    def visit(self, page: str, script: str = "", *, width: int = 1200, dark: bool = False) -> Visit:
        """Open a page, then call a function with the given body and keep what it returns."""
        (self._folder / "page.html").write_text(_with_script(page, script), encoding="utf-8")
        # In a frame, because a window is never narrower than 500 pixels.
        file = self._folder / "window.html"
        file.write_text(_WINDOW.format(width=width, result=_RESULT), encoding="utf-8")
        run = subprocess.run(
            [
                self._binary,
                *_FLAGS,
                f"--user-data-dir={self._folder / 'profile'}",
                "--window-size=1600,1000",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True,
            check=True,
            timeout=120,
        )
        dom = run.stdout.decode("utf-8", "replace")
        match = re.search(f'<pre id="{_RESULT}">(.*?)</pre>', dom, re.DOTALL)
        assert match is not None and match[1], (
            f"the test's script did not run: {run.stderr.decode('utf-8', 'replace')}"
        )
        console = [line for line in run.stderr.decode("utf-8", "replace").splitlines() if "CONSOLE" in line]
        return Visit(console, json.loads(html.unescape(match[1])))


def find() -> str:
    """Return Chromium's path; skips the test where there is none."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")


def _with_script(page: str, script: str) -> str:
    """Add a script after those of the page, and its hash to the policy, which refuses all others."""
    text = """
        {
            const put = (value) => parent.postMessage(JSON.stringify(value ?? null), "*");
            HELPERS
            try { put((() => { SCRIPT })()); } catch (error) { put(`failed: ${error.stack}`); }
        }
    """.replace("SCRIPT", script).replace("HELPERS", _HELPERS)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    return allowed.replace("</body>", f"<script>{text}</script></body>")
