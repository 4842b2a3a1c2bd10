"""Which tier of tests catches which fault: plants one fault at a time into a copy of the package and runs the tests.

    python tests/benchmarks/planted_faults.py [--only NAME] [--all] [--json FILE]
    python tests/benchmarks/planted_faults.py --before CHECKOUT   # the same faults, and a checkout with flat tests

Each fault of `FAULTS` is a mistake that a person could make: one text of one file becomes another. The copy is restored
after each. Tests of the unit tier run first, then those of the integration tier, with `--all` also those of fault
injection and those marked `slow`; the first failing test has caught the fault. Before, the same tests run on the
unchanged copy, where they must pass. A run that ends for another reason than a failing test catches nothing: it is an
error. With `--json` each result is saved at once, beside those that the file holds of other faults.
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
    "grpo_ray", "tests", "jobs", "notebooks", "docs", "pyproject.toml", "README.md", "LICENSE", "Makefile",
    "cluster.yaml",
)  # fmt: skip
IGNORED = shutil.ignore_patterns("__pycache__", ".venv", ".hypothesis", ".pytest_cache", "*.egg-info")
TIERS = ("unit", "integration", "fault_injection")
MOST_SECONDS = 3600.0
"""Longest run of one tier's tests on the unchanged copy."""

Selectors = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tests:
    """Test files of one module, in the order in which they run: paths below the folder of the tier.

    A selector is a file, `file::test` or `file -k expression`. A file that is not there is passed over.
    """

    unit: Selectors = ()
    integration: Selectors = ()
    fault_injection: Selectors = ()
    before: Selectors = ()
    """Below `tests/` of a checkout with flat tests: those without real runs."""
    before_runs: Selectors = ()
    """The same: real runs, for `--all`."""


@dataclass(frozen=True)
class Fault:
    """A mistake in one file. Selectors that are None are those of `TESTS` for the file."""

    name: str
    file: str
    """Below `grpo_ray/`."""
    old: str
    """Text that stands there exactly once."""
    new: str
    """Text in its place."""
    unit: Selectors | None = None
    integration: Selectors | None = None
    fault_injection: Selectors | None = None
    before: Selectors | None = None
    before_runs: Selectors | None = None

    def selectors(self, tier: str) -> Selectors:
        """Selectors of a tier, the fault's own or those of its file."""
        own: Selectors | None = getattr(self, tier)
        return getattr(TESTS[self.file], tier) if own is None else own


@dataclass(frozen=True)
class Result:
    """Outcome of the tests on one fault."""

    fault: str
    file: str
    caught_by: str
    """Name of a tier, `ESCAPED`, or `ERROR` where the tests could not be run."""
    seconds: float
    """Of the runs on the changed copy."""
    test: str = ""
    """First failing test, or the error."""
    message: str = ""
    """First line of its failure, as pytest summarises it."""
    ran: Selectors = ()
    """Selectors that ran and did not fail."""
    left_out: Selectors = ()
    """Selectors without a file or without a test to run."""


RUNS = ("test_launch.py",)
RUNS_BEFORE = ("test_launch.py", "test_resume.py", "test_chaos.py")
REWARDS = Tests(
    unit=("rewards/test_correctness.py", "rewards/test_compare.py", "rewards/test_answer.py", "rewards/test_value.py"),
    before=("rewards/test_correctness.py",),
)
POOL = Tests(
    unit=("rewards/test_frames.py", "rewards/test_pool.py", "rewards/test_accuracy.py"),
    integration=("test_pool.py", "rewards/test_pool.py"),
    before=("rewards/test_pool.py", "rewards/test_accuracy.py"),
)
PAGE = Tests(
    unit=("runpage/test_health.py", "runpage/test_read.py", "runpage/test_page.py"),
    integration=("runpage/test_page.py",),
    before=("test_runpage.py",),
)
STORAGE = Tests(
    unit=("test_patience.py", "test_storage.py", "test_security.py"),
    integration=("test_storage.py",),
    fault_injection=("test_storage.py", "test_s3.py"),
    before=("test_storage.py", "test_security.py"),
    before_runs=("test_s3.py",),
)
REFUSED = Tests(  # settings, and what is refused before a start
    unit=("test_config.py", "test_settings.py", "test_arguments.py", "test_preflight.py", "test_cli.py"),
    integration=("test_config.py", "test_learner.py", "test_preflight.py", "test_cli.py", *RUNS),
    fault_injection=("test_resume.py",),
    before=("test_config.py", "test_learner.py"),
    before_runs=RUNS_BEFORE,
)


def named(name: str, *, runs: Selectors = (), kills: Selectors = (), before_runs: Selectors = ()) -> Tests:
    """Tests of a module whose files have its name, in whichever tiers there are some."""
    folder, slash, module = name.rpartition("/")
    file = f"{folder}{slash}test_{module}.py"
    return Tests(
        unit=(file,),
        integration=(file, *runs),
        fault_injection=kills,
        before=(f"test_data_{module}.py" if folder == "data" else file,),
        before_runs=before_runs,
    )


