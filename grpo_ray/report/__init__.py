"""A run as one HTML page: what it is, how it went, what broke, and what the policy wrote before and after.

The page is a single file without scripts, and asks for nothing from anywhere. The way to it: `read.py` reads the run
folder and writes nothing; `facts.py`, `health.py`, `groups.py`, `fields.py` and `curves.py` say what is to be shown;
`charts.py` lays the curves out; `page.html` draws all of it, and `page.py` puts it together. What the page says comes
from outside: its template escapes everything, and all that it prints goes through `text.plain`.
"""

from grpo_ray.report.page import render, write_page

__all__ = ["render", "write_page"]
