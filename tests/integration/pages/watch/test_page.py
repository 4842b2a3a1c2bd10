"""Tests of the live page in a headless browser: views, refreshing, keyboard, hostile text, widths and colours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_page import Browser
from failing_storage import wait_for
from page_samples import make_group, metric_rows, write_run
from synthetic_runs import SyntheticRun, answer
from watched_runs import serving, watch_command

from grpo_ray.pages.watch import refresher as refresher_module
from grpo_ray.storage.records.conversation_columns import ConversationRecord, MessageRecord, bound_messages
from grpo_ray.storage.records.heldout_files import HeldoutRecord, bound_heldout_text, write_heldout
from grpo_ray.storage.records.rollout_files import write_rollouts

HOSTILE = (
    "<script>document.title='fooled'</script><img src=x onerror=\"document.title='fooled'\">",
    "\u202eright to left\u2066 &amp; <b>bold</b> </pre></main>{{7*7}} \x1b[31m \ud83d",
    "javascript:alert(1) " + "x" * 50_000,
)


@pytest.fixture(autouse=True)
def quick_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refresher_module, "LOCAL_SECONDS", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    """A run of 40 steps with groups, tokens and held-out measurements."""
    run = SyntheticRun(str(tmp_path), groups_per_step=4, num_generations=4, save_steps=4, num_problems=60, max_steps=40)
    run.grow(40)
    return run


def wait_until(page: Any, condition: str) -> None:
    """Wait until a condition in JavaScript is true. Playwright's own way is refused by the page's policy."""
    wait_for(lambda: page.evaluate(condition), condition, 120)


def no_wide_page(page: Any) -> bool:
    """Return True if the page does not scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.slow
def test_page_views_show_report_groups_tokens_problems_and_heldout(browser: Browser, run: SyntheticRun) -> None:
    with serving(run.folder) as server, browser.page(server.url) as page:
        page.wait_for_selector("#report figure svg")
        assert page.title().startswith("run: step 40")
        assert "Held-out accuracy" in page.inner_text("#report")
        page.click("summary:has-text('more curves')")
        page.wait_for_selector("details[data-source] figure")

        page.click("#tab-rollouts")
        page.wait_for_selector("#groups button")
        assert page.inner_text("#group-count") == "40 groups with texts"
        page.click("#groups li:first-child button")
        page.wait_for_selector("#group .answer")
        assert page.locator("#group .answer").count() == 4
        page.select_option("#filter [name=outcome]", "mixed")
        wait_until(page, "!document.querySelector('#group-count').textContent.startsWith('40')")
        page.click("#groups li:first-child button")
        page.wait_for_selector("#colouring")
        for colouring, coloured in (("logprob", "l"), ("ratio", "u"), ("advantage", "p"), ("masked", "masked")):
            page.select_option("#colouring", colouring)
            page.wait_for_selector(f".tokens span[class^={coloured}]", state="attached")
        texts = page.locator(".tokens").first.inner_text()
        assert "The answer is" in texts

        page.fill("#filter [name=text]", "SYMMETRY")
        page.wait_for_selector(".excerpt mark")
        assert page.locator(".excerpt mark").first.inner_text() == "symmetry"
        assert "text=SYMMETRY" in page.url

        page.click("#tab-problems")
        page.wait_for_selector("#problem-table tbody tr")
        problem = page.inner_text("#problem-table tbody tr:first-child button")
        page.click("#problem-table tbody tr:first-child button")
        wait_until(page, f"document.querySelector('#filter [name=problem]').value === '{problem}'")
        page.wait_for_selector("#groups button")

        page.click("#tab-heldout")
        page.wait_for_selector("#heldout-problems button")
        page.click("#kinds button:nth-child(2)")
        page.wait_for_selector("#kinds button:nth-child(2)[aria-pressed=true]")
        page.click("#heldout-problems button >> nth=0")
        page.wait_for_selector("#heldout-problem .side .answer.wrong")
        assert page.locator("#heldout-problem .side h3").all_inner_texts() == ["initial policy", "step 40"]


