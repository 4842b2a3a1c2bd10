"""What every machine is asked before a run takes its GPUs."""

import json
from pathlib import Path

import pytest
from several_nodes import HELPERS, several_nodes
from small_runs import small_settings

from grpo_ray import nodes
from grpo_ray.data import open_dataset
from grpo_ray.settings import load
from grpo_ray.storage import RunFolder


def test_a_machine_like_the_drivers_lacks_nothing(tmp_path: Path) -> None:
    config = load(None, [f"run.storage_path={tmp_path}", "run.name=r"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    shards = open_dataset(config.data.train, "train", config.data)[:1]
    assert nodes.look(config, folder, "token", nodes.versions(), shards, has_workers=True) == []
    assert folder.file_sizes() == {nodes.PROBE: 5}


def test_each_thing_that_a_machine_lacks_is_named(tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "1+1?", "solution": "2"}) + "\n")
    config = load(None, [f"run.storage_path={tmp_path}", "run.name=r", f"model.path={tmp_path / 'model'}"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("another token", nodes.PROBE)
    shards = open_dataset(str(problems), "train", config.data)
    problems.unlink()
    wanted = nodes.versions() | {"trl": "0.1", "python": "2.7.18"}
    versions, python, storage, model, data = sorted(
        nodes.look(config, folder, "token", wanted, shards, has_workers=True),
        key=lambda said: ["trl", "python", "run.storage_path", "model.path", str(problems)].index(
            next(name for name in ("trl", "python", "run.storage_path", "model.path", str(problems)) if name in said)
        ),
    )
    assert versions.endswith("and 0.1 where the driver runs")
    assert python.endswith("and 2.7 where the driver runs")
    assert "is not the storage that the driver writes to" in storage
    assert "cannot be read" in model
    assert "problems.jsonl" in data


def test_another_patch_release_of_python_and_another_commit_are_no_difference() -> None:
    mine = nodes.versions()
    patch = mine["python"].rpartition(".")[0] + ".99"
    assert nodes.differences(mine | {"python": patch, "commit": "another"}) == []


def test_a_fault_of_many_nodes_is_said_once() -> None:
    assert nodes._named(["10.0.0.1"]) == "node 10.0.0.1"
    assert nodes._named([f"10.0.0.{n}" for n in range(8)]) == (
        "nodes 10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 more"
    )


def train(overrides: list[str], said: str) -> None:
    """What the driver of the next test does."""
    from grpo_ray import launch
    from grpo_ray.errors import ConfigError

    try:
        launch.train(load(None, overrides))
    except ConfigError as error:
        Path(said).write_text(str(error))


def test_a_node_with_other_versions_is_named_before_any_worker_starts(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "math_verify-0.0.1.dist-info").mkdir(parents=True)
    (other / "math_verify-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: math-verify\nVersion: 0.0.1\n"
    )
    said = tmp_path / "said.txt"
    with several_nodes(4) as cluster:
        cluster.add_node(2, PYTHONPATH=f"{other}:{HELPERS}")
        assert cluster.drive(train, overrides=small_settings("r", tmp_path, policy), said=str(said)).wait(600) == 0
    first, *faults = said.read_text().splitlines()
    assert first == "the cluster is not ready, so nothing was started:"
    assert len(faults) == 1 and "math-verify is 0.0.1 here" in faults[0]
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
