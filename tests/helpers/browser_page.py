"""Headless Chromium for tests of a page: records every request, every message of the console, and every error."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_MS = 120_000
"""Longest wait for an element, milliseconds: other tests may take all cores."""


@dataclass
class Browser:
    """A browser whose pages are watched."""

    browser: Any
    requests: list[str] = field(default_factory=list)
    """URL of every request of every page."""
    faults: list[str] = field(default_factory=list)
    """Errors of scripts, warnings and errors of the console (refusals by the content security policy are among them),
    and requests that failed."""

    @contextlib.contextmanager
    def page(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Any]:
        """Open a URL in a page of its own, with nothing stored from other pages."""
        context = self.browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("requestfailed", lambda request: self.faults.append(f"failed: {request.url}"))
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._on_console)
        page.goto(url)
        yield page
        context.close()

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text}")


@contextlib.contextmanager
def headless_browser() -> Iterator[Browser]:
    """Start a browser; skip the test if there is none."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(BROWSERS)}")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; install the extra `test`")
    # Without a sandbox, because containers often lack the privileges for it.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield Browser(browser)
        browser.close()
