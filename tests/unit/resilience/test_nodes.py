"""Tests of how nodes are named in error messages, and of the commit that a run records."""

import subprocess
from pathlib import Path

from grpo_ray.resilience import nodes


def test_format_nodes_one_is_singular() -> None:
    assert nodes._format_nodes(["10.0.0.1"]) == "node 10.0.0.1"


def test_format_nodes_many_lists_five() -> None:
    assert nodes._format_nodes([f"10.0.0.{n}" for n in range(8)]) == (
        "nodes 10.0.0.0, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4 and 3 more"
    )


def test_commit_of_another_repository_is_not_taken(tmp_path: Path) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "--quiet"], [*identity, "commit", "--quiet", "--allow-empty", "--message=first"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    clone, installed = tmp_path / "grpo_ray", tmp_path / "venv" / "site-packages" / "grpo_ray"
    clone.mkdir()
    installed.mkdir(parents=True)
    assert len(nodes._commit(clone)) == 12  # the root of a clone has the folder of the package
    assert nodes._commit(installed) == ""
