"""Tests that figures in README are those of the pages: results of docs/performance.md, times of the tests of one place.

Figures are read by structure (a number, its spread, the unit behind it), so that the text around them may change.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import pytest
from documents import ROOT

UNITS = {
    **dict.fromkeys(("s", "second", "seconds"), "s"),
    **dict.fromkeys(("min", "minute", "minutes"), "min"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
    **dict.fromkeys(("x", "times"), "times"),
    **dict.fromkeys(("step", "steps"), "steps"),
    **dict.fromkeys(("worker", "workers"), "workers"),
    **dict.fromkeys(("core", "cores"), "cores"),
    **dict.fromkeys(("GPU", "GPUs"), "GPUs"),
    **{name: name for name in ("%", "completions", "problems", "seeds", "tests", "tokens", "GB", "GiB", "MB", "MiB")},
}
"""Word behind a number -> its unit. Any other word is no unit."""

WORDS = {"a": "1", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "ten": "10"}
"""Numbers that running text writes as words, before a unit of time."""

NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?<![\w.,-])(?P<value>{NUMBER})(?![\d.]*\d)(?:\s*±\s*(?P<spread>{NUMBER}))?\s*"
    rf"(?P<unit>%|(?:{'|'.join(sorted(filter(str.isalpha, UNITS), key=len, reverse=True))})\b)?"
)
CONNECTED = re.compile(r"\s*(?:,|to|and|or|-|->|→|,? and)\s*")
"""Text between two numbers of which only the last has the unit: "2.0 to 3.3 times"."""


@dataclass(frozen=True)
class Figure:
    """Number of a document."""

    text: str
    value: Decimal
    spread: Decimal | None
    unit: str

    def is_source_of(self, other: "Figure") -> bool:
        """Return True if the other one is this figure, in whole or without its unit or spread, or this one rounded."""
        has_spread = other.spread is None or (self.spread is not None and agrees(self.spread, other.spread))
        return other.unit in ("", self.unit) and agrees(self.value, other.value) and has_spread


def agrees(source: Decimal, other: Decimal) -> bool:
    """Return True if a number is its source, or its source rounded to one decimal or more."""
    decimals = other.as_tuple().exponent
    assert isinstance(decimals, int)
    return source == other or (decimals < 0 and source.quantize(other) == other)


def figures(text: str) -> list[Figure]:
    """Return the figures of a Markdown text, without those of code and of the targets of links."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    found = list(FIGURE.finditer(text))
    units = [UNITS.get(each["unit"] or "", "") for each in found]
    for at in reversed(range(len(found) - 1)):
        if not units[at] and CONNECTED.fullmatch(text[found[at].end() : found[at + 1].start()]):
            units[at] = units[at + 1]
    return [
        Figure(
            " ".join(each[0].split()), number(each["value"]), number(each["spread"]) if each["spread"] else None, unit
        )
        for each, unit in zip(found, units, strict=True)
    ]


def number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """Return the text of a section of a page."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {heading!r}"
    return found[1]


def unfounded(text: str, source: str) -> list[str]:
    """Return the figures of a text that its source does not have."""
    known = figures(source)
    return [each.text for each in figures(text) if not any(one.is_source_of(each) for one in known)]


def outputs(page: str) -> str:
    """Return the text blocks of a page that show an output with held-out results."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return "\n".join(block for block in blocks if "held-out" in block)


def test_readme_results_are_figures_of_the_performance_page() -> None:
    results = section(read("README.md"), "Results")
    assert re.search(r"^\|.*\d\.\d+.*\|$", results, re.MULTILINE), "Results has no table with figures"
    missing = unfounded(results, read("docs/performance.md"))
    assert missing == [], f"README.md, Results: {missing} are not in docs/performance.md; correct the older of the two"


