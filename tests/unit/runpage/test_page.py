"""Pages of runs: what stands on them, and that nothing from outside can be more on them than text."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from failing_storage import CREDENTIALS, S3Server, storage_path
from small_runs import groups_of

from grpo_ray import cli
from grpo_ray.errors import ConfigError
from grpo_ray.rollouts import Group, with_texts, write_rollouts
from grpo_ray.runpage import render, write_page
from grpo_ray.runpage.charts import Curve, chart
from grpo_ray.runpage.groups import early_and_late, solve_rates
from grpo_ray.runpage.read import Run, read_run
from grpo_ray.runpage.text import is_secret, plain
from grpo_ray.settings import load
from grpo_ray.storage import RunFolder

NAN = math.nan
NOW = 1_800_000_100.0
BEGAN = 1_800_000_000.0

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "end of style": "</style></title></pre></svg><h1>in</h1>",
    "end of an attribute": '"><img src=x onerror=alert(1)>',
    "single quotes": "' onmouseover='alert(1)",
    "template": "{{7*7}}{% raw %}${7*7}#{7*7}",
    "comment": "<!-- --!> <![CDATA[ ]]>",
    "entity": "&lt;script&gt;&#60;img&#62;",
    "NUL": "a\0b\x1b[31m",
    "right to left": "\u202egnp.exe\u2066\u200f",
    "unseen": "\u200b\ufeff\u2028\U000e0041",
    "surrogate": "\ud800 half",
    "long": "x" * 10_000_000,
    "long markup": "<b>" * 3_000_000,
    "quadratic": "s3://a:" * 1_000_000,
}

UNSEEN = re.compile("[\0\x1b\u202a-\u202e\u2066-\u2069\u200b\u200e\u200f\u2028\ufeff\U000e0041]")

CONFIG = load(None, ["grpo.max_steps=40", "grpo.learning_rate=3e-4"]).to_dict() | {
    "versions": {"torch": "2.13.0", "commit": "0123456789ab"}
}


def group(step: int, problem: str, correct: Sequence[float], epoch: int = 0, texts: Sequence[str] = ()) -> Group:
    count = len(correct)
    made = Group(
        step=step,
        epoch=epoch,
        problem=problem,
        rewards=tuple(correct),
        correct=tuple(correct),
        lengths=(7,) * count,
        truncated=(False,) * count,
    )
    return with_texts(made, [{"role": "user", "content": f"prompt of {problem}"}], texts) if texts else made


def rows(steps: int) -> list[dict[str, Any]]:
    made = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward/mean": step / steps, "step/seconds": 2.0, "step/completions_per_second": 64.0}
        row |= {"completion/length_mean": 20.0, "policy/entropy": 1.0, "engine/logprob_gap_mean": 1e-4}
        row |= {"phase/generate": 1.0, "phase/forward_backward": 0.6, "phase/wait": 0.3, "phase/other": 0.1}
        if step % 10 == 0:
            accuracy = 0.5 + step / 100
            row |= {"heldout/accuracy": accuracy, "heldout/low": accuracy - 0.02, "heldout/high": accuracy + 0.02}
            row |= {"checkpoint": f"checkpoint-{step:06d}"}
        made.append(row)
    return made


EVENTS = [
    {"event": "launched", "at": BEGAN},
    {"event": "began", "at": BEGAN + 10, "step": 0, "checkpoint": None, "workers": 2},
    {"event": "training", "at": BEGAN + 20, "step": 0},
    *({"event": "step", "at": BEGAN + 20 + 2 * step, "step": step} for step in range(1, 16)),
    {"event": "failed", "at": BEGAN + 51, "rank": 1, "what": "it died (killed)"},
    {"event": "began", "at": BEGAN + 55, "step": 10, "checkpoint": "checkpoint-000010", "workers": 2},
    {"event": "training", "at": BEGAN + 60, "step": 10},
    {"event": "notice", "at": BEGAN + 61, "what": "worker 0: a step (step 12) hangs: no end after 9.0 s"},
]
ENDED = {"event": "ended", "at": BEGAN + 99}


def write_run(
    storage: str | Path,
    name: str = "run",
    *,
    config: Mapping[str, Any] = CONFIG,
    metrics: Sequence[Mapping[str, Any]] = tuple(rows(40)),
    events: Sequence[Mapping[str, Any]] = (*EVENTS, ENDED),
    groups: Sequence[Group] = (group(1, "a" * 16, (0.0, 1.0), texts=("wrong", "\\boxed{4}")),),
) -> RunFolder:
    """A run folder as a run writes it, with the checkpoints of the steps 30 and 40 kept."""
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


def page_of(*folders: RunFolder) -> str:
    return render([read_run(str(folder.local)) for folder in folders], NOW)


class Page(HTMLParser):
    """What a browser would take the page for."""

    VOID = frozenset({"meta", "br", "img", "input", "link", "base"})

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.comments: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


# What stands there


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(page_of(write_run(tmp_path_factory.mktemp("runs"))))


@pytest.mark.parametrize(
    "said",
    [
        "0.235 → 0.900",  # 0.5 + 40/100
        "95 %: [0.203, 0.271] → [0.880, 0.920]",
        "0.138 → 0.887",  # of 1/40 to 10/40: 5.5/40; of 31/40 to 40/40: 35.5/40
        "40 of 40",
        "finished",
        "tiny-arithmetic",
        "2 on the CPU",
        "0123456789ab",
        "1 failure, 5 steps taken again; the last: worker 1: it died (killed)",
        "1 hang, the last: worker 0: a step (step 12) hangs",
        "engine and learner agree to 0.0001 nats at worst (tolerance 0.001)",
        "checkpoint-000010 deleted 10 0.600 [0.580, 0.620]",
        "checkpoint-000030 kept 30 0.800 [0.780, 0.820]",
        "checkpoint-000040 best by heldout/accuracy 40",
        "prompt of aaaaaaaaaaaaaaaa",
        "\\boxed{4}",
        "grpo.learning_rate 0.0003",
        "generating 50 % learning 30 % waiting 15 % all else 5 %",
        "forward_backward 30.0 % 0.600",
        "0:00:51 failed worker 1: it died (killed)",
    ],
)
def test_the_page_says(whole: Page, said: str) -> None:
    assert said in whole.text


@pytest.mark.parametrize(
    "name", ["Held-out accuracy", "Reward", "Completion length", "Entropy", "Seconds of a step", "Phases of a step"]
)
def test_the_page_has_a_curve_of(whole: Page, name: str) -> None:
    assert ("svg", "aria-label", name) in whole.attributes


def test_a_curve_without_values_is_left_out(whole: Page) -> None:
    assert "Divergence from the reference" not in whole.text


def test_a_run_without_a_profile_says_nothing_of_where_the_time_went(whole: Page, tmp_path: Path) -> None:
    bare = [{name: value for name, value in row.items() if not name.startswith("phase/")} for row in rows(40)]
    text = Page(page_of(write_run(tmp_path, metrics=bare))).text
    assert "Where the time went" in whole.text and "Curves" in text
    assert "Where the time went" not in text and "Phases of a step" not in text


def test_of_many_checkpoints_those_that_are_kept_come_first(tmp_path: Path) -> None:
    text = Page(page_of(write_run(tmp_path, metrics=rows(200)))).text
    assert "reward checkpoint-000030 kept" in text and "all 20, deleted ones too" in text


def test_a_restart_is_marked_in_the_curves(whole: Page) -> None:
    assert "workers started again from step 10" in whole.text


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert page_of(folder) == page_of(folder)


def test_looking_at_a_run_changes_nothing_in_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open(folder.path("events.jsonl"), "a") as file:
        file.write('{"event": "st')  # the run may be writing it at this moment
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    page_of(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# Untrusted text


def harmless(page: Page) -> None:
    """There is nothing on the page that acts, and nothing that is fetched."""
    assert {"script", "img", "iframe", "object", "embed", "link", "base", "form", "h4"}.isdisjoint(page.tags)
    for _, name, value in page.attributes:
        assert not name.startswith("on") and name not in ("src", "href", "style", "srcdoc", "action"), (name, value)
        assert "url(" not in (value or "")
    assert page.comments == []


def hostile_run(where: Path, text: str, name: str = "run") -> RunFolder:
    """A run in which every text from outside is the same one."""
    some = text[:20_000]
    config = {
        **CONFIG,
        "model": {"path": some},
        "data": {"train": some},
        "rewards": {"functions": [some], "settings": {text[:1000]: {text[:1000]: some}}},
        "versions": {"torch": some, "commit": some},
        "run": {"best_metric": "heldout/accuracy", "storage_path": some},
    }
    metrics = [row | {f"reward/{text[:1000]}_mean": 0.5} for row in rows(40)]
    metrics[4]["checkpoint"] = text
    events = [
        *EVENTS,
        {"event": "failed", "at": BEGAN + 70, "rank": text, "what": text},
        {"event": "notice", "at": BEGAN + 71, "what": f"checkpoint is not whole: {text}"},
        {"event": "notice", "at": BEGAN + 72, "what": f"a step hangs: {text}"},
        {"event": text, "at": BEGAN + 73, "what": text},
    ]
    groups = []
    for step in range(1, 9):
        made = group(step, text[:1000].encode("utf-8", "replace").decode(), (0.0, 1.0) * 4, texts=(text,) * 8)
        groups.append(replace(made, prompt=with_texts(made, [{"role": "user", "content": text}], ()).prompt))
    return write_run(where, name, config=config, metrics=metrics, events=events, groups=groups)


@pytest.fixture(scope="module")
def plain_tags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return Page(page_of(hostile_run(tmp_path_factory.mktemp("runs"), "x"))).tags


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_makes_no_element_and_no_large_page(tmp_path: Path, plain_tags: list[str], text: str) -> None:
    said = page_of(hostile_run(tmp_path, text))
    data = said.encode()  # a half of a surrogate pair could not be written
    assert len(data) < 1_000_000
    page = Page(said)
    harmless(page)
    assert page.tags == plain_tags
    assert not UNSEEN.search(said)


@pytest.mark.parametrize("text", ["<script>alert(1)<script>", '"><img onerror=x>', "{{7*7}}", "\u202egnp"])
def test_a_run_may_have_any_name(tmp_path: Path, text: str) -> None:
    said = page_of(write_run(tmp_path, text), write_run(tmp_path, "other"))
    page = Page(said)
    harmless(page)
    assert not UNSEEN.search(said)
    assert page.tags == Page(page_of(write_run(tmp_path, "x"), write_run(tmp_path, "other"))).tags


def test_what_is_written_like_a_template_is_not_computed(tmp_path: Path) -> None:
    text = Page(page_of(hostile_run(tmp_path, "{{7*7}}"))).text
    assert "{{7*7}}" in text and "49" not in text.replace(repr(NOW), "")


def test_the_page_forbids_itself_everything_but_its_own_style(whole: Page) -> None:
    (policy,) = [value for tag, name, value in whole.attributes if tag == "meta" and "default-src" in (value or "")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert whole.attributes.index(("meta", "http-equiv", "Content-Security-Policy")) < 4
    harmless(whole)


def test_nothing_gets_around_the_templates_escaping() -> None:
    package = Path(cli.__file__).parent / "runpage"
    template = (package / "page.html").read_text()
    assert "|safe" not in template.replace(" ", "") and "autoescape" not in template
    for module in package.glob("*.py"):
        assert "Markup(" not in module.read_text()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\0b\x1b", "a␀b␛"),
        ("\x7f\x85", "␡⟨U+0085⟩"),
        ("abc\u202edef", "abc⟨U+202E⟩def"),
        ("\ud800", "⟨U+D800⟩"),
        ("\0\0\0\1\u202e\u202e", "␀(3 times)␁⟨U+202E⟩(2 times)"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("line\n\tline", "line\n\tline"),
        ("مرحبا 世界 é 👩‍🔬", "مرحبا 世界 é 👩‍🔬"),
        (None, "None"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text: str, seen: str) -> None:
    assert plain(text) == seen


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    said = plain("question " + "x" * 10_000 + " answer", 300)
    assert said.startswith("question x") and said.endswith("x answer") and "of 10016 characters" in said
    assert len(said) < 350
    assert plain("abc" * 200 + "answer", 300).endswith("answer")


# Credentials

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
URI = f"s3://{KEY}:{SECRET}@bucket/runs"


def test_no_credential_is_on_the_page(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "run": {"storage_path": URI, "best_metric": "heldout/accuracy"},
        "model": {"path": f"{URI}/model"},
        "data": {"train": f"https://somebody:{SECRET}@host/data.jsonl", "columns": {"prompt": URI}},
        "rewards": {"functions": ["judge"], "settings": {"judge": {"api_key": SECRET, "url": URI}}},
        "grpo": {"hub_token": SECRET, "max_steps": 40},
    }
    what = f"OSError: When reading {URI}/x: AWS Error; AWS_SECRET_ACCESS_KEY={SECRET} " + "x" * 20_000 + URI
    events = [*EVENTS, {"event": "failed", "at": BEGAN + 70, "rank": 0, "what": what}]
    events += [{"event": "notice", "at": BEGAN + 71 + n, "what": "y" * (590 + n) + URI} for n in range(30)]
    groups = [group(1, "a" * 16, (0.0, 1.0), texts=(f"see {URI}", "x"))]
    run = write_run(tmp_path, config=config, events=events, groups=groups)
    run.write_text("not JSON", "summary.json")
    for said in (page_of(run), page_of(run, write_run(tmp_path, "other"))):
        for part in (KEY, SECRET, SECRET[:8], SECRET[-12:], KEY[:12]):
            assert part not in said
        assert "s3://bucket/runs" in said and "[hidden]" in said


@pytest.mark.parametrize("cut", range(280, 420, 7))
def test_no_part_of_a_credential_is_left_where_a_text_is_cut(cut: int) -> None:
    for text in ("x" * cut + URI + "x" * 9000, "x" * 9000 + URI + "x" * cut, URI * 200, "x" * 4396 + URI + "x" * cut):
        said = plain(text, 400)
        assert SECRET[:5] not in said and SECRET[-5:] not in said and KEY[:6] not in said


def test_names_of_secrets() -> None:
    assert all(map(is_secret, ("api_key", "hub_token", "judge.password", "aws_secret", "token")))
    assert not any(map(is_secret, ("max_completion_length", "tokenizer", "max_tokens_total", "monkey", "grpo.top_k")))


# Runs that are not whole


def told(run: RunFolder) -> str:
    page = Page(page_of(run))
    harmless(page)
    return page.text


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=rows(7), events=EVENTS)
    assert "under way; the last word of it is 39 s old" in told(folder)  # 100 - 61
    assert "No checkpoint has been written yet" in told(folder) and "no measured checkpoint yet" in told(folder)


def test_a_run_that_broke_off_says_so(tmp_path: Path) -> None:
    failed = EVENTS[: EVENTS.index(next(event for event in EVENTS if event["event"] == "failed")) + 1]
    assert "a worker failed 49 s ago, and nothing was started since" in told(write_run(tmp_path, events=failed))
    long_ago = [event | {"at": event["at"] - 7200} for event in EVENTS]
    assert "not ended, and silent for 2 h" in told(write_run(tmp_path, "silent", events=long_ago))


def test_a_run_that_was_stopped_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=rows(12))
    folder.write_json({"stopped": "SIGTERM"}, "summary.json")
    assert "stopped by SIGTERM at step 12 of 40" in told(folder)


def test_empty_files_make_a_page(tmp_path: Path) -> None:
    said = told(write_run(tmp_path, metrics=[], events=[], groups=[]))
    assert "metrics.jsonl is empty" in said and "events.jsonl is empty" in said
    assert "no word of a launch yet" in said and "No completions are kept yet" in said


def test_a_folder_with_nothing_but_a_config_makes_a_page(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text(yaml.safe_dump(CONFIG), "config.yaml")
    assert "there is no metrics.jsonl yet" in told(folder) and "No step has been reported yet" in told(folder)


def test_a_torn_last_line_is_named_and_the_others_stand(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=rows(9))
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('{"step": 10, "rew')
    assert "the last line of metrics.jsonl is cut short" in told(folder) and "9 of 40" in told(folder)
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('\n{"step": 11, "reward/mean": 1.0}\n')
    assert "1 line of metrics.jsonl not JSON, the first is line 10" in told(folder)
    assert "11 of 40" in told(folder)


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    metrics = rows(40)
    metrics[20]["reward/mean"] = NAN
    metrics[21]["learner/gradient_norm"] = math.inf
    folder = write_run(tmp_path, metrics=metrics)
    assert "2 numbers of metrics.jsonl not finite" in told(folder)
    page = page_of(folder)
    assert not re.search(r'(?:d|x|y|x1|y1|cx|cy|width|height)="[^"]*(?:nan|inf)', page)


@pytest.mark.parametrize("spoilt", ["", "[]", "\0", "{", '{"a": [' * 5000, "null", "1e999", "- x\n" * 10, "\xff"])
@pytest.mark.parametrize(
    "name",
    [
        *["config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "heldout_before.json"],
        *["checkpoint-000040/manifest.json", "rollouts/steps-00000002-00000003.parquet"],
    ],
)
def test_any_file_may_be_spoilt(tmp_path: Path, name: str, spoilt: str) -> None:
    folder = write_run(tmp_path)
    folder.write_bytes(spoilt.encode("latin-1"), *name.split("/"))
    assert "Curves" in told(folder)


STRANGE: list[Any] = [None, True, "x", "", [], {}, [1], -1, 10**400, 1e300, NAN, math.inf, -math.inf]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:20])
def test_any_value_may_be_strange(tmp_path: Path, value: Any) -> None:
    metrics = [dict.fromkeys(row, value) | {"step": row["step"]} for row in rows(40)]
    metrics += [{"step": value}, rows(40)[-1] | {"step/seconds": value}]
    events = [dict.fromkeys(event, value) | {"event": event["event"]} for event in EVENTS]
    events += [{**event, key: value} for event in EVENTS for key in event]
    config = {section: dict.fromkeys(fields, value) for section, fields in CONFIG.items()}
    folder = write_run(tmp_path, metrics=metrics, events=events, config=config)
    folder.write_json({"pass_at_1": value, "heldout_after": value, "price": value, "stopped": value}, "summary.json")
    folder.write_json({"pass_at_1": {"value": value, "low": value, "high": value}}, "heldout_before.json")
    folder.write_json({"metrics": {"step": value}, "serial": 1, "files": {}}, "checkpoint-000005", "manifest.json")
    folder.write_json(
        {"metrics": {"step": 6, "heldout/accuracy": value}, "serial": 2, "files": {}},
        "checkpoint-000006",
        "manifest.json",
    )
    assert "Curves" in told(folder)


# Several runs


def test_several_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    faster = {**CONFIG, "grpo": CONFIG["grpo"] | {"learning_rate": 1e-3}}
    page = Page(page_of(write_run(tmp_path, "slow"), write_run(tmp_path, "fast", config=faster)))
    harmless(page)
    assert "Settings that differ slow fast grpo.learning_rate 0.0003 0.001" in page.text
    assert "step 40 slow: 1 fast: 1" in page.text  # what a curve says where it is pointed at
    assert page.text.count("checkpoint-000040 best by") == 2


def test_runs_of_the_same_name_are_told_apart_by_their_place(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "here"), write_run(tmp_path / "there"))
    assert f"{tmp_path}/here/run" in page and f"{tmp_path}/there/run" in page


def test_a_page_of_eight_runs_is_small(tmp_path: Path) -> None:
    text = "<&\"'" * 3000  # each becomes five characters
    runs = [hostile_run(tmp_path, text, f"run-{number}") for number in range(8)]
    assert len(page_of(*runs).encode()) < 1_000_000


# Where it goes


def test_the_page_goes_into_the_run_folder_or_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path)
    assert cli.main(["report", f"{folder.local}/"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/report.html\n"
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(folder.local), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and str(tmp_path / "page.html") in capsys.readouterr().out


def test_what_cannot_be_reported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path)
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--out FILE"):
        write_page([str(folder.local), str(folder.local)])
    with pytest.raises(ConfigError, match="at most 8"):
        write_page([str(folder.local)] * 9, "out.html")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_page([str(folder.local)], str(tmp_path / "no" / "folder" / "page.html"))


def test_a_run_on_an_object_store_is_reported_there(capsys: pytest.CaptureFixture[str]) -> None:
    with S3Server() as server:
        key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
        where = storage_path(server.port, user=f"{key}:{secret}@")
        folder = write_run(where)
        path, _, query = where.partition("?")
        assert cli.main(["report", f"{path}/run?{query}"]) == 0
        said = capsys.readouterr()
        page = folder.read_text("report.html")
    harmless(Page(page))
    assert "0.235 → 0.900" in page
    assert said.out.startswith("s3://bucket/runs/run/report.html")
    assert secret not in page + said.out + said.err


# Curves and groups


def test_a_thinned_curve_keeps_what_stands_out() -> None:
    values = [(step, 5.0 if step == 7_777 else 1.0) for step in range(10_000)]
    drawn = chart("", "", [Curve(label="", colour=0, points=values)], smooth=False)
    assert drawn is not None
    line = drawn.curves[0].line
    assert len(line) < 5000
    heights = [float(point.split()[1]) for point in re.split("[ML]", line)[1:]]
    assert min(heights) < min(y for y, _ in drawn.y_ticks) + 30 and heights.count(max(heights)) == len(heights) - 1


def test_a_line_is_lifted_where_a_value_is_not_finite() -> None:
    drawn = chart("", "", [Curve(label="", colour=0, points=[(1, 1.0), (2, 2.0), (3, NAN), (4, 2.0)])])
    assert drawn is not None and re.sub("[^ML]", "", drawn.curves[0].line) == "MLM"


def test_a_line_is_a_moving_average_from_its_first_value_on() -> None:
    # Of 20 points the span is 5, so of each average a third is the new value: 0, then 1/3 of what is left ...
    points = [(step, 0.0 if step == 1 else 1.0) for step in range(1, 21)]
    drawn = chart("", "", [Curve(label="", colour=0, points=points)])
    assert drawn is not None and drawn.smoothed == 5
    first, second, last = (float(p.split()[1]) for p in (re.split("[ML]", drawn.curves[0].line)[i] for i in (1, 2, 20)))
    raw_low, raw_high = (float(p.split()[1]) for p in (re.split("[ML]", drawn.curves[0].raw)[i] for i in (1, 2)))
    assert first == raw_low
    assert (raw_low - second) / (raw_low - raw_high) == pytest.approx(0.6, abs=0.01)  # 1 / (1 + 2/3)
    assert last == pytest.approx(raw_high, abs=0.3)


def test_on_a_logarithmic_scale_one_large_value_does_not_hide_those_after_it() -> None:
    points = [(step, 1000.0 if step == 10 else 1.0) for step in range(1, 31)]
    drawn = chart("", "", [Curve(label="", colour=0, points=points)], logarithmic=True)
    assert drawn is not None
    heights = [float(point.split()[1]) for point in re.split("[ML]", drawn.curves[0].line)[1:]]
    # Of 30 points the span is 5: (2/3)^5 of what a third of three powers of ten had moved it is left, below half a one.
    assert heights[9] < heights[14] and heights[14] > heights[0] - (166 - 10) / 6


def test_a_chart_needs_a_finite_value() -> None:
    assert chart("", "", []) is None
    assert chart("", "", [Curve(label="", colour=0, points=[(1, NAN), (2, 1e200)])]) is None


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((0.0, 1.0), ["0", "0.5", "1"]),
        ((0.2, 0.9), ["0", "0.2", "0.4", "0.6", "0.8"]),
        ((1e-3, 10.0), ["0.001", "0.01", "0.1", "1", "10"]),
        ((1.0, 1.0000002), ["0.9999", "0.99995", "1", "1.00005", "1.0001"]),
        ((5.0, 5.0), None),
        ((0.0, 0.0), None),
        ((-1e99, 1e99), None),
        ((1e-300, 1e-300), None),
    ],
)
def test_the_scale_fits_what_it_measures(values: tuple[float, float], ticks: list[str] | None) -> None:
    points = [(number, value) for number, value in enumerate(values)]
    drawn = chart("", "", [Curve(label="", colour=0, points=points)], logarithmic=True)
    assert drawn is not None and 1 <= len(drawn.y_ticks) <= 12
    assert all(10 <= y <= 166 for y, _ in drawn.y_ticks)
    assert ticks is None or [label for _, label in drawn.y_ticks] == ticks


A, B, C, D = (letter * 16 for letter in "abcd")


def read(tmp_path: Path, groups: Sequence[Group]) -> Run:
    return read_run(str(write_run(tmp_path, groups=groups).local))


def test_solve_rates_of_epochs_say_how_problems_moved(tmp_path: Path) -> None:
    first = [group(1, A, (0.0, 0.0)), group(1, B, (0.0, 1.0)), group(2, C, (1.0, 1.0)), group(2, D, (0.0, 0.0))]
    last = [group(3, A, (1.0, 1.0), 1), group(3, B, (1.0, 1.0), 1), group(4, C, (0.0, 1.0), 1)]
    rates = solve_rates(read(tmp_path, first + last))
    assert rates is not None and rates.by_epoch
    assert [(each.label, each.never, each.sometimes, each.always) for each in rates.periods] == [
        ("epoch 1", 2, 1, 1),
        ("epoch 2", 0, 1, 2),
    ]
    # D has not come again yet.
    assert rates.moves == [("never", [0, 0, 1]), ("sometimes", [0, 0, 1]), ("always", [0, 1, 0])]
    assert rates.periods[0].histogram == [0.5, 0, 0.25, 0, 0, 0.25]


def test_solve_rates_of_one_epoch_are_those_of_its_parts(tmp_path: Path) -> None:
    groups = [group(step, f"{step:016x}", (1.0, NAN) if step > 4 else (0.0, NAN)) for step in range(1, 9)]
    rates = solve_rates(read(tmp_path, groups))
    assert rates is not None and not rates.by_epoch and rates.moves == []
    assert [(each.label, each.never, each.always) for each in rates.periods] == [
        ("steps 1 to 2", 2, 0), ("steps 3 to 4", 2, 0), ("steps 5 to 6", 0, 2), ("steps 7 to 8", 0, 2),
    ]  # fmt: skip


def test_without_verdicts_there_are_no_solve_rates(tmp_path: Path) -> None:
    assert solve_rates(read(tmp_path, [replace(group(1, A, (0.0, 1.0)), correct=None), group(2, B, (NAN,))])) is None
    assert solve_rates(read(tmp_path / "empty", [])) is None


def test_groups_of_the_first_and_of_the_last_steps_are_shown(tmp_path: Path) -> None:
    groups = [group(step, A, (0.0, 1.0), texts=(f"no {step}", f"yes {step}")) for step in range(1, 10)]
    early, late = early_and_late(read(tmp_path, groups))
    assert [each.step for each in early] == [1, 2, 3] and [each.step for each in late] == [7, 8, 9]
    assert [(each.text, each.right) for each in early[0].completions] == [("yes 1", True), ("no 1", False)]
    early, late = early_and_late(read(tmp_path / "short", groups[:3]))
    assert [each.step for each in early] == [1] and [each.step for each in late] == [2, 3]


def test_the_best_and_the_worst_of_a_large_group_are_shown(tmp_path: Path) -> None:
    rewards = (0.5, NAN, 1.0, 0.0, 0.75, 0.25)
    made = with_texts(replace(group(1, A, rewards), correct=None), [{"role": "user", "content": "?"}], list("abcdef"))
    _, (shown,) = early_and_late(read(tmp_path, [made]))
    assert [(each.text, each.reward, each.right) for each in shown.completions] == [
        ("c", "1", None), ("e", "0.75", None), ("d", "0", None), ("b", "?", None),
    ]  # fmt: skip
    assert shown.of == 6


# A real run


@pytest.mark.slow
def test_a_run_keeps_the_texts_of_the_first_group_of_each_step_however_many_workers_it_has(
    small_run: Callable[..., Any],
) -> None:
    kept = []
    for workers in (1, 2):
        _, folder = small_run(f"workers-{workers}", f"cluster.num_workers={workers}", "grpo.max_steps=3")
        rows = [row for row in groups_of(folder) if row["completions"] is not None]
        assert [row["step"] for row in rows] == [1, 2, 3]
        for row in rows:
            assert row["prompt"] and len(row["completions"]) == len(row["rewards"])
        kept.append([(row["problem"], row["prompt"]) for row in rows])
        early, late = early_and_late(read_run(str(folder)))
        assert [group.step for group in (*early, *late)] == [1, 2, 3]
        assert "finished" in Page(render([read_run(str(folder))], NOW)).text
    assert kept[0] == kept[1]
