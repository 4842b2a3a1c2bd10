"""Tests of the whole page: its contents, and its safety with untrusted text and malformed files."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_samples import (
    CONFIG,
    EVENTS,
    NAN,
    NOW,
    STARTED,
    Page,
    assert_harmless,
    make_group,
    metric_rows,
    render_folders,
    several_sets_run,
    write_run,
)

from grpo_ray import cli
from grpo_ray.errors import ConfigError
from grpo_ray.pages.report import render, write_page
from grpo_ray.pages.report.curves import layout_main_curves
from grpo_ray.pages.report.read import read_run
from grpo_ray.storage.records.groups import attach_texts
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.redaction import HIDDEN

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
KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
URI = f"s3://{KEY}:{SECRET}@bucket/runs"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return Page(render_folders(write_run(tmp_path_factory.mktemp("runs"))))


@pytest.mark.parametrize(
    "shown",
    [
        "0.235 → 0.900",  # 0.5 + 40/100
        "95 %: [0.203, 0.271] → [0.880, 0.920]",
        "0.138 → 0.887",  # of 1/40 to 10/40: 5.5/40; of 31/40 to 40/40: 35.5/40
        "40 of 40",
        "finished",
        "tiny-arithmetic",
        "2 on CPU",
        "0123456789ab",
        "1 failure, 5 steps repeated; last: worker 1: it died (killed)",
        "1 hang; last: worker 0: a step (step 12) hangs",
        "largest mean log-probability gap between engine and learner: 0.0001 nats (tolerance 0.001)",
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
    "name", ["Held-out accuracy", "Reward", "Completion length", "Entropy", "Step time", "Step time by phase"]
)
def test_page_whole_run_has_curve(whole: Page, name: str) -> None:
    assert ("svg", "aria-label", name) in whole.attributes


def test_page_several_heldout_sets_shows_each(tmp_path: Path) -> None:
    page = Page(render_folders(several_sets_run(tmp_path)))
    assert_harmless(page)
    for name in ("Held-out accuracy, math", "Held-out accuracy, gsm8k"):
        assert ("svg", "aria-label", name) in page.attributes
    for shown in (
        "held-out accuracy, gsm8k 0.125 → 0.900",
        "held-out accuracy, math 0.250 → 0.500",
        "95 %: [0.240, 0.260] → [0.480, 0.520]",
        "step held-out accuracy, gsm8k held-out accuracy, math reward",  # the primary set comes first
        "checkpoint-000040 best by heldout/gsm8k/accuracy 40 0.900 [0.880, 0.920] 0.500 [0.480, 0.520]",
    ):
        assert shown in page.text, shown
    charts = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert not [chart for chart in charts if chart and chart.startswith("heldout/")]  # nothing is shown twice


def test_page_set_measured_after_training_is_in_tile(tmp_path: Path) -> None:
    folder = several_sets_run(tmp_path)
    manifest = {"metrics": {"step": 40, "heldout/gsm8k/accuracy": 0.9}, "serial": 9, "files": {}}
    folder.write_json(manifest, "checkpoint-000040", "manifest.json")
    metrics = [{name: row[name] for name in row if "/math/" not in name} for row in metric_rows(40)]
    folder.write_text("".join(json.dumps(row) + "\n" for row in metrics), "metrics.jsonl")
    folder.write_json({"heldout": {"heldout/math": {"after": {"accuracy": 0.625}}}}, "summary.json")
    assert "held-out accuracy, math 0.250 → 0.625" in harmless_text(folder)


STRANGE_SETS: list[Any] = [{}, [], {"<b>": "x"}, {"a" * 1000: "x"}, {1: "x"}, {f"s{n}": "x" for n in range(99)}]


@pytest.mark.parametrize("heldout", STRANGE_SETS, ids=lambda value: repr(value)[:20])
def test_page_strange_heldout_sets_are_shown(tmp_path: Path, heldout: Any) -> None:
    folder = write_run(tmp_path, config={**CONFIG, "data": {"heldout": heldout}})
    assert "Curves" in harmless_text(folder)


def test_page_curve_without_values_is_left_out(whole: Page) -> None:
    assert "KL divergence from the reference" not in whole.text


def test_page_without_phases_has_no_time_section(whole: Page, tmp_path: Path) -> None:
    bare = [{name: value for name, value in row.items() if not name.startswith("phase/")} for row in metric_rows(40)]
    text = Page(render_folders(write_run(tmp_path, metrics=bare))).text
    assert "Time by phase" in whole.text and "Curves" in text
    assert "Time by phase" not in text and "Step time by phase" not in text


def test_page_many_checkpoints_lists_kept_first(tmp_path: Path) -> None:
    text = Page(render_folders(write_run(tmp_path, metrics=metric_rows(200)))).text
    assert "reward checkpoint-000030 kept" in text and "all 20 checkpoints, including deleted ones" in text


def test_page_restart_is_marked_in_curves(whole: Page) -> None:
    assert "workers restarted from step 10" in whole.text


def test_page_same_run_gives_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert render_folders(folder) == render_folders(folder)


def hostile_run(where: Path, text: str, name: str = "run") -> RunFolder:
    """Write a run in which every untrusted text is the same one."""
    long = text[:20_000]
    config = {
        **CONFIG,
        "model": {"path": long},
        "data": {"train": long},
        "rewards": {"functions": [long], "settings": {text[:1000]: {text[:1000]: long}}},
        "versions": {"torch": long, "commit": long},
        "run": {"best_metric": "heldout/accuracy", "storage_path": long},
    }
    metrics = [row | {f"reward/{text[:1000]}_mean": 0.5} for row in metric_rows(40)]
    metrics[4]["checkpoint"] = text
    events = [
        *EVENTS,
        {"event": "failed", "at": STARTED + 70, "rank": text, "what": text},
        {"event": "damaged_checkpoint", "at": STARTED + 71, "what": f"a checkpoint is damaged: {text}"},
        {"event": "hang", "at": STARTED + 72, "what": f"a step hangs: {text}"},
        {"event": text, "at": STARTED + 73, "what": text},
    ]
    groups = []
    for step in range(1, 9):
        problem = text[:1000].encode("utf-8", "replace").decode()
        shown = text if step == 8 else text[:20_000]  # masking secrets in a long text takes a tenth of a second
        group = make_group(step, problem, (0.0, 1.0) * 4, texts=(shown,) * 8)
        groups.append(replace(group, prompt=attach_texts(group, [{"role": "user", "content": shown}], ()).prompt))
    return write_run(where, name, config=config, metrics=metrics, events=events, groups=groups)


@pytest.mark.long
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_page_hostile_text_adds_no_element(tmp_path: Path, harmless_tags: list[str], text: str) -> None:
    html = render_folders(hostile_run(tmp_path, text))
    data = html.encode()  # raises for a lone surrogate
    assert len(data) < 1_000_000
    page = Page(html)
    assert_harmless(page)
    assert page.tags == harmless_tags
    assert not INVISIBLE.search(html)


def test_page_template_syntax_is_not_evaluated(tmp_path: Path) -> None:
    text = Page(render_folders(hostile_run(tmp_path, "{{7919*7907}}"))).text
    assert "{{7919*7907}}" in text and str(7919 * 7907) not in text


def test_page_policy_allows_own_style_only(whole: Page) -> None:
    (policy,) = [value for tag, name, value in whole.attributes if tag == "meta" and "default-src" in (value or "")]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert whole.attributes.index(("meta", "http-equiv", "Content-Security-Policy")) < 4
    assert_harmless(whole)


def test_page_template_never_disables_escaping() -> None:
    package = Path(cli.__file__).parent / "pages" / "report"
    for template in package.glob("*.html"):
        assert "|safe" not in template.read_text().replace(" ", "") and "autoescape" not in template.read_text()
    for module in package.glob("*.py"):
        assert "Markup(" not in module.read_text()


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
    events = [*EVENTS, {"event": "failed", "at": STARTED + 70, "rank": 0, "what": what}]
    events += [{"event": "notice", "at": STARTED + 71 + n, "what": "y" * (590 + n) + URI} for n in range(30)]
    groups = [make_group(1, "a" * 16, (0.0, 1.0), texts=(f"see {URI}", "x"))]
    run = write_run(tmp_path, config=config, events=events, groups=groups)
    run.write_text("not JSON", "summary.json")
    for html in (render_folders(run), render_folders(run, write_run(tmp_path, "other"))):
        for part in (KEY, SECRET, SECRET[:8], SECRET[-12:], KEY[:12]):
            assert part not in html
        assert "s3://bucket/runs" in html and HIDDEN in html


def harmless_text(run: RunFolder) -> str:
    """Render a run's page, check that it is harmless, and return its text."""
    page = Page(render_folders(run))
    assert_harmless(page)
    return page.text


