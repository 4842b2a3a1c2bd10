"""Facts for the model card of a checkpoint, read from its run folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_ray.config.heldout_keys import AUTO, heldout_label, ranking_metric
from grpo_ray.config.schema import RunConfig
from grpo_ray.errors import DataError
from grpo_ray.evaluation.paired import PairedComparison, compare_paired
from grpo_ray.pages.report.read import RunData, RunReader
from grpo_ray.storage.checkpoints import CheckpointInfo
from grpo_ray.storage.numbers import to_finite
from grpo_ray.storage.records.heldout_files import list_heldout_files, read_measurement, read_verdicts
from grpo_ray.telemetry.measures import BASELINE_MEASURES, Measure, heldout_measure, recorded_measure
from grpo_ray.telemetry.run_facts import RunFacts
from grpo_ray.text.redaction import known_secrets, redact, redact_settings

PRIVATE_FIELDS = {"run": ("storage_path", "notify")}
"""Section -> fields that the card leaves out: they belong to the author's machines and do not affect the result."""
LOCAL_PATH = re.compile(r"(\w+=)?(?:/|~|file://).*")
"""Absolute local path, also of a benchmark's files: `math500=/data/math500.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class HeldoutResult:
    """Results of the checkpoint and of the initial policy on one held-out set."""

    name: str
    """Name of the set; "" for the only one."""
    dataset: str
    """Dataset of its problems, as configured."""
    before: Measure | None
    """Accuracy of the initial policy; None if it was not measured under the same conditions."""
    after: Measure | None
    """Accuracy of the checkpoint; None if it was not measured."""
    paired: PairedComparison | None
    """Comparison of both, problem by problem; None unless the verdicts of both were recorded."""


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Facts about a checkpoint and its run for the card."""

    run: str
    checkpoint: str
    step: int
    config: Mapping[str, Mapping[str, Any]]
    """Section -> fields, without secrets and `PRIVATE_FIELDS`; empty if the config cannot be read."""
    versions: Mapping[str, Any]
    results: Sequence[HeldoutResult]
    """Held-out sets, the primary one first."""
    ranked_by: str
    """Metric by which the best checkpoint is chosen."""
    measured_checkpoints: int
    """Number of the run's checkpoints that have this metric."""
    seconds: float
    """Total time of the steps up to the checkpoint, seconds."""
    heldout_noun: str
    """Word for the measure of held-out completions: "accuracy" or "score"."""
    device: str | None
    """Name of a worker's device; None if no attempt recorded it."""
    device_gib: float | None
    """Memory of a worker's GPU in GiB; None if it was not recorded."""

    def field(self, section: str, name: str) -> Any:
        """Return a field of the config; None if it is not set."""
        return self.config.get(section, {}).get(name)

    @property
    def is_fine_tuning(self) -> bool:
        """True for supervised fine-tuning on demonstrations, False for GRPO."""
        return bool(self.field("run", "kind") == "sft")

    @property
    def initial_policy(self) -> str:
        """Name of the policy that the run began with: a run may begin with another run's checkpoint."""
        return "initial policy" if self.field("run", "from_checkpoint") else "base policy"

    @property
    def adapter_type(self) -> str | None:
        """Type of the adapter that was trained, in PEFT's terms; None if the whole policy was."""
        if self.field("model", "lora"):
            return "LORA"
        settings = self.field("model", "peft")
        return str(settings.get("type")) if isinstance(settings, Mapping) and settings else None