TESTS: dict[str, Tests] = {
    "thrift.py": Tests(
        unit=("test_thrift.py", "test_batches.py"),
        integration=("test_thrift.py",),
        before=("test_thrift.py",),
        before_runs=RUNS_BEFORE[:1],
    ),
    "batches.py": Tests(
        unit=("test_batches.py", "test_thrift.py"), integration=("test_thrift.py",), before=("test_thrift.py",)
    ),
    "topup.py": named("topup"),
    "ahead.py": named("ahead"),
    "learner.py": named("learner", runs=RUNS, kills=("test_resume.py", "test_survival.py"), before_runs=RUNS_BEFORE),
    "course.py": Tests(
        unit=("test_course.py",),
        integration=("test_course.py", "data/test_stream.py", *RUNS),
        fault_injection=("test_resume.py", "test_survival.py"),
        before=("test_course.py", "test_data_stream.py"),
        before_runs=(*RUNS_BEFORE, "test_survival.py"),
    ),
    "data/stream.py": Tests(
        unit=("data/test_stream.py", "data/test_stream_scale.py"),
        integration=("data/test_stream.py", *RUNS),
        before=("test_data_stream.py", "test_scale.py"),
        before_runs=RUNS_BEFORE,
    ),
    "deal.py": Tests(
        unit=("test_deal.py",),
        integration=("test_deal.py", "data/test_stream.py", "test_topup.py", *RUNS),
        before=("test_data_stream.py",),
        before_runs=(*RUNS_BEFORE, "test_topup.py"),
    ),
    "ledger.py": named("ledger"),
    "checkpoint.py": named("checkpoint", runs=RUNS, kills=("test_resume.py", "test_chaos.py"), before_runs=RUNS_BEFORE),
    "fence.py": Tests(
        unit=("test_fence.py", "test_checkpoint.py"),
        fault_injection=("test_network.py",),
        before=("test_checkpoint.py",),
        before_runs=("test_network.py",),
    ),
    "storage.py": STORAGE,
    "patience.py": STORAGE,
    "rowfiles.py": STORAGE,
    "worker.py": named(
        "worker",
        runs=RUNS,
        kills=("test_resume.py", "test_chaos.py", "test_survival.py"),
        before_runs=(*RUNS_BEFORE, "test_survival.py"),
    ),
    "engine.py": named("engine", runs=(*RUNS, "test_lora.py"), before_runs=RUNS_BEFORE[:1]),
    "rewards/__init__.py": Tests(
        unit=("rewards/test_accuracy.py", "rewards/test_dryrun.py"),
        before=("rewards/test_accuracy.py", "rewards/test_dryrun.py"),
    ),
    "rewards/accuracy.py": POOL,
    "rewards/answer.py": REWARDS,
    "rewards/compare.py": REWARDS,
    "rewards/correctness.py": REWARDS,
    "rewards/frames.py": POOL,
    "rewards/helper.py": POOL,
    "rewards/length.py": named("rewards/length"),
    "rewards/value.py": REWARDS,
    "settings.py": REFUSED,
    "config.py": REFUSED,
    "arguments.py": REFUSED,
    "preflight.py": REFUSED,
    "cli.py": REFUSED,
    "nodes.py": named("nodes"),
    "elastic.py": named("elastic", kills=("test_network.py", "test_machines.py"), before_runs=("test_network.py",)),
    "failures.py": named("failures", kills=("test_chaos.py",), before_runs=("test_chaos.py",)),
    "monitor.py": named("monitor", kills=("test_chaos.py",), before_runs=("test_chaos.py",)),
    "stop.py": named("stop", runs=RUNS, kills=("test_resume.py",), before_runs=RUNS_BEFORE),
    "estimate.py": Tests(unit=("test_estimate.py", "test_scores.py"), integration=RUNS, before=("test_scores.py",)),
    "scores.py": named("scores"),
    "before.py": named("before", runs=RUNS, before_runs=RUNS_BEFORE[:1]),
    "evaluate.py": named("evaluate", runs=("test_engine.py", *RUNS), before_runs=RUNS_BEFORE[:1]),
    "summary.py": Tests(
        unit=("test_summary.py", "test_phases.py", "test_security.py"),
        integration=RUNS,
        before=("test_phases.py", "test_security.py"),
        before_runs=RUNS_BEFORE[:1],
    ),
    "price.py": named("price"),
    "phases.py": named("phases", runs=RUNS, before_runs=RUNS_BEFORE[:1]),
    "report.py": named("report", runs=RUNS, before_runs=RUNS_BEFORE),
    "rollouts.py": named("rollouts"),
    "runpage/health.py": PAGE,
    "runpage/read.py": PAGE,
    "progress.py": named("progress", runs=RUNS, before_runs=RUNS_BEFORE[:1]),
    "tiny.py": named("tiny"),
    "sampling.py": named("sampling", runs=("test_engine.py",), before_runs=("test_engine.py",)),
    "memory.py": named("memory"),
    "export.py": named("export"),
    "adapter.py": named("lora", runs=("test_export.py",)),
    "data/arithmetic.py": named("data/arithmetic"),
    "data/files.py": named("data/files"),
    "data/gsm8k.py": named("data/gsm8k"),
    "problem.py": named("problem"),
}
"""File below `grpo_ray/` -> the tests of it."""

