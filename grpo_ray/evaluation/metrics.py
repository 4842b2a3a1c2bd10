"""What completions of held-out problems come to: pass@1, pass@k and maj@k."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.confidence import Estimate, mean_with_interval
from grpo_ray.rewards.math.extract import extract_answers
from grpo_ray.rewards.math.normalize import normalize_latex, strip_spacing


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one policy."""

    problems: int
    """Problems with a solution that can be understood; the others count for nothing."""
    unscorable: int
    """Problems whose solution cannot be understood."""
    num_samples: int
    """Completions of each problem."""
    pass_at_1: Estimate
    """Share of completions that are right; greedy with one completion, sampled with more."""
    pass_at_k: Estimate
    """Chance that of `num_samples` completions at least one is right."""
    maj_at_k: Estimate
    """Share of problems whose most frequent answer is right."""
    truncated_share: float
    """Share of completions cut off at the longest allowed."""
    completions_per_second: float
    """Of generating and scoring, engine start aside."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def score_completions(
    problems: Sequence[Problem],
    texts: Sequence[str],
    truncated: Sequence[bool],
    reward: Callable[..., list[float | None]],
    begun: float,
) -> dict[str, list[Any]]:
    """Score completions: columns with a row for each problem, as `summarise` takes them.

    texts: as many completions of each problem as of the others, one problem's after the other's.
    truncated: whether each was cut off at the longest allowed.
    begun: when generating began, on the clock of `time.perf_counter`.
    """
    k = len(texts) // max(1, len(problems))
    verdicts = reward(completions=texts, solution=[problem.solution for problem in problems for _ in range(k)])
    seconds = time.perf_counter() - begun
    groups = [slice(start, start + k) for start in range(0, len(texts), k)]
    return {
        "id": [problem.id for problem in problems],
        "scores": [_numbers(verdicts[group]) for group in groups],
        "answers": [[vote_key(text) for text in texts[group]] for group in groups],
        "truncated": [sum(truncated[group]) for group in groups],
        "seconds": [seconds / max(1, len(problems))] * len(problems),
    }


def _numbers(verdicts: Sequence[float | None]) -> list[float]:
    """Verdicts for Arrow, which has no None among floats in a list: NaN where there is none."""
    return [math.nan if verdict is None else float(verdict) for verdict in verdicts]


def vote_key(completion: str) -> str:
    """What a completion answers, in the form in which equal answers are equal texts; "" for no answer."""
    return "; ".join(strip_spacing(normalize_latex(answer)) for answer in extract_answers(completion))


def summarize_evaluation(rows: Sequence[dict[str, Any]], num_samples: int) -> Evaluation:
    """Turn the scores of each problem into estimates.

    rows: `scores` (K,) of 1, 0 or NaN, `answers` (K,), `truncated` (a count) and `seconds` for each problem.
    """
    known = [row for row in rows if not any(math.isnan(score) for score in row["scores"])]
    ones = [_mean(row["scores"]) for row in known]
    seconds = sum(row["seconds"] for row in rows)
    return Evaluation(
        problems=len(known),
        unscorable=len(rows) - len(known),
        num_samples=num_samples,
        pass_at_1=mean_with_interval(ones),
        pass_at_k=mean_with_interval([pass_at_k(num_samples, round(sum(row["scores"])), num_samples) for row in known]),
        maj_at_k=mean_with_interval([majority_score(row["answers"], row["scores"]) for row in known]),
        truncated_share=sum(row["truncated"] for row in rows) / max(1, len(rows) * num_samples),
        completions_per_second=len(rows) * num_samples / seconds if seconds else 0.0,
    )


def pass_at_k(n: int, right: int, k: int) -> float:
    """Unbiased chance that k of n completions hold a right one (arXiv 2107.03374, eq. 1)."""
    return 1.0 if n - right < k else 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_score(answers: Sequence[str], scores: Sequence[float]) -> float:
    """Whether the most frequent answer is right; of equally frequent ones the first counts, and "" is no answer."""
    counted = Counter(answer for answer in answers if answer)
    if not counted:  # no completion answers anything
        return 0.0
    (answer, _), *_ = counted.most_common(1)
    return scores[list(answers).index(answer)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
