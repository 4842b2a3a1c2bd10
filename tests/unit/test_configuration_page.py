"""Tests of the generated configuration reference."""

import dataclasses
import re
from pathlib import Path

from configuration_page import PAGE, main, render

from grpo_ray.config.fields import field_descriptions
from grpo_ray.config.schema import SECTIONS, Config, GrpoConfig, SourceConfig
from grpo_ray.config.trl_fields import trl_fields


def test_committed_page_equals_the_rendering() -> None:
    message = "the page is out of date; run: python scripts/configuration_page.py"
    assert PAGE.read_text(encoding="utf-8") == render(), message


def test_render_names_every_field_once_per_section() -> None:
    page = render()
    for section in SECTIONS:
        (body,) = [part for part in page.split("\n## ") if part.startswith(f"{section}\n")]
        body = re.split(r"\n### (?:grpo|engine\.vllm)", body)[0]  # tables of TRL's fields and vLLM's arguments
        rows = [line.split("`")[1] for line in body.splitlines() if line.startswith("| `")]
        inside = [path.partition(".")[2] for path in field_descriptions(Config) if path.startswith(f"{section}.")]
        inside += field_descriptions(SourceConfig) if section == "data" else []
        assert sorted(rows) == sorted(path.rpartition(".")[2] for path in inside if path != "trl")


def test_render_table_rows_have_as_many_cells_as_their_head() -> None:
    tables = [part for part in render().split("\n\n") if part.startswith("| ")]
    # data.train, model.lora, model.adapter_optimizer, rollout.structured_outputs, four tables of TRL's fields, two of
    # vLLM's arguments
    assert len(tables) == len(SECTIONS) + 10
    for table in tables:
        assert len({row.count("|") for row in table.strip().splitlines()}) == 1, table


def test_render_names_every_field_of_trl_in_one_table() -> None:
    """A field that is also a key of the section `grpo` is described as that key only."""
    body = render().split("\n### grpo: fields of TRL\n")[1].split("\n## ")[0]
    without_conditions = re.sub(r"### grpo: fields of TRL that need.*?(?=###)", "", body, flags=re.DOTALL)
    rows = [line.split("`")[1] for line in without_conditions.splitlines() if line.startswith("| `")]
    keys = {field.name for field in dataclasses.fields(GrpoConfig)}
    assert sorted(rows) == sorted(trl_fields().keys() - keys)


def test_main_writes_the_page(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "docs" / "page.md")]) == 0
    assert (tmp_path / "docs" / "page.md").read_text(encoding="utf-8") == render()
