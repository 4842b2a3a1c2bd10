"""Tests of the generated configuration reference."""

from pathlib import Path

from grpo_ray.config.fields import field_descriptions
from grpo_ray.config.reference import PAGE, main, render
from grpo_ray.config.schema import SECTIONS, Config


def test_committed_page_equals_the_rendering():
    message = "the page is out of date; run: python -m grpo_ray.config.reference"
    assert PAGE.read_text(encoding="utf-8") == render(), message


def test_render_names_every_field_once_per_section():
    page = render()
    for section in SECTIONS:
        (body,) = [part for part in page.split("\n## ") if part.startswith(f"{section}\n")]
        rows = [line.split("`")[1] for line in body.splitlines() if line.startswith("| `")]
        inside = [path.partition(".")[2] for path in field_descriptions(Config) if path.startswith(f"{section}.")]
        assert sorted(rows) == sorted(path.rpartition(".")[2] for path in inside if path != "trl")


def test_render_table_rows_have_four_cells():
    rows = [line for line in render().splitlines() if line.startswith("|")]
    assert rows and {row.count("|") for row in rows} == {5}


def test_main_writes_the_page(tmp_path: Path):
    assert main([str(tmp_path / "docs" / "page.md")]) == 0
    assert (tmp_path / "docs" / "page.md").read_text(encoding="utf-8") == render()
