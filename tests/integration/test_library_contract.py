"""The supported releases of vLLM, TRL, transformers, accelerate and Ray have all that our source uses."""

import json
from pathlib import Path
from typing import Any

import pytest
from library_contract.check import ROOT, check_releases
from library_contract.releases import FetchError, Release, oldest_and_newest
from vllm_field_table import read_release, render

from grpo_ray.config.vllm_fields import DATA

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def releases() -> list[list[Release]]:
    """The oldest and the newest supported release of each library."""
    folder = Path(ROOT, "build", "contract")  # that of `make contract`, so that releases are downloaded once
    try:
        return oldest_and_newest(ROOT / "pyproject.toml", folder)
    except FetchError as error:
        pytest.skip(f"needs the package index: {error}")


@pytest.mark.parametrize("age", [0, 1], ids=["oldest", "newest"])
def test_supported_releases_have_all_that_we_use(releases: list[list[Release]], age: int) -> None:
    results = check_releases(ROOT, releases[age])
    assert [problem for each in results for problem in each.problems] == []


def test_engine_arguments_are_those_of_the_supported_releases(releases: list[list[Release]]) -> None:
    engines = [each for both in releases for each in both if each.library == "vllm"]
    text = render({str(age): read_release(each.folder / "vllm") for age, each in enumerate(engines)})
    written = json.loads(DATA.read_text(encoding="utf-8"))

    def by_age(row: dict[str, Any]) -> dict[str, Any]:
        # A release that only mends bugs of the oldest one has the same arguments.
        return row | ({"only": [str(written["releases"].index(each)) for each in row["only"]]} if "only" in row else {})

    assert json.loads(text)["fields"] == {name: by_age(row) for name, row in written["fields"].items()}