@pytest.mark.slow
def test_page_follows_a_growing_run_and_keeps_what_is_open(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path, metrics=metric_rows(20))
    with serving(folder) as server, browser.page(server.url) as page:
        page.wait_for_selector("#report figure svg")
        page.click("summary:has-text('settings, changed')")
        page.wait_for_selector("#report details[open]")
        with open(folder.path("metrics.jsonl"), "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in metric_rows(40)[20:]))
        wait_until(page, "document.title.startsWith('run: step 40')")
        wait_until(page, "document.querySelector('#report').innerText.includes('40 of 40')")
        assert page.locator("#report details[open]").count() == 1
        page.click("#tab-rollouts")
        page.wait_for_selector("#groups button")
        write_rollouts(folder, [make_group(40, "d" * 16, (1.0, 0.0), texts=("a", "b"))])
        page.wait_for_selector("#new-groups:not([hidden])")
        page.click("#new-groups")
        page.wait_for_selector("#groups button:has-text('step 40')")

        assert folder.local is not None
        folder.local.rename(tmp_path / "other")
        page.wait_for_selector("#problem:not([hidden])")
        assert "is not there any more" in page.inner_text("#problem")
        (tmp_path / "other").rename(folder.local)
        page.wait_for_selector("#problem", state="hidden")


@pytest.mark.slow
def test_page_compares_with_the_newest_measurement(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path)

    def measure(step: int, verdict: float) -> None:
        record = HeldoutRecord(problem="p", correct=(verdict,), lengths=(5,), truncated=(False,))
        write_heldout(folder, "heldout", step, [record], policy="", conditions={})

    newest = "document.querySelector('#heldout-filter [name=after]')"
    measure(0, 0.0)
    with serving(folder) as server, browser.page(f"{server.url}#heldout") as page:
        page.wait_for_selector("#heldout-problems .empty")
        measure(40, 1.0)
        wait_until(page, f"(poll(), {newest}.value === '40')")
        page.wait_for_selector("#heldout-problems button")
        page.select_option("#heldout-filter [name=after]", "0")
        measure(50, 1.0)
        wait_until(page, f"(poll(), {newest}.options.length === 3)")
        assert page.evaluate(f"{newest}.value") == "0"


@pytest.mark.slow
def test_page_says_that_the_command_has_ended(shared_browser: Browser, tmp_path: Path) -> None:
    with watch_command(write_run(tmp_path)) as (process, url), shared_browser.page(url) as page:
        page.wait_for_selector("#report figure svg")
        process.terminate()
        process.wait(60)
        page.evaluate("poll()")
        page.wait_for_selector("#problem:not([hidden])")
        assert "does not answer" in page.inner_text("#problem")
        assert page.locator("#report figure").count() > 3


@pytest.mark.slow
def test_page_hostile_text_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    group = make_group(40, "d" * 16, (1.0, 0.0, 0.0), texts=HOSTILE)
    tokens = tuple(replace(answer(1, True, 0)[1], text=text[:200].encode("utf-8", "replace")) for text in HOSTILE)
    tokens = tuple(replace(each, ends=type(each.ends)("i", _ends(each.text, len(each.ends)))) for each in tokens)
    group = replace(group, prompt=HOSTILE[0], tokens=tokens, advantages=(1.0, -0.5, -0.5))
    config = {"run": {"name": HOSTILE[0]}, "grpo": {"max_steps": 40}}
    folder = write_run(tmp_path, name="run <b>x", groups=[group], config=config)
    for step, verdict in ((0, 0.0), (40, 1.0)):
        record = HeldoutRecord(
            problem="p", correct=(verdict,), lengths=(5,), truncated=(False,),
            prompt=bound_heldout_text(HOSTILE[1], 1), solution=HOSTILE[0], completions=(HOSTILE[0],),
        )  # fmt: skip
        write_heldout(folder, "heldout", step, [record], policy="", conditions={})
    with serving(folder) as server, browser.page(f"{server.url}#rollouts") as page:
        page.wait_for_selector("#groups button")
        page.click("#groups button")
        page.wait_for_selector("#colouring")
        assert HOSTILE[0] in page.locator("#group .answer pre").first.inner_text()
        page.select_option("#colouring", "advantage")
        page.wait_for_selector(".tokens span", state="attached")
        assert "<script>" in page.locator(".tokens").first.inner_text()
        page.fill("#filter [name=text]", "<script>")
        page.wait_for_selector(".excerpt mark")
        page.click("#tab-heldout")
        page.click("#heldout-problems button")
        page.wait_for_selector("#heldout-problem .side")
        assert "⟨U+202E⟩" in page.inner_text("#heldout-problem .prompt")
        page.click("#tab-report")
        page.wait_for_selector("#report figure")
        assert page.evaluate("document.querySelectorAll('img, iframe, object, body script').length") == 0
        assert "fooled" not in page.title() and page.inner_text("#name") == "run <b>x"
        assert no_wide_page(page)


def _ends(text: bytes, count: int) -> list[int]:
    """Divide a text into tokens at character boundaries."""
    ends, characters = [], text.decode()
    for number in range(count):
        ends.append(len(characters[: (number + 1) * len(characters) // count].encode()))
    return ends


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_page_fits_widths_and_colours(browser: Browser, run: SyntheticRun, width: int, scheme: str) -> None:
    address = "#rollouts?outcome=mixed"
    with serving(run.folder) as server, browser.page(f"{server.url}{address}", width, 844, scheme) as page:
        page.wait_for_selector("#groups button")
        page.click("#groups button")
        page.select_option("#colouring", "advantage")
        page.wait_for_selector(".tokens span", state="attached")
        assert no_wide_page(page)
        for tab, ready in (("report", "#report figure"), ("problems", "#problem-table tr td"), ("heldout", "#kinds b")):
            page.click(f"#tab-{tab}")
            page.wait_for_selector(ready)
            assert no_wide_page(page), tab
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 19, 23)"}[scheme]


@pytest.mark.slow
def test_page_is_used_with_the_keyboard_and_labelled(browser: Browser, run: SyntheticRun) -> None:
    with serving(run.folder) as server, browser.page(server.url) as page:
        page.wait_for_selector("#report figure")
        page.focus("#tab-report")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#groups button")
        assert page.evaluate("document.activeElement.id") == "tab-rollouts"
        assert page.get_attribute("#tab-rollouts", "aria-selected") == "true"
        page.focus("#groups li:first-child button")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector("#group .answer")
        assert page.locator("#groups li:nth-child(2) button[aria-current=true]").count() == 1
        page.select_option("#colouring", "logprob")
        page.focus(".tokens >> nth=0")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".token-line:has-text('token 2:')")
        unlabelled = """[...document.querySelectorAll('input, select, button, textarea, [role=group], svg[role=img]')]
            .filter((each) => each.checkVisibility())
            .filter((each) => !(each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim()))
            .map((each) => each.outerHTML)"""
        assert page.evaluate(unlabelled) == []


def tool_run(tmp_path: Path) -> SyntheticRun:
    """A run whose sampled completions are conversations with a calculator."""
    run = SyntheticRun(
        str(tmp_path), groups_per_step=4, num_generations=4, save_steps=4, num_problems=60, max_steps=40, tools=True
    )
    run.grow(40)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_page_shows_conversations_as_messages(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    run = tool_run(tmp_path)
    address = "#rollouts?outcome=mixed"
    with serving(run.folder) as server, browser.page(f"{server.url}{address}", width, 844, scheme) as page:
        page.wait_for_selector("#groups button")
        page.click("#groups button")
        page.wait_for_selector("#group .answer .message")
        answers = page.locator("#group .answer")
        titles = ["assistant", "call", "result", "final answer"]
        assert answers.nth(0).locator(".message b").all_inner_texts() == titles
        assert answers.nth(0).locator(".turns").inner_text().startswith("2 turns, 1 call, 0.012 s in tools")
        assert "boxed" in answers.nth(0).locator(".final pre").inner_text()
        assert answers.nth(1).locator(".turns .error").inner_text() == "1 call failed"
        folded = answers.nth(2).locator("details")
        assert folded.count() == 1 and not folded.locator("pre").is_visible()
        folded.locator("summary").click()
        assert "days:" in folded.locator("pre").inner_text()
        assert no_wide_page(page)

        page.select_option("#colouring", "advantage")
        page.wait_for_selector("#group .tokens .result")
        assert "not generated by the policy" in page.inner_text("#group .scale")
        results = answers.nth(0).locator(".tokens .result")
        assert results.count() == 2  # a number and a line break
        results.first.click()
        page.wait_for_selector(".token-line:has-text('no gradient')")
        colour = "getComputedStyle(document.querySelector('.tokens .result')).backgroundColor"
        assert page.evaluate(colour) != "rgba(0, 0, 0, 0)"
        assert no_wide_page(page)

        page.click("#tab-heldout")
        page.wait_for_selector("#heldout-problems button")
        page.click("#heldout-problems button >> nth=0")
        page.wait_for_selector("#heldout-problem .side .message.final")
        assert no_wide_page(page)


@pytest.mark.slow
def test_page_search_unfolds_the_result_with_the_text(browser: Browser, tmp_path: Path) -> None:
    with serving(tool_run(tmp_path).folder) as server, browser.page(f"{server.url}#rollouts?text=ninety-NINE") as page:
        page.wait_for_selector("#groups .excerpt mark")
        page.click("#groups button >> nth=0")
        page.wait_for_selector("#group .message details[open] pre mark")
        assert page.locator("#group .message details[open] pre mark").first.inner_text() == "Ninety-nine"


@pytest.mark.slow
def test_page_hostile_messages_are_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    parts = [MessageRecord(role, text[:80], text) for text in HOSTILE for role in ("call", "tool", "assistant", "<b>")]
    record = ConversationRecord(
        turns=4, calls=3, call_errors=0, tool_seconds=0.1, ended="stop", messages=bound_messages(parts, 4096)
    )
    group = replace(make_group(40, "d" * 16, (1.0, 0.0), texts=("a", "b")), conversations=(record, record))
    folder = write_run(tmp_path, groups=[group])
    for step, verdict in ((0, 0.0), (40, 1.0)):
        heldout = HeldoutRecord(
            problem="p", correct=(verdict,), lengths=(5,), truncated=(False,), prompt="?", solution="4",
            completions=("a",), conversations=(record,),
        )  # fmt: skip
        write_heldout(folder, "heldout", step, [heldout], policy="", conditions={})
    with serving(folder) as server, browser.page(f"{server.url}#rollouts") as page:
        page.wait_for_selector("#groups button")
        page.click("#groups button")
        page.wait_for_selector("#group .message")
        assert HOSTILE[0] in page.locator("#group .answer .message.tool pre").first.inner_text()
        assert "⟨U+202E⟩" in page.inner_text("#group .completions")
        page.click("#tab-heldout")
        page.click("#heldout-problems button")
        page.wait_for_selector("#heldout-problem .message")
        assert page.evaluate("document.querySelectorAll('img, iframe, object, body script, .message b b').length") == 0
        assert "fooled" not in page.title() and no_wide_page(page)
