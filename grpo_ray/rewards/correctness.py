"""The `correctness` reward, graded by a pool of verifier processes that all rewards of this process share.

`start_grading` submits a completion while others are still being generated; the reward then finds its verdict ready.
Verdicts are cached, so several rewards that need the verdict of one completion cost one grading.
"""

import atexit
import hashlib
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Any

from grpo_ray.errors import RewardError
from grpo_ray.rewards.completions import Completion, completion_text
from grpo_ray.rewards.math.words import is_boolean
from grpo_ray.rewards.sandbox.pool import Verdict, VerifierPool

_CACHE_SIZE = 8_192
"""Verdicts kept in the cache; the completions of one step are far fewer."""


class Grader:
    """Verifier pool with a cache: a (completion, solution) pair is graded once while its verdict is cached."""

    def __init__(self, pool: VerifierPool) -> None:
        self.pool = pool
        self._verdicts: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, completion: str, solution: str) -> Future[Verdict]:
        """Start grading a pair, or return the future of the same pair from the cache."""
        key = _pair_digest(completion, solution)
        with self._lock:
            future = self._verdicts.get(key)
            if future is None or (future.done() and future.exception() is not None):
                future = self._verdicts[key] = self.pool.submit(completion, solution)
                if len(self._verdicts) > _CACHE_SIZE:
                    self._verdicts.popitem(last=False)
        return future

    def grade(self, completions: Sequence[str], solutions: Sequence[str]) -> list[Verdict]:
        """Return the verdicts in input order. Raises VerifierError if no verifier process can run."""
        futures = [self.submit(*pair) for pair in zip(completions, solutions, strict=True)]
        return [future.result() for future in futures]


def _pair_digest(completion: str, solution: str) -> bytes:
    """Return the cache key of a pair.

    A digest, so that the cache does not keep megabytes of text alive; with lengths, so that `("a$", "b")` and
    `("a", "$b")` differ.
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in (completion, solution):
        digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
    return digest.digest()


@lru_cache(maxsize=4)
def shared_grader(strict: bool = True, time_limit: float = 3.0) -> Grader:
    """Return this process's grader for these settings. Its pool starts on the first item and ends with the process."""
    grader = Grader(VerifierPool(strict=strict, time_limit=time_limit))
    atexit.register(grader.pool.close)
    return grader


def start_grading(
    completion: Completion, solution: str, strict: bool = True, time_limit: float = 3.0
) -> Future[Verdict]:
    """Start grading a finished completion; `accuracy_reward` with the same settings picks up the verdict."""
    return shared_grader(strict, time_limit).submit(completion_text(completion), solution)


def accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str],
    *,
    strict: bool = True,
    boolean_share: float = 1.0,
    time_limit: float = 3.0,
    prompts: Sequence[Any] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Reward right final answers: 1.0 if right, 0.0 if wrong, None if the solution cannot be parsed.

    The rules of comparison are in `grpo_ray.rewards.math.verify`. A completion that hits a time or memory limit
    counts as wrong.

    Args:
        completions: One completion per row.
        solution: The dataset's reference answer of each row.
        strict: False for Math-Verify's plain verdicts, to compare with other systems.
        boolean_share: Share, 0 to 1, of the Yes/No/True/False problems that count. The others give None; the choice is
            fixed by the prompt. Whole groups are dropped instead of weighted because GRPO divides by the group's
            standard deviation, which would cancel a weight. The default of 1.0 is right for most models: a guess is
            right half of the time, but so are the other completions of the group, so after centring a guess earns
            nothing on average, while reasoning does. The remaining noise is no more than that of any half-solved
            problem (18 % of DeepMath is boolean). Use 0.5 or 0 for a base model that answers without reasoning, because
            such groups then mostly reward lucky guesses.
        time_limit: Seconds for one verdict.
        prompts: Passed by TRL; needed when 0 < boolean_share < 1.
        log_metric: Receives each call's `reward/verifier_timeouts` (items that hit a limit or crashed a worker),
            `reward/unscorable_share` (0 to 1, share of items that gave None because the solution cannot be parsed) and
            `reward/undecided_share` (0 to 1, share that counts as wrong because the answer's form cannot be compared).

    Returns:
        One reward per row.

    Raises:
        RewardError: boolean_share is outside 0 to 1; or it is neither 0 nor 1, a solution is boolean, and prompts is
            None.
        VerifierError: No verifier process can run.
    """
    if not 0 <= boolean_share <= 1:
        raise RewardError(f"boolean_share must be 0 to 1; got {boolean_share}; set 1 to keep all boolean problems")
    verdicts = shared_grader(strict, time_limit).grade(
        [completion_text(completion) for completion in completions], solution
    )
    rewards = [verdict.reward for verdict in verdicts]
    if log_metric is not None and verdicts:
        log_metric("reward/verifier_timeouts", float(sum(verdict.status != "ok" for verdict in verdicts)))
        log_metric("reward/unscorable_share", sum(reward is None for reward in rewards) / len(rewards))
        log_metric("reward/undecided_share", sum(verdict.is_undecided for verdict in verdicts) / len(verdicts))
    if boolean_share < 1:
        for index, text in enumerate(solution):
            if is_boolean(text) and not _is_kept(index, prompts, boolean_share):
                rewards[index] = None
    return rewards


def _is_kept(index: int, prompts: Sequence[Any] | None, share: float) -> bool:
    """Return True if a boolean problem is in the share that counts, chosen by a hash of its prompt."""
    if share == 0:
        return False
    if prompts is None:
        raise RewardError(f"boolean_share={share} selects problems by their prompts; pass prompts, or set 0 or 1")
    return zlib.crc32(str(prompts[index]).encode(errors="replace")) < share * 2**32
