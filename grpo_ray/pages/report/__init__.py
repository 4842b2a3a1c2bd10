"""HTML report of a run: configuration, curves, failures, and completions from its first and last steps.

The page is one file without scripts that loads nothing. `read.py` reads the run folder and writes nothing; `facts.py`,
`health.py`, `groups.py`, `settings.py` and `curves.py` compute the contents; `charts.py` computes the geometry of the
curves; `contents.html` is the template of the contents, `page.html` that of the document, and `page.py` renders them.
The contents are untrusted text: the templates escape everything, and everything that they print passes through
`text.display.safe_text`.
"""

from grpo_ray.pages.report.page import render, write_page

__all__ = ["render", "write_page"]