def test_page_running_run_shows_status(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=metric_rows(7), events=EVENTS)
    text = harmless_text(folder)
    assert "running; last event 39 s ago" in text  # 100 - 61
    assert "No checkpoint has been written yet" in text and "no checkpoint evaluated yet" in text


def test_page_silent_run_shows_status(tmp_path: Path) -> None:
    failed = EVENTS[: EVENTS.index(next(event for event in EVENTS if event["event"] == "failed")) + 1]
    assert "a worker failed 49 s ago; no new attempt has started" in harmless_text(write_run(tmp_path, events=failed))
    long_ago = [event | {"at": event["at"] - 7200} for event in EVENTS]
    assert "not finished; no event for 2 h" in harmless_text(write_run(tmp_path, "silent", events=long_ago))


def test_page_stopped_run_shows_status(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=metric_rows(12))
    folder.write_json({"stopped": "SIGTERM"}, "summary.json")
    assert "stopped by SIGTERM at step 12 of 40" in harmless_text(folder)


def test_page_empty_files_are_named(tmp_path: Path) -> None:
    text = harmless_text(write_run(tmp_path, metrics=[], events=[], groups=[]))
    assert "metrics.jsonl is empty" in text and "events.jsonl is empty" in text
    assert "no launch recorded yet" in text and "No completions stored yet" in text


