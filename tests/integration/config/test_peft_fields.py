"""Comparison of the table of PEFT's adapters with the installed release."""

from pathlib import Path

import peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft_field_table import main, render

from grpo_ray.config.peft_fields import DATA, OURS, REFUSED_TYPES, peft_types


def test_table_equals_the_installed_release() -> None:
    committed = DATA.read_text(encoding="utf-8")
    assert committed == render(), f"run python scripts/peft_field_table.py for PEFT {peft.__version__}"


def test_main_writes_the_file(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "fields.json")]) == 0
    assert (tmp_path / "fields.json").read_text() == DATA.read_text()


def test_every_type_is_taken_or_refused() -> None:
    assert {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} == peft_types().keys() | REFUSED_TYPES.keys()


def test_derived_fields_are_those_of_every_type() -> None:
    for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        assert OURS.keys() <= config.__dataclass_fields__.keys(), kind
