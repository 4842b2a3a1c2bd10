"""Tests of the cluster templates with bash, with Ray's AWS setup on moto, and with Ray's packaging of the checkout."""

import copy
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture
def cluster_yaml() -> dict[str, Any]:
    return read("cluster.yaml")


@pytest.fixture
def cluster(cluster_yaml: dict[str, Any]) -> dict[str, Any]:
    """cluster.yaml with Ray's defaults filled in, as by `ray up`."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(copy.deepcopy(cluster_yaml))


def test_cluster_yaml_commands_are_valid_shell(cluster: dict[str, Any]) -> None:
    commands = [line for name, lines in cluster.items() if name.endswith("_commands") for line in lines]
    assert len(commands) > 5
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def rules_after_ray_up(
    config: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch, own_rule: str | None = None
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the inbound rules and the ids of the security groups after Ray's AWS setup, on moto.

    own_rule: CIDR that an existing group of this name already allows on port 22.
    """
    import boto3
    from moto import mock_aws
    from ray.autoscaler._private.aws.config import bootstrap_aws

    region = config["provider"]["region"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    monkeypatch.setenv("HOME", str(home))  # Ray writes the machines' SSH key there
    with mock_aws():
        iam, ec2 = boto3.client("iam", region), boto3.client("ec2", region)
        # Created here because Ray waits half a minute after creating them.
        iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
        iam.create_role(RoleName="head", AssumeRolePolicyDocument="{}")
        iam.add_role_to_instance_profile(InstanceProfileName="ray-autoscaler-v1", RoleName="head")
        if own_rule:
            (vpc,) = ec2.describe_vpcs()["Vpcs"]
            name = config["provider"]["security_group"]["GroupName"]
            group = ec2.create_security_group(GroupName=name, Description=name, VpcId=vpc["VpcId"])["GroupId"]
            ec2.authorize_security_group_ingress(
                GroupId=group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp=own_rule
            )
        types = bootstrap_aws(config)["available_node_types"].values()
        groups = {group for node_type in types for group in node_type["node_config"]["SecurityGroupIds"]}
        found = ec2.describe_security_groups(GroupIds=sorted(groups))["SecurityGroups"]
    return [rule for group in found for rule in group["IpPermissions"]], groups


def test_ray_up_opens_port_22_only(cluster: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, groups = rules_after_ray_up(cluster, tmp_path, monkeypatch)
    outside = [rule for rule in rules if rule["IpRanges"] or rule.get("Ipv6Ranges") or rule.get("PrefixListIds")]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in outside] == [(22, 22)]
    between = [pair["GroupId"] for rule in rules for pair in rule["UserIdGroupPairs"]]
    assert set(between) == groups  # any traffic between the nodes


def test_ray_up_extra_rule_is_found(cluster: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {"IpProtocol": "tcp", "FromPort": 8265, "ToPort": 8265, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    cluster["provider"]["security_group"]["IpPermissions"] = [opened]
    rules, _ = rules_after_ray_up(cluster, tmp_path, monkeypatch)
    assert 8265 in [rule["FromPort"] for rule in rules if rule["IpRanges"]]


def test_ray_up_existing_rules_are_kept(
    cluster: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, _ = rules_after_ray_up(cluster, tmp_path, monkeypatch, own_rule="203.0.113.7/32")
    assert [rule["IpRanges"][0]["CidrIp"] for rule in rules] == ["203.0.113.7/32"]


def packed(folder: Path, out: Path, **changes: Any) -> zipfile.ZipFile:
    """Package the folder with Ray's code, as in `ray job submit --working-dir FOLDER --runtime-env ...`."""
    from ray._private.runtime_env.packaging import create_package
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
    from ray.dashboard.modules.dashboard_sdk import parse_runtime_env_args

    runtime_env = parse_runtime_env_args(runtime_env=str(ROOT / "jobs" / "runtime_env.yaml"), working_dir=str(folder))

    def upload(path: str, excludes: list[str], is_file: bool = False) -> None:
        create_package(path, out, include_gitignore=True, excludes=excludes)

    upload_working_dir_if_needed(runtime_env | changes, include_gitignore=True, upload_fn=upload)
    return zipfile.ZipFile(out)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the project, with the files that accumulate in a working copy."""
    folder = tmp_path_factory.mktemp("checkout") / "grpo_ray"
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", ".hypothesis")
    )
    for path in (
        ".git/objects/pack/pack-1.pack",
        ".venv/lib/python3.11/site-packages/torch/torch.so",
        "notebooks/pictures.ipynb",
        "tests/recorded.bin",
        "docs/figure.bin",
        "runs/deepmath/checkpoint-000100/model.safetensors",
        "grpo_ray_runs/arithmetic/checkpoint-000100/model.safetensors",
        "build/lib/grpo_ray.bin",
        "dist/grpo_ray-0.1.0-py3-none-any.whl",
        "grpo_ray.egg-info/SOURCES.bin",
        "grpo_ray/__pycache__/cli.cpython-311.pyc",
        ".pytest_cache/v/cache.bin",
        ".hypothesis/examples/1.bin",
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(os.urandom(200_000))
    return folder


def test_working_dir_package_is_small_and_complete(checkout: Path, tmp_path: Path) -> None:
    package = packed(checkout, tmp_path / "package.zip")
    # With the package's data: tables, pages and scripts.
    code = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("grpo_ray/**/*.*"), *ROOT.glob("jobs/**/*.*"))}
    code = {path for path in code if "__pycache__" not in path}
    assert len(code) > 50 and code <= set(package.namelist())
    beside_code = [file for file in package.infolist() if file.filename not in code]
    assert sum(file.file_size for file in beside_code) < 200_000  # each file that accumulates has as many bytes
    assert {name.partition("/")[0] for name in package.namelist() if "/" in name} == {"grpo_ray", "jobs"}
    assert not any("__pycache__" in name or name.endswith(".bin") for name in package.namelist())


def test_working_dir_without_excludes_is_large(checkout: Path, tmp_path: Path) -> None:
    package = packed(checkout, tmp_path / "package.zip", excludes=[])
    assert (tmp_path / "package.zip").stat().st_size > 2_000_000 and "tests/recorded.bin" in package.namelist()