def test_page_config_alone_is_enough(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text(yaml.safe_dump(CONFIG), "config.yaml")
    text = harmless_text(folder)
    assert "metrics.jsonl does not exist yet" in text and "No step has been reported yet" in text


def test_page_config_with_aliases_is_not_expanded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text("\n".join(lines), "config.yaml")
    assert "it has an alias" in harmless_text(folder)  # expanded, it has 10**30 entries


def test_page_truncated_line_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=metric_rows(9))
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('{"step": 10, "rew')
    text = harmless_text(folder)
    assert "the last line of metrics.jsonl is incomplete" in text and "9 of 40" in text
    with open(folder.path("metrics.jsonl"), "a") as file:
        file.write('\n{"step": 11, "reward/mean": 1.0}\n')
    text = harmless_text(folder)
    assert "metrics.jsonl: 1 invalid line, the first is line 10" in text and "11 of 40" in text


def test_page_non_finite_numbers_leave_gaps(tmp_path: Path) -> None:
    metrics = metric_rows(40)
    metrics[20]["reward/mean"] = NAN
    metrics[21]["learner/gradient_norm"] = math.inf
    folder = write_run(tmp_path, metrics=metrics)
    assert "metrics.jsonl: 2 non-finite numbers, omitted from the curves" in harmless_text(folder)
    page = render_folders(folder)
    assert not re.search(r'(?:d|x|y|x1|y1|cx|cy|width|height)="[^"]*(?:nan|inf)', page)


