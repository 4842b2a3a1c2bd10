"""Tests of the recipes: each example has one, with the results of its runs; curves are drawn, and data prepared."""

import json
import re
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest
import recipe_curve

from grpo_ray.config.loader import load_config
from grpo_ray.examples import example_names, example_path

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path for path in (ROOT / "recipes").iterdir() if path.is_dir())
SECTIONS = ["What to expect", "What to look at", "What went wrong"]


def test_each_example_is_linked_by_one_recipe() -> None:
    links = sorted(path for folder in FOLDERS for path in folder.glob("*.yaml"))
    assert sorted(link.stem for link in links) == sorted(example_names())
    for link in links:
        assert link.is_symlink() and link.resolve() == example_path(link.stem).resolve()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_recipe_describes_its_configs_and_what_was_seen(folder: Path) -> None:
    text = (folder / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading != "Data"] == SECTIONS
    configs = [load_config(path) for path in folder.glob("*.yaml")]
    assert all(f"({path.name})" in text for path in folder.glob("*.yaml"))
    is_trained = not any(config.cluster.use_gpu for config in configs)
    # A curve and figures where it was trained, and otherwise the statement that it was not.
    assert is_trained == (folder / "curve.svg").exists() == ("](curve.svg)" in text)
    assert is_trained == ("only been checked" not in text) == ("Not measured." not in text)
    assert ("## Data" in text) == (
        "no data has to\nbe prepared" not in text and "no data has to be prepared" not in text
    )
    index = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| \[{folder.name}\]\({folder.name}/README.md\).*$", index, re.MULTILINE)
    assert ("| trained; " in row) == is_trained


@pytest.mark.parametrize(
    "folder", [each for each in FOLDERS if (each / "curve.svg").exists()], ids=lambda path: path.name
)
def test_curve_of_a_recipe_is_one_of_its_runs(folder: Path) -> None:
    picture = ET.parse(folder / "curve.svg").getroot()
    title = picture.findtext("{http://www.w3.org/2000/svg}title")
    assert title in [f"{load_config(path).run.name}: reward by step" for path in folder.glob("*.yaml")]


def test_recipe_curve_draws_reward_and_heldout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "game"
    run.mkdir()
    rows = [{"step": step, "reward/mean": step / 4} for step in (1, 2, 3)]
    rows[1] |= {"heldout/accuracy": 0.5, "heldout/low": 0.25, "heldout/high": 0.75}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = {"accuracy": 0.0, "low": 0.0, "high": 0.25}
    sets = {"heldout/sums": {"before": {**before, "accuracy": 0.125}}, "heldout/games": {"before": before}}
    (run / "summary.json").write_text(json.dumps({"heldout": sets, "heldout_before": 0.0}))
    reward, heldout = recipe_curve.curves_of(run)
    assert reward.points == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert heldout.points == [(0, 0.0), (2, 0.5)] and heldout.intervals == [(0.0, 0.25), (0.25, 0.75)]
    output = tmp_path / "curve.svg"
    monkeypatch.setattr(sys, "argv", ["recipe_curve.py", str(run), str(output)])
    assert recipe_curve.main() == 0
    picture = ET.parse(output).getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}path")) >= 3  # the axis and two curves


def test_mbpp_problem_shows_the_first_test() -> None:
    prepare = runpy.run_path(str(ROOT / "recipes" / "mbpp-code" / "prepare.py"))
    row = {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "task_id": 7}
    problem = prepare["problem"](row)
    assert problem["prompt"] == (
        "Add two numbers. Your code must pass:\nassert add(1, 2) == 3\nAnswer with one block of Python."
    )
    assert problem["test_list"] == row["test_list"] and problem["task_id"] == 7


def test_mbpp_problems_of_both_splits_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str, *, split: str) -> list[dict[str, object]]:
        assert (name, config) == ("google-research-datasets/mbpp", "full")
        return [{"text": f"Of {split}.", "test_list": ["assert f()"]}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    folder = tmp_path / "new" / "folder"
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--folder", str(folder)])
    runpy.run_path(str(ROOT / "recipes" / "mbpp-code" / "prepare.py"))["main"]()
    assert sorted(path.name for path in folder.iterdir()) == ["mbpp-test.jsonl", "mbpp-train.jsonl"]
    assert json.loads((folder / "mbpp-test.jsonl").read_text())["prompt"].startswith("Of test. Your code must pass:")
