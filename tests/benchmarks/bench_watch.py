"""Live page of a long run: time to the first paint, size of the page, cost of refreshes, and memory over an hour.

    python tests/benchmarks/bench_watch.py [--steps 10000] [--groups 10] [--refreshes 720]

The run folder is synthetic (`tests/helpers/synthetic_runs.py`) and grows by one step before each refresh, and by a file
of rollouts at each checkpoint; 720 refreshes at the page's interval of five seconds are an hour. The server is the real
command in a process of its own, the page is opened in headless Chromium.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from browser_page import headless_browser
from synthetic_runs import SyntheticRun
from watched_runs import request

COMMAND = """
import sys
from grpo_ray import cli
from grpo_ray.pages.watch import refresher
refresher.LOCAL_SECONDS, refresher.MAX_SHARE = 0.0, 1.0
sys.exit(cli.main(["watch", sys.argv[1]]))
"""
"""The command, with refreshes as often as they are asked for."""
PAGE_BYTES = """() => performance.getEntriesByType('navigation').concat(performance.getEntriesByType('resource'))
    .reduce((sum, each) => sum + each.decodedBodySize, 0)"""
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--refreshes", type=int, default=720)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grpo_ray-") as scratch:
        run = SyntheticRun(scratch, groups_per_step=arguments.groups, max_steps=2 * arguments.steps)
        began = time.monotonic()
        run.grow(arguments.steps)
        print(f"{run.steps} steps, {run.steps * arguments.groups} groups written in {time.monotonic() - began:.1f} s")
        for name, value in measure(run, arguments.refreshes).items():
            print(f"{name:<52} {value}")


def measure(run: SyntheticRun, refreshes: int) -> dict[str, Any]:
    """Serve the run in a process of its own; return the measured values by name."""
    assert run.folder.local is not None
    command = [sys.executable, "-c", COMMAND, str(run.folder.local)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        headless_browser() as browser,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" at ")[1].split()[0]
            return measure_page(browser, url) | measure_refreshes(run, server.pid, url, browser, refreshes)
        finally:
            server.terminate()


def measure_page(browser: Any, url: str) -> dict[str, Any]:
    """Open the page as soon as the server listens, and again when everything has been read."""
    measured: dict[str, Any] = {}
    for name in ("cold", "warm"):
        began = time.monotonic()
        with browser.page(url) as page:
            page.wait_for_selector("#report figure svg")
            measured[f"{name}: report with curves visible, s"] = round(time.monotonic() - began, 2)
            measured[f"{name}: first contentful paint, s"] = round(page.evaluate(FIRST_PAINT) / 1000, 2)
            measured[f"{name}: page, MB"] = round(page.evaluate(PAGE_BYTES) / 1e6, 2)
            if name == "warm":
                measured |= measure_views(page)
    return measured


def measure_views(page: Any) -> dict[str, Any]:
    """Open the other views and a group; return the time of each, and the size of everything that was loaded."""
    measured: dict[str, Any] = {}
    views = {
        "#tab-rollouts": "#groups button",
        "#groups li:first-child button": "#group .answer",
        "#tab-problems": "#problem-table td",
        "#tab-heldout": "#kinds b",
    }
    for button, ready in views.items():
        began = time.monotonic()
        page.click(button)
        page.wait_for_selector(ready)
        measured[f"warm: {button} to {ready}, s"] = round(time.monotonic() - began, 2)
    measured["warm: page with all views, MB"] = round(page.evaluate(PAGE_BYTES) / 1e6, 2)
    return measured


def measure_refreshes(run: SyntheticRun, pid: int, url: str, browser: Any, refreshes: int) -> dict[str, Any]:
    """Let the run grow and the page refresh; return memory of server and page at a tenth of the time and at its end."""
    port = int(url.split(":")[2].strip("/"))
    first = max(1, refreshes // 10)
    measured: dict[str, Any] = {}
    cpu_before = 0.0
    with browser.page(url) as page:
        page.wait_for_selector("#report figure svg")
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable")
        for number in range(1, refreshes + 1):
            run.grow(1)
            while json.loads(request(port, "/api/state")[1])["step"] < run.steps:
                time.sleep(0.01)
            page.evaluate("poll()")
            if number not in (first, refreshes):
                continue
            devtools.send("HeapProfiler.collectGarbage")
            metrics = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
            measured |= {
                f"after {number} refreshes: server, MiB": round(resident_mib(pid), 1),
                f"after {number} refreshes: page's scripts, MB": round(metrics["JSHeapUsedSize"] / 1e6, 2),
                f"after {number} refreshes: page's nodes": int(metrics["Nodes"]),
            }
            if number == refreshes:
                spent = cpu_seconds(pid) - cpu_before
                measured["server, CPU seconds per refresh"] = round(spent / max(1, refreshes - first), 3)
            cpu_before = cpu_seconds(pid)
    return measured


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process, MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