def gather_facts(checkpoint: CheckpointInfo) -> CardFacts:
    """Read the facts for a card from a checkpoint's run folder; missing or damaged files are skipped."""
    reader = RunReader(checkpoint.folder)
    reader.refresh()
    run = reader.contents()
    config, versions = _public_config(run.config)
    metric = ranking_metric(str(run.section("run").get("best_metric", RunConfig.best_metric)), run.heldout_keys)
    saved = set(run.checkpoint_steps.values())
    timed = (to_finite(row.get("step/seconds")) for row in run.rows if row["step"] <= checkpoint.step)
    memory: Mapping[str, Any] = next((event for event in reversed(run.events) if event["event"] == "memory"), {})
    device, sizes = memory.get("device"), memory.get("measured")
    return CardFacts(
        run=run.folder.name,
        checkpoint=checkpoint.name,
        step=checkpoint.step,
        config=config,
        versions=versions,
        results=[_heldout_result(checkpoint, key, run) for key in run.heldout_keys],
        ranked_by=metric,
        measured_checkpoints=sum(row["step"] in saved and to_finite(row.get(metric)) is not None for row in run.rows),
        seconds=sum(seconds for seconds in timed if seconds is not None),
        heldout_noun=RunFacts.recorded(run.config).heldout_noun,
        device=device if isinstance(device, str) else None,
        device_gib=to_finite(sizes.get("total_gib")) if isinstance(sizes, Mapping) else None,
    )


def _public_config(recorded: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], Mapping[str, Any]]:
    """Return the sections of a recorded config that a card shows, and the recorded versions."""
    known = {name: section for name, section in recorded.items() if isinstance(section, Mapping)}
    sections: dict[str, dict[str, Any]] = _shorten_paths(redact_settings(known, known_secrets()))
    versions = sections.pop("versions", {})
    for section, names in PRIVATE_FIELDS.items():
        for name in names:
            sections.get(section, {}).pop(name, None)
    return sections, versions


def _shorten_paths(value: Any) -> Any:
    """Replace the folders of absolute local paths by "...", since they exist only on the author's machine."""
    if isinstance(value, Mapping):  # a reward model's folder is a key of its settings
        return {_shorten_paths(key): _shorten_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shorten_paths(item) for item in value]
    if isinstance(value, str) and (path := LOCAL_PATH.fullmatch(value)):
        return f"{path[1] or ''}.../{value.rstrip('/').rpartition('/')[2]}"
    return value


def _heldout_result(checkpoint: CheckpointInfo, key: str, run: RunData) -> HeldoutResult:
    """Return the results of one held-out set."""
    data = run.section("data")
    heldout, label = data.get("heldout"), heldout_label(key)
    is_named = heldout not in (None, AUTO)
    sets = heldout if is_named else data.get("train")
    dataset = sets.get(label) if isinstance(sets, Mapping) else sets
    if isinstance(dataset, Mapping):  # a source of a mixture
        dataset = dataset.get("path")
    baseline = _comparable_baseline(checkpoint, key, run)
    problems = baseline.get("problems")
    count = problems if isinstance(problems, int) else None
    return HeldoutResult(
        name=label,
        dataset=str(_shorten_paths(redact(dataset or ""))),
        before=recorded_measure(baseline.get("pass_at_1"), BASELINE_MEASURES, count),
        after=heldout_measure(checkpoint.metrics, key, count),
        paired=_compare_records(checkpoint, key),
    )


def _comparable_baseline(checkpoint: CheckpointInfo, key: str, run: RunData) -> Mapping[str, Any]:
    """Return the initial policy's evaluation; empty unless its conditions are those of the checkpoint's evaluation."""
    conditions = (checkpoint.measured_on or {}).get(key)
    evaluation = run.baselines[key]
    return evaluation if evaluation.get("measured_on") == conditions is not None else {}


def _compare_records(checkpoint: CheckpointInfo, key: str) -> PairedComparison | None:
    """Compare the verdicts per problem of the initial policy and of the checkpoint, if both were recorded."""
    folder = checkpoint.folder
    try:
        files = {file.step: file for file in list_heldout_files(folder, key)}
        if 0 not in files or checkpoint.step not in files:
            return None
        base, measured = (read_measurement(folder, files[step]) for step in (0, checkpoint.step))
        # A record of the same step may be of another checkpoint, if the step was repeated, or of other conditions.
        if (base.policy, measured.policy) != ("", checkpoint.name) or base.conditions != measured.conditions:
            return None
        return compare_paired(read_verdicts(folder, base.file), read_verdicts(folder, measured.file))
    except (DataError, OSError):
        return None
