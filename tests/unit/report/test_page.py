"""Tests of the page of a run: its content, the escaping of untrusted text, and charts and groups on it."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_samples import BEGAN, CONFIG, EVENTS, NAN, NOW, Page, assert_harmless, group, rows, write_run

from grpo_ray import cli
from grpo_ray.errors import ConfigError
from grpo_ray.report import render, write_page
from grpo_ray.report.charts import Curve, chart
from grpo_ray.report.groups import early_and_late, solve_rates
from grpo_ray.report.health import health
from grpo_ray.report.read import Run, _rows, read_run
from grpo_ray.report.text import is_secret, plain
from grpo_ray.storage.rollouts import GroupRecord, attach_texts
from grpo_ray.storage.run_folder import RunFolder

QUICK = settings(max_examples=100, deadline=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Compile the page's template once for all tests: compiling takes several times as long as rendering."""
    compiled: dict[str, Any] = {}
    compile_template = jinja2.Environment.compile

    def compile_once(environment: jinja2.Environment, source: str) -> Any:
        # `render` makes a new environment each time, always with the same options.
        if source not in compiled:
            compiled[source] = compile_template(environment, source)
        return compiled[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", compile_once)
        yield


# The long texts are larger than the page may become, so that one of them shown whole fails the test.
HOSTILE = {
    "script": "<script>alert(1)</script>",
    "end of style": "</style></title></pre></svg><h1>in</h1>",
    "end of attribute": '"><img src=x onerror=alert(1)>',
    "single quotes": "' onmouseover='alert(1)",
    "template": "{{7*7}}{% raw %}${7*7}#{7*7}",
    "comment": "<!-- --!> <![CDATA[ ]]>",
    "entity": "&lt;script&gt;&#60;img&#62;",
    "NUL": "a\0b\x1b[31m",
    "right to left": "\u202egnp.exe\u2066\u200f",
    "invisible": "\u200b\ufeff\u2028\U000e0041",
    "surrogate": "\ud800 half",
    "long": "x" * 2_000_000,
    "long markup": "<b>" * 500_000,
    "quadratic": "s3://a:" * 200_000,
}


INVISIBLE = re.compile("[\0\x1b\u202a-\u202e\u2066-\u2069\u200b\u200e\u200f\u2028\ufeff\U000e0041]")


def page_of(*folders: RunFolder) -> str:
    return render([read_run(str(folder.local)) for folder in folders], NOW)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(page_of(write_run(tmp_path_factory.mktemp("runs"))))


@pytest.mark.parametrize(
    "shown",
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
def test_page_whole_run_shows_text(whole: Page, shown: str) -> None:
    assert shown in whole.text


@pytest.mark.parametrize(
    "name", ["Held-out accuracy", "Reward", "Completion length", "Entropy", "Seconds of a step", "Phases of a step"]
)
def test_page_whole_run_has_curve(whole: Page, name: str) -> None:
    assert ("svg", "aria-label", name) in whole.attributes


def test_page_curve_without_values_is_left_out(whole: Page) -> None:
    assert "Divergence from the reference" not in whole.text


def test_page_without_phases_has_no_time_section(whole: Page, tmp_path: Path) -> None:
    bare = [{name: value for name, value in row.items() if not name.startswith("phase/")} for row in rows(40)]
    text = Page(page_of(write_run(tmp_path, metrics=bare))).text
    assert "Where the time went" in whole.text and "Curves" in text
    assert "Where the time went" not in text and "Phases of a step" not in text


def test_page_many_checkpoints_lists_kept_first(tmp_path: Path) -> None:
    text = Page(page_of(write_run(tmp_path, metrics=rows(200)))).text
    assert "reward checkpoint-000030 kept" in text and "all 20, deleted ones too" in text


def test_page_restart_is_marked_in_curves(whole: Page) -> None:
    assert "workers started again from step 10" in whole.text


def test_page_same_run_gives_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert page_of(folder) == page_of(folder)


def test_page_reading_leaves_run_unchanged(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with open(folder.path("events.jsonl"), "a") as file:
        file.write('{"event": "st')  # a run may be writing it
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    page_of(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def hostile_run(where: Path, text: str, name: str = "run") -> RunFolder:
    """Write a run in which every untrusted text is the same one."""
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
        groups.append(replace(made, prompt=attach_texts(made, [{"role": "user", "content": text}], ()).prompt))
    return write_run(where, name, config=config, metrics=metrics, events=events, groups=groups)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_page_hostile_text_adds_no_element(tmp_path: Path, harmless_tags: list[str], text: str) -> None:
    html = page_of(hostile_run(tmp_path, text))
    data = html.encode()  # fails on half a surrogate pair
    assert len(data) < 1_000_000
    page = Page(html)
    assert_harmless(page)
    assert page.tags == harmless_tags
    assert not INVISIBLE.search(html)


def test_page_template_syntax_is_not_evaluated(tmp_path: Path) -> None:
    text = Page(page_of(hostile_run(tmp_path, "{{7*7}}"))).text
    assert "{{7*7}}" in text and "49" not in text.replace(repr(NOW), "")


def test_page_policy_allows_own_style_only(whole: Page) -> None:
    (policy,) = [value for tag, name, value in whole.attributes if tag == "meta" and "default-src" in (value or "")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert whole.attributes.index(("meta", "http-equiv", "Content-Security-Policy")) < 4
    assert_harmless(whole)


def test_page_template_never_disables_escaping() -> None:
    package = Path(cli.__file__).parent / "report"
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
def test_plain_invisible_characters_are_written_out(text: str, seen: str) -> None:
    assert plain(text) == seen


def test_plain_long_text_keeps_begin_and_end() -> None:
    shortened = plain("question " + "x" * 10_000 + " answer", 300)
    assert shortened.startswith("question x") and shortened.endswith("x answer")
    assert "of 10016 characters" in shortened
    assert len(shortened) < 350
    assert plain("abc" * 200 + "answer", 300).endswith("answer")


KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


URI = f"s3://{KEY}:{SECRET}@bucket/runs"


def test_page_shows_no_credential(tmp_path: Path) -> None:
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
    for html in (page_of(run), page_of(run, write_run(tmp_path, "other"))):
        for part in (KEY, SECRET, SECRET[:8], SECRET[-12:], KEY[:12]):
            assert part not in html
        assert "s3://bucket/runs" in html and "[hidden]" in html


def test_is_secret_recognises_names() -> None:
    assert all(map(is_secret, ("api_key", "hub_token", "judge.password", "aws_secret", "token")))
    assert not any(map(is_secret, ("max_completion_length", "tokenizer", "max_tokens_total", "monkey", "grpo.top_k")))


def text_of(run: RunFolder) -> str:
    page = Page(page_of(run))
    assert_harmless(page)
    return page.text


def test_page_running_run_shows_status(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=rows(7), events=EVENTS)
    assert "under way; the last word of it is 39 s old" in text_of(folder)  # 100 - 61
    assert "No checkpoint has been written yet" in text_of(folder) and "no measured checkpoint yet" in text_of(folder)


def test_page_silent_run_shows_status(tmp_path: Path) -> None:
    failed = EVENTS[: EVENTS.index(next(event for event in EVENTS if event["event"] == "failed")) + 1]
    assert "a worker failed 49 s ago, and nothing was started since" in text_of(write_run(tmp_path, events=failed))
    long_ago = [event | {"at": event["at"] - 7200} for event in EVENTS]
    assert "not ended, and silent for 2 h" in text_of(write_run(tmp_path, "silent", events=long_ago))


def test_page_stopped_run_shows_status(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=rows(12))
    folder.write_json({"stopped": "SIGTERM"}, "summary.json")
    assert "stopped by SIGTERM at step 12 of 40" in text_of(folder)


def test_page_empty_files_are_named(tmp_path: Path) -> None:
    text = text_of(write_run(tmp_path, metrics=[], events=[], groups=[]))
    assert "metrics.jsonl is empty" in text and "events.jsonl is empty" in text
    assert "no word of a launch yet" in text and "No completions are kept yet" in text


def test_page_config_alone_is_enough(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text(yaml.safe_dump(CONFIG), "config.yaml")
    assert "there is no metrics.jsonl yet" in text_of(folder) and "No step has been reported yet" in text_of(folder)


def test_page_truncated_line_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=rows(9))
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('{"step": 10, "rew')
    assert "the last line of metrics.jsonl is cut short" in text_of(folder) and "9 of 40" in text_of(folder)
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('\n{"step": 11, "reward/mean": 1.0}\n')
    assert "1 line of metrics.jsonl not JSON, the first is line 10" in text_of(folder)
    assert "11 of 40" in text_of(folder)


@pytest.mark.parametrize("gap, kind", [(1e-4, "fine"), (1e-2, "bad")])
def test_health_largest_gap_of_engine_and_learner_decides(tmp_path: Path, gap: float, kind: str) -> None:
    """One step beyond the tolerance is bad, whatever the others are."""
    metrics = rows(3)
    metrics[1]["engine/logprob_gap_mean"] = gap
    found = health(read_run(str(write_run(tmp_path, metrics=metrics).local)))
    (finding,) = (finding for finding in found if "engine and learner agree" in finding.text)
    assert finding.kind == kind


def test_page_non_finite_numbers_leave_gaps(tmp_path: Path) -> None:
    metrics = rows(40)
    metrics[20]["reward/mean"] = NAN
    metrics[21]["learner/gradient_norm"] = math.inf
    folder = write_run(tmp_path, metrics=metrics)
    assert "2 numbers of metrics.jsonl not finite" in text_of(folder)
    page = page_of(folder)
    assert not re.search(r'(?:d|x|y|x1|y1|cx|cy|width|height)="[^"]*(?:nan|inf)', page)


STRANGE: list[Any] = [None, True, "x", "", [], {}, [1], -1, 10**400, 1e300, NAN, math.inf, -math.inf]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:20])
def test_page_unexpected_values_are_shown(tmp_path: Path, value: Any) -> None:
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
    assert "Curves" in text_of(folder)


def test_page_several_runs_share_curves(tmp_path: Path) -> None:
    faster = {**CONFIG, "grpo": CONFIG["grpo"] | {"learning_rate": 1e-3}}
    page = Page(page_of(write_run(tmp_path, "slow"), write_run(tmp_path, "fast", config=faster)))
    assert_harmless(page)
    assert "Settings that differ slow fast grpo.learning_rate 0.0003 0.001" in page.text
    assert "step 40 slow: 1 fast: 1" in page.text  # shown where the mouse points at a curve
    assert page.text.count("checkpoint-000040 best by") == 2


def test_page_runs_of_one_name_show_their_paths(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "here"), write_run(tmp_path / "there"))
    assert f"{tmp_path}/here/run" in page and f"{tmp_path}/there/run" in page


def test_report_writes_into_run_folder_or_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path)
    assert cli.main(["report", f"{folder.local}/"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/report.html\n"
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
    assert cli.main(["report", str(folder.local), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists() and str(tmp_path / "page.html") in capsys.readouterr().out


def test_report_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path)
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--out FILE"):
        write_page([str(folder.local), str(folder.local)])
    with pytest.raises(ConfigError, match="at most 8"):
        write_page([str(folder.local)] * 9, "out.html")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_page([str(folder.local)], str(tmp_path / "no" / "folder" / "page.html"))


def test_chart_thinned_curve_keeps_outlier() -> None:
    values = [(step, 5.0 if step == 7_777 else 1.0) for step in range(10_000)]
    drawn = chart("", "", [Curve(label="", colour=0, points=values)], smooth=False)
    assert drawn is not None
    line = drawn.curves[0].line
    assert len(line) < 5000
    heights = [float(point.split()[1]) for point in re.split("[ML]", line)[1:]]
    assert min(heights) < min(y for y, _ in drawn.y_ticks) + 30 and heights.count(max(heights)) == len(heights) - 1


def test_chart_non_finite_value_breaks_line() -> None:
    drawn = chart("", "", [Curve(label="", colour=0, points=[(1, 1.0), (2, 2.0), (3, NAN), (4, 2.0)])])
    assert drawn is not None and re.sub("[^ML]", "", drawn.curves[0].line) == "MLM"


def test_chart_line_is_moving_average() -> None:
    # The span of 20 points is 5, so each new value has a weight of one third.
    points = [(step, 0.0 if step == 1 else 1.0) for step in range(1, 21)]
    drawn = chart("", "", [Curve(label="", colour=0, points=points)])
    assert drawn is not None and drawn.smoothed == 5
    first, second, last = (float(p.split()[1]) for p in (re.split("[ML]", drawn.curves[0].line)[i] for i in (1, 2, 20)))
    raw_low, raw_high = (float(p.split()[1]) for p in (re.split("[ML]", drawn.curves[0].raw)[i] for i in (1, 2)))
    assert first == raw_low
    assert (raw_low - second) / (raw_low - raw_high) == pytest.approx(0.6, abs=0.01)  # 1 / (1 + 2/3)
    assert last == pytest.approx(raw_high, abs=0.3)


def test_chart_log_scale_recovers_after_outlier() -> None:
    points = [(step, 1000.0 if step == 10 else 1.0) for step in range(1, 31)]
    drawn = chart("", "", [Curve(label="", colour=0, points=points)], logarithmic=True)
    assert drawn is not None
    heights = [float(point.split()[1]) for point in re.split("[ML]", drawn.curves[0].line)[1:]]
    # The span of 30 points is 5. The outlier moves the average by a third of three powers of ten; five steps later
    # (2/3)^5 of that is left, less than half a power of ten.
    assert heights[9] < heights[14] and heights[14] > heights[0] - (166 - 10) / 6


def test_chart_without_finite_value_is_none() -> None:
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
def test_chart_ticks_fit_values(values: tuple[float, float], ticks: list[str] | None) -> None:
    points = [(number, value) for number, value in enumerate(values)]
    drawn = chart("", "", [Curve(label="", colour=0, points=points)], logarithmic=True)
    assert drawn is not None and 1 <= len(drawn.y_ticks) <= 12
    assert all(10 <= y <= 166 for y, _ in drawn.y_ticks)
    assert ticks is None or [label for _, label in drawn.y_ticks] == ticks


A, B, C, D = (letter * 16 for letter in "abcd")


def read(tmp_path: Path, groups: Sequence[GroupRecord]) -> Run:
    return read_run(str(write_run(tmp_path, groups=groups).local))


def test_solve_rates_count_moves_between_epochs(tmp_path: Path) -> None:
    first = [group(1, A, (0.0, 0.0)), group(1, B, (0.0, 1.0)), group(2, C, (1.0, 1.0)), group(2, D, (0.0, 0.0))]
    last = [group(3, A, (1.0, 1.0), 1), group(3, B, (1.0, 1.0), 1), group(4, C, (0.0, 1.0), 1)]
    rates = solve_rates(read(tmp_path, first + last))
    assert rates is not None and rates.by_epoch
    assert [(each.label, each.never, each.sometimes, each.always) for each in rates.periods] == [
        ("epoch 1", 2, 1, 1),
        ("epoch 2", 0, 1, 2),
    ]
    # Problem D has not been repeated yet.
    assert rates.moves == [("never", [0, 0, 1]), ("sometimes", [0, 0, 1]), ("always", [0, 1, 0])]
    assert rates.periods[0].histogram == [0.5, 0, 0.25, 0, 0, 0.25]


def test_solve_rates_one_epoch_is_split_into_parts(tmp_path: Path) -> None:
    groups = [group(step, f"{step:016x}", (1.0, NAN) if step > 4 else (0.0, NAN)) for step in range(1, 9)]
    rates = solve_rates(read(tmp_path, groups))
    assert rates is not None and not rates.by_epoch and rates.moves == []
    assert [(each.label, each.never, each.always) for each in rates.periods] == [
        ("steps 1 to 2", 2, 0), ("steps 3 to 4", 2, 0), ("steps 5 to 6", 0, 2), ("steps 7 to 8", 0, 2),
    ]  # fmt: skip


def test_solve_rates_without_verdicts_is_none(tmp_path: Path) -> None:
    assert solve_rates(read(tmp_path, [replace(group(1, A, (0.0, 1.0)), correct=None), group(2, B, (NAN,))])) is None
    assert solve_rates(read(tmp_path / "empty", [])) is None


def test_groups_first_and_last_steps_are_shown(tmp_path: Path) -> None:
    groups = [group(step, A, (0.0, 1.0), texts=(f"no {step}", f"yes {step}")) for step in range(1, 10)]
    early, late = early_and_late(read(tmp_path, groups))
    assert [each.step for each in early] == [1, 2, 3] and [each.step for each in late] == [7, 8, 9]
    assert [(each.text, each.right) for each in early[0].completions] == [("yes 1", True), ("no 1", False)]
    early, late = early_and_late(read(tmp_path / "short", groups[:3]))
    assert [each.step for each in early] == [1] and [each.step for each in late] == [2, 3]


def test_groups_large_group_shows_best_and_worst(tmp_path: Path) -> None:
    rewards = (0.5, NAN, 1.0, 0.0, 0.75, 0.25)
    made = attach_texts(replace(group(1, A, rewards), correct=None), [{"role": "user", "content": "?"}], list("abcdef"))
    _, (shown,) = early_and_late(read(tmp_path, [made]))
    assert [(each.text, each.reward, each.right) for each in shown.completions] == [
        ("c", "1", None), ("e", "0.75", None), ("d", "0", None), ("b", "?", None),
    ]  # fmt: skip
    assert shown.of == 6


@pytest.fixture(scope="module")
def harmless_tags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tags of the page of a run in which every untrusted text is a letter."""
    return Page(page_of(hostile_run(tmp_path_factory.mktemp("runs"), "x"))).tags


def test_page_hostile_run_name_adds_no_element(tmp_path: Path) -> None:
    other = read_run(str(write_run(tmp_path, "other").local))
    expected = None
    for name in ("x", "<script>alert(1)<script>", '"><img onerror=x>', "{{7*7}}", "\u202egnp"):
        html = render([read_run(str(write_run(tmp_path, name).local)), other], NOW)
        page = Page(html)
        assert_harmless(page)
        assert not INVISIBLE.search(html)
        expected = expected or page.tags
        assert page.tags == expected, name


CHARACTERS = st.text(st.one_of(st.characters(codec=None), st.sampled_from("\0\x1b\u202e\u200b\ufeff\ud800\U000e0041")))


@QUICK
@given(text=CHARACTERS, copies=st.integers(1, 3000), limit=st.integers(30, 400))
def test_plain_any_text_is_visible_and_short(text: str, copies: int, limit: int) -> None:
    shortened = plain(text * copies, limit)
    assert not INVISIBLE.search(shortened)
    # One character may become `⟨U+E0041⟩(1000 times)`.
    assert len(shortened) <= 25 * (limit + 50)
    assert plain("seen " * copies).startswith("seen ")


CUT = st.one_of(st.integers(250, 450), st.integers(0, 9000))


@QUICK
@given(before=CUT, after=CUT, copies=st.integers(1, 200))
@example(before=300, after=9000, copies=1)
@example(before=9000, after=300, copies=1)
@example(before=4396, after=300, copies=1)
@example(before=0, after=0, copies=200)
def test_plain_cut_text_shows_no_part_of_credential(before: int, after: int, copies: int) -> None:
    shortened = plain("x" * before + URI * copies + "x" * after, 400)
    assert SECRET[:5] not in shortened and SECRET[-5:] not in shortened and KEY[:6] not in shortened


@pytest.mark.parametrize("content", ["", "[]", "\0", "{", '{"a": [' * 5000, "null", "1e999", "- x\n" * 10, "\xff"])
def test_page_unreadable_file_is_skipped(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path)
    for name in (
        *("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json", "heldout_before.json"),
        *("checkpoint-000040/manifest.json", "rollouts/steps-00000002-00000003.parquet"),
    ):
        path = Path(folder.path(*name.split("/")))
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content.encode("latin-1"))
        assert "Curves" in text_of(folder), name
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def test_page_eight_runs_are_small(tmp_path: Path) -> None:
    text = "<&\"'" * 3000  # each becomes five characters
    run = read_run(str(hostile_run(tmp_path, text).local))
    runs = [replace(run, folder=RunFolder(str(tmp_path), f"run-{number}")) for number in range(8)]
    assert len(render(runs, NOW).encode()) < 1_000_000


def test_rows_of_a_repeated_step_are_the_latest() -> None:
    rows, saved = _rows([{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 1, "a": 3.0, "checkpoint": "c"}], [])
    assert rows == [{"step": 1.0, "a": 3.0}, {"step": 2.0, "a": 2.0}] and saved == {"c": 1}
