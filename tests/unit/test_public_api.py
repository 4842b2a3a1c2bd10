"""Tests of the public interface: the names of `grpo_ray`, imported at their first use."""

import ast
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_ray
from grpo_ray import errors

PUBLIC = {
    *("train", "prepare", "load_config", "Config", "Problem", "accuracy_reward", "load_reward", "__version__"),
    *("load_stages", "train_stages"),
    *("GrpoRayError", "ConfigError", "DataError", "RewardError", "VerifierError", "SyncError", "CheckpointError"),
    *("SupersededError", "LedgerError", "TrainingError", "DamagedFileError", "RepeatedWorkerError", "NonFiniteError"),
    *("HubError", "ToolError", "ConfinementError", "RolloutError", "TakenRunError", "RefusedRewardError"),
    *("EndpointAccess", "EngineError", "RolloutPolicy", "RolloutRow", "Run", "Trajectory"),
}

LIGHT_NAMES = sorted(PUBLIC - {"train", "prepare", "train_stages"})
"""Names whose use loads no heavy library."""

HEAVY = ("torch", "ray", "vllm", "trl", "transformers", "pandas", "pyarrow")


def run_python(code: str) -> str:
    """Return the output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_the_public_interface() -> None:
    assert set(grpo_ray.__all__) == PUBLIC and len(grpo_ray.__all__) == len(PUBLIC)
    assert set(dir(grpo_ray)) >= PUBLIC


def test_all_contains_every_error() -> None:
    tree = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert tree <= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_public_name_is_the_object_of_its_module(name: str) -> None:
    value = getattr(grpo_ray, name)
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert value.__doc__ and name in vars(grpo_ray)  # the next use imports nothing


def test_type_checker_imports_match_the_lazy_names() -> None:
    tree = ast.parse(Path(grpo_ray.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported.keys() == PUBLIC - {"__version__"}
    assert {name: getattr(grpo_ray, name).__module__ for name in imported} == imported


def test_version_is_that_of_the_installed_package() -> None:
    assert grpo_ray.__version__ == importlib.metadata.version("grpo-ray")


def test_version_without_installation_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.delitem(vars(grpo_ray), "__version__", raising=False)
    try:
        assert grpo_ray.__version__ == "0+unknown"
    finally:
        vars(grpo_ray).pop("__version__", None)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'grpo_ray' has no attribute 'nothing'"):
        _ = grpo_ray.nothing


def test_import_loads_no_module_of_the_package() -> None:
    code = "import sys; before = set(sys.modules); import grpo_ray; print(*set(sys.modules) - before)"
    loaded = run_python(code).split()
    assert "grpo_ray" in loaded
    assert [name for name in loaded if name.startswith("grpo_ray.")] == []
    assert {name.partition(".")[0] for name in loaded} - {"grpo_ray"} <= set(sys.stdlib_module_names)


def test_light_names_load_no_heavy_library() -> None:
    code = (
        "import json, sys, grpo_ray\n"
        f"for name in {LIGHT_NAMES!r}: getattr(grpo_ray, name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    assert json.loads(run_python(code)) == []
