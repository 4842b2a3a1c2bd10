"""Picture of the live page of a real run: a group of completions, its tokens coloured by their log-probability.

    python tests/helpers/page_picture.py RUN docs/images/watch.png

It needs Chromium and the extra `test`. The group is the newest one whose rewards differ.
"""

import argparse
from pathlib import Path

from browser_page import headless_browser
from watched_runs import serving

from grpo_ray.pages.report.read import open_run

WIDTH, HEIGHT = 1280, 860
"""Size of the picture, pixels."""


def take_picture(run: str, file: Path) -> None:
    """Write the picture of the run at a path or URI to a PNG file."""
    with (
        serving(open_run(run)) as server,
        headless_browser() as browser,
        browser.page(f"{server.url}#rollouts?outcome=mixed", WIDTH, HEIGHT) as page,
    ):
        page.wait_for_selector("#groups button")
        page.click("#groups button")
        page.wait_for_selector("#colouring")
        page.select_option("#colouring", "logprob")
        page.wait_for_selector(".tokens span", state="attached")
        page.screenshot(path=str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="path or URI of a run folder")
    parser.add_argument("file", type=Path, help="PNG file to write")
    options = parser.parse_args()
    take_picture(options.run, options.file)


if __name__ == "__main__":
    main()
