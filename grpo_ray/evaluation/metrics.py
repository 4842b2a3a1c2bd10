"""Metrics of completions of held-out problems: pass@1, pass@k and maj@k, or mean scores."""

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_ray.config.heldout_keys import HELDOUT
from grpo_ray.config.reward_names import REWARD_SCORES
from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.confidence import normal_interval, wilson_interval
from grpo_ray.evaluation.records import make_records
from grpo_ray.evaluation.scores import Answer, HeldoutScore, MixtureScore
from grpo_ray.inference.sampling import heldout_sampling
from grpo_ray.rewards.math.extract import extract_answers
from grpo_ray.rewards.math.limits import MAX_LENGTH
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing
from grpo_ray.storage.records.heldout_files import HeldoutRecord, bound_heldout_text
from grpo_ray.telemetry.measures import ACCURACY_MEASURES, BASELINE_MEASURES, Measure
from grpo_ray.text.redaction import redact

ESTIMATES = ("pass_at_1", "pass_at_k", "maj_at_k")
"""Fields of `EvaluationResult` that are a `Measure`."""


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of one policy on the held-out problems."""

    problems: int
    """Problems of which every completion has a score. Only these count in pass@1, pass@k and maj@k."""
    unscorable: int
    """Problems with a completion without a score: the solution cannot be parsed, the environment failed, or no reward
    applies."""
    num_samples: int
    """Completions per problem, k."""
    pass_at_1: Measure
    """Share of correct completions; mean score if `heldout.score` is not correctness."""
    pass_at_k: Measure
    """Probability that at least one of `num_samples` completions is correct; mean score of the best one, if
    `heldout.score` is not correctness."""
    maj_at_k: Measure | None
    """Share of problems whose most frequent answer among `num_samples` completions is correct; None if `heldout.score`
    is not correctness."""
    truncated_share: float
    """Share of completions truncated at `grpo.max_completion_length`, of all problems."""
    completions_per_second: float
    """Rate of generation and scoring, without the start of the engine."""
    reward: float | None = None
    """Mean reward of the environment; None without one."""
    records: Sequence[HeldoutRecord] = field(default=(), repr=False, compare=False)
    """Completions of each problem, in the order of the set; empty for a result that was read from a file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON-serializable values, without the records."""
        metrics = asdict(dataclasses.replace(self, records=()))
        del metrics["records"]
        for name in ESTIMATES:
            measure: Measure | None = getattr(self, name)
            metrics[name] = None if measure is None else measure.numbers(BASELINE_MEASURES)
        return metrics

    def measures(self) -> dict[str, float]:
        """Return the metrics by their name within a held-out set; empty if no problem could be scored."""
        if not math.isfinite(self.pass_at_1.value):
            return {}
        measures = self.pass_at_1.numbers(ACCURACY_MEASURES) | {"truncated_share": self.truncated_share}
        if self.reward is not None:
            measures["reward"] = self.reward
        if self.num_samples > 1:
            measures["pass_at_k"] = self.pass_at_k.value
            if self.maj_at_k is not None:
                measures["maj_at_k"] = self.maj_at_k.value
        return measures

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "EvaluationResult":
        """Create a result from the output of `to_dict`; other entries are ignored."""
        names = [each.name for each in dataclasses.fields(EvaluationResult) if each.name != "records"]
        fields = {name: values[name] for name in names}
        count = fields["problems"]
        measures = {name: Measure(**fields[name], count=count) if fields[name] else None for name in ESTIMATES}
        return EvaluationResult(**fields | measures)


MEASURES = (*ACCURACY_MEASURES, "reward", "truncated_share", "pass_at_k", "maj_at_k")
"""Names that `EvaluationResult.measures` may contain."""


ROLLOUT_FIELDS = ("tools", "environment", "settings", "max_turns", "max_calls", "max_result_tokens")
"""Fields of `rollout` that a completion with tools depends on, except limits whose effect depends on the machine."""
FUNCTION_FIELDS = ("function", "settings", "max_result_tokens")
"""Fields that a completion of a rollout function depends on."""


def measurement_conditions(fingerprints: Mapping[str, DatasetFingerprint], config: Config) -> dict[str, dict[str, Any]]:
    """Return the conditions of a measurement by held-out set: problems, sampling, tools and grading, as JSON values.

    Records made under other conditions are not comparable, so they are not used. The sets are independent: changing one
    leaves the records of the others valid. Secrets are hidden, as in the records.

    Args:
        fingerprints: key of a held-out set -> fingerprint of its problems.
    """
    rollout = config.to_dict()["rollout"]
    fields: Sequence[str] = ROLLOUT_FIELDS if config.rollout.has_turns else ()
    if config.rollout.function is not None:
        fields = FUNCTION_FIELDS
    settings = {
        "num_samples": config.heldout.num_samples,
        "sampling": heldout_sampling(config),
        "chat_template_kwargs": config.chat_template_kwargs,
        "rollout": {name: rollout[name] for name in fields},
        "strict": config.rewards.strict,
    }

    def conditions(key: str, fingerprint: DatasetFingerprint) -> dict[str, Any]:
        source = config.source_of(key)
        scored = {"score": config.heldout_score_of(source), "rewards": _scoring_rewards(config, source)}
        # In the form in which JSON is read back: the token ids of `logit_bias` become text.
        in_json: dict[str, Any] = redact(json.loads(json.dumps(settings | scored)))
        return asdict(fingerprint) | in_json

    return {key: conditions(key, fingerprint) for key, fingerprint in fingerprints.items()}


def _scoring_rewards(config: Config, source: str) -> dict[str, Any]:
    """Return the settings of the rewards that `heldout.score` is computed from; empty for built-in scores."""
    score, rewards = config.heldout_score_of(source), config.rewards
    if score == "reward":
        names, weights = config.rewards_of(source), config.grpo.trl.get("reward_weights")
        used = [index for index, name in enumerate(rewards.functions) if name in names]
        all_settings = config.to_dict()["rewards"]["settings"]
        return {"functions": list(names), "settings": {k: v for k, v in all_settings.items() if k in names}} | (
            {"weights": [weights[index] for index in used]} if weights else {}
        )
    has_settings = ":" in score or score in REWARD_SCORES
    return {"settings": dict(rewards.settings.get(score, {}))} if has_settings else {}


def heldout_metrics(results: Mapping[str, EvaluationResult], primary: str) -> dict[str, float]:
    """Return the metrics of the held-out sets by name; those of the primary set also under "heldout".

    Args:
        results: key of a held-out set -> its evaluation.
        primary: key of the primary set.
    """
    prefixes = {HELDOUT: results[primary]} | dict(results)
    return {
        f"{prefix}/{name}": value for prefix, result in prefixes.items() for name, value in result.measures().items()
    }


def recorded_measures(metrics: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return the measures of one held-out set among metrics; empty if it was not measured."""
    return {name: float(metrics[f"{key}/{name}"]) for name in MEASURES if metrics.get(f"{key}/{name}") is not None}


