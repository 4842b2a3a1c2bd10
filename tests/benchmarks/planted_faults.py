"""Mutation test of the test tiers: plant one fault at a time into a copy of the package, and run the tests on it.

    python tests/benchmarks/planted_faults.py [--only NAME] [--all] [--json FILE]

Each fault of `FAULTS` is a mistake that a person could make: one text of one file is replaced by another. The tests of
the unit tier run first, then those of the integration tier, with `--all` also the slow tests and those of fault
injection. The first failing test catches the fault, which is then removed from the copy. Before that, the same tests
run on the unchanged copy, where they must pass. A run that ends for another reason than a failing test catches nothing
and counts as an error. With `--json` each result is saved at once, in the file with results of other faults.

`tests/unit/test_planted_faults.py` checks that every fault can be planted and that the test files exist.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = (
    "grpo_ray", "tests", "jobs", "notebooks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md",
    "SECURITY.md", "LICENSE", "Makefile", "cluster.yaml", "scripts",
)  # fmt: skip
"""Files and folders of the checkout that the tests need."""
IGNORED = shutil.ignore_patterns("__pycache__", ".venv", ".hypothesis", ".pytest_cache", "*.egg-info")
TIERS = ("unit", "integration", "fault_injection")
MAX_SECONDS = 3600.0
"""Time limit of one test file on the unchanged copy."""

Paths = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TestFiles:
    """Test files of one module, in the order in which they run: paths below the tier's folder."""

    unit: Paths = ()
    integration: Paths = ()
    fault_injection: Paths = ()


@dataclass(frozen=True)
class Fault:
    """Mistake in one file. Its test files are those of `TESTS`, except in tiers where it names its own."""

    name: str
    file: str
    """Path below `grpo_ray/`."""
    old: str
    """Text that the file contains exactly once."""
    new: str
    """Replacement of the text."""
    unit: Paths | None = None
    integration: Paths | None = None
    fault_injection: Paths | None = None

    def test_files(self, tier: str) -> Paths:
        """Return the test files of a tier, below the tier's folder."""
        own: Paths | None = getattr(self, tier)
        default: Paths = getattr(TESTS[self.file], tier)
        return default if own is None else own


@dataclass(frozen=True)
class Result:
    """Outcome of the tests on one fault."""

    fault: str
    file: str
    caught_by: str
    """Name of a tier, `ESCAPED`, or `ERROR` if the tests could not be run."""
    seconds: float
    """Duration of the runs on the changed copy."""
    test: str = ""
    """First failing test, or the error."""
    message: str = ""
    """First line of its failure in pytest's summary."""
    ran: Paths = ()
    """Test files that ran and did not fail."""
    left_out: Paths = ()
    """Test files without a test to run, or over the time limit."""


RUNS = ("driver/test_run.py",)
"""Integration tests of whole runs."""

MATH = TestFiles(unit=("rewards/math/test_verify.py", "rewards/math/test_real_sets.py"))
SANDBOX = TestFiles(
    unit=("rewards/sandbox/test_pool.py", "rewards/test_correctness.py"),
    integration=("rewards/sandbox/test_pool.py",),
)
CONFIG = TestFiles(
    unit=(
        "config/test_loader.py", "config/test_schema.py", "config/test_fields.py", "config/test_checks.py",
        "config/test_sizes.py",
        "driver/preflight/test_checks.py", "driver/preflight/test_same_run.py", "test_cli.py",
    ),
    integration=("learner/test_learner.py", *RUNS),
    fault_injection=("test_resume.py",),
)  # fmt: skip
ENGINE = TestFiles(
    integration=("inference/test_engine.py", "inference/test_weight_proof.py", *RUNS, "models/test_lora.py")
)
CHECKPOINTS = TestFiles(
    unit=("storage/test_checkpoints.py",), integration=RUNS, fault_injection=("test_resume.py", "test_chaos.py")
)
STORAGE = TestFiles(
    unit=("storage/test_run_folder.py", "test_security.py"),
    integration=("storage/test_run_folder.py",),
    fault_injection=("test_s3.py",),
)
START = TestFiles(
    unit=("training/test_start_point.py", "training/test_run_histories.py"),
    integration=RUNS,
    fault_injection=("test_resume.py", "test_chaos.py", "test_survival.py"),
)
SAVINGS = TestFiles(
    unit=("learner/test_exact_savings.py", "learner/test_micro_batches.py"),
    integration=("learner/test_exact_savings.py",),
)
AHEAD = TestFiles(
    unit=("learner/rollouts/test_collector.py", "learner/rollouts/test_bounded_staleness.py"),
    integration=("learner/rollouts/test_bounded_staleness.py",),
    fault_injection=("test_bounded_staleness.py",),
)
GAMES_AHEAD = TestFiles(
    unit=("learner/rollouts/test_conversation_rounds.py",), integration=("driver/test_tool_run.py",)
)
REPORT = TestFiles(
    unit=("pages/report/test_health.py", "pages/report/test_rows.py", "pages/report/test_page.py"),
    integration=("pages/report/test_page.py",),
)

HISTORIES = ("training/test_run_histories.py",)

