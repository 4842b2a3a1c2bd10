"""The accuracy reward in TRL's signature: `correctness` on lists, judged in a pool that this process shares.

`start_grading` lets judging begin while other completions are still being generated; the reward then finds
the verdicts ready. Verdicts are remembered for a while, so several rewards that ask about the same completion
cost one judgement.
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
from grpo_ray.rewards.completion_text import completion_text
from grpo_ray.rewards.math.words import is_boolean
from grpo_ray.rewards.sandbox.pool import Verdict, VerifierPool

_REMEMBERED = 8_192
"""Verdicts kept; a step's completions are far fewer."""

Completion = str | list[dict[str, Any]]


class Grader:
    """A pool that remembers: each (completion, solution) pair is judged once while it is remembered."""

    def __init__(self, pool: VerifierPool) -> None:
        self.pool = pool
        self._verdicts: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, completion: str, solution: str) -> Future[Verdict]:
        """Begins to judge a pair, or finds it begun."""
        # Digests, not texts: a megabyte of text must not live on because it was once judged.
        digest = hashlib.blake2b(digest_size=16)
        for text in (completion, solution):
            digest.update(len(text).to_bytes(8, "little") + text.encode("utf-8", "surrogatepass"))
        key = digest.digest()
        with self._lock:
            future = self._verdicts.get(key)
            if future is None or (future.done() and future.exception() is not None):
                future = self._verdicts[key] = self.pool.submit(completion, solution)
                if len(self._verdicts) > _REMEMBERED:
                    self._verdicts.popitem(last=False)
        return future

    def verdicts(self, completions: Sequence[str], solutions: Sequence[str]) -> list[Verdict]:
        """Verdicts in input order. Raises VerifierError if no verifier process can run."""
        futures = [self.start(*pair) for pair in zip(completions, solutions, strict=True)]
        return [future.result() for future in futures]


@lru_cache(maxsize=4)
def shared_grader(strict: bool = True, time_limit: float = 3.0) -> Grader:
    """This process's judge. Its pool starts with the first item and ends with the process."""
    judge = Grader(VerifierPool(strict=strict, limit_seconds=time_limit))
    atexit.register(judge.pool.close)
    return judge


def start_grading(
    completion: Completion, solution: str, strict: bool = True, time_limit: float = 3.0
) -> Future[Verdict]:
    """Begins to judge a finished completion; `accuracy_reward` picks the verdict up later."""
    return shared_grader(strict, time_limit).start(completion_text(completion), solution)


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
    """1.0 for a right answer, 0.0 for a wrong one, None where the solution is not understood. See
    `correctness`.

    strict: False for Math-Verify's plain verdicts, to compare with other systems.
    boolean_share: share (0 to 1) of the Yes/No/True/False problems that count; the others give None, always
    the same ones, chosen by their prompt (`prompts`, which TRL passes). Dropping whole groups is used instead
    of a weight because dividing by the group's spread, as GRPO does, would cancel a weight. The default is
    1.0: a guess is right half of the time, but so are its neighbours in the group, so after centring it earns
    nothing on average, while thinking does; what remains is noise, no more than that of any half-solved
    problem, for 18 % of DeepMath. Take 0.5 or 0 for a base model that answers without thinking, where lucky
    guesses are most of what such groups reward.
    time_limit: seconds that one verdict may take; past it the completion counts as wrong.
    log_metric: given each call's `reward/verifier_timeouts` (items that hit a limit or broke a worker), and
    `reward/unscorable_share` (0 to 1, of items that gave None because the solution is not understood).

    Raises RewardError for a share outside 0 to 1, or one between them without prompts; VerifierError as the
    pool does.
    """
    if not 0 <= boolean_share <= 1:
        raise RewardError(f"boolean_share={boolean_share} must lie in 0 to 1; 1 keeps all boolean problems")
    verdicts = shared_grader(strict, time_limit).verdicts(
        [completion_text(completion) for completion in completions], solution
    )
    rewards = [verdict.reward for verdict in verdicts]
    if log_metric is not None and verdicts:
        log_metric("reward/verifier_timeouts", float(sum(verdict.status != "ok" for verdict in verdicts)))
        log_metric("reward/unscorable_share", sum(reward is None for reward in rewards) / len(rewards))
    if boolean_share < 1:
        for index, text in enumerate(solution):
            if is_boolean(text) and not _is_kept(index, prompts, boolean_share):
                rewards[index] = None
    return rewards


def _is_kept(index: int, prompts: Sequence[Any] | None, share: float) -> bool:
    if share == 0:
        return False
    if prompts is None:
        raise RewardError(f"boolean_share={share} chooses problems by their prompts, and none were given; use 0 or 1")
    return zlib.crc32(str(prompts[index]).encode(errors="replace")) < share * 2**32