FAULTS = (
    # --- exactness: every problem once, the same step on any cluster, TRL's own gradient
    Fault(
        "seed-ignores-epoch",
        "engine.py",
        'f"{run_seed}/{problem_id}/{epoch}/{index}".encode()',
        'f"{run_seed}/{problem_id}/{index}".encode()',
        integration=("test_engine.py", "test_launch.py"),
    ),
    Fault(
        "loss-keeps-the-rows-left-as-denominator",
        "thrift.py",
        "return loss * part.loss_factor",
        "return loss",
    ),
    Fault(
        "rows-without-advantage-left-out-despite-kl-term",
        "thrift.py",
        "rows=trainer.beta == 0.0 and not over_micro_batch,",
        "rows=not over_micro_batch,",
    ),
    Fault(
        "importance-ratio-upside-down",
        "thrift.py",
        "importance_ratio((logps - engine_logps) * mask",
        "importance_ratio((engine_logps - logps) * mask",
    ),
    Fault(
        "sequence-ratio-is-a-mean",
        "thrift.py",
        "gap = gap.sum(dim=-1, keepdim=True)",
        "gap = gap.mean(dim=-1, keepdim=True)",
    ),
    Fault(
        "one-pass-with-several-iterations",
        "thrift.py",
        "one_pass=one_step and trainer.num_iterations == 1,",
        "one_pass=one_step,",
    ),
    Fault(
        "negative-advantages-left-out",
        "batches.py",
        'return (batch["advantages"] != 0) & loss_mask(batch).any(dim=1)',
        'return (batch["advantages"] > 0) & loss_mask(batch).any(dim=1)',
    ),
    Fault(
        "loss-per-row-not-scaled",
        "batches.py",
        "factor = left / size if loss_type in PER_ROW else 1.0",
        "factor = 1.0",
    ),
    Fault(
        "moved-prompts-padded-on-the-right",
        "batches.py",
        'left = key.startswith("prompt")',
        "left = False",
    ),
    Fault(
        "first-completion-token-not-scored",
        "batches.py",
        "labels = ids.masked_fill((places < prompt) | (places >= lengths), -100)",
        "labels = ids.masked_fill((places <= prompt) | (places >= lengths), -100)",
    ),
    Fault(
        "packed-rows-share-positions",
        "batches.py",
        "Packed(input_ids[mask][None], positions[mask][None],",
        "Packed(input_ids[mask][None], torch.arange(int(mask.sum()))[None],",
    ),
    Fault(
        "top-up-takes-the-newest-groups",
        "topup.py",
        "chosen = places[True][:wanted]",
        "chosen = places[True][-wanted:]",
    ),
    Fault(
        "top-up-counts-own-tokens-only",
        "topup.py",
        "trainer.accelerator.gather(loss_mask(step.output).sum()).sum()",
        "loss_mask(step.output).sum()",
    ),
    Fault(
        "top-up-ignores-reward-weights",
        "topup.py",
        "total = (rewards * weights.to(rewards.device)).nansum(dim=1)",
        "total = rewards.nansum(dim=1)",
    ),
    Fault(
        "ahead-across-a-checkpoint",
        "ahead.py",
        "return step % self.state.save_steps == 0 or step >= self.state.max_steps",
        "return step >= self.state.max_steps",
    ),
    Fault(
        "ahead-clips-against-the-engine",
        "ahead.py",
        'output["old_per_token_logps"] = torch.nn.functional.pad(generated.learner_logps, (0, more))\n'
        '        self._see(output, output["old_per_token_logps"])',
        'output["old_per_token_logps"] = output["sampling_per_token_logps"]\n'
        "        self._see(output, torch.nn.functional.pad(generated.learner_logps, (0, more)))",
    ),
    Fault(
        "ahead-keeps-the-seeds-of-the-step-before",
        "ahead.py",
        "        self.prepare_engine(rows)\n        prompt_ids, images",
        "        prompt_ids, images",
    ),
    Fault(
        "record-forgets-the-last-group-of-a-step",
        "learner.py",
        "for first in range(0, len(inputs), self.num_generations):",
        "for first in range(0, len(inputs) - self.num_generations, self.num_generations):",
    ),
    Fault(
        "heldout-problems-solved-by-every-worker",
        "learner.py",
        "mine = problems[self.accelerator.process_index :: self.accelerator.num_processes]",
        "mine = problems[:: self.accelerator.num_processes]",
    ),
    Fault(
        "heldout-measured-with-old-weights",
        "learner.py",
        "if self.state.global_step != self._last_loaded_step:",
        "if self._last_loaded_step < 0:",
        integration=("test_learner.py", "test_engine.py", "test_launch.py"),
    ),
    Fault(
        "new-epoch-of-a-period-not-marked",
        "course.py",
        "for epoch in sorted({group.epoch for group in groups}):",
        "for epoch in sorted({group.epoch for group in groups})[:1]:",
    ),
    Fault(
        "rest-of-an-epoch-lost-on-other-workers",
        "course.py",
        "carried = [row for rest in gathered(list(rows)) for row in rest]",
        "carried = gathered(list(rows))[0]",
    ),
    Fault(
        "problems-passed-over-are-dealt",
        "course.py",
        "done = np.union1d(self.ledger.used(epoch), self.ledger.passed_over(epoch))",
        "done = self.ledger.used(epoch)",
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
        "if self.heldout_share and is_heldout(problem.id, self.heldout_share) != self.keep_heldout:",
        "if self.keep_heldout and not is_heldout(problem.id, self.heldout_share):",
    ),
    Fault(
        "repeated-problem-read-from-every-shard",
        "data/stream.py",
        "if self.homes.get(problem.id, number) == number:",
        "if number >= 0:",
    ),
    Fault(
        "carried-rows-dropped",
        "data/stream.py",
        "            yield from round.carried\n            return",
        "            return",
    ),
    Fault(
        "worker-gets-a-whole-step",
        "deal.py",
        "share = self.prompts_per_step // world_size",
        "share = self.prompts_per_step",
    ),
    Fault(
        "advantages-scaled-over-the-batch",
        "arguments.py",
        '        "report_to": "none",\n',
        '        "report_to": "none",\n        "scale_rewards": "batch",\n',
        integration=("test_learner.py", "test_topup.py", "test_launch.py"),
        before=("test_config.py", "test_learner.py", "test_topup.py"),
    ),
    # --- the ledger
    Fault(
        "mark-forgets-the-last-problem",
        "ledger.py",
        "used = np.insert(record.used, np.searchsorted(record.used, new), new)",
        "used = np.insert(record.used, np.searchsorted(record.used, new[:-1]), new[:-1])",
    ),
    Fault(
        "problem-used-twice-is-accepted",
        "ledger.py",
        '_refuse(epoch, new[within(record.used, new)], "would be used twice")',
        "new = new[~within(record.used, new)]",
    ),
    Fault(
        "epoch-closes-one-problem-early",
        "ledger.py",
        "record.marked == self._contents.count:",
        "record.marked >= self._contents.count - 1:",
    ),
    Fault(
        "ledger-not-checked-when-read",
        "ledger.py",
        "if spoilt := file.zip.testzip():",
        "if spoilt := file.zip.comment:",
    ),
    # --- checkpoints, and what a run goes on from
    Fault("best-checkpoint-by-minimum", "checkpoint.py", "return max(ranked,", "return min(ranked,"),
    Fault(
        "checksum-not-compared",
        "checkpoint.py",
        'if _checksum(stored.folder, stored.name, name) != stored.files[name]["sha256"]',
        'if not stored.files[name]["sha256"]',
    ),
    Fault(
        "upload-not-read-back",
        "checkpoint.py",
        "if _checksum(self.folder, *names) != digest.hexdigest():",
        "if not self.folder.exists(*names):",
    ),
    Fault(
        "manifest-before-the-other-workers-files",
        "checkpoint.py",
        "for rank in range(self.workers):",
        "for rank in range(1):",
    ),
    Fault(
        "checkpoint-written-under-its-own-name",
        "checkpoint.py",
        'return f"{name}.{self.fence.token}{ASIDE}" if self.fence else name + ASIDE',
        "return name",
    ),
    Fault(
        "oldest-checkpoint-first",
        "checkpoint.py",
        "latest_first = stored_checkpoints(folder)[::-1]",
        "latest_first = stored_checkpoints(folder)",
    ),
    Fault(
        "latest-checkpoint-pruned",
        "checkpoint.py",
        "kept = {stored[-1].name} if stored else set()",
        "kept: set[str] = set()",
    ),
    Fault(
        "reward-states-of-rank-0-everywhere",
        "checkpoint.py",
        'for name in (f"rewards_{rank}.json", "rewards_0.json"):',
        'for name in ("rewards_0.json",):',
    ),
    Fault(
        "superseded-attempt-may-write",
        "fence.py",
        "if self.folder.read_text(NAME) != self.token:",
        "if not self.folder.read_text(NAME):",
    ),
    Fault(
        "removal-fails-after-a-lost-answer",
        "storage.py",
        "if tries == 1:  # later,",
        "if tries:  # later,",
    ),
    Fault(
        "password-shown-in-a-uri",
        "storage.py",
        r'return re.sub(r"(://[^/?@:\s]*):[^/?@]*@", r"\1@", uri)',
        "return uri",
    ),
    Fault(
        "damaged-checkpoint-resumed",
        "worker.py",
        "        if not wrong:\n            return stored, last",
        "        if not wrong or stored.files:\n            return stored, last",
    ),
    Fault(
        "rollouts-past-the-checkpoint-kept",
        "worker.py",
        '            drop_after(folder, at["step"])\n',
        "",
    ),
    Fault(
        "other-datasets-problems-stay-in-the-ledger",
        "worker.py",
        "        ledger.keep_only(ray.get(assignment.numbers))",
        "        ray.get(assignment.numbers)",
    ),
    Fault(
        "data-skipped-again-on-resume",
        "arguments.py",
        "ignore_data_skip=True,",
        "ignore_data_skip=False,",
        integration=("test_learner.py", "test_launch.py"),
        fault_injection=("test_resume.py",),
    ),
    Fault(
        "retry-gives-up-at-once",
        "patience.py",
        "left = began + patience - now",
        "left = began - now",
    ),
    Fault(
        "full-storage-is-not-waited-for",
        "patience.py",
        "if inside or not (is_transient(error) or is_full(error)):",
        "if inside or not is_transient(error):",
    ),
    # --- the proof of weight sync
    Fault(
        "tolerance-times-100",
        "engine.py",
        "self.tolerance = TOLERANCE[dtype] if",
        "self.tolerance = 100 * TOLERANCE[dtype] if",
    ),
    Fault(
        "gap-that-is-no-number-passes",
        "engine.py",
        "if not gap.mean <= self.tolerance:",
        "if gap.mean > self.tolerance:",
    ),
    Fault(
        "unsynced-parameters-not-noticed",
        "engine.py",
        "if missing := sorted(expected - (loaded or set())):",
        "if missing := sorted((loaded or set()) - expected):",
    ),
    Fault(
        "norms-withheld-from-the-sync",
        "engine.py",
        "loaded = self._model.load_weights(self._iter_named_params())",
        'loaded = self._model.load_weights((n, w) for n, w in self._iter_named_params() if "norm" not in n)',
    ),
    Fault(
        "last-packed-layer-stays-stale",
        "engine.py",
        "for layer in self._packed_layers:",
        "for layer in self._packed_layers[:-1]:",
    ),
    Fault(
        "prefix-cache-survives-a-sync",
        "engine.py",
        "        self.llm.reset_prefix_cache()\n        self.phases.wait_for_device()",
        "        self.phases.wait_for_device()",
    ),
    Fault(
        "learner-proven-against-itself",
        "learner.py",
        "gap = self.engine.prove_sync(learner_logps, engine_logps, mask, self.state.global_step)",
        "gap = self.engine.prove_sync(learner_logps, learner_logps, mask, self.state.global_step)",
        integration=("test_learner.py", "test_engine.py", "test_launch.py", "test_lora.py"),
    ),
    Fault(
        "proof-of-no-token",
        "thrift.py",
        "self.prove(learner_logps, engine_logps, torch.ones_like(learner_logps))",
        "self.prove(learner_logps, engine_logps, torch.zeros_like(learner_logps))",
    ),
    # --- grading
    Fault(
        "timed-out-verdict-counts-as-right",
        "rewards/helper.py",
        "self._report(item, TIMEOUT, 0.0)",
        "self._report(item, TIMEOUT, 1.0)",
    ),
    Fault(
        "killed-verifier-counts-as-wrong",
        "rewards/helper.py",
        "elif exit_signal in _OUTSIDE_SIGNALS and item.tries < _MAX_RETRIES:",
        "elif exit_signal in _OUTSIDE_SIGNALS and item.tries < 0:",
    ),
    Fault(
        "interval-ends-swapped",
        "rewards/compare.py",
        'shape.opening == "(", shape.closing == ")")]',
        'shape.closing == ")", shape.opening == "(")]',
    ),
    Fault(
        "subset-of-a-set-is-right",
        "rewards/compare.py",
        "    return not gold\n",
        "    return True\n",
    ),
    Fault(
        "hedged-answer-is-right",
        "rewards/correctness.py",
        "right = all(_is_right(gold, answer) for answer in answers)",
        "right = any(_is_right(gold, answer) for answer in answers)",
    ),
    Fault(
        "answer-inside-the-reasoning-counts",
        "rewards/answer.py",
        'elif "<think>" in text:\n        return ()',
        'elif "<think>" in text:\n        text = text.replace("<think>", "")',
    ),
    Fault(
        "rounded-to-three-places-is-right",
        "rewards/value.py",
        "_MIN_DECIMALS = 6",
        "_MIN_DECIMALS = 3",
    ),
    Fault(
        "unscorable-counts-as-wrong",
        "rewards/frames.py",
        "(number, status, None if reward != reward else reward)",
        "(number, status, 0.0 if reward != reward else reward)",
    ),
    Fault(
        "time-limit-of-the-config-ignored",
        "rewards/accuracy.py",
        "VerifierPool(strict=strict, limit_seconds=time_limit)",
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
        "rewards/__init__.py",
        'accuracy_settings(config) | {"boolean_share": 1.0}',
        "accuracy_settings(config)",
        unit=("rewards/test_accuracy.py", "rewards/test_dryrun.py", "rewards/test_load.py", "test_scores.py"),
        before=("rewards/test_accuracy.py", "rewards/test_dryrun.py", "test_scores.py"),
    ),
    # --- settings, and what is refused before a start
    Fault(
        "override-ignored",
        "settings.py",
        "settings[section][name] = _parse_value(value, takes_text=(section, name) in _text_fields())",
        "settings[section].setdefault(name, _parse_value(value, takes_text=(section, name) in _text_fields()))",
    ),
    Fault(
        "checkpoint-inside-a-batch-accepted",
        "config.py",
        "if grpo.save_steps % config.num_iterations:",
        "if grpo.save_steps < config.num_iterations:",
    ),
    Fault(
        "micro-batch-not-shared-evenly",
        "config.py",
        "return config.grpo.prompts_per_step % workers == 0 and config.micro_batch_size % workers == 0",
        "return config.grpo.prompts_per_step % workers == 0",
        unit=("test_config.py", "test_elastic.py"),
    ),
    Fault(
        "learning-rate-ignored",
        "arguments.py",
        "            learning_rate=grpo.learning_rate,\n",
        "",
    ),
    Fault(
        "same-number-of-other-problems-accepted",
        "preflight.py",
        "    if was == now:",
        "    if was.count == now.count:",
    ),
    Fault(
        "seed-may-change-during-a-run",
        "preflight.py",
        '    ("run", "seed"),\n',
        "",
    ),
    Fault(
        "missing-package-not-noticed",
        "nodes.py",
        "        if here != there:",
        "        if here and there and here != there:",
    ),
    Fault(
        "first-override-without-a-file-lost",
        "cli.py",
        "path, overrides = None, [path, *overrides]",
        "path, overrides = None, overrides",
    ),
    # --- failures and watching
    Fault(
        "watchdog-never-arms",
        "failures.py",
        "file=self._file)\n            self._changed.notify()",
        "file=self._file)",
    ),
    Fault(
        "death-blamed-before-its-cause",
        "failures.py",
        "return int(_died(error)), rank",
        "return int(not _died(error)), rank",
    ),
    Fault(
        "ledger-error-is-retried",
        "failures.py",
        "CheckpointError, ConfigError, DataError, LedgerError, SupersededError)\n",
        "CheckpointError, ConfigError, DataError, SupersededError)\n",
    ),
    Fault(
        "bad-gradient-of-one-worker-not-skipped",
        "monitor.py",
        "dist.all_reduce(bad, op=dist.ReduceOp.MAX)",
        "dist.all_reduce(bad, op=dist.ReduceOp.MIN)",
    ),
    Fault(
        "bad-steps-counted-for-ever",
        "monitor.py",
        "            self.in_a_row = 0\n            return",
        "            return",
    ),
    Fault(
        "resize-without-a-checkpoint",
        "elastic.py",
        "return any(number in self._with_checkpoint for number in range(before, after))",
        "return after > before",
    ),
    Fault(
        "workers-fit-by-their-most-plentiful-resource",
        "elastic.py",
        "return sum(int(min(node.get(name, 0)",
        "return sum(int(max(node.get(name, 0)",
    ),
    Fault(
        "second-ctrl-c-ignored",
        "stop.py",
        "if self.heard is None and self.is_training():",
        "if self.is_training():",
    ),
    # --- measuring, records and reports
    Fault(
        "confidence-interval-swapped",
        "estimate.py",
        "Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))",
        "Estimate(mean, min(1.0, centre + half), max(0.0, centre - half))",
    ),
    Fault(
        "no-answer-wins-the-vote",
        "scores.py",
        "Counter(answer for answer in answers if answer)",
        "Counter(answers)",
    ),
    Fault(
        "baseline-of-other-problems-taken",
        "before.py",
        'return before if before["measured_on"] == asdict(self.contents) else None',
        "return before",
    ),
    Fault(
        "all-samples-of-a-problem-alike",
        "evaluate.py",
        "seed=request_seed(config.run.seed, problem.id, 0, index),",
        "seed=request_seed(config.run.seed, problem.id, 0, 0),",
    ),
    Fault(
        "last-rewards-are-the-first",
        "summary.py",
        "reward_last=_mean(rewards[-10:]),",
        "reward_last=_mean(rewards[:10]),",
    ),
    Fault("launch-after-a-death-is-no-failure", "price.py", "died = self._launched", "died = False"),
    Fault(
        "outer-phase-gets-the-inner-ones-seconds",
        "phases.py",
        "self._seconds[lane.open[-1].phase] += now - lane.since",
        "self._seconds[lane.open[0].phase] += now - lane.since",
    ),
    Fault(
        "speed-ignores-steps-between-reports",
        "report.py",
        '"step/completions_per_second": steps * self.config',
        '"step/completions_per_second": self.config',
    ),
    Fault(
        "watchdog-not-told-of-a-checkpoint",
        "report.py",
        'self.watchdog.beat("a checkpoint" if control.should_save else "drawing problems", state.global_step)',
        'self.watchdog.beat("drawing problems", state.global_step)',
    ),
    Fault(
        "solved-problems-never-come-back",
        "rollouts.py",
        "passed_over = just_before & (solved_before[ends] - solved_before[since] == skip_solved)",
        "passed_over = solved_before[ends] - solved_before[since] == skip_solved",
    ),
    Fault(
        "rollout-file-that-spans-the-step-deleted",
        "rollouts.py",
        "        if first <= step:\n            _write(",
        "        if first == step:\n            _write(",
    ),
    Fault(
        "best-gap-shown-as-the-worst",
        "runpage/health.py",
        'Finding("fine" if max(gaps) <= tolerance else "bad", said)',
        'Finding("fine" if min(gaps) <= tolerance else "bad", said)',
    ),
    Fault(
        "page-shows-the-first-row-of-a-repeated-step",
        "runpage/read.py",
        'by_step[int(step)] = values | {"step": float(int(step))}',
        'by_step.setdefault(int(step), values | {"step": float(int(step))})',
    ),
    Fault(
        "metrics-keep-rows-of-later-steps",
        "rowfiles.py",
        'kept = [r for r in self.rows if r["step"] < row["step"]]',
        'kept = [r for r in self.rows if r["step"] != row["step"]]',
    ),
    Fault("entries-of-the-board-read-again", "progress.py", "self._read += len(entries)", "self._read += 0"),
    # --- policy, data and memory
    Fault(
        "policy-cache-ignores-the-seed",
        "tiny.py",
        "json.dumps([RECIPE, seed])",
        "json.dumps([RECIPE])",
    ),
    Fault(
        "warm-up-learns-the-questions",
        "tiny.py",
        "labels[row, len(question) : len(sequence)] = sequence[len(question) :]",
        "labels[row, : len(sequence)] = sequence",
    ),
    Fault(
        "noise-left-out-inside-a-block",
        "sampling.py",
        "(rates / noise[:, mass.shape[1] :]).argmax(dim=-1, keepdim=True)",
        "rates.argmax(dim=-1, keepdim=True)",
    ),
    Fault(
        "one-moment-of-the-optimizer",
        "memory.py",
        "optimizer=8 * trained // parts,",
        "optimizer=4 * trained // parts,",
    ),
    Fault(
        "export-of-a-damaged-checkpoint",
        "export.py",
        "if wrong := faults(stored):",
        "if (wrong := faults(stored)) and not stored.files:",
    ),
    Fault(
        "adapter-added-to-rounded-weights",
        "adapter.py",
        'precision = "auto" if policy is not None or dtype is None else dtype',
        'precision = "auto" if dtype is None else dtype',
    ),
    Fault(
        "arithmetic-trains-on-heldout-tasks",
        "data/arithmetic.py",
        '"train": every[HELDOUT:]}',
        '"train": every}',
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
        "problem.py",
        'content = json.dumps([[(m["role"], m["content"]) for m in prompt], solution], ensure_ascii=False)',
        'content = json.dumps([[(m["role"], m["content"]) for m in prompt]], ensure_ascii=False)',
    ),
)


