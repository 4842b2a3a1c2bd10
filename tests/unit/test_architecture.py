"""Tests of the import structure: the order of packages, and where heavy libraries may be imported."""

import ast
from pathlib import Path

import pytest
from import_graph import MODULES, ROOT, all_imports, inner, own_imports

ORDER = [
    "text",
    "errors",
    "processes",
    "distributed",
    "device",
    "loopback",
    "config",
    "examples",
    "storage",
    "data",
    "telemetry",
    "models",
    "resilience",
    "tools",
    "rewards",
    "inference",
    "evaluation",
    "learner",
    "training",
    "pages",
    "export",
    "observers",
    "driver",
    "experiments",
    "sweep",
    "cli",
]
"""Packages and top-level modules, lowest first. A module imports only from its own package and from lower ones."""

LEVEL = {name: level for level, name in enumerate(ORDER)}

SCRIPTS = {
    "driver.cluster.warm_start",
    "driver.cluster.warm_client",
    "resilience.gpu_driver",
    "resilience.libnuma",
    "tools.python_child",
}
"""Modules that also run as scripts, before the package can be imported: they import nothing of it."""

AT_IMPORT = {
    "starlette": {"inference.endpoint", "pages.watch.api", "pages.watch.server"},
    "uvicorn": {"inference.endpoint", "pages.watch.server"},
    "vllm": {"inference.local_engine", "inference.trl_without_trackers"},
    "trl": {
        "inference.trl_without_trackers",
        "learner.advantages",
        "learner.learner",
        "learner.rollouts.scoring",
        "learner.rollouts.step_metrics",
        "learner.sft",
        "learner.sft_config",
        "learner.trl_config",
        "learner.trl_internals",
    },
    "ray": {
        "data.split",
        "driver.attack",
        "driver.cluster.connection",
        "driver.engines",
        "driver.run",
        "driver.stage_runs",
        "driver.trainer",
        "evaluation.evaluate",
        "inference.dedicated_engine",
        "inference.pool.pool",
        "observers.follower",
        "observers.monitoring.ray_metrics",
        "resilience.controller_callback",
        "resilience.elastic",
        "resilience.nodes",
        "resilience.ray_internals",
        "resilience.ray_train_internals",
        "resilience.signals",
        "storage.checkpoint_upload",
        "sweep.runner",
        "sweep.trial_process",
        "training.report_callback",
        "training.start_point",
        "training.attempt",
        "training.worker",
    },
    "torch": {
        "distributed",
        "inference.cpu_packing",
        "inference.cpu_sampler",
        "inference.dedicated_engine",
        "inference.engine",
        "inference.learner_end",
        "inference.local_engine",
        "inference.lora_requests",
        "inference.pool.broadcast",
        "inference.pool.weights",
        "inference.quantized_base",
        "inference.shared_base",
        "inference.sync_proof",
        "inference.unprocessed_logprobs",
        "inference.weight_layout",
        "inference.weight_proof",
        "inference.weight_sums",
        "models.adapter_folders",
        "models.adapters",
        "models.quantized",
        "models.shards",
        "resilience.nonfinite",
        "resilience.signals",
        "learner.advantages",
        "learner.attention",
        "learner.batch",
        "learner.collectives",
        "learner.rollouts.diversity",
        "learner.rollouts.dynamic_sampling",
        "learner.entropy",
        "learner.exact_savings",
        "learner.forward_pass",
        "learner.hooks",
        "learner.rollouts.group_recorder",
        "learner.learner",
        "learner.masked_output_layer",
        "learner.micro_batches",
        "learner.resume",
        "learner.sft",
        "learner.schedule",
        "learner.sharding",
        "learner.rollouts.bounded_staleness",
        "learner.rollouts.staleness_metrics",
        "learner.rollouts.sync_probe",
        "learner.rollouts.recorded_samples",
        "learner.rollouts.assembly",
        "learner.rollouts.collector",
        "learner.rollouts.padding",
        "learner.rollouts.rollout",
        "learner.rollouts.scoring",
        "learner.rollouts.step_metrics",
        "learner.sync_check",
        "learner.trl_internals",
        "training.memory_use",
    },
}
"""Library -> the modules that import it at import time; all others stay light."""

