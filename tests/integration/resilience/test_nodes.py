"""Tests of the checks that every machine runs before a run takes its GPUs."""

import json
from pathlib import Path

import pytest
from several_nodes import HELPERS, several_nodes
from small_runs import small_settings

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import ModelConfig
from grpo_ray.data.registry import open_dataset
from grpo_ray.resilience import nodes
from grpo_ray.storage.run_folder import RunFolder


@pytest.fixture(scope="module")
def own_versions() -> dict[str, str]:
    """Versions of this machine, computed once: an edit of the package during the tests must not become a fault."""
    return nodes.versions()


def test_look_machine_like_the_driver_has_no_fault(own_versions: dict[str, str], tmp_path: Path) -> None:
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    shards = open_dataset(config.data.train, "train", config.data)[:1]
    assert nodes.look(config, folder, "token", own_versions, shards, has_workers=True) == []
    assert folder.file_sizes() == {nodes.PROBE: 5}


def test_look_names_every_fault(own_versions: dict[str, str], tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "1+1?", "solution": "2"}) + "\n")
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r", f"model.path={tmp_path / 'model'}"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("another token", nodes.PROBE)
    shards = open_dataset(str(problems), "train", config.data)
    problems.unlink()
    wanted = own_versions | {"trl": "0.1", "python": "2.7.18"}
    faults = nodes.look(config, folder, "token", wanted, shards, has_workers=True)
    subjects = ["trl", "python", "run.storage_path", "model.path", str(problems)]

    def subject(fault: str) -> int:
        return next(number for number, name in enumerate(subjects) if name in fault)

    versions, python, storage, model, data = sorted(faults, key=subject)
    assert versions.endswith("and 0.1 where the driver runs")
    assert python.endswith("and 2.7 where the driver runs")
    assert "is not the storage that the driver writes to" in storage
    assert "cannot be read" in model
    assert "problems.jsonl" in data


def test_differences_ignore_patch_release_and_commit(own_versions: dict[str, str]) -> None:
    patch = own_versions["python"].rpartition(".")[0] + ".99"
    assert nodes.differences(own_versions | {"python": patch, "commit": "another"}) == []


def test_differences_name_packages_that_only_one_side_has(own_versions: dict[str, str]) -> None:
    without_trl = {package: version for package, version in own_versions.items() if package != "trl"}
    assert nodes.differences(without_trl | {"another": "1.0"}) == [
        "another is missing here, and 1.0 where the driver runs",
        f"trl is {own_versions['trl']} here, and missing where the driver runs",
    ]


def train(overrides: list[str], output: str) -> None:
    """Start a run and write the error that ends it; called in a process of its own."""
    from grpo_ray.driver.run import train as run_training
    from grpo_ray.errors import ConfigError

    nodes.ANSWER_SECONDS = 900.0  # a busy machine takes minutes to start the processes of two nodes
    try:
        run_training(load_config(None, overrides))
    except ConfigError as error:
        Path(output).write_text(str(error))


def test_check_nodes_other_versions_stop_run_before_workers(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "math_verify-0.0.1.dist-info").mkdir(parents=True)
    (other / "math_verify-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: math-verify\nVersion: 0.0.1\n"
    )
    output = tmp_path / "error.txt"
    # The embedded policy: it is built only after the nodes were checked.
    overrides = [*small_settings("r", tmp_path, tmp_path), f"model.path={ModelConfig.path}"]
    with several_nodes(4) as cluster:
        cluster.add_node(2, PYTHONPATH=f"{other}:{HELPERS}")
        driver = cluster.drive(train, overrides=overrides, output=str(output))
        code = driver.wait(1200)
        assert code == 0, (cluster.folder / "driver.log").read_text()[-2000:]
    first, *faults = output.read_text().splitlines()
    assert first == "the cluster is not ready, so nothing was started:"
    # Driver and nodes compute the digest of the package's source at different times, between which it may be edited.
    faults = [fault for fault in faults if ": grpo_ray is " not in fault]
    assert len(faults) == 1 and "math-verify is 0.0.1 here" in faults[0]
    assert not (tmp_path / "r" / "metrics.jsonl").exists()