STRANGE: list[Any] = [None, True, "x", "", [], {}, [1], -1, 10**400, 1e300, NAN, math.inf, -math.inf]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:20])
def test_page_unexpected_values_are_shown(tmp_path: Path, value: Any) -> None:
    metrics = [dict.fromkeys(row, value) | {"step": row["step"]} for row in metric_rows(40)]
    metrics += [{"step": value}, metric_rows(40)[-1] | {"step/seconds": value}]
    events = [dict.fromkeys(event, value) | {"event": event["event"]} for event in EVENTS]
    events += [{**event, key: value} for event in EVENTS for key in event]
    config = {section: dict.fromkeys(fields, value) for section, fields in CONFIG.items()}
    folder = write_run(tmp_path, metrics=metrics, events=events, config=config)
    folder.write_json(
        {"pass_at_1": value, "heldout": {"heldout": {"after": value}}, "price": value, "stopped": value}, "summary.json"
    )
    folder.write_json({"pass_at_1": {"value": value, "low": value, "high": value}}, "heldout_before.json")
    folder.write_json({"metrics": {"step": value}, "serial": 1, "files": {}}, "checkpoint-000005", "manifest.json")
    folder.write_json(
        {"metrics": {"step": 6, "heldout/accuracy": value}, "serial": 2, "files": {}},
        "checkpoint-000006",
        "manifest.json",
    )
    assert "Curves" in harmless_text(folder)


def test_page_several_runs_share_curves(tmp_path: Path) -> None:
    faster = {**CONFIG, "grpo": CONFIG["grpo"] | {"learning_rate": 1e-3}, "run": CONFIG["run"] | {"pause_at": 40}}
    page = Page(render_folders(write_run(tmp_path, "slow"), write_run(tmp_path, "fast", config=faster)))
    assert_harmless(page)
    assert "Settings that differ slow fast grpo.learning_rate 0.0003 0.001" in page.text
    assert "run.pause_at null 40" not in page.text  # shown in the title of the run that it has stopped
    assert "step 40 slow: 1 fast: 1" in page.text  # tooltip of a strip of the chart
    assert page.text.count("checkpoint-000040 best by") == 2


def test_page_runs_of_one_name_show_their_paths(tmp_path: Path) -> None:
    page = render_folders(write_run(tmp_path / "here"), write_run(tmp_path / "there"))
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
    assert "is not a run folder" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--out FILE"):
        write_page([str(folder.local), str(folder.local)])
    with pytest.raises(ConfigError, match="at most 8"):
        write_page([str(folder.local)] * 9, "out.html")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_page([str(folder.local)], str(tmp_path / "no" / "folder" / "page.html"))


@pytest.fixture(scope="module")
def harmless_tags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tags of the page of a run in which every untrusted text is a letter."""
    return Page(render_folders(hostile_run(tmp_path_factory.mktemp("runs"), "x"))).tags


def test_page_has_the_title_of_a_sweep_in_place_of_the_names(tmp_path: Path) -> None:
    runs = [read_run(str(write_run(tmp_path, name).local)) for name in ("slow", "fast")]
    assert Page(render(runs, NOW)).text.startswith("slow and fast")
    assert Page(render(runs, NOW, title="<rates>")).text.startswith("<rates>")


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


@pytest.mark.long
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
        assert "Curves" in harmless_text(folder), name
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def test_page_eight_runs_are_small(tmp_path: Path) -> None:
    text = "<&\"'" * 3000  # each becomes five characters
    run = read_run(str(hostile_run(tmp_path, text).local))
    runs = [replace(run, folder=RunFolder(str(tmp_path), f"run-{number}")) for number in range(8)]
    assert len(render(runs, NOW).encode()) < 1_000_000


@pytest.mark.long
def test_page_size_is_bounded_for_long_runs(tmp_path: Path) -> None:
    """Long series are thinned, and the extremes stay: a spike of one step is still drawn."""
    sizes = []
    for steps in (1000, 8000):
        metrics = metric_rows(steps)
        metrics[steps // 3]["policy/entropy"] = 77.0
        events = [{"event": "step", "at": STARTED + step, "step": step} for step in range(1, steps + 1)]
        run = write_run(tmp_path, f"run-{steps}", metrics=metrics, events=[*EVENTS[:3], *events])
        html = render_folders(run)
        sizes.append(len(html))
        chart = next(chart for chart in layout_main_curves([read_run(str(run.local))]) if chart.title == "Entropy")
        heights = [float(point.split()[1]) for point in re.split("[ML]", chart.curves[0].raw)[1:]]
        assert min(heights) < 30 and sum(height < 100 for height in heights) == 1  # SVG counts from the top
    assert sizes[1] < 1.25 * sizes[0]
