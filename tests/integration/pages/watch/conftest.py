"""Fixtures of the live page's tests: a served run folder, and a headless browser."""

from collections.abc import Iterator

import pytest
from browser_page import Browser, headless_browser


@pytest.fixture(scope="module")
def shared_browser() -> Iterator[Browser]:
    """One browser for all tests of a module: it takes seconds to start."""
    with headless_browser() as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """The browser with nothing recorded; afterwards, no page had an error and nothing came from elsewhere."""
    shared_browser.requests.clear()
    shared_browser.faults.clear()
    yield shared_browser
    assert shared_browser.faults == []
    outside = [url for url in shared_browser.requests if not url.startswith(("http://127.0.0.1:", "data:"))]
    assert outside == [] and shared_browser.requests
