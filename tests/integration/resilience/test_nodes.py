"""Tests of the preflight check that runs on every node."""

import json
from pathlib import Path

import pytest
from several_nodes import HELPERS, several_nodes
from small_runs import small_settings

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import ModelConfig
from grpo_ray.data.registry import open_dataset
from grpo_ray.resilience import libnuma, nodes
from grpo_ray.resilience.gpu_driver import driver_issue_here
from grpo_ray.storage.run_folder import RunFolder


@pytest.fixture(scope="module")
def own_versions() -> dict[str, str]:
    """Return the versions of this machine, computed once: an edit of the package during the tests must not matter."""
    return nodes.versions()


def test_check_this_node_equal_to_driver_has_no_issue(own_versions: dict[str, str], tmp_path: Path) -> None:
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    shards = open_dataset("arithmetic", "train", config.data)[:1]
    assert nodes.check_this_node(config, folder, "token", own_versions, shards, has_workers=True, on_gpu=False) == []
    assert folder.file_sizes() == {nodes.PROBE: 5}


def test_check_this_node_asks_the_gpu_driver_where_workers_compute_on_gpus(
    own_versions: dict[str, str], tmp_path: Path
) -> None:
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    issues = nodes.check_this_node(config, folder, "token", own_versions, [], has_workers=True, on_gpu=True)
    # On a machine without GPUs there is an issue.
    assert issues == [f"cluster.use_gpu=true: {issue}" for issue in [driver_issue_here()] if issue]


def test_check_this_node_names_libnuma_where_it_is_missing(
    own_versions: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    monkeypatch.setattr(libnuma, "LIBRARY", "libnuma-that-is-missing.so.1")
    (issue,) = nodes.check_this_node(config, folder, "token", own_versions, [], has_workers=True, on_gpu=False)
    assert issue.startswith("libnuma-that-is-missing.so.1, which vLLM's CPU build needs, is not installed; ")
    assert nodes.check_this_node(config, folder, "token", own_versions, [], has_workers=False, on_gpu=False) == []


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (["rollout.tools=['grpo_ray.tools.python_tool:python']"], 1),
        (["rollout.tools=['grpo_ray.tools.python_tool:python']", "rollout.isolation=best"], 0),
        (["rollout.tools=['grpo_ray.tools.examples:multiply']", "rollout.confine=true"], 1),
        (["rollout.tools=['grpo_ray.tools.examples:multiply']"], 0),
    ],
)
def test_check_this_node_that_cannot_confine_code_has_an_issue(
    own_versions: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], count: int
) -> None:
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r", *settings])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    # This machine can confine code; tests/unit/processes/test_isolation.py has the issue itself.
    monkeypatch.setattr(nodes, "isolation_issue", lambda: "rollout.isolation=required: none here")
    issues = nodes.check_this_node(config, folder, "token", own_versions, [], has_workers=True, on_gpu=False)
    assert issues == ["rollout.isolation=required: none here"] * count


def test_check_this_node_without_the_sandboxs_token_has_an_issue(
    own_versions: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = ["rollout.tools=['grpo_ray.tools.remote_python:python']", "rollout.sandbox_url=https://host"]
    token = "rollout.sandbox_token_variable=SANDBOX"
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r", *remote, token])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("token", nodes.PROBE)
    issue = "rollout.sandbox_token_variable=SANDBOX: this environment variable is not set"
    for value, issues in (("", [issue]), ("secret", [])):
        monkeypatch.setenv("SANDBOX", value)
        found = nodes.check_this_node(config, folder, "token", own_versions, [], has_workers=True, on_gpu=False)
        assert found == issues


def test_check_this_node_lists_every_issue(own_versions: dict[str, str], tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "1+1?", "solution": "2"}) + "\n")
    config = load_config(None, [f"run.storage_path={tmp_path}", "run.name=r", f"model.path={tmp_path / 'model'}"])
    folder = RunFolder(config.run.storage_path, config.run.name)
    folder.write_text("another token", nodes.PROBE)
    shards = open_dataset(str(problems), "train", config.data)
    problems.unlink()
    driver_versions = own_versions | {"trl": "0.1", "python": "2.7.18"}
    issues = nodes.check_this_node(config, folder, "token", driver_versions, shards, has_workers=True, on_gpu=False)
    subjects = ["trl", "python", "run.storage_path", "model.path", str(problems)]

    def subject(issue: str) -> int:
        return next(number for number, name in enumerate(subjects) if name in issue)

    versions, python, storage, model, data = sorted(issues, key=subject)
    assert versions.endswith("but 0.1 on the driver")
    assert python.endswith("but 2.7 on the driver")
    assert "not the driver's storage" in storage
    assert "cannot be read" in model
    assert "problems.jsonl" in data


def test_version_differences_ignore_patch_release_and_commit(own_versions: dict[str, str]) -> None:
    patch = own_versions["python"].rpartition(".")[0] + ".99"
    assert nodes.version_differences(own_versions | {"python": patch, "commit": "another"}) == []


def test_version_differences_list_missing_packages(own_versions: dict[str, str]) -> None:
    without_trl = {package: version for package, version in own_versions.items() if package != "trl"}
    assert nodes.version_differences(without_trl | {"another": "1.0"}) == [
        "another is missing here but 1.0 on the driver",
        f"trl is {own_versions['trl']} here but missing on the driver",
    ]


def train(overrides: list[str], output: str) -> None:
    """Start a run and write the error that ends it to a file; called in a separate process."""
    from grpo_ray.driver.run import train as run_training
    from grpo_ray.errors import ConfigError

    nodes.CHECK_TIMEOUT_SECONDS = 900.0  # a busy machine takes minutes to start the processes of two nodes
    try:
        run_training(load_config(None, overrides))
    except ConfigError as error:
        Path(output).write_text(str(error))


@pytest.mark.slow
def test_check_nodes_other_versions_stop_run_before_workers(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "math_verify-0.0.1.dist-info").mkdir(parents=True)
    (other / "math_verify-0.0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: math-verify\nVersion: 0.0.1\n"
    )
    output = tmp_path / "error.txt"
    # An embedded policy, because every node has it.
    overrides = [*small_settings("r", tmp_path, tmp_path), f"model.path={ModelConfig.path}"]
    with several_nodes(4) as cluster:
        cluster.add_node(2, PYTHONPATH=f"{other}:{HELPERS}")
        driver = cluster.drive(train, overrides=overrides, output=str(output))
        code = driver.wait(1200)
        assert code == 0, (cluster.folder / "driver.log").read_text()[-2000:]
    first, *issues = output.read_text().splitlines()
    assert first == "the cluster is not ready, so the run was not started:"
    # Driver and nodes hash the package's source at different times; it may be edited in between.
    issues = [issue for issue in issues if ": grpo_ray is " not in issue]
    assert len(issues) == 1 and "math-verify is 0.0.1 here" in issues[0]
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_model_issue_router_loss_needs_one_worker_and_one_pass(tmp_path: Path) -> None:
    # Qwen3-MoE's own config has a coefficient of 0.001, which TRL takes.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "router_aux_loss_coef": 0.001}))
    settings = [f"model.path={tmp_path}", "grpo.prompts_per_step=4", "grpo.num_generations=4"]
    refused = nodes.model_issue(load_config(None, settings))
    assert refused is not None and "set grpo.router_aux_loss_coef=0, or cluster.num_workers=1" in refused
    for accepted in (["grpo.router_aux_loss_coef=0"], ["cluster.num_workers=1", "grpo.micro_batch_size=16"]):
        assert nodes.model_issue(load_config(None, [*settings, *accepted])) is None
