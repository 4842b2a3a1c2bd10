"""Every script, and every command that a document names, is run by a test or has a reason why none runs it.

Scripts are the files with a `__main__` block below `tests`, `jobs`, `notebooks` and `scripts`. Documents are the pages,
the docstrings of the scripts, and the Makefile.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPT_FOLDERS = ("tests", "jobs", "notebooks", "scripts")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BENCHMARKS = "tests/benchmarks/test_benchmarks.py"
COMMANDS = "tests/integration/test_commands.py"

SLOW = {
    "python tests/benchmarks/measure_coverage.py",
    *(
        f"python tests/benchmarks/bench_{name}.py"
        for name in (
            *("confinement", "curve", "engine", "failure", "floor", "health", "long_run", "micro_batches"),
            *("observers", "overlap", "sampling", "savings", "scale", "sharding", "slow_tools"),
            *("startup", "sweep", "weight_proof", "workers"),
        )
    ),
}
"""Commands whose test is slow: measurements. The type checker reads them, and their help is a test."""

RUN_BY: Mapping[str, str] = {
    "python jobs/train.py": f"{COMMANDS}::test_train_job_takes_its_steps",
    "python jobs/evaluate.py": f"{COMMANDS}::test_evaluate_job_measures_a_checkpoint",
    "python tests/benchmarks/bench_confinement.py": f"{BENCHMARKS}::test_bench_confinement_compares_both_levels",
    "python tests/benchmarks/bench_curve.py": f"{BENCHMARKS}::test_bench_curve_measures_both_systems",
    "python tests/benchmarks/bench_engine.py": f"{BENCHMARKS}::test_bench_engine_measures_every_variant",
    "python tests/benchmarks/bench_failure.py": f"{BENCHMARKS}::test_bench_failure_measures_each_phase_of_a_restart",
    "python tests/benchmarks/bench_floor.py": f"{BENCHMARKS}::test_bench_floor_measures_our_step_and_its_floor",
    "python tests/benchmarks/bench_gpu.py": f"{BENCHMARKS}::test_bench_gpu_dry_run_measures_our_run_and_learner",
    "python tests/benchmarks/bench_health.py": f"{BENCHMARKS}::test_bench_health_names_the_warning_of_a_wrong_run",
    "python tests/benchmarks/bench_long_run.py": f"{BENCHMARKS}::test_bench_long_run_measures_memory_and_the_page",
    "python tests/benchmarks/bench_micro_batches.py": f"{BENCHMARKS}::test_bench_micro_batches_plans_every_variant",
    "python tests/benchmarks/bench_weight_proof.py": f"{BENCHMARKS}::test_bench_weight_proof_measures_a_proof",
    "python tests/benchmarks/bench_observers.py": f"{BENCHMARKS}::test_bench_observers_compares_steps_with_and_without",
    "python tests/benchmarks/bench_overlap.py": f"{BENCHMARKS}::test_bench_overlap_measures_late_and_early_scoring",
    "python tests/benchmarks/bench_placement.py": f"{BENCHMARKS}::test_bench_placement_prints_both_tables",
    "python tests/benchmarks/bench_rewards.py": f"{BENCHMARKS}::test_bench_rewards_compares_the_pool_with_inline",
    "python tests/benchmarks/bench_sampling.py": f"{BENCHMARKS}::test_bench_sampling_measures_every_sampler",
    "python tests/benchmarks/bench_savings.py": f"{BENCHMARKS}::test_bench_savings_measures_every_variant",
    "python tests/benchmarks/bench_scale.py": f"{BENCHMARKS}::test_bench_scale_measures_every_part",
    "python tests/benchmarks/bench_sharding.py": f"{BENCHMARKS}::test_bench_sharding_measures_every_way",
    "python tests/benchmarks/bench_slow_tools.py": f"{BENCHMARKS}::test_bench_slow_tools_compares_with_the_simulation",
    "python tests/benchmarks/bench_staleness.py": f"{BENCHMARKS}::test_bench_staleness_compares_with_the_simulation",
    "python tests/benchmarks/bench_startup.py": f"{BENCHMARKS}::test_bench_startup_splits_the_time_to_the_first_step",
    "python tests/benchmarks/bench_step.py": f"{BENCHMARKS}::test_bench_step_compares_ours_with_stock_trl",
    "python tests/benchmarks/bench_sweep.py": f"{BENCHMARKS}::test_bench_sweep_compares_with_full_runs",
    "python tests/benchmarks/bench_tools.py": f"{BENCHMARKS}::test_bench_tools_compares_ours_with_stock_trl",
    "python tests/benchmarks/bench_watch.py": f"{BENCHMARKS}::test_bench_watch_measures_the_page_and_its_server",
    "python tests/benchmarks/bench_workers.py": f"{BENCHMARKS}::test_bench_workers_measures_the_rate_of_a_worker",
    "python tests/benchmarks/length_model.py": f"{BENCHMARKS}::test_length_model_describes_its_completions",
    "python tests/benchmarks/measure_coverage.py": f"{BENCHMARKS}::test_measure_coverage_counts_subprocesses_and_forks",
    "python tests/benchmarks/mutants.py": f"{BENCHMARKS}::test_mutants_counts_those_that_are_caught",
    "python tests/benchmarks/planted_faults.py": f"{BENCHMARKS}::test_planted_faults_catches_a_fault",
    "python tests/gpu/run.py": f"{BENCHMARKS}::test_gpu_tests_dry_run_passes",
    "python tests/helpers/number_server.py": (
        "tests/integration/tools/adapters/test_openenv.py::test_text_is_the_action"
    ),
    "python tests/helpers/escape_attempts.py": (
        "tests/unit/processes/test_confinement.py::test_attempts_to_escape_work_without_confinement"
    ),
    "python tests/helpers/escape_table.py": (
        "tests/unit/processes/test_confinement.py::test_page_has_the_attempts_of_the_code"
    ),
    "python tests/helpers/replay.py": f"{COMMANDS}::test_replay_shows_a_recorded_run",
    "python tests/helpers/run_histories.py": f"{COMMANDS}::test_run_histories_counts_what_happened",
    "python tests/helpers/slow_tests.py": (
        "tests/unit/test_slow_tests.py::test_main_prints_reasons_and_files_without_a_slow_test"
    ),
    "python tests/helpers/page_picture.py": f"{COMMANDS}::test_page_picture_of_a_run_is_taken",
    "python tests/helpers/synthetic_runs.py": f"{COMMANDS}::test_synthetic_run_is_reported",
    "python tests/helpers/terminal_recording.py": f"{COMMANDS}::test_terminal_recording_draws_the_screen",
    "python scripts/configuration_page.py": "tests/unit/test_configuration_page.py::test_main_writes_the_page",
    "python scripts/grafana_dashboard.py": (
        "tests/unit/observers/monitoring/test_exported_metrics.py::test_grafana_file_is_generated_from_the_code"
    ),
    "python scripts/metrics_page.py": "tests/unit/training/test_metric_names.py::test_metrics_page_is_up_to_date",
    "python scripts/notebook_code.py": "tests/unit/test_generated_file.py::test_notebook_code_parses",
    "python scripts/peft_field_table.py": ("tests/integration/config/test_peft_fields.py::test_main_writes_the_file"),
    "python scripts/recipe_curve.py": "tests/unit/test_recipes.py::test_recipe_curve_draws_reward_and_heldout",
    "python scripts/set_up.py": ("tests/integration/test_set_up.py::test_extras_resolve_without_settings_of_pip"),
    "python scripts/trl_field_table.py": "tests/integration/config/test_trl_fields.py::test_main_writes_the_file",
    "python scripts/vllm_field_table.py": (
        "tests/unit/test_vllm_field_table.py::test_main_writes_the_release_of_a_folder"
    ),
    "python -m grpo_ray.models.warm_up": (
        "tests/integration/models/test_warm_up.py::test_make_policy_rounds_weights_and_replaces_the_folder"
    ),
    "grpo-ray chaos": "tests/fault_injection/test_chaos.py::test_chaos_command_lists_outcome_of_each_fault",
    "grpo-ray check": f"{COMMANDS}::test_check_of_a_sound_config_passes",
    "grpo-ray contains": (
        "tests/unit/experiments/test_used_problems.py::test_contains_command_has_an_exit_status_for_each_outcome"
    ),
    "grpo-ray eval": "tests/integration/driver/test_run.py::test_eval_several_samples_of_a_problem_differ",
    "grpo-ray export": (
        "tests/integration/export/test_checkpoint.py::test_export_checkpoint_gives_same_logits_and_weights"
    ),
    "grpo-ray fork": (
        "tests/integration/experiments/test_experiments.py::test_fork_without_changes_equals_the_run_bit_for_bit"
    ),
    "grpo-ray replay": ("tests/integration/experiments/test_experiments.py::test_replay_of_an_untouched_run_is_equal"),
    "grpo-ray init": "tests/integration/test_wheel.py::test_wheel_trains_outside_of_a_clone",
    "grpo-ray report": "tests/integration/driver/test_run.py::test_report_of_a_real_run_makes_a_page",
    "grpo-ray sweep": ("tests/integration/sweep/test_sweep.py::test_halved_sweep_leaves_the_survivor_unchanged"),
    "grpo-ray train": (
        "tests/integration/driver/test_run.py::test_sharded_run_from_the_command_line_takes_the_same_steps"
    ),
    "grpo-ray watch": "tests/integration/pages/watch/test_server.py::test_watch_command_serves_until_interrupted",
}
"""Command without its arguments -> the test that runs it."""

RECIPES: Mapping[str, str] = {
    "make train": "python jobs/train.py",
    "make test-gpu": "python tests/gpu/run.py",
    "make bench-gpu": "python tests/benchmarks/bench_gpu.py",
    "make coverage": "python tests/benchmarks/measure_coverage.py",
    "make test-slow": "python tests/helpers/slow_tests.py",
    "make mutants": "python tests/benchmarks/mutants.py",
}
"""Target -> the command of RUN_BY that is its recipe."""

NOT_RUN: Mapping[str, str] = {
    "make setup": "installs the environment in which the tests run",
    "make clean": "deletes the environment in which the tests run",
    "make help": "prints the targets",
    "make notebook": "opens a browser; tests/integration/test_notebook.py runs the notebook",
    "make lint": "is no test",
    "make contract": "downloads releases; tests/unit/test_library_contract.py checks the installed ones",
    "make test": "runs the tests",
    "make test-all": "runs the tests",
    "make test-integration": "runs the tests",
    "make test-unit": "runs the tests",
    "python -m build": "is a tool of others",
    "python -m pytest": "runs the tests",
    "python tests/benchmarks/peers.py": "is started by bench_step.py and others",
    "python tests/gpu/probes.py": "is started by the tests of a GPU",
    "python tests/helpers/library_contract/__main__.py": "is `make contract`",
    "python -m library_contract": "is `make contract`",
    "python tests/helpers/fake_slurm.py": "is started by tests of the Slurm script",
    "python tests/helpers/several_nodes.py": "is started by tests of several machines",
    "python tests/helpers/terminal_run.py": "is started by tests/integration/observers/terminal/test_terminal.py",
}
"""Command that no test runs -> why."""

TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
SUBCOMMANDS = set(re.findall(r"add_parser\(\s*\"(\w+)\"", (ROOT / "grpo_ray" / "cli.py").read_text(encoding="utf-8")))


def scripts() -> Iterator[str]:
    """Yield the command of each script."""
    for path in sorted(path for folder in SCRIPT_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        is_test = path.name.startswith("test_")
        if not is_test and re.search(r"^if __name__ == \"__main__\":", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield f"python {path.relative_to(ROOT)}"


def named_commands() -> Iterator[tuple[str, str]]:
    """Yield each document with each command that it names."""
    documents = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    for command in scripts():
        path = command.removeprefix("python ")
        documents[path] = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    documents["Makefile"] = re.sub(r"\$\(BIN\)/", "", MAKEFILE)
    for document, text in documents.items():
        for path in re.findall(rf"\bpython3? ((?:{'|'.join(SCRIPT_FOLDERS)})/[\w/]+\.py)", text):
            yield document, f"python {path}"
        for module in re.findall(r"\bpython3? -m ([\w.]+)", text):
            yield document, f"python -m {module.rstrip('.')}"
        # In code only, because "make" and "check" are words.
        for target in re.findall(r"(?:^|`|: )make ([a-z][a-z-]*)\b", text, re.MULTILINE):
            yield document, f"make {target}"
        for subcommand in re.findall(r"(?:^|[`\"/ ])grpo-ray ([a-z]+)\b", text, re.MULTILINE):
            if subcommand in SUBCOMMANDS:
                yield document, f"grpo-ray {subcommand}"
    for target in TARGETS:
        yield "Makefile", f"make {target}"


KNOWN = {*RUN_BY, *RECIPES, *NOT_RUN}


def test_every_script_is_run_or_has_a_reason() -> None:
    unknown = set(scripts()) - KNOWN
    assert not unknown, f"write a test that runs it, and a row of RUN_BY: {sorted(unknown)}"


def test_every_command_of_a_document_is_run_or_has_a_reason() -> None:
    unknown = {(document, command) for document, command in named_commands() if command not in KNOWN}
    assert not unknown, f"write a test that runs it, and a row of RUN_BY: {sorted(unknown)}"
    assert len({command for _, command in named_commands()}) > 40  # the patterns find the commands


def test_tables_have_no_stale_row() -> None:
    assert KNOWN - set(scripts()) - {command for _, command in named_commands()} == set()
    assert {f"grpo-ray {name}" for name in SUBCOMMANDS} <= set(RUN_BY)
    assert len(KNOWN) == len(RUN_BY) + len(RECIPES) + len(NOT_RUN)  # no command is in two tables


@pytest.mark.parametrize("command", RUN_BY)
def test_named_test_exists_and_runs_the_command(command: str) -> None:
    file, _, name = RUN_BY[command].partition("::")
    source = (ROOT / file).read_text(encoding="utf-8")
    tests = {each.name: each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}
    assert name in tests, f"{file} has no test {name}"
    marks = [ast.unparse(each) for each in tests[name].decorator_list]
    is_slow = any("mark.slow" in each for each in marks) or "\npytestmark = pytest.mark.slow" in source
    assert is_slow == (command in SLOW)
    # The script, the module or the subcommand; the module of a generator is imported, so that its name is in the file.
    word = re.split(r"[/ .]", command.removesuffix(".py"))[-1]
    assert word in (ast.unparse(tests[name]) if file in (BENCHMARKS, COMMANDS) else source)


@pytest.mark.parametrize("target", RECIPES)
def test_recipe_is_the_command_that_is_run(target: str) -> None:
    (recipe,) = re.findall(rf"^{target.removeprefix('make ')}: setup\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert RECIPES[target].removeprefix("python ") in recipe and RECIPES[target] in RUN_BY