ANYWHERE = {
    "starlette": AT_IMPORT["starlette"],
    "uvicorn": AT_IMPORT["uvicorn"],
    "vllm": AT_IMPORT["vllm"]
    | {"evaluation.evaluate", "inference.arguments", "inference.lora_requests", "inference.vllm_internals"},
    "trl": AT_IMPORT["trl"]
    | {"learner.sharding", "rewards.format", "rewards.length", "rewards.reward_models", "tools.template"},
    "ray": AT_IMPORT["ray"]
    | {
        "data.mixture",
        "data.stream",
        "driver.preflight.audit",
        "inference.pool.engine_process",
        "rewards.reward_models",
        "storage.ray_snapshot",
        "sweep.trials",
    },
    "torch": AT_IMPORT["torch"]
    | {
        "device",
        "inference.pool.engine_process",
        "inference.vllm_internals",
        "learner.sharding_settings",
        "models.memory",
        "models.warm_up",
        "rewards.reward_models",
    },
}
"""Library -> the modules that import it at all, including inside functions."""


def test_order_names_every_package() -> None:
    tops = {module.partition(".")[0] for module in MODULES} - {""}
    assert tops == set(ORDER)


@pytest.mark.long
def test_imports_of_package_name_existing_modules() -> None:
    assert [str(each) for each in own_imports() if inner(each.target) not in MODULES] == []


def test_imports_go_to_lower_packages_only() -> None:
    upward = [
        str(each)
        for each in own_imports()
        if each.module  # the package itself names modules of every level, for type checkers
        and (target := inner(each.target).partition(".")[0])
        and target != each.top
        and LEVEL[target] >= LEVEL[each.top]
    ]
    assert upward == []


def test_packages_of_the_driver_do_not_import_the_modules_around_them() -> None:
    """`driver/preflight/` may import other packages in `driver/`, but none of `driver/*.py`, which import from it."""
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py" and name.startswith("driver.")}
    outward = [
        str(each)
        for each in own_imports()
        if each.module.rpartition(".")[0] in packages
        and inner(each.target).rpartition(".")[0] == "driver"
        and inner(each.target) not in packages
    ]
    assert packages
    assert outward == []


def test_scripts_import_nothing_of_the_package() -> None:
    assert [str(each) for each in own_imports() if each.module in SCRIPTS] == []


def test_package_init_imports_little_at_import() -> None:
    imported = {each.target for each in all_imports() if each.module == "" and each.when == "import"}
    assert imported == {"typing", "logging"}  # a line of a library is silenced before anything can import it


def test_imports_have_no_cycle() -> None:
    imported: dict[str, set[str]] = {module: set() for module in MODULES}
    for each in own_imports():
        if each.when == "import":
            imported[each.module].add(inner(each.target))

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(imported[module]):
                walk(target, (*path, module))
            done.add(module)

    done: set[str] = set()
    for module in MODULES:
        walk(module, ())


@pytest.mark.parametrize("library", sorted(AT_IMPORT))
def test_heavy_library_is_imported_in_listed_modules_only(library: str) -> None:
    outside = [
        str(each)
        for each in all_imports()
        if each.library == library
        and each.when != "typing"
        and each.module not in (AT_IMPORT if each.when == "import" else ANYWHERE)[library]
    ]
    assert outside == []


def test_heavy_library_list_has_no_stale_module() -> None:
    for library in AT_IMPORT:
        for allowed, when in ((AT_IMPORT, ("import",)), (ANYWHERE, ("import", "call"))):
            used = {each.module for each in all_imports() if each.library == library and each.when in when}
            assert allowed[library] <= used, f"{library} is no longer used in {allowed[library] - used}"


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_job_has_docstring_and_at_most_fifty_lines(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50
    assert ast.get_docstring(ast.parse(text)), "the module docstring must describe the job"


def test_jobs_train_and_evaluate_exist() -> None:
    assert {path.name for path in (ROOT / "jobs").glob("*.py")} >= {"train.py", "evaluate.py"}
