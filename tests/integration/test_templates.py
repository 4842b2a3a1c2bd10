"""The templates of a real cluster: what Ray, AWS and KubeRay would make of them, and that they open nothing."""

import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from grpo_ray.settings import load

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "jobs" / "configs").glob("*.yaml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def pinned(commands: list[str]) -> dict[str, Requirement]:
    """Package -> what `pip install` of the commands asks for."""
    words = [word.strip('"') for command in commands for word in command.split() if "==" in word]
    return {requirement.name: requirement for requirement in map(Requirement, words)}


# cluster.yaml


@pytest.fixture
def cluster_yaml() -> dict[str, Any]:
    return read("cluster.yaml")


@pytest.fixture
def as_ray_reads_it(cluster_yaml):
    """The config with Ray's defaults filled in, as `ray up` uses it."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(copy.deepcopy(cluster_yaml))


def test_the_cluster_is_valid_by_rays_own_schema(as_ray_reads_it):
    from ray.autoscaler._private.util import validate_config

    validate_config(as_ray_reads_it)


def test_a_misspelt_field_of_the_cluster_is_found(as_ray_reads_it):
    from ray.autoscaler._private.util import validate_config

    as_ray_reads_it["available_node_types"]["gpu"]["min_worker"] = 0
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(as_ray_reads_it)


def test_the_head_has_no_gpu_and_the_workers_come_from_none_as_spot_machines(as_ray_reads_it):
    types = as_ray_reads_it["available_node_types"]
    head, gpu = types["head"], types["gpu"]
    assert as_ray_reads_it["head_node_type"] == "head"
    assert head["resources"] == {"CPU": 0, "GPU": 0} and "InstanceMarketOptions" not in head["node_config"]
    assert gpu["min_workers"] == 0 < gpu["max_workers"] <= as_ray_reads_it["max_workers"]
    assert gpu["resources"]["GPU"] == 4 and gpu["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert 0 < as_ray_reads_it["idle_timeout_minutes"] <= 30
    (start,) = [line for line in as_ray_reads_it["head_start_ray_commands"] if "--head" in line]
    assert "--num-cpus=0" in start.split() and "--num-gpus=0" in start.split()


def test_the_dashboard_is_on_loopback_and_every_call_needs_the_token(as_ray_reads_it):
    starts = as_ray_reads_it["head_start_ray_commands"] + as_ray_reads_it["worker_start_ray_commands"]
    assert re.findall(r"--dashboard-host[= ](\S+)", " ".join(starts)) == ["127.0.0.1"]
    assert "0.0.0.0" not in str(as_ray_reads_it)
    # In the container of every node: Ray reads the token where the file is mounted (the image's user is `ray`).
    assert "--env RAY_AUTH_MODE=token" in as_ray_reads_it["docker"]["run_options"]
    assert as_ray_reads_it["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"


def test_every_node_has_the_same_image_and_the_versions_that_the_project_takes(as_ray_reads_it):
    assert not {"head_image", "worker_image"} & set(as_ray_reads_it["docker"])
    assert not any("docker" in node_type for node_type in as_ray_reads_it["available_node_types"].values())
    head, worker = pinned(as_ray_reads_it["head_setup_commands"]), pinned(as_ray_reads_it["worker_setup_commands"])
    assert head == worker  # what setup_commands say, merged into both
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["gpu"]]
    for requirement in wanted:
        (exact,) = worker[requirement.name].specifier
        assert exact.operator == "==" and requirement.specifier.contains(exact.version), requirement
    tag = re.fullmatch(r"rayproject/ray:(\d+\.\d+\.\d+)-py(\d)(\d+)-gpu", as_ray_reads_it["docker"]["image"])
    assert tag and worker["ray"].specifier.contains(tag[1])
    assert Version(f"{tag[2]}.{tag[3]}") in Requirement(f"python{project['requires-python']}").specifier


def test_the_shared_storage_is_mounted_on_each_machine_and_seen_in_its_container(as_ray_reads_it):
    assert "--volume /mnt/shared:/mnt/shared" in as_ray_reads_it["docker"]["run_options"]
    (mount,) = [line for line in as_ray_reads_it["initialization_commands"] if "mount -t nfs4" in line]
    assert "nfsvers=4.1" in mount and mount.startswith("mountpoint -q /mnt/shared ||")  # a second time mounts nothing
    for path in CONFIGS:
        storage = load(path).run.storage_path
        assert storage.startswith("/mnt/shared/") or path.name == "arithmetic.yaml"


def test_every_command_of_the_cluster_is_shell(as_ray_reads_it):
    commands = [line for name, lines in as_ray_reads_it.items() if name.endswith("_commands") for line in lines]
    assert len(commands) > 5
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True)


def rules_after_ray_up(
    config: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch, own_rule: str | None = None
):
    """The security group's inbound rules once Ray has set the account up, on an AWS that moto plays.

    own_rule: a CIDR for port 22 that the group of this name allows beforehand.
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
        # There already, because Ray waits half a minute after making them.
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


def test_from_outside_nothing_but_port_22_can_be_reached(as_ray_reads_it, tmp_path, monkeypatch):
    rules, groups = rules_after_ray_up(as_ray_reads_it, tmp_path, monkeypatch)
    outside = [rule for rule in rules if rule["IpRanges"] or rule.get("Ipv6Ranges") or rule.get("PrefixListIds")]
    assert [(rule["FromPort"], rule["ToPort"]) for rule in outside] == [(22, 22)]
    between = [pair["GroupId"] for rule in rules for pair in rule["UserIdGroupPairs"]]
    assert set(between) == groups  # among themselves the nodes say what they like


def test_a_rule_that_opens_the_dashboard_would_be_seen(as_ray_reads_it, tmp_path, monkeypatch):
    opened = {"IpProtocol": "tcp", "FromPort": 8265, "ToPort": 8265, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    as_ray_reads_it["provider"]["security_group"]["IpPermissions"] = [opened]
    rules, _ = rules_after_ray_up(as_ray_reads_it, tmp_path, monkeypatch)
    assert 8265 in [rule["FromPort"] for rule in rules if rule["IpRanges"]]


def test_ray_leaves_a_group_that_has_rules_as_it_is(as_ray_reads_it, tmp_path, monkeypatch):
    rules, _ = rules_after_ray_up(as_ray_reads_it, tmp_path, monkeypatch, own_rule="203.0.113.7/32")
    assert [rule["IpRanges"][0]["CidrIp"] for rule in rules] == ["203.0.113.7/32"]


# jobs/rayjob.yaml


def closed(schema: Any) -> Any:
    """The schema with every object closed: KubeRay drops fields that it does not know, here they are mistakes."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return inner | {"additionalProperties": False} if "properties" in inner else inner


RAYJOB_SCHEMA = closed(read("tests/fixtures/kuberay_rayjob_schema.yaml")["rayJob"])


@pytest.fixture
def rayjob() -> dict[str, Any]:
    return json.loads(json.dumps(read("jobs/rayjob.yaml")))  # no longer one object where an anchor stands in two places


def pods(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod specs of the head and of each group of workers."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_the_rayjob_has_only_fields_that_kuberay_knows_with_their_types(rayjob):
    jsonschema.Draft7Validator.check_schema(RAYJOB_SCHEMA)
    jsonschema.validate(rayjob, RAYJOB_SCHEMA)


MISTAKES = {
    "a misspelt field of the job": ("spec", "shutdownAfterJobFinish", True),
    "a misspelt field of the cluster": ("spec.rayClusterSpec", "enableInTreeAutoscaler", True),
    "an unknown mode": ("spec.rayClusterSpec.authOptions", "mode", "tokens"),
    "a number for Ray's start": ("spec.rayClusterSpec.headGroupSpec.rayStartParams", "num-cpus", 0),
    "text for a number": ("spec.rayClusterSpec.workerGroupSpecs.0", "maxReplicas", "4"),
    "a field of a container on the pod": ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec", "image", "ray"),
    "no quantity": (
        "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0.resources.limits",
        "memory",
        "160 GB",
    ),
    "a misspelt field of a volume": (
        "spec.rayClusterSpec.headGroupSpec.template.spec.volumes.1.emptyDir",
        "size",
        "1Gi",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_rayjob_is_found(rayjob, mistake):
    path, key, value = MISTAKES[mistake]
    place: Any = rayjob
    for step in path.split("."):
        place = place[int(step) if step.isdigit() else step]
    place[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(rayjob, RAYJOB_SCHEMA)


def test_the_rayjobs_cluster_is_closed_and_its_secrets_are_references(rayjob):
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "grpo-ray-token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP" and "enableIngress" not in cluster["headGroupSpec"]
    for pod in pods(rayjob):
        (container,) = pod["containers"]
        secret = [variable for variable in container["env"] if re.search("TOKEN|KEY|SECRET", variable["name"])]
        assert [set(variable) for variable in secret] == [{"name", "valueFrom"}]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False}
    assert pods(rayjob)[1]["automountServiceAccountToken"] is False


def test_the_rayjobs_workers_come_from_none_and_suffice_for_its_config(rayjob):
    spec = rayjob["spec"]
    cluster = spec["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"] and spec["shutdownAfterJobFinishes"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
    python, script, config, *overrides = spec["entrypoint"].split()
    assert python == "python" and script == "/home/ray/grpo_ray/jobs/train.py"
    run = load(ROOT / Path(config).relative_to("/home/ray/grpo_ray"), overrides)
    gpus = int(pods(rayjob)[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert run.cluster.max_workers <= gpus * group["maxReplicas"]
    mounted = {mount["mountPath"] for pod in pods(rayjob) for mount in pod["containers"][0]["volumeMounts"]}
    assert any(run.run.storage_path.startswith(path + "/") for path in mounted)


def test_the_rayjobs_nodes_share_an_image_and_a_volume_and_have_memory_for_the_object_store(rayjob):
    assert len({pod["containers"][0]["image"] for pod in pods(rayjob)}) == 1
    tag = read("cluster.yaml")["docker"]["image"].partition(":")[2]
    assert tag.startswith(rayjob["spec"]["rayClusterSpec"]["rayVersion"] + "-")
    assert f"FROM rayproject/ray:{tag}" in (ROOT / "jobs" / "rayjob.yaml").read_text(encoding="utf-8")
    for pod in pods(rayjob):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/mnt/shared"]["persistentVolumeClaim"] == {"claimName": "grpo-ray-runs"}
        shm, memory = mounts["/dev/shm"]["emptyDir"], container["resources"]["limits"]["memory"]
        assert shm["medium"] == "Memory"
        assert int(shm["sizeLimit"].removesuffix("Gi")) >= 0.3 * int(memory.removesuffix("Gi"))


# jobs/runtime_env.yaml


def packed(folder: Path, out: Path, **changes: Any) -> zipfile.ZipFile:
    """What `ray job submit --working-dir FOLDER --runtime-env jobs/runtime_env.yaml` would send, by Ray's own code."""
    from ray._private.runtime_env.packaging import create_package
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
    from ray.dashboard.modules.dashboard_sdk import parse_runtime_env_args

    asked = parse_runtime_env_args(runtime_env=str(ROOT / "jobs" / "runtime_env.yaml"), working_dir=str(folder))

    def upload(path: str, excludes: list[str], is_file: bool = False) -> None:
        create_package(path, out, include_gitignore=True, excludes=excludes)

    upload_working_dir_if_needed(asked | changes, include_gitignore=True, upload_fn=upload)
    return zipfile.ZipFile(out)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the project, with what piles up in one that is worked in."""
    folder = tmp_path / "grpo_ray"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__"))
    for path in (
        ".git/objects/pack/pack-1.pack",
        ".venv/lib/python3.11/site-packages/torch/torch.so",
        "notebooks/pictures.ipynb",
        "tests/recorded.bin",
        "runs/deepmath/checkpoint-000100/model.safetensors",
        "grpo_ray_runs/arithmetic/checkpoint-000100/model.safetensors",
        "build/lib/grpo_ray.bin",
        "dist/grpo_ray-0.1.0-py3-none-any.whl",
        "grpo_ray.egg-info/SOURCES.bin",
        "grpo_ray/__pycache__/cli.cpython-311.pyc",
        ".pytest_cache/v/cache.bin",
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(os.urandom(200_000))
    return folder


def test_the_working_directory_that_travels_is_small_and_whole(checkout, tmp_path):
    sent = packed(checkout, tmp_path / "sent.zip")
    assert (tmp_path / "sent.zip").stat().st_size < 1_000_000
    code = {str(path.relative_to(ROOT)) for path in (*ROOT.glob("grpo_ray/**/*.py"), *ROOT.glob("jobs/**/*.*"))}
    code = {path for path in code if "__pycache__" not in path}
    assert len(code) > 50 and code <= set(sent.namelist())
    assert {name.partition("/")[0] for name in sent.namelist() if "/" in name} == {"grpo_ray", "jobs"}
    assert not any("__pycache__" in name or name.endswith(".bin") for name in sent.namelist())


def test_without_its_list_of_what_stays_the_directory_is_too_large(checkout, tmp_path):
    sent = packed(checkout, tmp_path / "sent.zip", excludes=[])
    assert (tmp_path / "sent.zip").stat().st_size > 1_000_000 and "tests/recorded.bin" in sent.namelist()


def test_ray_takes_the_runtime_environment_and_it_holds_no_secret():
    from ray.runtime_env import RuntimeEnv

    settings = read("jobs/runtime_env.yaml")
    RuntimeEnv(**settings)
    assert set(settings["env_vars"]) == {"RAY_JOB_STOP_WAIT_TIME_S"}
    assert int(settings["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300  # a checkpoint takes minutes
    on_kubernetes = yaml.safe_load(read("jobs/rayjob.yaml")["spec"]["runtimeEnvYAML"])
    assert on_kubernetes == {"env_vars": settings["env_vars"]}


# jobs/configs


def test_the_configs_are_there():
    assert {path.name for path in CONFIGS} >= {
        "arithmetic.yaml",
        "gsm8k.yaml",
        "deepmath-qwen2.5-0.5b.yaml",
        "deepmath-qwen2.5-7b-lora.yaml",
        "deepmath-qwen2.5-72b.yaml",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_divides_the_step(path):
    config = load(path)
    workers, tensor_parallel = config.cluster.max_workers, int(config.grpo.trl.get("vllm_tensor_parallel_size", 1))
    assert config.grpo.prompts_per_step % workers == 0 and workers % tensor_parallel == 0
    assert config.completions_per_step % config.micro_batch_size == 0 == config.micro_batch_size % workers
    longest = config.engine.max_context
    assert longest is None or longest > config.grpo.max_completion_length  # room for the prompt


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_opens_with_its_hardware_its_time_and_its_command(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    assert any(re.match(r"Hardware: .+ Time: .+", line) for line in head)
    command = " ".join(line.removesuffix("\\") for line in head[head.index("") + 1 :])
    assert " ".join(command.split()) == (
        "ray job submit --address http://127.0.0.1:8265 --working-dir . --runtime-env jobs/runtime_env.yaml "
        f"-- python jobs/train.py jobs/configs/{path.name}"
    )


def test_the_largest_config_spans_machines_and_no_engine_does():
    config = load(ROOT / "jobs" / "configs" / "deepmath-qwen2.5-72b.yaml")
    assert config.cluster.max_workers == 4 * 8 and config.cluster.shard_learner
    assert 8 % config.grpo.trl["vllm_tensor_parallel_size"] == 0
