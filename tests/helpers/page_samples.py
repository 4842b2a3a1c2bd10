"""Sample run folders for tests of the report, and an HTML parser that checks the rendered page."""

import json
import math
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from grpo_ray.config.loader import load_config
from grpo_ray.pages.report import render
from grpo_ray.pages.report.read import read_run
from grpo_ray.storage.records.groups import GroupRecord, attach_texts
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder

NAN = math.nan

STARTED = 1_800_000_000.0
"""Time of the first event, seconds since 1970."""
NOW = STARTED + 100
"""Time at which the pages are rendered."""

CONFIG = load_config(None, ["grpo.max_steps=40", "grpo.learning_rate=3e-4"]).to_dict() | {
    "versions": {"torch": "2.13.0", "commit": "0123456789ab"}
}


def make_group(
    step: int, problem: str, correct: Sequence[float], epoch: int = 0, texts: Sequence[str] = ()
) -> GroupRecord:
    """Make the record of a group whose rewards are its verdicts; with `texts`, also its prompt and completions."""
    size = len(correct)
    group = GroupRecord(
        step=step,
        epoch=epoch,
        problem=problem,
        rewards=tuple(correct),
        correct=tuple(correct),
        lengths=(7,) * size,
        truncated=(False,) * size,
    )
    return attach_texts(group, [{"role": "user", "content": f"prompt of {problem}"}], texts) if texts else group


def metric_rows(steps: int) -> list[dict[str, Any]]:
    """Make the rows of `metrics.jsonl`; the reward rises to 1, and every tenth step has a checkpoint."""
    rows = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "reward/mean": step / steps, "step/seconds": 2.0}
        row |= {"step/completions_per_second": 64.0}
        row |= {"completion/length_mean": 20.0, "policy/entropy": 1.0, "engine/logprob_gap_mean": 1e-4}
        row |= {"phase/generate": 1.0, "phase/forward_backward": 0.6, "phase/wait": 0.3, "phase/other": 0.1}
        if step % 10 == 0:
            accuracy = 0.5 + step / 100
            row |= {"heldout/accuracy": accuracy, "heldout/low": accuracy - 0.02, "heldout/high": accuracy + 0.02}
            row |= {"checkpoint": f"checkpoint-{step:06d}"}
        rows.append(row)
    return rows


EVENTS: list[dict[str, Any]] = [
    {"event": "launched", "at": STARTED},
    {"event": "began", "at": STARTED + 10, "step": 0, "checkpoint": None, "workers": 2},
    {"event": "training", "at": STARTED + 20, "step": 0},
    *({"event": "step", "at": STARTED + 20 + 2 * step, "step": step} for step in range(1, 16)),
    {"event": "failed", "at": STARTED + 51, "rank": 1, "what": "it died (killed)"},
    {"event": "began", "at": STARTED + 55, "step": 10, "checkpoint": "checkpoint-000010", "workers": 2},
    {"event": "training", "at": STARTED + 60, "step": 10},
    {"event": "hang", "at": STARTED + 61, "what": "worker 0: a step (step 12) hangs: no end after 9.0 s"},
]
"""A run that is killed after step 15, goes on from step 10 and hangs in step 12."""


ENDED = {"event": "ended", "at": STARTED + 99}


def several_sets_run(storage: str | Path, name: str = "run") -> RunFolder:
    """Write a run with two held-out sets, of which the second one, gsm8k, ranks checkpoints."""
    config = {**CONFIG, "data": {"heldout": {"math": "m.jsonl", "gsm8k": "gsm8k"}}}
    config["run"] = {**CONFIG["run"], "best_metric": "heldout/gsm8k/accuracy"}
    rows = []
    for row in metric_rows(40):
        if "checkpoint" in row:
            math_measures = {"accuracy": 0.5, "low": 0.48, "high": 0.52}
            row |= {f"heldout/gsm8k/{measure}": row[f"heldout/{measure}"] for measure in math_measures}
            row |= {f"heldout/math/{measure}": value for measure, value in math_measures.items()}
        rows.append(row)
    folder = write_run(storage, name, config=config, metrics=rows)
    folder.delete_file("heldout_before.json")
    for label, value in (("math", 0.25), ("gsm8k", 0.125)):
        evaluation = {"pass_at_1": {"value": value, "low": value - 0.01, "high": value + 0.01}}
        folder.write_json(evaluation, f"heldout_{label}_before.json")
    return folder


def write_run(
    storage: str | Path,
    name: str = "run",
    *,
    config: Mapping[str, Any] = CONFIG,
    metrics: Sequence[Mapping[str, Any]] = tuple(metric_rows(40)),
    events: Sequence[Mapping[str, Any]] = (*EVENTS, ENDED),
    groups: Sequence[GroupRecord] = (make_group(1, "a" * 16, (0.0, 1.0), texts=("wrong", "\\boxed{4}")),),
) -> RunFolder:
    """Write a run folder in the format of a run, with the checkpoints of steps 30 and 40 kept."""
    folder = RunFolder(str(storage), name)
    folder.write_text(yaml.safe_dump(dict(config)), "config.yaml")
    folder.write_text("".join(json.dumps(row) + "\n" for row in metrics), "metrics.jsonl")
    folder.write_text("".join(json.dumps(event) + "\n" for event in events), "events.jsonl")
    folder.write_json({"pass_at_1": {"value": 0.235, "low": 0.203, "high": 0.271}}, "heldout_before.json")
    write_rollouts(folder, groups)
    kept = [row for row in metrics if row.get("step") in (30, 40) and isinstance(row.get("checkpoint"), str)]
    for serial, row in enumerate(kept):
        folder.write_json({"metrics": row, "serial": serial, "files": {}}, row["checkpoint"], "manifest.json")
    return folder


def render_folders(*folders: RunFolder) -> str:
    """Render the page of local run folders."""
    return render([read_run(str(folder.local)) for folder in folders], NOW)


class Page(HTMLParser):
    """Parsed page: its tags, attributes, text and comments. Fails on tags that are not closed."""

    VOID = frozenset({"meta", "br", "img", "input", "link", "base"})

    def __init__(self, html: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        """Tag, name and value."""
        self.comments: list[str] = []
        self._open_tags: list[str] = []
        self._texts: list[str] = []
        self.feed(html)
        self.close()
        assert self._open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self._open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self._texts.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def text(self) -> str:
        """All text of the page, with runs of white space as one space."""
        return " ".join(" ".join(self._texts).split())


def assert_harmless(page: Page) -> None:
    """Check that the page has no active element and loads nothing."""
    assert {"script", "img", "iframe", "object", "embed", "link", "base", "form", "h4"}.isdisjoint(page.tags)
    for _, name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "href", "style", "srcdoc", "action"), (name, value)
        assert "url(" not in (value or "")
    assert page.comments == []
