"""Tests of the live page's memory while a run goes on: the server's, and that of the page in the browser."""

import gc
import json
import os
from pathlib import Path

import pytest
from browser_page import Browser
from failing_storage import wait_for
from synthetic_runs import SyntheticRun
from watched_runs import serving, state_of

from grpo_ray.pages.watch import refresher as refresher_module
from grpo_ray.pages.watch.live_run import LiveRun
from grpo_ray.pages.watch.refresher import Refresher

REFRESHES = 720
"""An hour at the page's interval."""


def resident_mib() -> float:
    """Return the resident memory of this process, MiB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_server_memory_is_flat_over_an_hour_of_refreshes(tmp_path: Path) -> None:
    run = SyntheticRun(str(tmp_path), groups_per_step=4, save_steps=20, max_steps=4000)
    run.grow(200)
    refresher = Refresher(LiveRun(run.folder))
    for number in range(1, REFRESHES + 1):
        run.grow(1)
        refresher.refresh()
        assert refresher.view.problem == ""
        if number == REFRESHES // 6:
            before = resident_mib()
    grown = resident_mib() - before
    assert refresher.view.snapshot is not None and len(refresher.view.snapshot.run.rows) == 200 + REFRESHES
    # The data itself: 600 steps of 60 numbers, their events, and 2,400 groups without texts, about 3 MiB.
    assert grown < 25, f"{grown:.1f} MiB more after {REFRESHES - REFRESHES // 6} refreshes"


@pytest.mark.slow
def test_page_memory_is_flat_over_many_refreshes(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refresher_module, "LOCAL_SECONDS", 0.0)
    monkeypatch.setattr(refresher_module, "MAX_SHARE", 1.0)
    run = SyntheticRun(str(tmp_path), groups_per_step=4, save_steps=10, max_steps=4000)
    run.grow(200)
    with serving(run.folder) as server, browser.page(server.url) as page:
        page.wait_for_selector("#report figure svg")
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        used = []
        for number in range(1, 121):
            run.grow(1)
            wait_for(lambda: state_of(server)["step"] == run.steps, "the new step")
            page.evaluate("poll()")
            if number in (30, 120):
                devtools.send("HeapProfiler.collectGarbage")
                metrics = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
                used.append((metrics["JSHeapUsedSize"], metrics["Nodes"]))
        (heap_before, nodes_before), (heap, nodes) = used
        assert heap < heap_before + 3_000_000 and nodes < nodes_before * 1.3, json.dumps(used)
