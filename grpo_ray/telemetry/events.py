"""Kinds of events in `events.jsonl`, with their texts for every view.

The terminal, the report and the live page, trackers and messages all take their texts from the table `EVENTS`. Fields
of an event that was read from a file may be missing or hold anything: the texts are untrusted, and the views make them
safe. Imports no heavy library.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_ray.telemetry.measures import format_measures, heldout_measure, heldout_measures

View = Literal["terminal", "live view", "trackers"]
"""View that shows events as lines: permanent lines at the terminal, the latest event in the live view, a list in
trackers. The report shows every event but steps."""


@dataclass(frozen=True, kw_only=True)
class EventKind:
    """Texts of one kind of event. The placeholders of its formats are the event's own fields and those of `_fields`."""

    text: str = ""
    """Format of the text beside the name of the kind, as in a table; "" if the name is sufficient."""
    line: str = "{text}"
    """Format of the text that stands alone."""
    views: tuple[View, ...] = ()
    """Views that show the line."""


NOTICE = EventKind(text="{what}", views=("terminal", "live view", "trackers"))

EVENTS: Mapping[str, EventKind] = {
    "launched": EventKind(line="launched", views=("trackers",)),
    "began": EventKind(
        text="{workers} workers, from {start}",
        line="training from step {step} with {workers} workers",
        views=("live view", "trackers"),
    ),
    "baseline": EventKind(text="initial policy{accuracy}"),
    "training": EventKind(text="step {step}{accuracy}"),
    "step": EventKind(text="step {step}"),
    "measured": EventKind(text="step {step}{accuracy}", views=("live view",)),
    "memory": EventKind(),
    "warning": EventKind(text="step {step}: {what} ({name})", line="warning at {text}", views=("terminal", "trackers")),
    "notice": NOTICE,
    "hang": NOTICE,
    "damaged_checkpoint": NOTICE,
    "failed": EventKind(
        text="worker {rank}: {what}",
        line="worker {rank} failed: {what}",
        views=("terminal", "live view", "trackers"),
    ),
    "ended": EventKind(line="workers ended", views=("trackers",)),
}
"""Name of each kind -> its texts."""

TAKES_STEPS: Mapping[str, bool] = {"began": False, "training": True, "failed": False}
"""Kind of event -> True if the workers take steps from then on, and thus look for a requested stop; False if not."""

UNKNOWN = EventKind(text="{what}", line="{event}: {text}", views=("trackers",))
"""Kind of the events that this version does not record."""


def event_text(entry: Mapping[str, Any], heldout_keys: Sequence[str] | None = None) -> str:
    """Return the text of an event beside the name of its kind.

    Args:
        entry: entry of `events.jsonl`.
        heldout_keys: keys of the held-out sets whose accuracy is shown, in this order; None: those that the event has.
    """
    return _kind_of(entry).text.format_map(_fields(entry, heldout_keys))


def event_line(entry: Mapping[str, Any], view: View) -> str | None:
    """Return the line of an event in a view; None if the view does not show it."""
    kind, text = _kind_of(entry), event_text(entry)
    if view not in kind.views or (not text and "{text}" in kind.line):
        return None
    return kind.line.format_map(_Fields(_fields(entry, None), text=text))


def _kind_of(entry: Mapping[str, Any]) -> EventKind:
    return EVENTS.get(entry["event"], UNKNOWN)


class _Fields(dict[str, Any]):
    """Fields of a text; one that an event lacks is shown as a question mark, and a missing `what` is empty."""

    def __missing__(self, name: str) -> str:
        return "" if name == "what" else "?"


def _fields(entry: Mapping[str, Any], heldout_keys: Sequence[str] | None) -> _Fields:
    """Return an event's fields, with `start` (start point of an attempt) and `accuracy` (on each held-out set)."""
    found = entry.get("metrics")
    metrics = found if isinstance(found, Mapping) else {}
    if heldout_keys is None:
        measures = heldout_measures(metrics)
    else:
        measures = {key: each for key in heldout_keys if (each := heldout_measure(metrics, key)) is not None}
    accuracy = f": held-out {format_measures(measures)}" if measures else ""
    return _Fields(entry, start=entry.get("checkpoint") or "the initial policy", accuracy=accuracy)