TESTS: dict[str, TestFiles] = {
    "cli.py": CONFIG,
    "config/loader.py": CONFIG,
    "config/checks.py": CONFIG,
    "config/sizes.py": CONFIG,
    "config/peft_fields.py": TestFiles(
        unit=("config/test_peft_fields.py", "models/test_adapters.py"), integration=("config/test_peft_fields.py",)
    ),
    "data/arithmetic.py": TestFiles(unit=("data/test_arithmetic.py",)),
    "data/curriculum.py": TestFiles(unit=("data/test_curriculum.py",)),
    "data/files.py": TestFiles(
        unit=(
            "data/test_files.py",
            "data/test_unreachable_files.py",
        )
    ),
    "data/gsm8k.py": TestFiles(unit=("data/test_gsm8k.py",)),
    "data/ledger.py": TestFiles(
        unit=("data/test_ledger.py", "training/test_start_point.py", "training/test_run_histories.py")
    ),
    "config/recorded.py": TestFiles(unit=("test_hostile_run_folder.py",)),
    "data/mixture.py": TestFiles(unit=("data/test_mixture.py",), integration=("data/test_mixture_run.py",)),
    "data/mixture_ledger.py": TestFiles(
        unit=("data/test_mixture_ledger.py", "training/test_problem_loader.py"),
        integration=("data/test_mixture_run.py",),
    ),
    "data/problem.py": TestFiles(unit=("data/test_problem.py",)),
    "data/split.py": TestFiles(
        integration=("data/test_stream.py", "learner/rollouts/test_dynamic_sampling.py", *RUNS),
    ),
    "data/stream.py": TestFiles(
        unit=("data/test_stream.py", "data/test_stream_order.py", "data/test_stream_scale.py"),
        integration=("data/test_stream.py", *RUNS),
    ),
    "driver/cluster/connection.py": TestFiles(
        unit=("driver/cluster/test_connection.py",), integration=("test_logical_gpus.py",)
    ),
    "export/checkpoint.py": TestFiles(integration=("export/test_checkpoint.py",)),
    "driver/preflight/same_run.py": CONFIG,
    "observers/follower.py": TestFiles(unit=("observers/terminal/test_progress.py",), integration=RUNS),
    "driver/preflight/resume_fields.py": TestFiles(unit=("driver/preflight/test_resume_fields.py",), integration=RUNS),
    "driver/launch.py": TestFiles(unit=("driver/test_launch.py",)),
    "driver/attack.py": TestFiles(unit=("driver/test_attack.py",), integration=("driver/test_check_trials.py",)),
    "driver/forecast.py": TestFiles(unit=("driver/test_forecast.py",), integration=("driver/test_check_trials.py",)),
    "driver/trial.py": TestFiles(
        unit=("driver/test_attack.py", "driver/test_forecast.py"), integration=("driver/test_check_trials.py",)
    ),
    "driver/summary.py": TestFiles(
        unit=("driver/test_summary.py", "telemetry/test_profiler.py", "test_security.py"), integration=RUNS
    ),
    "evaluation/baseline.py": TestFiles(integration=("evaluation/test_baseline.py", *RUNS)),
    "evaluation/confidence.py": TestFiles(
        unit=("evaluation/test_confidence.py", "evaluation/test_metrics.py"), integration=RUNS
    ),
    "evaluation/evaluate.py": TestFiles(
        unit=("evaluation/test_evaluate.py", "driver/cluster/test_connection.py"), integration=("test_logical_gpus.py",)
    ),
    "evaluation/metrics.py": TestFiles(
        unit=("evaluation/test_metrics.py", "evaluation/test_scores.py", "evaluation/test_solve.py")
    ),
    "evaluation/probes.py": TestFiles(unit=("evaluation/test_probes.py",)),
    "evaluation/scores.py": TestFiles(
        unit=("evaluation/test_scores.py", "rewards/test_isolated.py"),
        integration=("driver/test_heldout_score_run.py",),
    ),
    "evaluation/solve.py": TestFiles(unit=("evaluation/test_solve.py",), integration=RUNS),
    "inference/arguments.py": TestFiles(
        unit=("inference/test_arguments.py",), integration=("inference/test_engine.py", *RUNS)
    ),
    "inference/cpu_sampler.py": TestFiles(
        unit=("inference/test_cpu_sampler.py",),
        integration=("inference/test_cpu_sampler.py", "inference/test_engine.py"),
    ),
    "inference/dedicated_engine.py": TestFiles(unit=("inference/test_dedicated_engine.py",)),
    "inference/engine.py": ENGINE,
    "inference/pool/pool.py": TestFiles(integration=("inference/pool/test_pool.py",)),
    "inference/learner_end.py": ENGINE,
    "inference/local_engine.py": ENGINE,
    "inference/quantized_base.py": TestFiles(
        unit=("models/test_quantized.py",), integration=("inference/test_adapters.py",)
    ),
    "models/quantized.py": TestFiles(unit=("models/test_quantized.py", "models/test_memory_trace.py")),
    "inference/lora_requests.py": TestFiles(
        integration=("inference/test_adapters.py", "inference/test_vllm_internals.py")
    ),
    "inference/weight_layout.py": TestFiles(
        unit=("inference/test_weight_proof.py",), integration=("inference/test_weight_proof.py",)
    ),
    "inference/weight_proof.py": TestFiles(
        unit=("inference/test_weight_proof.py",), integration=("inference/test_weight_proof.py",)
    ),
    "inference/weight_sums.py": TestFiles(
        unit=("inference/test_weight_sums.py",), integration=("inference/test_weight_proof.py",)
    ),
    "inference/sync_proof.py": TestFiles(
        unit=("inference/test_sync_proof.py",), integration=("inference/test_engine.py", *RUNS)
    ),
    "learner/attention.py": TestFiles(
        unit=("learner/test_attention.py",), integration=("learner/test_token_budget.py",)
    ),
    "learner/sharding.py": TestFiles(integration=("learner/test_sharding.py",)),
    "learner/advantages.py": TestFiles(
        unit=("learner/test_advantages.py", "learner/rollouts/test_dynamic_sampling.py"),
        integration=("learner/test_exact_savings.py",),
    ),
    "learner/batch.py": TestFiles(unit=("learner/test_batch.py", *SAVINGS.unit), integration=SAVINGS.integration),
    "learner/exact_savings.py": SAVINGS,
    "learner/masked_output_layer.py": TestFiles(unit=("learner/test_masked_output_layer.py",)),
    "learner/forward_pass.py": TestFiles(
        unit=("learner/test_forward_pass.py", *SAVINGS.unit), integration=SAVINGS.integration
    ),
    "learner/learner.py": TestFiles(
        unit=("learner/test_trl_internals.py",),
        integration=("learner/test_learner.py", *RUNS),
        fault_injection=("test_resume.py", "test_survival.py"),
    ),
    "learner/micro_batches.py": SAVINGS,
    "learner/passes.py": TestFiles(unit=("learner/test_passes.py",), integration=("learner/test_token_budget.py",)),
    "learner/rollouts/collector.py": AHEAD,
    "learner/rollouts/dynamic_sampling.py": TestFiles(
        unit=("learner/rollouts/test_dynamic_sampling.py", "learner/rollouts/test_collector.py"),
        integration=("learner/rollouts/test_dynamic_sampling.py",),
        fault_injection=("test_dynamic_sampling.py",),
    ),
    "rewards/code/grading.py": TestFiles(unit=("rewards/test_code_tests.py",)),
    "rewards/code/assertions.py": TestFiles(unit=("rewards/test_code_tests.py",)),
    "rewards/code/values.py": TestFiles(unit=("rewards/test_code_tests.py",)),
    "learner/rollouts/scoring.py": TestFiles(
        unit=("learner/rollouts/test_mixture_scoring.py",), integration=("data/test_mixture_run.py",)
    ),
    "learner/rollouts/group_recorder.py": TestFiles(
        unit=("learner/rollouts/test_group_recorder.py",),
        integration=("learner/test_learner.py", *RUNS),
        fault_injection=("test_resume.py", "test_survival.py"),
    ),
    "learner/rollouts/heldout.py": TestFiles(
        integration=("evaluation/test_baseline.py", *RUNS), fault_injection=("test_resume.py", "test_survival.py")
    ),
    "learner/rollouts/bounded_staleness.py": AHEAD,
    "learner/rollouts/segment_rounds.py": AHEAD,
    "learner/rollouts/conversation_rounds.py": GAMES_AHEAD,
    "tools/open_conversation.py": GAMES_AHEAD,
    "learner/rollouts/staleness_schedule.py": TestFiles(
        unit=("learner/rollouts/test_staleness_schedule.py",), integration=AHEAD.integration
    ),
    "learner/rollouts/sync_probe.py": TestFiles(
        unit=("learner/rollouts/test_sync_probe.py",), integration=("learner/rollouts/test_stale_rollouts.py",)
    ),
    "inference/vllm_internals.py": TestFiles(
        integration=("inference/test_vllm_internals.py", "inference/test_weight_proof.py")
    ),
    "inference/rollout_function.py": TestFiles(
        unit=("inference/test_rollout_function.py",), integration=("driver/test_rollout_function_run.py",)
    ),
    "learner/rollouts/sampler.py": TestFiles(
        unit=("learner/rollouts/test_collector.py",), integration=("learner/test_learner.py", *RUNS)
    ),
    "learner/schedule.py": TestFiles(
        unit=("learner/test_schedule.py",),
        integration=("learner/test_exact_savings.py", "learner/test_worker_count_invariance.py"),
        fault_injection=("test_several_steps.py",),
    ),
    "learner/sync_check.py": TestFiles(
        unit=("learner/test_sync_check.py", *SAVINGS.unit), integration=SAVINGS.integration
    ),
    "learner/trl_config.py": CONFIG,
    "models/adapters.py": TestFiles(
        unit=("models/test_adapters.py",),
        integration=("models/test_lora.py", "inference/test_adapters.py", "learner/test_adapter_gradients.py"),
    ),
    "models/adapter_folders.py": TestFiles(
        unit=("test_hostile_folders.py",),
        integration=("models/test_lora.py", "export/test_checkpoint.py", "test_security.py"),
    ),
    "models/memory.py": TestFiles(
        unit=(
            "models/test_memory.py",
            "models/test_memory_trace.py",
            "models/test_shipped_configs.py",
            "training/test_memory_use.py",
        ),
    ),
    "models/warm_up.py": TestFiles(unit=("models/test_warm_up.py",), integration=("models/test_warm_up.py",)),
    "pages/report/health.py": REPORT,
    "pages/report/rows.py": REPORT,
    "resilience/elastic.py": TestFiles(
        unit=("resilience/test_elastic.py",),
        fault_injection=("test_elastic.py", "test_network.py", "test_machines.py"),
    ),
    "resilience/error_triage.py": TestFiles(
        unit=("resilience/test_error_triage.py",), fault_injection=("test_chaos.py",)
    ),
    "resilience/nodes.py": TestFiles(unit=("resilience/test_nodes.py",), integration=("resilience/test_nodes.py",)),
    "resilience/nonfinite.py": TestFiles(
        unit=("resilience/test_nonfinite.py",),
        integration=("resilience/test_nonfinite.py",),
        fault_injection=("test_chaos.py",),
    ),
    "resilience/signals.py": TestFiles(
        unit=("resilience/test_signals.py",),
        integration=("resilience/test_signals.py", *RUNS),
        fault_injection=("test_resume.py",),
    ),
    "resilience/watchdog.py": TestFiles(
        unit=("resilience/test_error_triage.py",),
        integration=("resilience/test_watchdog.py",),
        fault_injection=("test_chaos.py",),
    ),
    "rewards/correctness.py": SANDBOX,
    "rewards/length.py": TestFiles(unit=("rewards/test_length.py",)),
    "rewards/math/compare.py": MATH,
    "rewards/math/extract.py": MATH,
    "rewards/math/real_sets.py": MATH,
    "rewards/math/values.py": MATH,
    "rewards/math/verify.py": MATH,
    "models/plain_prompts.py": TestFiles(
        unit=("models/test_plain_prompts.py",), integration=("models/test_plain_prompts_run.py",)
    ),
    "processes/limited_process.py": TestFiles(
        unit=("tools/test_turn_reader.py", "rewards/test_json_format.py"),
    ),
    "rewards/choice.py": TestFiles(unit=("rewards/test_choice.py",)),
    "rewards/json_format.py": TestFiles(unit=("rewards/test_json_format.py",)),
    "processes/request_client.py": TestFiles(unit=("processes/test_request_client.py", "rewards/test_isolated.py")),
    "data/benchmarks.py": TestFiles(unit=("data/test_benchmarks.py",), integration=("evaluation/test_suite.py",)),
    "config/schema.py": TestFiles(unit=("data/test_benchmarks.py", "config/test_schema.py")),
    "rewards/code_tests.py": TestFiles(unit=("rewards/test_code_tests.py", "data/test_benchmarks.py")),
    "rewards/isolated.py": TestFiles(unit=("rewards/test_isolated.py",), integration=("rewards/test_isolated_run.py",)),
    "rewards/isolated_process.py": TestFiles(
        unit=("rewards/test_isolated.py",), integration=("rewards/test_isolated_run.py",)
    ),
    "rewards/judge.py": TestFiles(unit=("rewards/test_judge.py",), integration=("rewards/test_judge_run.py",)),
    "rewards/reward_models.py": TestFiles(
        unit=("rewards/test_reward_models.py",), integration=("rewards/test_reward_model_run.py",)
    ),
    "rewards/verdicts.py": TestFiles(unit=("rewards/test_judge.py",), integration=("rewards/test_judge_run.py",)),
    "rewards/registry.py": TestFiles(
        unit=(
            "evaluation/test_scores.py",
            "rewards/test_correctness.py",
            "rewards/test_dry_run.py",
            "evaluation/test_metrics.py",
        )
    ),
    "rewards/sandbox/protocol.py": SANDBOX,
    "rewards/sandbox/supervisor.py": SANDBOX,
    "storage/checkpoint_integrity.py": CHECKPOINTS,
    "storage/checkpoint_upload.py": CHECKPOINTS,
    "storage/checkpoints.py": CHECKPOINTS,
    "storage/fencing.py": TestFiles(unit=("storage/test_checkpoints.py",), fault_injection=("test_network.py",)),
    "storage/filesystem.py": STORAGE,
    "storage/jsonl.py": STORAGE,
    "storage/lease.py": TestFiles(unit=("storage/test_lease.py",), fault_injection=("test_drivers.py",)),
    "storage/records/group_columns.py": TestFiles(
        unit=("storage/records/test_rollout_files.py", "pages/watch/test_rollouts.py")
    ),
    "storage/records/rollout_files.py": TestFiles(unit=("storage/records/test_rollout_files.py",)),
    "storage/retry.py": STORAGE,
    "storage/uris.py": STORAGE,
    "telemetry/goodput.py": TestFiles(unit=("telemetry/test_goodput.py",)),
    "telemetry/profiler.py": TestFiles(unit=("telemetry/test_profiler.py",), integration=RUNS),
    "text/redaction.py": TestFiles(unit=("text/test_redaction.py",)),
    "training/problem_loader.py": TestFiles(
        unit=("training/test_problem_loader.py",),
        integration=("training/test_problem_loader.py", "data/test_stream.py", *RUNS),
        fault_injection=("test_resume.py", "test_survival.py"),
    ),
    "training/report_callback.py": TestFiles(
        unit=("training/test_report_callback.py", "training/test_metric_names.py"), integration=RUNS
    ),
    "training/start_point.py": START,
    "training/attempt.py": START,
}
"""File below `grpo_ray/` -> its tests."""

