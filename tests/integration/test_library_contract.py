"""The supported releases of vLLM, TRL, transformers, accelerate and Ray have all that our source uses."""

from pathlib import Path

import pytest
from library_contract.check import ROOT, check_releases
from library_contract.releases import FetchError, oldest_and_newest


@pytest.mark.slow
@pytest.mark.parametrize("place", ["oldest", "newest"])
def test_supported_releases_have_all_that_we_use(place: str) -> None:
    folder = Path(ROOT, "build", "contract")  # that of `make contract`, so that releases are downloaded once
    try:
        oldest, newest = oldest_and_newest(ROOT / "pyproject.toml", folder)
    except FetchError as error:
        pytest.skip(f"needs the package index: {error}")
    results = check_releases(ROOT, oldest if place == "oldest" else newest)
    assert [problem for each in results for problem in each.problems] == []
