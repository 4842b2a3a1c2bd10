"""Live page of a run: the report, refreshed while the run is in progress, and a viewer of its completions.

`live_run.py` reads the files of the run folder that have changed, with `pages/report/read.py`, `rollouts.py` and
`heldout.py`, and writes nothing. `refresher.py` reads in a thread while a page is open. `api.py` computes the JSON
responses to the page's requests, and `server.py` serves them on the loopback interface, with Starlette and uvicorn.
`static/` is the page: HTML, a stylesheet and one script.

The contents of a run folder are untrusted text. Everything that is sent passes through `text.display.safe_text`; the
report's part is escaped by its templates, and the script inserts everything else as text.
"""

from grpo_ray.pages.watch.server import watch

__all__ = ["watch"]