FAULTS = (
    # Worker-count invariance, exactly-once and exact savings
    Fault(
        "forecast-counts-the-first-batch",
        "driver/forecast.py",
        "statistics.median(per_step[1:] or per_step)",
        "statistics.median(per_step)",
    ),
    Fault(
        "forecast-takes-equal-groups-for-signal",
        "driver/forecast.py",
        'size * (1 - row["group/equal_share"])',
        'size * row["group/equal_share"]',
    ),
    Fault(
        "trial-keeps-the-runs-warm-up",
        "driver/trial.py",
        '("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps")',
        '("lr_scheduler_type", "lr_scheduler_kwargs")',
    ),
    Fault(
        "trial-trains-on-problems-that-the-run-leaves-out",
        "driver/trial.py",
        "if original.exists(UNVERIFIABLE_FILE):",
        "if False:",
    ),
    Fault(
        "attack-shows-completions-of-all-steps",
        "driver/attack.py",
        "first=1 + 2 * steps // 3",
        "first=1",
    ),
    Fault(
        "attack-starts-more-workers-than-gpus",
        "driver/attack.py",
        "range(min(gpus, config.cluster.max_workers), 0, -1)",
        "range(config.cluster.max_workers, 0, -1)",
    ),
    Fault(
        "probe-that-pays-a-little-is-a-hole",
        "evaluation/probes.py",
        "(failure + max(failure, top)) / 2",
        "failure",
    ),
    Fault(
        "worker-without-heldout-problems-fails",
        "evaluation/metrics.py",
        "k = max(1, len(answers) // max(1, len(problems)))",
        "k = len(answers) // max(1, len(problems))",
    ),
    Fault(
        "single-dataset-gets-a-source",
        "storage/records/group_columns.py",
        'return table if has_source else table.drop_columns(["source"])',
        "return table",
    ),
    Fault(
        "seed-ignores-epoch",
        "inference/arguments.py",
        'name = f"{run_seed}/{problem_id}/{epoch}/{index}" +',
        'name = f"{run_seed}/{problem_id}/{index}" +',
    ),
    Fault(
        "loss-keeps-the-rows-left-as-denominator",
        "learner/learner.py",
        "return loss * scale.loss_factor",
        "return loss",
        unit=SAVINGS.unit,
        integration=SAVINGS.integration,
    ),
    Fault(
        "rows-without-advantage-left-out-despite-kl-term",
        "learner/exact_savings.py",
        "rows=settings.beta == 0.0 and not over_micro_batch,",
        "rows=not over_micro_batch,",
    ),
    Fault(
        "learner-knows-no-form",
        "learner/masked_output_layer.py",
        "masked_fill(~allowed, -torch.inf).log_softmax",
        "log_softmax",
    ),
    Fault(
        "masks-of-a-form-one-token-late",
        "inference/vllm_internals.py",
        "self._form.fill_bitmask(masks, row)",
        "self._form.fill_bitmask(masks, max(row - 1, 0))",
        integration=("inference/test_sampling_options.py",),
    ),
    Fault(
        "form-of-rows-in-another-order",
        "learner/learner.py",
        "order = range(len(input_ids)) if parts is None else [row for part in parts for row in part]",
        "order = range(len(input_ids))",
        integration=("inference/test_sampling_options.py",),
    ),
    Fault(
        "importance-ratio-upside-down",
        "learner/sync_check.py",
        "importance.ratio((logps - engine_logps) * mask)",
        "importance.ratio((engine_logps - logps) * mask)",
    ),
    Fault(
        "sequence-ratio-is-a-mean",
        "learner/sync_check.py",
        "gap = gap.sum(dim=-1, keepdim=True)",
        "gap = gap.mean(dim=-1, keepdim=True)",
    ),
    Fault(
        "one-pass-with-several-iterations",
        "learner/exact_savings.py",
        "one_pass=one_step and settings.num_iterations == 1,",
        "one_pass=one_step,",
    ),
    Fault(
        "negative-advantages-left-out",
        "learner/batch.py",
        'return (batch["advantages"] != 0) & loss_mask(batch).any(dim=1)',
        'return (batch["advantages"] > 0) & loss_mask(batch).any(dim=1)',
    ),
    Fault(
        "loss-per-row-not-scaled",
        "learner/micro_batches.py",
        "factor = left / size if loss_type in MEAN_OVER_ROWS else 1.0",
        "factor = 1.0",
    ),
    Fault(
        "moved-prompts-padded-on-the-right",
        "learner/batch.py",
        'left=key.startswith("prompt"))',
        "left=False)",
    ),
    Fault(
        "first-completion-token-not-scored",
        "learner/forward_pass.py",
        "labels = ids.masked_fill((places < prompt) | (places >= lengths), -100)",
        "labels = ids.masked_fill((places <= prompt) | (places >= lengths), -100)",
    ),
    Fault(
        "packed-rows-share-positions",
        "learner/forward_pass.py",
        "PackedRows(input_ids[mask][None], positions[mask][None],",
        "PackedRows(input_ids[mask][None], torch.arange(int(mask.sum()))[None],",
    ),
    Fault(
        "packed-row-sees-the-row-before",
        "learner/forward_pass.py",
        "starts = torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0)).int()",
        "starts = torch.tensor([0, int(lengths.sum())]).int()",
    ),
    Fault(
        "sliding-window-one-token-longer",
        "learner/attention.py",
        "window_size=(-1 if sliding_window is None else sliding_window - 1, 0)",
        "window_size=(-1 if sliding_window is None else sliding_window, 0)",
    ),
    Fault(
        "pass-of-packed-rows-exceeds-its-limit",
        "learner/passes.py",
        "while count < most and total + lengths[first + count] <= self.tokens:",
        "while count < most and total <= self.tokens:",
    ),
    Fault(
        "workers-make-different-numbers-of-passes",
        "learner/passes.py",
        "least = fewest_passes(lengths[0], limit, lengths[1:])",
        "least = fewest_passes(lengths[0], limit)",
    ),
    Fault(
        "every-epoch-repeats-the-first-step",
        "learner/schedule.py",
        "return count % self.micro_batches // self.per_part",
        "return 0",
    ),
    Fault(
        "steps-take-rewards-in-the-order-of-ranks",
        "learner/schedule.py",
        "return blocks.transpose(0, 1).reshape(by_rank.shape)",
        "return by_rank",
    ),
    Fault(
        "stop-in-the-middle-of-a-batch",
        "training/report_callback.py",
        "if (preempted or stopping) and state.global_step % self.config.steps_per_batch == 0:",
        "if preempted or stopping:",
    ),
    Fault(
        "top-up-takes-the-newest-groups",
        "learner/rollouts/dynamic_sampling.py",
        "chosen = indices[True][:wanted]",
        "chosen = indices[True][-wanted:]",
    ),
    Fault(
        "top-up-counts-own-tokens-only",
        "learner/rollouts/dynamic_sampling.py",
        "self.workers.sum(loss_mask(step.batch).sum())",
        "loss_mask(step.batch).sum()",
    ),
    Fault(
        "top-up-ignores-reward-weights",
        "learner/advantages.py",
        "total = (rewards * weights.to(rewards.device)).nansum(dim=-1)",
        "total = rewards.nansum(dim=-1)",
    ),
    Fault(
        "round-samples-whole-completions",
        "learner/rollouts/staleness_schedule.py",
        "return min(-(-self.longest // rounds), self.longest - sampled)",
        "return self.longest - sampled",
    ),
    Fault(
        "continued-completions-not-probed",
        "learner/rollouts/sync_probe.py",
        "CONTINUED_PROBES if segment.age else FRESH_PROBES",
        "0 if segment.age else FRESH_PROBES",
    ),
    Fault(
        "round-proven-after-the-weights-move",
        "learner/rollouts/bounded_staleness.py",
        "            self._requests = []\n            self.probe.prove(segments)\n",
        "            self._requests = []\n",
    ),
    Fault(
        "segments-sampled-with-the-seed-of-the-first",
        "learner/rollouts/sampler.py",
        'row["index"], segment)',
        'row["index"])',
        unit=AHEAD.unit,
        integration=AHEAD.integration,
        fault_injection=AHEAD.fault_injection,
    ),
    Fault(
        "segment-that-fills-the-context-goes-on",
        "learner/rollouts/segment_rounds.py",
        "length == request.limit and has_space",
        "length == request.limit",
    ),
    Fault(
        "earlier-requests-not-repeated",
        "tools/open_conversation.py",
        "        for request in self._requests_of(turn):\n            request.send(self.episode)\n",
        "        self.requests = []\n",
    ),
    Fault(
        "game-goes-on-in-another-state",
        "tools/open_conversation.py",
        "if request.digest() != request.answer:",
        "if request.digest() == '':",
    ),
    Fault(
        "tokens-before-a-new-beginning-kept",
        "learner/rollouts/conversation_rounds.py",
        "            if conversation.has_begun_anew:\n",
        "            if conversation.has_begun_anew and False:\n",
    ),
    Fault(
        "all-turns-in-the-first-round",
        "learner/rollouts/staleness_schedule.py",
        "return turns - (turns - max_turns) // rounds",
        "return max_turns",
        unit=(*GAMES_AHEAD.unit, "learner/rollouts/test_staleness_schedule.py"),
        integration=GAMES_AHEAD.integration,
    ),
    Fault(
        "turns-without-proof",
        "learner/rollouts/conversation_rounds.py",
        "for context, turn in turns.sampled",
        "for context, turn in turns.sampled[:0]",
    ),
    Fault(
        "open-rollouts-of-other-settings-kept",
        "learner/rollouts/bounded_staleness.py",
        "if rollouts and changed:",
        "if rollouts and changed and False:",
    ),
    Fault(
        "open-rollouts-of-another-step-taken",
        "learner/rollouts/bounded_staleness.py",
        "(saved.batch, saved.prompt) != (rollout.batch, rollout.prompt)",
        "saved.prompt != rollout.prompt",
    ),
    Fault(
        "curriculum-derived-again-for-open-problems",
        "training/problem_loader.py",
        " and not len(ledger.open(epoch)) and not pending",
        " and not pending",
    ),
    Fault(
        "older-tokens-checked-against-the-present-weights",
        "learner/sync_check.py",
        "        if is_on_policy:\n            self.check(",
        "        if self.check:\n            self.check(",
        unit=("learner/test_sync_check.py",),
        integration=AHEAD.integration,
        fault_injection=AHEAD.fault_injection,
    ),
    Fault(
        "ahead-clips-against-the-engine",
        "learner/rollouts/collector.py",
        'batch["old_per_token_logps"] = logps',
        'batch["old_per_token_logps"] = batch["sampling_per_token_logps"]',
    ),
    Fault(
        "every-problem-sampled-with-the-seeds-of-the-first",
        "learner/rollouts/sampler.py",
        '{"seed": self._seed(row)} for row in rows]',
        '{"seed": self._seed(rows[0])} for row in rows]',
        unit=AHEAD.unit,
        integration=AHEAD.integration,
        fault_injection=AHEAD.fault_injection,
    ),
    Fault(
        "rollout-function-samples-every-turn-with-the-seed-of-the-first",
        "inference/rollout_function.py",
        "*row.key, self._calls[row.key])",
        "*row.key, 0)",
    ),
    Fault(
        "rollout-function-trains-tokens-of-others",
        "inference/rollout_function.py",
        "own=trajectory.mask,",
        "own=[1] * len(trajectory.mask),",
    ),
    Fault(
        "worker-leaves-the-shared-engine-when-its-rollout-function-returns",
        "inference/rollout_function.py",
        "while is_any_active(False):",
        "if is_any_active(False):",
    ),
    Fault(
        "record-forgets-the-last-group-of-a-step",
        "learner/rollouts/group_recorder.py",
        "for first in range(0, len(rows), self.num_generations):",
        "for first in range(0, len(rows) - self.num_generations, self.num_generations):",
    ),
    Fault(
        "heldout-problems-solved-by-every-worker",
        "learner/rollouts/heldout.py",
        "mine = problems[self.workers.rank :: self.workers.count]",
        "mine = problems[:: self.workers.count]",
    ),
    Fault(
        "heldout-measured-with-old-weights",
        "learner/rollouts/sampler.py",
        "if self._loaded_step != self.step():",
        "if self._loaded_step is None:",
        integration=("learner/test_learner.py", "inference/test_engine.py", *RUNS),
    ),
    Fault(
        "new-epoch-of-a-period-not-marked",
        "training/problem_loader.py",
        "for source, epoch in sorted({(group.source, group.epoch) for group in groups}):",
        "for source, epoch in sorted({(group.source, group.epoch) for group in groups})[:1]:",
    ),
    Fault(
        "program-without-a-result-passes",
        "rewards/code/grading.py",
        'result.get("hash") == output_hash(test.output)',
        'result.get("hash") in (None, output_hash(test.output))',
    ),
    Fault(
        "later-results-of-a-call-count",
        "rewards/code/grading.py",
        "results.setdefault(number, result)",
        "results[number] = result",
    ),
    Fault(
        "test-beyond-its-limits-is-passed",
        "rewards/code/grading.py",
        "passed[number] = outcome is True",
        "passed[number] = outcome is not False",
    ),
    Fault(
        "arguments-of-a-call-stay-as-they-were",
        "rewards/code/assertions.py",
        '        _write_back(args, decode(result["args"]))\n',
        "",
    ),
    Fault(
        "tuples-of-a-program-become-lists",
        "rewards/code/values.py",
        '"tuple": tuple, "set": set, "frozenset": frozenset}\n    for',
        '"tuple": list, "set": set, "frozenset": frozenset}\n    for',
    ),
    Fault(
        "mixture-deals-drawn-problems-again",
        "training/problem_loader.py",
        "excluded = np.union1d(excluded, ids_to_uint64(pending))",
        "pass",
        unit=HISTORIES,
    ),
    Fault(
        "mixture-forgets-drawn-problems",
        "training/problem_loader.py",
        "with_drawn(self.ledger.draws, (source for source, *_ in drawn))",
        "self.ledger.draws",
        unit=HISTORIES,
    ),
    Fault(
        "mixture-counts-drawn-problems-as-left",
        "training/problem_loader.py",
        "self.ledger.ledgers[name].remaining(last + 1) - len(pending)",
        "self.ledger.ledgers[name].remaining(last + 1)",
        unit=HISTORIES,
    ),
    Fault(
        "other-shares-continue-the-old-count",
        "data/mixture_ledger.py",
        "recorded if dict(recorded.shares) == dict(shares) else Draws(shares)",
        "Draws(shares, recorded.drawn)",
    ),
    Fault(
        "ledger-of-a-removed-source-lost",
        "data/mixture_ledger.py",
        "sorted({**self.absent, **self.ledgers}.items())",
        "sorted(self.ledgers.items())",
    ),
    Fault(
        "draws-are-not-saved",
        "data/mixture_ledger.py",
        '"drawn": dict(self.draws.drawn)',
        '"drawn": {}',
    ),
    Fault(
        "mixture-order-ignores-the-draws-so-far",
        "data/mixture.py",
        "weight * total - self.drawn.get(name, 0) * scale",
        "0",
    ),
    Fault(
        "reward-called-for-other-sources",
        "learner/rollouts/scoring.py",
        'if applies[row.get(SOURCE, "")]]',
        "if applies or row]",
    ),
    Fault(
        "sources-scored-by-the-first-ones-rewards",
        "evaluation/scores.py",
        "scores = self.scores[source](",
        "scores = next(iter(self.scores.values()))(",
    ),
    Fault(
        "equal-problems-of-two-sources-are-one",
        "data/problem.py",
        "return replace(self, id=digest, source=source, columns=columns)",
        "return replace(self, source=source, columns=columns)",
        unit=("data/test_mixture.py",),
    ),
    Fault(
        "rest-of-an-epoch-lost-on-other-workers",
        "training/problem_loader.py",
        "carried_over = [row for rest in all_gather_object(list(rows)) for row in rest]",
        "carried_over = all_gather_object(list(rows))[0]",
    ),
    Fault(
        "problems-passed-over-are-dealt",
        "training/problem_loader.py",
        "excluded = np.union1d(ledger.used(epoch), ledger.skipped(epoch))",
        "excluded = ledger.used(epoch)",
        fault_injection=("test_resume.py",),
    ),
    Fault(
        "every-epoch-in-the-same-order",
        "data/stream.py",
        'random.Random(f"{self.seed}/{epoch}/{window}").shuffle(problems)',
        'random.Random(f"{self.seed}/{window}").shuffle(problems)',
    ),
    Fault(
        "heldout-problems-trained-on",
        "data/stream.py",
        "if self.heldout_share and is_heldout(problem.question_id, self.heldout_share) != self.keep_heldout:",
        "if self.keep_heldout and not is_heldout(problem.question_id, self.heldout_share):",
    ),
    Fault(
        "repeated-problem-read-from-every-shard",
        "data/stream.py",
        "is_owner = self.owner_shards.get(problem.id, shard_index) == shard_index",
        "is_owner = shard_index >= 0",
    ),
    Fault(
        "carried-rows-dropped",
        "data/stream.py",
        "            yield from plan.carried_over\n            return",
        "            return",
    ),
    Fault(
        "worker-gets-a-whole-step",
        "data/split.py",
        "rows_per_block = self.prompts_per_step // world_size",
        "rows_per_block = self.prompts_per_step",
    ),
    Fault(
        "advantages-scaled-over-the-batch",
        "learner/trl_config.py",
        '        "report_to": "none",\n',
        '        "report_to": "none",\n        "scale_rewards": "batch",\n',
        integration=("learner/test_learner.py", "learner/rollouts/test_dynamic_sampling.py", *RUNS),
    ),
    # Ledger
    Fault(
        "mark-forgets-the-last-problem",
        "data/ledger.py",
        "used = np.insert(record.used, np.searchsorted(record.used, new), new)",
        "used = np.insert(record.used, np.searchsorted(record.used, new[:-1]), new[:-1])",
    ),
    Fault(
        "problem-used-twice-is-accepted",
        "data/ledger.py",
        '_raise_if_any(epoch, new[isin_sorted(new, record.used)], "would be used twice")',
        "new = new[~isin_sorted(new, record.used)]",
    ),
    Fault(
        "epoch-closes-one-problem-early",
        "data/ledger.py",
        "record.counted == self.fingerprint.count:",
        "record.counted >= self.fingerprint.count - 1:",
    ),
    Fault(
        "ledger-not-checked-when-read",
        "data/ledger.py",
        "if damaged := file.zip.testzip():",
        "if damaged := file.zip.comment:",
    ),
    # Checkpoints and the start point of a resumed run
    Fault(
        "best-checkpoint-by-minimum",
        "storage/checkpoints.py",
        "return (False, -value, checkpoint.step, checkpoint.serial)",
        "return (False, value, checkpoint.step, checkpoint.serial)",
    ),
    Fault(
        "checksum-not-compared",
        "storage/checkpoint_integrity.py",
        'if file_checksum(checkpoint.folder, checkpoint.name, name) != checkpoint.files[name]["sha256"]',
        'if not checkpoint.files[name]["sha256"]',
    ),
    Fault(
        "upload-not-read-back",
        "storage/checkpoint_upload.py",
        "if file_checksum(self.folder, *names) != digest.hexdigest():",
        "if not self.folder.exists(*names):",
    ),
    Fault(
        "complete-checkpoint-cleared",
        "storage/checkpoint_upload.py",
        "if not (folder.exists(name, MANIFEST) or folder.exists(name, DAMAGED))]",
        "if not folder.exists(name, DAMAGED)]",
    ),
    Fault(
        "manifest-before-the-other-workers-files",
        "storage/checkpoint_upload.py",
        "for rank in range(self.world_size):",
        "for rank in range(1):",
    ),
    Fault(
        "checkpoint-written-under-its-own-name",
        "storage/checkpoint_upload.py",
        'return f"{name}.{self.fence.token}{STAGING_SUFFIX}" if self.fence else name + STAGING_SUFFIX',
        "return name",
    ),
    Fault(
        "oldest-checkpoint-first",
        "storage/checkpoints.py",
        "each for each in list_checkpoints(folder)[::-1] if not any(",
        "each for each in list_checkpoints(folder) if not any(",
    ),
    Fault(
        "latest-checkpoint-pruned",
        "storage/checkpoints.py",
        "for each in (*checkpoints[-1:], *rank_checkpoints(checkpoints, metric)[:keep])}",
        "for each in rank_checkpoints(checkpoints, metric)[:keep]}",
    ),
    Fault(
        "reward-states-of-rank-0-everywhere",
        "storage/checkpoints.py",
        'for name in (f"rewards_{rank}.json", "rewards_0.json"):',
        'for name in ("rewards_0.json",):',
    ),
    Fault(
        "living-driver-replaced",
        "storage/lease.py",
        "if holder.is_alive_here:",
        "if not holder.is_alive_here:",
    ),
    Fault(
        "heartbeat-elsewhere-not-watched",
        "storage/lease.py",
        "if now != beat:",
        "if now == beat and False:",
    ),
    Fault(
        "superseded-attempt-may-write",
        "storage/fencing.py",
        "if self.folder.read_text(NAME) != self.token:",
        "if not self.folder.read_text(NAME):",
    ),
    Fault(
        "removal-fails-after-a-lost-answer",
        "storage/filesystem.py",
        "if attempts == 1:",
        "if attempts:",
    ),
    Fault(
        "password-shown-in-a-uri",
        "storage/uris.py",
        r'return re.sub(r"(://[^/?@:\s]*):[^/?@]*@", r"\1@", uri)',
        "return uri",
    ),
    Fault(
        "damaged-checkpoint-resumed",
        "training/start_point.py",
        "if not (faults := _find_faults(checkpoint)):",
        "if not (faults := _find_faults(checkpoint)) or checkpoint.files:",
    ),
    Fault(
        "steps-of-another-run-counted",
        "training/start_point.py",
        "return self.checkpoint.step if self.checkpoint and not self.is_of_other_run else 0",
        "return self.checkpoint.step if self.checkpoint else 0",
    ),
    Fault(
        "metrics-of-another-run-taken-over",
        "training/start_point.py",
        'OF_THE_RUN = ("metrics.jsonl", "rewards_*.json",',
        'OF_THE_RUN = ("rewards_*.json",',
    ),
    Fault(
        "rollouts-past-the-checkpoint-kept",
        "training/attempt.py",
        "if names := drop_rollouts_after(attempt.folder, start.step):",
        "if names := []:",
    ),
    Fault(
        "other-datasets-problems-stay-in-the-ledger",
        "training/start_point.py",
        "ledger.set_datasets(training_ids, fingerprints)",
        'ledger.ledgers[""].fingerprint = fingerprints[""]',
    ),
    Fault(
        "data-skipped-again-on-resume",
        "learner/trl_config.py",
        "ignore_data_skip=True,",
        "ignore_data_skip=False,",
    ),
    Fault(
        "retry-gives-up-at-once",
        "storage/retry.py",
        "return self._elapsed >= self.retry_seconds",
        "return self._elapsed >= 0.0",
    ),
    Fault(
        "full-storage-is-not-waited-for",
        "storage/retry.py",
        "or not (is_transient(error) or is_full(error)):",
        "or not is_transient(error):",
    ),
    # Proven weight sync
    Fault(
        "tolerance-times-100",
        "inference/learner_end.py",
        "DEFAULT_LOGPROB_TOLERANCE[self.config.dtype] if tolerance is None",
        "100 * DEFAULT_LOGPROB_TOLERANCE[self.config.dtype] if tolerance is None",
    ),
    Fault(
        "gap-that-is-no-number-passes",
        "inference/sync_proof.py",
        "if not gap.mean <= tolerance:",
        "if gap.mean > tolerance:",
    ),
    Fault(
        "unsynced-parameters-not-noticed",
        "inference/local_engine.py",
        "if missing := sorted(expected - loaded):",
        "if missing := sorted(loaded - expected):",
    ),
    Fault(
        "norms-withheld-from-the-sync",
        "inference/engine.py",
        "self.receive_weights(self._iter_named_params(),",
        'self.receive_weights(((n, w) for n, w in self._iter_named_params() if "norm" not in n),',
    ),
    Fault(
        "codes-of-int4-in-the-other-order",
        "models/quantized.py",
        "torch.stack((pairs & 15, pairs >> 4), dim=-1)",
        "torch.stack((pairs >> 4, pairs & 15), dim=-1)",
    ),
    Fault(
        "rows-of-nf4-divide-blocks",
        "models/quantized.py",
        "quantize_4bit(weight.reshape(-1, BLOCK), blocksize=BLOCK",
        "quantize_4bit(weight.flatten()[1:], blocksize=BLOCK",
    ),
    Fault(
        "saved-modules-are-quantized",
        "models/quantized.py",
        'and not any(f".{each}." in f".{name}." for each in kept)',
        "",
    ),
    Fault(
        "exported-adapter-on-the-unquantized-policy",
        "models/adapter_folders.py",
        "round_policy(model, base.method, adapter.modules_to_save or ())",
        "pass",
        unit=("models/test_quantized.py",),
    ),
    Fault(
        "base-in-four-bits-not-compared",
        "inference/quantized_base.py",
        "if not error <= TOLERANCE * size:",
        "if error > 100 * size:",
    ),
    Fault(
        "shared-weights-may-change",
        "inference/weight_proof.py",
        "self._constant = names",
        "self._constant = frozenset()",
        integration=("inference/test_adapters.py",),
    ),
    Fault(
        "requests-without-their-adapter",
        "inference/local_engine.py",
        "lora_request=None if self.slot is None else self.slot.request,",
        "lora_request=None,",
        integration=("inference/test_adapters.py",),
    ),
    Fault(
        "adapter-of-requests-keeps-its-id",
        "inference/lora_requests.py",
        "self._version += 1",
        "self._version = 1",
    ),
    Fault(
        "numbers-beside-the-adapter-pass",
        "inference/lora_requests.py",
        "if int(tensor.count_nonzero()) != own:",
        "if int(tensor.count_nonzero()) < own:",
    ),
    Fault(
        "scale-left-out-of-an-update",
        "models/adapters.py",
        "second.detach().float() * layer.scaling[adapter])",
        "second.detach().float())",
    ),
    Fault(
        "every-other-packed-layer-stays-stale",
        "inference/local_engine.py",
        "for layer in self._repackable_layers:",
        "for layer in self._repackable_layers[::2]:",
    ),
    Fault(
        "prefix-cache-survives-a-sync",
        "inference/engine.py",
        "        self.empty_prefix_cache()\n        self._prove_weights()",
        "        self._prove_weights()",
    ),
    Fault(
        "no-checksums-after-a-sync",
        "inference/engine.py",
        "        self.empty_prefix_cache()\n        self._prove_weights()",
        "        self.empty_prefix_cache()",
        integration=("inference/test_weight_proof.py", "driver/test_run.py"),
    ),
    Fault(
        "old-copies-beside-new-weights-pass",
        "inference/weight_proof.py",
        "if changed and (copies := stale_copies()):",
        "if not changed and (copies := stale_copies()):",
    ),
    Fault(
        "adapter-left-out-of-the-learners-checksums",
        "inference/weight_proof.py",
        "if id(parameter) in owners:",
        "if id(parameter) in added:",
    ),
    Fault(
        "first-replica-alone-is-compared",
        "inference/weight_proof.py",
        "for i in range(layout.replicas[name]))",
        "for i in range(1))",
    ),
    Fault(
        "shards-counted-once-each-worker",
        "inference/weight_proof.py",
        "numbers[name] = add_sums(parts)",
        "numbers[name] = parts[0]",
        integration=("test_sharding.py",),
    ),
    Fault(
        "killed-engine-delivers-twice",
        "inference/pool/pool.py",
        "if key not in each.delivered:",
        "if key:",
    ),
    Fault(
        "open-problems-forgotten-with-less-staleness",
        "data/mixture_ledger.py",
        "{epoch: uint64_to_ids(ledger.open(epoch)) for epoch in ledger.open_epochs}",
        "{}",
    ),
    Fault(
        "sharded-parameters-left-whole",
        "learner/sharding.py",
        "            module.reshard()\n",
        "            pass\n",
    ),
    Fault(
        "shard-of-a-lost-engine-forgotten",
        "inference/pool/pool.py",
        "                    self._pending.appendleft(shard)\n",
        "                    pass\n",
    ),
    Fault(
        "shard-may-kill-any-number-of-engines",
        "inference/pool/pool.py",
        "if shard.losses < MAX_LOSSES:",
        "if shard.losses:",
    ),
    Fault(
        "work-of-an-earlier-attempt-goes-on",
        "inference/pool/pool.py",
        "process.abort.options(concurrency_group=CONTROL).remote(engine.shard.round.token)",
        "process.pid.options(concurrency_group=CONTROL).remote()",
    ),
    Fault(
        "engine-works-before-it-is-proven",
        "inference/pool/pool.py",
        "if self._pending and engine.proven == version.number:",
        "if self._pending:",
    ),
    Fault(
        "answers-of-shards-in-another-order",
        "inference/pool/pool.py",
        "rank, index = key = shard.rows[place]",
        "rank, index = key = shard.rows[-1 - place]",
    ),
    Fault(
        "learners-of-other-workers-not-compared",
        "inference/dedicated_engine.py",
        "if digest != digests[0]]:",
        "if digest == digests[0]][:0]:",
    ),
    Fault(
        "digest-without-the-sums",
        "inference/weight_proof.py",
        "repr(sorted(self.sums.items()))",
        "repr(sorted(self.sums))",
        unit=("inference/test_dedicated_engine.py",),
        integration=(),
    ),
    Fault(
        "plain-sum-of-the-bits",
        "inference/weight_sums.py",
        "BASE = 0x9E3779B97F4A7C15",
        "BASE = 1",
    ),
    Fault(
        "part-without-its-place",
        "inference/weight_sums.py",
        "return total * _signed(pow(BASE, offset, MODULUS))",
        "return total",
    ),
    Fault(
        "half-of-a-weight-is-enough",
        "inference/weight_layout.py",
        "elif max(counts) < numel and not computes:",
        "elif max(counts) < numel // 2 and not computes:",
    ),
    Fault(
        "fused-parts-in-any-order",
        "inference/weight_layout.py",
        "if found != sorted(found, key=order.index):",
        "if len(found) > len(order):",
    ),
    Fault(
        "generation-without-a-sync-not-proven",
        "learner/rollouts/sampler.py",
        "if self.engine.proofs == proofs:",
        "if self.engine.proofs < proofs:",
    ),
    Fault(
        "learner-proven-against-itself",
        "learner/learner.py",
        "gap = self.engine.prove_sync(learner_logps, engine_logps, mask, self.state.global_step)",
        "gap = self.engine.prove_sync(learner_logps, learner_logps, mask, self.state.global_step)",
        integration=(
            "learner/test_exact_savings.py",
            "learner/test_learner.py",
            "inference/test_engine.py",
            *RUNS,
            "models/test_lora.py",
        ),
    ),
    Fault(
        "proof-of-no-token",
        "learner/sync_check.py",
        "self.check(tokens.learner, tokens.proof, torch.ones_like(tokens.learner))",
        "self.check(tokens.learner, tokens.proof, torch.zeros_like(tokens.learner))",
    ),
    Fault(
        "proof-of-filtered-log-probabilities",
        "learner/sync_check.py",
        "ratios, proof_logps(batch)[mask],",
        "ratios, engine_logps[mask],",
    ),
    # Grading
    Fault(
        "timed-out-verdict-counts-as-right",
        "rewards/sandbox/supervisor.py",
        "self._send_result(item, TIMEOUT, 0.0)",
        "self._send_result(item, TIMEOUT, 1.0)",
    ),
    Fault(
        "killed-verifier-counts-as-wrong",
        "rewards/sandbox/supervisor.py",
        "elif exit_signal in _EXTERNAL_SIGNALS and item.retries < _MAX_RETRIES:",
        "elif exit_signal in _EXTERNAL_SIGNALS and item.retries < 0:",
    ),
    Fault(
        "interval-ends-swapped",
        "rewards/math/real_sets.py",
        'low_open=brackets.opening == "(", high_open=brackets.closing == ")"',
        'low_open=brackets.closing == ")", high_open=brackets.opening == "("',
    ),
    Fault(
        "subset-of-a-set-is-right",
        "rewards/math/compare.py",
        "    return not unmatched\n",
        "    return True\n",
    ),
    Fault(
        "hedged-answer-is-right",
        "rewards/math/verify.py",
        "right = all(_is_right(gold, answer) for answer in answers)",
        "right = any(_is_right(gold, answer) for answer in answers)",
    ),
    Fault(
        "answer-inside-the-reasoning-counts",
        "rewards/math/extract.py",
        'elif "<think>" in text:\n        return ()',
        'elif "<think>" in text:\n        text = text.replace("<think>", "")',
    ),
    Fault(
        "rounded-to-three-places-is-right",
        "rewards/math/values.py",
        "_MIN_DECIMALS = 6",
        "_MIN_DECIMALS = 3",
    ),
    Fault(
        "unscorable-counts-as-wrong",
        "rewards/sandbox/protocol.py",
        "(number, status, None if reward != reward else reward)",
        "(number, status, 0.0 if reward != reward else reward)",
    ),
    Fault(
        "time-limit-of-the-config-ignored",
        "rewards/correctness.py",
        "VerifierPool(strict=strict, time_limit=time_limit)",
        "VerifierPool(strict=strict)",
    ),
    Fault(
        "cosine-length-of-right-and-wrong-swapped",
        "rewards/length.py",
        "shortest, longest = right if reward else wrong",
        "shortest, longest = wrong if reward else right",
    ),
    Fault(
        "heldout-booleans-left-out",
        "rewards/registry.py",
        'correctness_settings(config) | {"boolean_share": 1.0}',
        "correctness_settings(config)",
    ),
    Fault(
        "plain-prompt-without-its-beginning",
        "models/plain_prompts.py",
        "encoded = self._tokenizer(texts[0] if is_single else texts)",
        "encoded = self._tokenizer(texts[0] if is_single else texts, add_special_tokens=False)",
    ),
    Fault(
        "length-of-a-plain-prompt-without-its-beginning",
        "models/plain_prompts.py",
        "texts = [self._beginning + text for text in texts]",
        "texts = list(texts)",
    ),
    Fault(
        "text-beyond-its-time-is-tried-again",
        "processes/limited_process.py",
        "if answer is None and code != -signal.SIGPROF:",
        "if answer is None:",
    ),
    Fault(
        "hedge-in-the-sentence-of-a-choice-pays",
        "rewards/choice.py",
        'letters |= {statement["letter"], *_LETTER.findall(sentence[0] if sentence else "")}',
        'letters |= {statement["letter"]}',
    ),
    Fault(
        "repeated-key-is-json",
        "rewards/json_format.py",
        "object_pairs_hook=_unique_keys, ",
        "",
    ),
    Fault(
        "verdicts-stay-in-memory",
        "rewards/verdicts.py",
        'self._folder.write_json({"verdicts": dict(verdicts), "cost": cost}, FOLDER, name)',
        "pass",
    ),
    Fault(
        "newer-verdict-counts",
        "rewards/verdicts.py",
        "self._verdicts.setdefault(key, verdict)",
        "self._verdicts[key] = verdict",
    ),
    Fault(
        "failed-verdict-is-not-kept",
        "rewards/judge.py",
        "store.add(new, cost)",
        "store.add({key: verdict for key, verdict in new.items() if verdict is not None}, cost)",
    ),
    Fault(
        "tags-of-a-judge-do-not-depend-on-the-texts",
        "rewards/judge.py",
        "mark = key[:12]",
        'mark = "0" * 12',
    ),
    Fault(
        "score-outside-of-the-scale-counts",
        "rewards/judge.py",
        "type(each) in (int, float) and self.lowest <= each <= self.highest for each in scores",
        "type(each) in (int, float) for each in scores",
    ),
    Fault(
        "isolated-reward-fails-for-single-completions",
        "rewards/isolated.py",
        "places.setdefault(json.dumps(problem), []).append(place)",
        "places[str(place)] = [place]",
    ),
    Fault(
        "isolated-reward-keeps-the-state-of-a-failed-call",
        "rewards/isolated.py",
        '"restored": self._state if self._is_dirty else None,',
        '"restored": None,',
    ),
    Fault(
        "isolated-reward-restarts-without-end",
        "rewards/isolated.py",
        "if self._ends >= MAX_ENDED_PROCESSES:",
        "if False:",
    ),
    Fault(
        "random-numbers-of-isolated-rewards-differ",
        "rewards/isolated_process.py",
        "random.seed(digest)",
        "random.seed()",
    ),
    Fault(
        "heldout-score-leaves-out-a-failed-reward",
        "evaluation/scores.py",
        "None if place in failed else self._sum(row)",
        "self._sum(row)",
    ),
    Fault(
        "choices-of-gpqa-in-the-order-of-the-file",
        "data/benchmarks.py",
        'choices = sorted([right, *wrong], key=lambda each: hashlib.sha256(f"{question}\\n{each}".encode()).digest())',
        "choices = [right, *wrong]",
    ),
    Fault(
        "functions-of-a-question-are-unknown-to-its-program",
        "rewards/code_tests.py",
        'return f"{preamble}\\n\\n{program}" if preamble and program else program',
        "return program",
    ),
    Fault(
        "benchmark-scored-by-the-runs-score",
        "config/schema.py",
        "benchmark_score(source) or self.heldout.score or derived_score",
        "self.heldout.score or derived_score",
    ),
    Fault(
        "processes-of-an-isolated-reward-outlive-it",
        "processes/request_client.py",
        "os.killpg(child.process.pid, signal.SIGKILL)",
        "child.process.kill()",
    ),
    Fault(
        "scores-of-a-reward-model-in-the-order-of-its-passes",
        "rewards/reward_models.py",
        "for place, value in zip(places, logits[:, 0].float().tolist(), strict=True):",
        "for place, value in zip(sorted(places), logits[:, 0].float().tolist(), strict=True):",
    ),
    Fault(
        "reward-model-reads-its-padding",
        "rewards/reward_models.py",
        "text_config.pad_token_id = tokenizer.pad_token_id",
        "pass",
    ),
    Fault(
        "reward-models-that-die-stay-dead",
        "rewards/reward_models.py",
        "max_restarts=-1",
        "max_restarts=0",
    ),
    Fault(
        "cost-of-other-workers-is-not-counted",
        "rewards/verdicts.py",
        "self._cost += sum(cost for _, cost in self._read_new())",
        "pass",
    ),
    Fault(
        "heldout-score-without-weights",
        "evaluation/scores.py",
        "weight * reward for weight, reward in",
        "reward for weight, reward in",
    ),
    Fault(
        "heldout-score-of-no-reward-counts-as-zero",
        "evaluation/scores.py",
        "return sum(applied) if applied else None",
        "return sum(applied)",
    ),
    Fault(
        "heldout-score-of-a-failed-environment-kept",
        "evaluation/scores.py",
        "[None if each.is_unscorable else score for each, score in",
        "[score for each, score in",
    ),
    Fault(
        "heldout-scores-of-any-size-with-wilson-interval",
        "evaluation/metrics.py",
        'all(row.get("is_share", True) for row in rows) else normal_interval',
        'all(row.get("is_share", True) for row in rows) or rows else normal_interval',
    ),
    Fault(
        "own-function-reads-missing-solutions",
        "rewards/registry.py",
        "return parameter is not None and parameter.default is parameter.empty",
        "return False",
    ),
    Fault(
        "only-the-first-of-several-solutions",
        "data/problem.py",
        'return ", ".join(_parse_solution(item, where) for item in solution)',
        "return _parse_solution(solution[0], where)",
    ),
    Fault(
        "rewards-of-a-run-folder-trusted",
        "config/recorded.py",
        "if code and not is_trusted:",
        "if code and is_trusted is None:",
    ),
    Fault(
        "packed-layer-keeps-the-bias-in-float32",
        "inference/vllm_internals.py",
        "        layer.bias = own\n    if read",
        "        own = layer.bias\n    if read",
    ),
    # Config and preflight
    Fault(
        "override-ignored",
        "config/loader.py",
        "target[names[-1]] = _parse_value(value, _field_type(section, names[0]) if len(names) == 1 else None)",
        "target.setdefault(names[-1], _parse_value(value, _field_type(section, names[0])))",
    ),
    Fault(
        "checkpoint-inside-a-batch-accepted",
        "config/checks.py",
        "if steps % config.steps_per_batch:",
        "if steps < config.steps_per_batch:",
    ),
    Fault(
        "micro-batch-not-shared-evenly",
        "config/sizes.py",
        "return grpo.prompts_per_step % workers == 0 and divides_micro_batches",
        "return grpo.prompts_per_step % workers == 0",
        unit=("config/test_checks.py", "config/test_sizes.py", "resilience/test_elastic.py"),
    ),
    Fault(
        "learning-rate-ignored",
        "learner/trl_config.py",
        "            learning_rate=grpo.learning_rate,\n",
        "",
    ),
    Fault(
        "same-number-of-other-problems-accepted",
        "driver/preflight/same_run.py",
        "if recorded == current:",
        "if recorded.count == current.count:",
    ),
    Fault(
        "seed-may-change-during-a-run",
        "driver/preflight/resume_fields.py",
        '    "run.seed": Fixed(reason="it determines the order of problems, which the ledger relies on"),\n',
        "",
    ),
    Fault(
        "missing-package-not-noticed",
        "resilience/nodes.py",
        "if own != driver:",
        "if own and driver and own != driver:",
    ),
    Fault(
        "first-override-without-a-file-lost",
        "cli.py",
        "words = [word for word in (getattr(arguments, field), *arguments.overrides) if word is not None]",
        "words = [word for word in arguments.overrides if word is not None]",
    ),
    # Failures
    Fault(
        "watchdog-never-arms",
        "resilience/watchdog.py",
        "self._set_backstop(self._activity)\n            self._changed.notify()",
        "self._set_backstop(self._activity)",
    ),
    Fault(
        "death-blamed-before-its-cause",
        "resilience/error_triage.py",
        "return int(_is_death(error)), rank",
        "return int(not _is_death(error)), rank",
    ),
    Fault(
        "ledger-error-is-retried",
        "resilience/error_triage.py",
        '    LedgerError,\n    RefusedRewardError,\n    RolloutError,\n    SupersededError,\n)\n"""',
        '    RefusedRewardError,\n    RolloutError,\n    SupersededError,\n)\n"""',
    ),
    Fault(
        "bad-gradient-of-one-worker-not-skipped",
        "resilience/nonfinite.py",
        "dist.all_reduce(flags, op=dist.ReduceOp.MAX)",
        "dist.all_reduce(flags, op=dist.ReduceOp.MIN)",
    ),
    Fault(
        "bad-steps-counted-for-ever",
        "resilience/nonfinite.py",
        "            self.in_a_row = 0\n            return",
        "            return",
    ),
    Fault(
        "resize-without-a-checkpoint",
        "resilience/elastic.py",
        "return any(number in self._with_checkpoint for number in range(before, after))",
        "return after > before",
    ),
    Fault(
        "workers-fit-by-their-most-plentiful-resource",
        "resilience/elastic.py",
        "return sum(int(min(node.get(name, 0)",
        "return sum(int(max(node.get(name, 0)",
    ),
    Fault(
        "second-ctrl-c-ignored",
        "resilience/signals.py",
        "if self.received is None and self.is_training():",
        "if self.is_training():",
    ),
    # Metrics, records and reports
    Fault(
        "held-out-prompts-without-template-variables",
        "evaluation/solve.py",
        "[problem.prompt for problem in problems], config.chat_template_kwargs)",
        "[problem.prompt for problem in problems], {})",
    ),
    Fault(
        "confidence-interval-swapped",
        "evaluation/confidence.py",
        "Measure(mean, max(0.0, center - half), min(1.0, center + half), n)",
        "Measure(mean, min(1.0, center + half), max(0.0, center - half), n)",
    ),
    Fault(
        "no-answer-wins-the-vote",
        "evaluation/metrics.py",
        "Counter(answer for answer in answers if answer)",
        "Counter(answers)",
    ),
    Fault(
        "baseline-of-other-problems-taken",
        "evaluation/baseline.py",
        'if evaluation["measured_on"] == conditions and',
        'if evaluation["measured_on"] and',
    ),
    Fault(
        "baseline-of-another-policy-taken",
        "evaluation/baseline.py",
        'and evaluation["setup"] == self.setup:',
        'and evaluation["setup"]:',
    ),
    Fault(
        "all-samples-of-a-problem-alike",
        "evaluation/solve.py",
        "request_seed(config.run.seed, problem.id, 0, index)",
        "request_seed(config.run.seed, problem.id, 0, 0)",
    ),
    Fault(
        "evaluation-of-a-shared-engine-on-one-gpu",
        "evaluation/evaluate.py",
        "return config.tensor_parallel_size if config.cluster.use_gpu else 1",
        "return 1",
    ),
    Fault(
        "part-of-the-held-out-problems-measured",
        "evaluation/evaluate.py",
        "bounds = [len(problems) * part // count for part in range(count + 1)]",
        "bounds = [len(problems) // count * part for part in range(count + 1)]",
    ),
    Fault(
        "no-gpu-left-for-measuring-accepted",
        "driver/cluster/connection.py",
        'if cluster.use_gpu and total["GPU"] < of_training + engine_gpus:',
        'if cluster.use_gpu and total["GPU"] < engine_gpus:',
    ),
    Fault(
        "engine-over-two-nodes-accepted",
        "driver/cluster/connection.py",
        "if on_nodes < least:",
        "if on_nodes < 1:",
    ),
    Fault(
        "elastic-workers-take-the-gpus-of-dedicated-engines",
        "driver/cluster/connection.py",
        "engines = dedicated_processes(config) if config.cluster.use_gpu else 0",
        "engines = 0",
    ),
    Fault(
        "dedicated-engine-counted-on-the-workers-gpu",
        "models/memory.py",
        "        if self.is_dedicated:\n            return self.others",
        "        if self.sleep_mode:\n            return self.others",
    ),
    Fault(
        "structured-outputs-with-dedicated-engines-accepted",
        "config/checks.py",
        'config.rollout.structured_outputs is not None and "rollout.structured_outputs",',
        'False and "rollout.structured_outputs",',
    ),
    Fault(
        "elastic-run-takes-the-gpu-of-the-measuring-engine",
        "resilience/elastic.py",
        "worker_slots(self._total_resources(usable), needed) - self.spare_workers)",
        "worker_slots(self._total_resources(usable), needed))",
    ),
    Fault(
        "last-rewards-are-the-first",
        "driver/summary.py",
        "reward_last=_mean(last_rewards),",
        "reward_last=_mean(first_rewards),",
    ),
    Fault(
        "launch-after-a-death-is-no-failure",
        "telemetry/goodput.py",
        "driver_died = self._launch_open",
        "driver_died = False",
    ),
    Fault(
        "outer-phase-gets-the-inner-ones-seconds",
        "telemetry/profiler.py",
        "self._seconds[lane.open_spans[-1].phase] += now - lane.charged_until",
        "self._seconds[lane.open_spans[0].phase] += now - lane.charged_until",
    ),
    Fault(
        "speed-ignores-steps-between-reports",
        "training/report_callback.py",
        "completions = steps * self.config",
        "completions = self.config",
    ),
    Fault(
        "saved-step-not-logged",
        "training/report_callback.py",
        "control.should_log |= control.should_save",
        "control.should_log |= False",
        integration=("training/test_report_callback.py",),
    ),
    Fault(
        "watchdog-not-told-of-a-checkpoint",
        "training/report_callback.py",
        'self.watchdog.heartbeat("a checkpoint" if control.should_save else "drawing problems", state.global_step)',
        'self.watchdog.heartbeat("drawing problems", state.global_step)',
    ),
    Fault(
        "solved-problems-never-come-back",
        "data/curriculum.py",
        "skipped = used_just_before & (solved_before[ends] - solved_before[last_groups] == skip_solved)",
        "skipped = solved_before[ends] - solved_before[last_groups] == skip_solved",
    ),
    Fault(
        "rollout-file-that-spans-the-step-deleted",
        "storage/records/rollout_files.py",
        "        if file.first_step <= step:",
        "        if file.first_step == step:",
    ),
    Fault(
        "best-gap-shown-as-the-worst",
        "pages/report/health.py",
        'HealthFinding("ok" if max(gaps) <= tolerance else "error", text)',
        'HealthFinding("ok" if min(gaps) <= tolerance else "error", text)',
    ),
    Fault(
        "page-shows-the-first-row-of-a-repeated-step",
        "pages/report/rows.py",
        "self.rows[at : at + replaces] = [row]",
        "self.rows[at:at] = [] if replaces else [row]",
    ),
    Fault(
        "metrics-keep-rows-of-later-steps",
        "storage/jsonl.py",
        'self._remove_after(row["step"] - 1)',
        'self._remove_after(row["step"])',
    ),
    Fault(
        "entries-of-the-board-read-again",
        "observers/follower.py",
        "self._entries_read += len(entries)",
        "self._entries_read += 0",
    ),
    # Policy, data and memory
    Fault(
        "policy-of-an-earlier-launch-kept",
        "driver/launch.py",
        "    elif uploaded != identity:",
        "    elif uploaded is None:",
    ),
    Fault(
        "adapters-lose-their-policy",
        "driver/launch.py",
        "if uploaded is not None and has_checkpoints:",
        "if uploaded == identity and has_checkpoints:",
    ),
    Fault(
        "other-weights-in-the-policys-folder-accepted",
        "driver/preflight/same_run.py",
        "    if changed == ():",
        "    if begun:",
        unit=("driver/test_launch.py",),
    ),
    Fault(
        "keys-of-files-redacted",
        "text/redaction.py",
        "return {key: redact_texts(item, secrets) for key, item in value.items()}",
        "return {redact_texts(key, secrets): redact_texts(item, secrets) for key, item in value.items()}",
        unit=("text/test_redaction.py",),
    ),
    Fault(
        "adapters-of-one-embedded-policy-only",
        "models/adapter_folders.py",
        "if base in EMBEDDED_POLICIES:",
        "if base == EMBEDDED_POLICIES[0]:",
    ),
    Fault(
        "adapter-merged-in-the-precision-of-the-policy",
        "models/adapters.py",
        "copy = whole.to(torch.float32, copy=True) if module is base else whole",
        "copy = whole.clone() if module is base else whole",
    ),
    Fault(
        "adapter-merged-into-the-learner",
        "models/adapters.py",
        "_restore(module, state)",
        "pass",
    ),
    Fault(
        "trained-module-replaced-by-the-frozen-one",
        "models/adapters.py",
        "yield name, _unsharded(weight), originals[name]\n    elif",
        "yield name, originals[name], originals[name]\n    elif",
    ),
    Fault(
        "norms-trained-in-16-bits",
        "models/adapters.py",
        "parameter.data = parameter.data.float()",
        "parameter.data = parameter.data",
    ),
    Fault(
        "refused-adapters-of-strangers-are-read",
        "models/adapter_folders.py",
        "settings[name] and settings[name] != defaults.get(name)",
        "name == 'megatron_core' and settings[name] != defaults.get(name)",
    ),
    Fault(
        "peft-fields-of-any-type",
        "config/peft_fields.py",
        "if not field.fits(value):",
        "if field is None:",
    ),
    Fault(
        "warm-up-learns-the-questions",
        "models/warm_up.py",
        "labels[row, : len(sequence)] = torch.where(learns, sequence, -100)",
        "labels[row, : len(sequence)] = sequence",
    ),
    Fault(
        "noise-left-out-inside-a-block",
        "inference/cpu_sampler.py",
        "(rates / noise[:, mass.shape[1] :]).argmax(dim=-1, keepdim=True)",
        "rates.argmax(dim=-1, keepdim=True)",
    ),
    Fault(
        "one-moment-of-the-optimizer",
        "models/memory.py",
        "optimizer_states=8 * trained // shards,",
        "optimizer_states=4 * trained // shards,",
    ),
    Fault(
        "export-of-a-damaged-checkpoint",
        "export/checkpoint.py",
        "if faults := find_faults(checkpoint):",
        "if (faults := find_faults(checkpoint)) and not checkpoint.files:",
    ),
    Fault(
        "adapter-added-to-rounded-weights",
        "models/adapter_folders.py",
        '"auto" if policy is not None or dtype is None else dtype',
        '"auto" if dtype is None else dtype',
    ),
    Fault(
        "arithmetic-trains-on-heldout-tasks",
        "data/arithmetic.py",
        '"train": tasks[HELDOUT:]}',
        '"train": tasks}',
    ),
    Fault(
        "parquet-rows-numbered-wrong",
        "data/files.py",
        "        first += rows\n",
        "        first = rows\n",
    ),
    Fault(
        "first-mark-of-a-worked-answer-taken",
        "data/gsm8k.py",
        'answer.rpartition("####")',
        'answer.partition("####")',
    ),
    Fault(
        "id-ignores-the-solution",
        "data/problem.py",
        'content = json.dumps([[(m["role"], m["content"]) for m in prompt], solution], ensure_ascii=False).encode()',
        'content = json.dumps([[(m["role"], m["content"]) for m in prompt]], ensure_ascii=False).encode()',
    ),
    Fault(
        "problems-of-one-question-on-both-sides",
        "data/stream.py",
        "if self.heldout_share and is_heldout(problem.question_id, self.heldout_share) != self.keep_heldout:",
        "if self.heldout_share and is_heldout(problem.id, self.heldout_share) != self.keep_heldout:",
    ),
    Fault(
        "id-ignores-the-columns",
        "data/problem.py",
        "content_id = problem_id(prompt, solution, columns) if columns else question_id",
        "content_id = question_id",
    ),
    Fault(
        "row-repeated-after-a-storage-failure",
        "data/files.py",
        "return rows, next((row for row in rows if row[0] > last), None)",
        "return rows, next(rows, None)",
    ),
)