def unique_problems(sets: Mapping[str, Sequence[Problem]]) -> list[Problem]:
    """Return the problems of all held-out sets, each once, even if it is in several sets."""
    return list({problem.id: problem for problems in sets.values() for problem in problems}.values())


def summarize_sets(
    rows: Sequence[Mapping[str, Any]], sets: Mapping[str, Sequence[Problem]], num_samples: int
) -> dict[str, EvaluationResult]:
    """Compute the metrics of each held-out set, with the records of its completions.

    Args:
        rows: rows of `unique_problems(sets)` in any order, as `score_completions` returns them.
        sets: key of a held-out set -> its problems.
        num_samples: completions per problem, k.
    """
    row_of = {row["id"]: row for row in rows}
    results = {}
    for key, problems in sets.items():
        own = [row_of[problem.id] for problem in problems]
        results[key] = dataclasses.replace(summarize_evaluation(own, num_samples), records=make_records(own, problems))
    return results


def score_completions(
    problems: Sequence[Problem],
    answers: Sequence[Answer],
    score: HeldoutScore | MixtureScore,
    started: float,
    recorded: Collection[str] = (),
) -> dict[str, list[Any]]:
    """Score the completions of P problems, k each.

    Args:
        problems: (P,).
        answers: (P k,), those of one problem next to each other.
        started: start of the generation, seconds on the clock of `time.perf_counter`.
        recorded: ids of the problems whose texts are returned.

    Returns:
        Columns with one row per problem, the input of `summarize_evaluation`: `id`, `scores` (k,) with NaN for None,
        `rewards` (k,) of the environment with NaN for None, `answers` (k,), `has_votes` (True if scores are verdicts),
        `is_share` (True if they are between 0 and 1), `truncated` (k,), `lengths` (k,) in tokens, `texts` (k,) of
        bounded size or None, and `seconds`; in a run with tools also `conversations`, (k,) records as JSON or None.
    """
    k = max(1, len(answers) // max(1, len(problems)))  # a worker may have no problem of a small set
    rewards = [each.reward for each in answers]
    scores = score([problem for problem in problems for _ in range(k)], answers)
    seconds = time.perf_counter() - started
    groups = [slice(start, start + k) for start in range(0, len(answers), k)]
    columns: dict[str, list[Any]] = {
        "id": [problem.id for problem in problems],
        "scores": [_nan_for_none(scores[group]) for group in groups],
        "rewards": [_nan_for_none(rewards[group]) for group in groups],
        "answers": [[vote_key(each.text) for each in answers[group]] for group in groups],
        "has_votes": [score.of(problem).is_verdict for problem in problems],
        "is_share": [score.of(problem).is_share for problem in problems],
        "truncated": [[each.truncated for each in answers[group]] for group in groups],
        "lengths": [[each.length for each in answers[group]] for group in groups],
        "texts": [
            [bound_heldout_text(each.shown, k) for each in answers[group]] if problem.id in recorded else None
            for problem, group in zip(problems, groups, strict=True)
        ],
        "seconds": [seconds / max(1, len(problems))] * len(problems),
    }
    if any(each.conversation is not None for each in answers):
        # As JSON text, from which `records.make_records` restores the conversations.
        columns["conversations"] = [
            [each.conversation.to_json() for each in answers[group] if each.conversation is not None]
            if problem.id in recorded
            else None
            for problem, group in zip(problems, groups, strict=True)
        ]
    return columns


def _nan_for_none(verdicts: Sequence[float | None]) -> list[float]:
    """Replace None by NaN, the unknown value of the columns of `score_completions`."""
    return [math.nan if verdict is None else float(verdict) for verdict in verdicts]


def vote_key(completion: str) -> str:
    """Return a completion's normalized answers as one text, equal for equal answers; "" if it has none."""
    # This runs outside the verifier processes, and normalizing takes quadratic time on some texts: answers longer than
    # MAX_LENGTH are therefore equal only if their texts are identical.
    answers = extract_answers(completion)
    return "; ".join(
        strip_spacing(normalize_latex(answer)) if len(answer) <= MAX_LENGTH else answer for answer in answers
    )


def summarize_evaluation(rows: Sequence[Mapping[str, Any]], num_samples: int) -> EvaluationResult:
    """Compute the metrics from the scores of each problem.

    Args:
        rows: one per problem, with `scores` (k,) or NaN, `answers` (k,), `truncated` (k,), `seconds`, and unless scores
            are verdicts also `rewards` (k,), `has_votes` and `is_share`.
        num_samples: completions per problem, k.
    """
    rewards = [reward for row in rows for reward in row.get("rewards", ()) if not math.isnan(reward)]
    scorable = [row for row in rows if not any(math.isnan(score) for score in row["scores"])]
    seconds = sum(row["seconds"] for row in rows)
    has_votes = all(row.get("has_votes", True) for row in rows)
    interval = wilson_interval if all(row.get("is_share", True) for row in rows) else normal_interval
    votes = [majority_score(row["answers"], row["scores"]) for row in scorable] if has_votes else []
    best = [
        pass_at_k(num_samples, round(sum(row["scores"])), num_samples) if has_votes else max(row["scores"])
        for row in scorable
    ]
    return EvaluationResult(
        problems=len(scorable),
        unscorable=len(rows) - len(scorable),
        num_samples=num_samples,
        pass_at_1=interval([_mean(row["scores"]) for row in scorable]),
        pass_at_k=interval(best),
        maj_at_k=interval(votes) if has_votes else None,
        truncated_share=sum(sum(row["truncated"]) for row in rows) / max(1, len(rows) * num_samples),
        completions_per_second=len(rows) * num_samples / seconds if seconds else 0.0,
        reward=_mean(rewards) if rewards else None,
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate the probability that at least one of k completions is correct, from n completions, without bias.

    1 - C(n - correct, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1)
    """
    return 1.0 if n - correct < k else 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_score(answers: Sequence[str], scores: Sequence[float]) -> float:
    """Return the score of the most frequent answer (majority voting, arXiv 2203.11171).

    Of several equally frequent answers the first one counts. "" is not a vote; without votes the score is 0.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    (answer, _), *_ = votes.most_common(1)
    return scores[list(answers).index(answer)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