def test_readme_output_shows_figures_of_the_performance_page() -> None:
    shown = re.sub(r"~?/\S+", "", outputs(read("README.md")))  # a path has a number of a step
    assert figures(shown)
    assert unfounded(shown, read("docs/performance.md")) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("| 0.235 | 0.98 | 35 s of training |", []),
        ("2.0 to 3.3 times; 0.947 ± 0.010; 4,000 problems; [1.5](x.md), `9`", []),
        ("0.99 after 36 s", ["0.99", "36 s"]),
        ("0.947 ± 0.011", ["0.947 ± 0.011"]),
        ("2.0 to 3.4 times", ["3.4 times"]),
        ("35 min; 98 %", ["35 min", "98 %"]),
        ("1 seeds", ["1 seeds"]),
    ],
)
def test_unfounded_figures_are_found(text: str, missing: list[str]) -> None:
    source = "0.235, 0.980; 35 s; (1.96x), (3.26x), 0.947 ± 0.010, 4,000 problems, 1.5 and 0.6 seeds"
    assert unfounded(text, source) == missing


# --- Times and numbers of tests ---

MENTION = re.compile(r"\bmake ([\w-]+)")
SPAN = re.compile(rf"\b({NUMBER}|{'|'.join(WORDS)})(?: (?:to|and|or) ({NUMBER}))? (s|min|minutes?|h|hours?|tests)\b")
SECONDS = {"s": 1, "min": 60, "h": 3600}


def sizes(text: str) -> set[str]:
    """Return times ("180 s") and numbers of tests ("4000 tests") of a text."""
    found = set()
    for first, last, unit in SPAN.findall(text):
        for each in filter(None, (first, last)):
            amount = number(WORDS.get(each, each))
            found.add(f"{amount} tests" if unit == "tests" else f"{(amount * SECONDS[UNITS[unit]]).normalize():f} s")
    return found


def sizes_by_target(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each target of make that a text mentions, with the times and numbers that follow it on the line."""
    for line in text.splitlines():
        mentions = list(MENTION.finditer(line))
        ends = [mention.start() for mention in mentions[1:]] + [len(line)]
        for mention, end in zip(mentions, ends, strict=False):  # a line without a mention has an end, too
            yield mention[1], sizes(line[mention.end() : end])


def table_of_tests(readme: str) -> dict[str, set[str]]:
    """Return the targets of README's table of tests, each with the times and numbers of its row."""
    rows = [line for line in section(readme, "Tests").splitlines() if line.startswith("| `make")]
    return {target: sizes(row) for row in rows for target in MENTION.findall(row.split("|")[1])}


def contradictions(table: dict[str, set[str]], text: str) -> list[str]:
    """Return the times and numbers of a text that the table gives otherwise."""
    return [
        f"make {target}: {', '.join(sorted(other))}, not {', '.join(sorted(table[target]))}"
        for target, found in sizes_by_target(text)
        if target in table and (other := found - table[target])
    ]


@pytest.mark.parametrize("name", ["docs/development.md", "CONTRIBUTING.md", "Makefile"])
def test_times_of_tests_are_those_of_readme(name: str) -> None:
    table = table_of_tests(read("README.md"))
    assert {"test-unit", "test", "test-all"} <= table.keys()
    found = contradictions(table, read(name))
    assert found == [], f"{name} and the table in README.md, section Tests, differ: {found}; correct the older one"


def test_development_page_gives_times_of_tests() -> None:
    given = {target for target, found in sizes_by_target(read("docs/development.md")) if found}
    assert given & table_of_tests(read("README.md")).keys()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("make test-unit  # 3 minutes, 4,000 tests", []),
        ("`make test` takes 22 min", []),
        ("`make test-unit` (about a minute), then `make test`", ["make test-unit: 60 s, not 180 s, 4000 tests"]),
        ("make test-gpu: under 21 minutes", ["make test-gpu: 1260 s, not 1200 s, 1500 s, 240 s"]),
    ],
)
def test_contradicting_times_are_found(text: str, found: list[str]) -> None:
    readme = """## Tests

| command | runs | 2 cores |
|---|---|---|
| `make test-unit` | 4,000 tests | 3 min |
| `make test` | these | 22 min |
| `make test-gpu`, `make bench-gpu` | under 20 minutes each | 25 and 4 min |
"""
    assert contradictions(table_of_tests(readme), text) == found