NO_CLUSTER_PLUGIN = """
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if "cluster" in getattr(item, "fixturenames", ())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
"""
"""Plugin of pytest that deselects the tests that use the fixture `cluster`, as all tests with real runs do."""

PRINT_LOCATIONS = """
import grpo_ray, subprocess, sys
print(grpo_ray.__file__)
print(subprocess.check_output([sys.executable, "-c", "import grpo_ray; print(grpo_ray.__file__)"], text=True).strip())
if sys.argv[1:] == ["ray"]:
    import ray
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    @ray.remote
    def location():
        import grpo_ray
        return grpo_ray.__file__
    print(ray.get(location.remote()))
    ray.shutdown()
"""
"""Prints the location from which this process, a subprocess and, with the argument `ray`, a Ray worker import the
package, one per line."""

TIMED_OUT = -1
PASSED, FAILED, EMPTY = 0, 1, 5
"""Exit codes of pytest; all others are errors."""


@dataclass(frozen=True)
class Outcome:
    """One run of pytest."""

    code: int
    seconds: float
    output: str

    @property
    def failure(self) -> tuple[str, str]:
        """Name and message of the first failing test in pytest's summary."""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", self.output, re.MULTILINE)
        return (found[1], found[2] or "") if found else ("", "")

    @property
    def error(self) -> str:
        """Description of a run that neither passed nor failed."""
        if self.code == TIMED_OUT:
            return f"took longer than {self.seconds:.0f} s"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"pytest ended with {self.code}: {' | '.join(lines[-3:])}"