NO_CLUSTER = """
def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if "cluster" in getattr(item, "fixturenames", ())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
"""
"""Plugin of pytest that leaves out the tests with real runs, all of which use the fixture `cluster`."""

WHERE = """
import grpo_ray, subprocess, sys
print(grpo_ray.__file__)
print(subprocess.check_output([sys.executable, "-c", "import grpo_ray; print(grpo_ray.__file__)"], text=True).strip())
if sys.argv[1:] == ["ray"]:
    import ray
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    @ray.remote
    def where():
        import grpo_ray
        return grpo_ray.__file__
    print(ray.get(where.remote()))
    ray.shutdown()
"""
"""Prints where this process, a subprocess and with `ray` a Ray worker import the package from, a line for each."""

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
        """Name and message of the first test that failed, as pytest summarises them."""
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", self.output, re.MULTILINE)
        return (found[1], found[2] or "") if found else ("", "")

    @property
    def trouble(self) -> str:
        """Description of a run that was none."""
        if self.code == TIMED_OUT:
            return f"took longer than {self.seconds:.0f} s"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"pytest ended with {self.code}: {' | '.join(lines[-3:])}"


class Copy:
    """A copy of a checkout in a temporary folder, with the tests that run in it."""

    def __init__(self, checkout: Path, scratch: Path, python: Path, clusters: bool, most: float):
        """
        python: interpreter of the environment with the package's dependencies.
        clusters: run tests that use the fixture `cluster`.
        most: seconds; a test file that takes longer on the unchanged copy is left out.
        """
        self.tree = scratch / "tree"
        self.scratch = scratch
        self.python = python
        self.clusters = clusters
        self.most = most
        self._baselines: dict[tuple[str, str], Outcome] = {}
        for name in filter(lambda name: (checkout / name).exists(), COPIED):
            if (checkout / name).is_dir():
                shutil.copytree(checkout / name, self.tree / name, ignore=IGNORED, symlinks=True)
            else:
                shutil.copy2(checkout / name, self.tree / name)
        if (ROOT.parent / "shared").exists():  # real problems, which some tests find beside the checkout
            (scratch / "shared").symlink_to(ROOT.parent / "shared")
        (scratch / "plugins").mkdir()
        (scratch / "plugins" / "without_cluster.py").write_text(NO_CLUSTER)

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which the package is imported from the copy, before an editable install elsewhere."""
        # A cache of its own: a policy that a fault has spoilt must not be found later.
        return os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.tree), str(self.scratch / "plugins")]),
            "GRPO_RAY_CACHE": str(self.scratch / "cache"),
            "COLUMNS": "300",  # pytest cuts its summary off at the width
        }

    def check_imports(self) -> None:
        """Raise RuntimeError if the package is imported from elsewhere, in subprocesses and Ray workers too."""
        command = [str(self.python), "-c", WHERE, *(["ray"] if self.clusters else [])]
        said = subprocess.run(command, cwd="/", env=self.environment, capture_output=True, text=True, check=True)
        for line in said.stdout.splitlines():
            if line.strip() and Path(line.strip()) != self.tree / "grpo_ray" / "__init__.py":
                raise RuntimeError(f"grpo_ray is imported from {line}, not from {self.tree}")

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The copy with a fault in it."""
        path = self.tree / "grpo_ray" / fault.file
        text = path.read_text(encoding="utf-8")
        try:
            _write(path, changed(text, fault))
            yield
        finally:
            _write(path, text)
            if fault.file in ("tiny.py", "data/arithmetic.py"):
                shutil.rmtree(self.scratch / "cache", ignore_errors=True)

    def baseline(self, selector: str, marker: str) -> Outcome:
        """Run a selector's tests on the unchanged copy, once."""
        key = (selector, marker)
        if key not in self._baselines:
            self._baselines[key] = self.run([selector], marker, self.most)
        return self._baselines[key]

    def run(self, selectors: Sequence[str], marker: str, limit: float, *options: str) -> Outcome:
        """Run pytest on selectors below `tests/`; a run past the limit, in seconds, is ended."""
        words = [word for selector in selectors for word in _words(selector)]
        plugin = [] if self.clusters else ["-p", "without_cluster"]
        command = [str(self.python), "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *plugin, *options]
        command += ["--basetemp", str(self.scratch / "t"), *(["-m", marker] if marker else []), *words]
        begun = time.monotonic()
        # The process group is the run's own: whatever a fault lets hang ends with it.
        process = subprocess.Popen(
            command,
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
            _end(process)
        return Outcome(process.returncode, time.monotonic() - begun, output)


def _write(path: Path, text: str) -> None:
    """Write a source file, and remove its bytecode: with equal size and second it would count as up to date."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process group that is still there, with time for its fixtures to clean up."""
    for number, seconds in ((signal.SIGINT, 20), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            continue


def _words(selector: str) -> list[str]:
    """A selector as words of the command line."""
    file, option, expression = selector.partition(" -k ")
    return [f"tests/{file}", *(["-k", expression] if option else [])]


def changed(text: str, fault: Fault) -> str:
    """A file's text with a fault in it. ValueError if its old text does not stand there exactly once."""
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has the text of {fault.name} {text.count(fault.old)} times")
    with_fault = text.replace(fault.old, fault.new)
    ast.parse(with_fault)
    return with_fault


def stages(fault: Fault, flat: bool, everything: bool) -> list[tuple[str, list[tuple[Selectors, str]]]]:
    """Tiers in the order in which they run, each with selectors below `tests/` and the expression of `-m`.

    flat: for a checkout without folders by tier.
    everything: fault injection and slow tests too.
    """
    if flat:
        quick = fault.selectors("before")
        found = [("before", [(quick, "not slow")])]
        return (
            [*found, ("before_runs", [(quick, "slow"), (fault.selectors("before_runs"), "")])] if everything else found
        )
    below = {tier: tuple(f"{tier}/{each}" for each in fault.selectors(tier)) for tier in TIERS}
    found = [(tier, [(below[tier], "not slow")]) for tier in TIERS[:2]]
    if everything:
        found.append((TIERS[2], [(below[TIERS[1]], "slow"), (below[TIERS[2]], "")]))
    return found


def try_fault(copy: Copy, fault: Fault, flat: bool, everything: bool) -> Result:
    """Run a fault's tests tier by tier until one fails."""
    ran: list[str] = []
    left_out: list[str] = []
    seconds = 0.0

    def result(caught_by: str, test: str = "", message: str = "") -> Result:
        rest = tuple(dict.fromkeys(left_out))
        return Result(fault.name, fault.file, caught_by, round(seconds, 1), test, message, tuple(ran), rest)

    for tier, parts in stages(fault, flat, everything):
        for selectors, marker in parts:
            chosen, usual = [], 0.0
            for selector in selectors:
                if not (copy.tree / "tests" / re.split("::| -k ", selector)[0]).exists():
                    left_out.append(f"{selector}: no such file")
                    continue
                baseline = copy.baseline(selector, marker)
                if baseline.code == EMPTY:
                    left_out.append(f"{selector}: no test of it is to run")
                elif baseline.code == TIMED_OUT and copy.most < MOST_SECONDS:
                    left_out.append(f"{selector}: {baseline.trouble}")
                elif baseline.code == FAILED:
                    test, message = baseline.failure
                    return result("ERROR", test, f"fails without the fault: {message}")
                elif baseline.code != PASSED:
                    return result("ERROR", selector, f"without the fault: {baseline.trouble}")
                else:
                    chosen.append(selector)
                    usual += baseline.seconds
            with copy.planted(fault):
                for group in _groups(chosen):
                    outcome = copy.run(group, marker, 3 * usual + 120, "-x")
                    seconds += outcome.seconds
                    if outcome.code == FAILED:
                        return result(tier, *outcome.failure)
                    if outcome.code != PASSED:
                        return result("ERROR", " ".join(group), outcome.trouble)
                    ran += group
    return result("ESCAPED")


def _groups(selectors: Sequence[str]) -> list[list[str]]:
    """Selectors that can run in one call of pytest: those with `-k` run alone."""
    together = [each for each in selectors if " -k " not in each]
    return [*([together] if together else []), *([each] for each in selectors if " -k " in each)]


def table(results: Sequence[Result]) -> str:
    """Results in columns, and how many faults each tier caught."""
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
    """Write results as JSON, in place of those of the same faults; those of other faults stay."""
    kept = {row["fault"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    path.write_text(json.dumps([*(kept | {r.fault: asdict(r) for r in results}).values()], indent=1) + "\n")


def main() -> int:
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
        "--most", type=float, default=MOST_SECONDS, metavar="SECONDS", help="leave out longer test files"
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="a checkout with flat tests, and its .venv")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    chosen = parser.parse_args()
    checkout = (chosen.before or ROOT).absolute()
    faults = [each for each in FAULTS if not chosen.only or each.name in chosen.only or each.file in chosen.only]
    if not faults:
        parser.error(f"no fault is called {', '.join(chosen.only)}; see --list")
    for fault in faults:
        changed((checkout / "grpo_ray" / fault.file).read_text(encoding="utf-8"), fault)
        if chosen.list:
            print(f"{fault.name:55} {fault.file}")
    if chosen.list:
        print(f"{len(faults)} faults in {len({fault.file for fault in faults})} files")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy is deleted, and pytest ended, on the way out
    python = checkout / ".venv" / "bin" / "python"
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        interpreter = python if python.exists() else Path(sys.executable)
        copy = Copy(checkout, Path(scratch), interpreter, not chosen.without_cluster, chosen.most)
        copy.check_imports()
        for fault in faults:
            result = try_fault(copy, fault, bool(chosen.before), chosen.all)
            results.append(result)
            print(f"{result.caught_by:12} {fault.name}: {result.test} {result.message[:100]}", flush=True)
            if chosen.json:
                save(chosen.json, results)
    print(f"\n{table(results)}")
    return int(any(result.caught_by in ("ESCAPED", "ERROR") for result in results))


if __name__ == "__main__":
    sys.exit(main())
