"""Tests of the page of stages: run folders in one folder, whose curves follow one another."""

import json
from pathlib import Path

import pytest
from page_samples import CONFIG, metric_rows, write_run

from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.pages.report import write_page
from grpo_ray.pages.report.read import find_stages, follow_one_another, read_run


def write_stages(tmp_path: Path, *names: str, begun: int = 2) -> Path:
    """Write a folder of stages, of which the first ones have begun; each has taken 40 steps."""
    folder = tmp_path / "math"
    folder.mkdir()
    (folder / "stages.json").write_text(json.dumps(names))
    for name in names[:begun]:
        write_run(folder, name, config=CONFIG | {"run": CONFIG["run"] | {"name": name}}, metrics=metric_rows(40))
    return folder


def test_curves_of_a_stage_begin_where_those_before_it_end(tmp_path: Path) -> None:
    folder = write_stages(tmp_path, "01-warm", "02-hard", "03-last")
    _, paths = find_stages(str(folder))
    assert [Path(path).name for path in paths] == ["01-warm", "02-hard"]  # the third has not begun
    first, second = follow_one_another([read_run(path) for path in paths])
    steps = [[step for step, _ in run.series("reward/mean")] for run in (first, second)]
    assert steps == [list(range(1, 41)), list(range(41, 81))]


def test_page_of_stages_is_written_beside_them(tmp_path: Path) -> None:
    folder = write_stages(tmp_path, "01-warm", "02-hard")
    assert write_page([str(folder)]) == str(folder / "report.html")
    page = (folder / "report.html").read_text()
    assert "01-warm and 02-hard" in page and "step 80" in page
    overlaid = tmp_path / "both.html"
    write_page([str(folder / name) for name in ("01-warm", "02-hard")], str(overlaid))
    assert "step 80" not in overlaid.read_text()


def test_stages_that_have_not_begun_have_no_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no stage has begun; run grpo-ray train first"):
        write_page([str(write_stages(tmp_path, "01-warm", begun=0))])


@pytest.mark.parametrize("names", ['["../secrets"]', '["/etc"]', "{}", "[1]", '["warm"]'])
def test_hostile_list_of_stages_is_refused(tmp_path: Path, names: str) -> None:
    folder = write_stages(tmp_path, "01-warm", begun=1)
    (folder / "stages.json").write_text(names)
    with pytest.raises(DamagedFileError, match=r"stages.json is damaged: it is no list of run folders"):
        write_page([str(folder)])


def test_list_of_stages_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = write_stages(tmp_path, "01-warm", begun=1)
    (tmp_path / "elsewhere.json").write_text('["01-warm"]')
    (folder / "stages.json").unlink()
    (folder / "stages.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(DamagedFileError, match=r"stages.json is a link that leads out of the run"):
        write_page([str(folder)])