class Copy:
    """Copy of a checkout in a temporary folder, with the tests that run in it."""

    def __init__(self, checkout: Path, scratch: Path, python: Path, with_cluster: bool, max_seconds: float) -> None:
        """Copy the checkout.

        Args:
            scratch: temporary folder, deleted by the caller.
            python: interpreter of the environment with the package's dependencies.
            with_cluster: run tests that use the fixture `cluster`.
            max_seconds: test files that take longer on the unchanged copy are left out.
        """
        self.tree = scratch / "tree"
        self.scratch = scratch
        self.python = python
        self.with_cluster = with_cluster
        self.max_seconds = max_seconds
        self._baselines: dict[tuple[str, str], Outcome] = {}
        for name in filter(lambda name: (checkout / name).exists(), COPIED):
            if (checkout / name).is_dir():
                shutil.copytree(checkout / name, self.tree / name, ignore=IGNORED, symlinks=True)
            else:
                shutil.copy2(checkout / name, self.tree / name)
        if (checkout.parent / "shared").exists():  # some tests read real problems from beside the checkout
            (scratch / "shared").symlink_to(checkout.parent / "shared")
        (scratch / "plugins").mkdir()
        (scratch / "plugins" / "without_cluster.py").write_text(NO_CLUSTER_PLUGIN)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables under which the package is imported from the copy and not from an installation."""
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.tree), str(self.scratch / "plugins")]),
            "COLUMNS": "300",  # pytest truncates its summary at this width
        }

    def check_imports(self) -> None:
        """Check that this process's children and Ray workers import the package from the copy.

        Raises:
            RuntimeError: the package is imported from elsewhere.
        """
        command = [str(self.python), "-c", PRINT_LOCATIONS, *(["ray"] if self.with_cluster else [])]
        printed = subprocess.run(command, cwd="/", env=self.environment, capture_output=True, text=True, check=True)
        for line in printed.stdout.splitlines():
            if line.strip() and Path(line.strip()) != self.tree / "grpo_ray" / "__init__.py":
                raise RuntimeError(f"grpo_ray is imported from {line}, not from {self.tree}")

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant a fault in the copy, and remove it at the end."""
        with self.changed(fault.file, plant((self.tree / "grpo_ray" / fault.file).read_text(encoding="utf-8"), fault)):
            yield

    @contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        """Replace the source of a file below `grpo_ray/` in the copy, and restore it at the end."""
        path = self.tree / "grpo_ray" / file
        text = path.read_text(encoding="utf-8")
        try:
            _write_source(path, source)
            yield
        finally:
            _write_source(path, text)

    def baseline(self, test_file: str, marker: str) -> Outcome:
        """Run a test file on the unchanged copy; later calls return the first outcome."""
        key = (test_file, marker)
        if key not in self._baselines:
            self._baselines[key] = self.run([test_file], marker, self.max_seconds)
        return self._baselines[key]

    def run(self, test_files: Sequence[str], marker: str, limit: float, *options: str) -> Outcome:
        """Run pytest on test files below `tests/`; kill a run that exceeds `limit`, in seconds."""
        plugin = [] if self.with_cluster else ["-p", "without_cluster"]
        command = [str(self.python), "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *plugin, *options]
        command += ["--basetemp", str(self.scratch / "t"), *(["-m", marker] if marker else [])]
        started = time.monotonic()
        # A process group of its own, so that processes which hang because of the fault can be ended too.
        process = subprocess.Popen(
            [*command, *(f"tests/{file}" for file in test_files)],
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return Outcome(TIMED_OUT, limit, "")
        finally:
            _end_process_group(process)
        return Outcome(process.returncode, time.monotonic() - started, output)


def _write_source(path: Path, text: str) -> None:
    """Write a source file and delete its bytecode, which would count as current if size and second are equal."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _end_process_group(process: "subprocess.Popen[str]") -> None:
    """End a process group that still runs, with time for its fixtures to clean up."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue


def plant(text: str, fault: Fault) -> str:
    """Return a file's text with a fault in it.

    Raises:
        ValueError: the fault's old text does not occur exactly once.
        SyntaxError: the changed text does not parse.
    """
    if (count := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.name}: its old text must occur once in grpo_ray/{fault.file}; found {count} times")
    changed = text.replace(fault.old, fault.new)
    ast.parse(changed)
    return changed


def check_fault(checkout: Path, fault: Fault) -> None:
    """Check that a fault can be planted and that its test files exist.

    Raises:
        FileNotFoundError, ValueError, SyntaxError: it cannot be planted, or a test file is missing.
    """
    plant((checkout / "grpo_ray" / fault.file).read_text(encoding="utf-8"), fault)
    for tier in TIERS:
        for file in fault.test_files(tier):
            if not (checkout / "tests" / tier / file).is_file():
                raise FileNotFoundError(f"{fault.name}: tests/{tier}/{file} does not exist")


def tiers_to_run(fault: Fault, run_all: bool) -> list[tuple[str, list[tuple[Paths, str]]]]:
    """Return the tiers in order, each with test files below `tests/` and a marker expression for `-m`.

    Args:
        run_all: run fault injection and slow tests too.
    """
    files = {tier: tuple(f"{tier}/{file}" for file in fault.test_files(tier)) for tier in TIERS}
    unit, integration, fault_injection = TIERS
    tiers = [(tier, [(files[tier], "not slow")]) for tier in (unit, integration)]
    if run_all:
        tiers.append((fault_injection, [(files[integration], "slow"), (files[fault_injection], "")]))
    return tiers


def try_fault(copy: Copy, fault: Fault, run_all: bool) -> Result:
    """Run a fault's tests tier by tier until one fails."""
    ran: list[str] = []
    left_out: list[str] = []
    seconds = 0.0

    def result(caught_by: str, test: str = "", message: str = "") -> Result:
        unused = tuple(dict.fromkeys(left_out))
        return Result(fault.name, fault.file, caught_by, round(seconds, 1), test, message, tuple(ran), unused)

    for tier, parts in tiers_to_run(fault, run_all):
        for files, marker in parts:
            chosen, usual_seconds = [], 0.0
            for file in files:
                baseline = copy.baseline(file, marker)
                if baseline.code == EMPTY:
                    left_out.append(f"{file}: no test to run")
                elif baseline.code == TIMED_OUT and copy.max_seconds < MAX_SECONDS:
                    left_out.append(f"{file}: {baseline.error}")
                elif baseline.code == FAILED:
                    test, message = baseline.failure
                    return result("ERROR", test, f"fails without the fault: {message}")
                elif baseline.code != PASSED:
                    return result("ERROR", file, f"without the fault: {baseline.error}")
                else:
                    chosen.append(file)
                    usual_seconds += baseline.seconds
            if not chosen:
                continue
            with copy.planted(fault):
                outcome = copy.run(chosen, marker, 3 * usual_seconds + 120, "-x")
            seconds += outcome.seconds
            if outcome.code == FAILED:
                return result(tier, *outcome.failure)
            if outcome.code != PASSED:
                return result("ERROR", " ".join(chosen), outcome.error)
            ran += chosen
    return result("ESCAPED")


def format_table(results: Sequence[Result]) -> str:
    """Format the results in columns, and the number of faults that each tier caught."""
    rows = [("fault", "module", "caught by", "seconds", "first failing test")]
    rows += [(r.fault, r.file, r.caught_by, f"{r.seconds:.0f}", r.test.removeprefix("tests/")) for r in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
    ]
    tiers = dict.fromkeys(r.caught_by for r in results)
    counts = [f"{tier}: {sum(r.caught_by == tier for r in results)}" for tier in tiers]
    return "\n".join([*(line.rstrip() for line in lines), "", f"{len(results)} faults; {', '.join(counts)}"])


def save(path: Path, results: Sequence[Result]) -> None:
    """Write results as JSON. Results of the same faults are replaced, those of other faults are kept."""
    kept = {row["fault"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    path.write_text(json.dumps([*(kept | {r.fault: asdict(r) for r in results}).values()], indent=1) + "\n")


def main() -> int:
    """Run the command; return 0 if the tests caught every chosen fault, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault, or all of a file; may be repeated")
    parser.add_argument(
        "--list", action="store_true", help="print the faults, check that each can be planted, and stop"
    )
    parser.add_argument("--all", action="store_true", help="run fault injection and slow tests too")
    parser.add_argument("--without-cluster", action="store_true", help="leave out tests that use a Ray cluster")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=MAX_SECONDS,
        metavar="SECONDS",
        help="leave out test files that take longer without a fault",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file too")
    options = parser.parse_args()
    faults = [each for each in FAULTS if not options.only or {each.name, each.file} & set(options.only)]
    if not faults:
        parser.error(f"--only {' --only '.join(options.only)} selects no fault; --list prints their names and files")
    for fault in faults:
        check_fault(ROOT, fault)
        if options.list:
            print(f"{fault.name:55} {fault.file}")
    if options.list:
        print(f"{len(faults)} faults in {len({fault.file for fault in faults})} files")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # on the way out, the copy is deleted and pytest ended
    python = ROOT / ".venv" / "bin" / "python"
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        interpreter = python if python.exists() else Path(sys.executable)
        copy = Copy(ROOT, Path(scratch), interpreter, not options.without_cluster, options.max_seconds)
        copy.check_imports()
        for fault in faults:
            result = try_fault(copy, fault, options.all)
            results.append(result)
            print(f"{result.caught_by:12} {fault.name}: {result.test} {result.message[:100]}", flush=True)
            if options.json:
                save(options.json, results)
    print(f"\n{format_table(results)}")
    return int(any(result.caught_by in ("ESCAPED", "ERROR") for result in results))


if __name__ == "__main__":
    sys.exit(main())
