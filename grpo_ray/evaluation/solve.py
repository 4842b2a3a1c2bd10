"""Solving of held-out problems: from problems to scored completions, with any engine."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import SOURCE, Problem
from grpo_ray.evaluation.metrics import score_completions
from grpo_ray.evaluation.scores import Answer, heldout_scores
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion, heldout_sampling
from grpo_ray.models.plain_prompts import uses_plain_prompts
from grpo_ray.models.tokenizer import decode_texts, tokenize_prompts
from grpo_ray.rewards.completions import completion_text, transcript
from grpo_ray.storage.records.heldout_files import heldout_text_bytes
from grpo_ray.tools.conversation import Conversation
from grpo_ray.tools.conversation_record import record_conversation
from grpo_ray.tools.template import assistant_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RunRequests = Callable[[list[list[int]], list[dict[str, Any]]], list[Completion]]
"""Function of (B,) prompts as token ids and (B,) arguments of `vllm.SamplingParams` that returns (B,) completions."""


Converse = Callable[[list[dict[str, Any]], dict[str, Any]], list[Conversation]]
"""Function of (B,) rows of `Problem.as_row` and common arguments of `vllm.SamplingParams`, without a seed, that returns
(B,) completions of several turns."""


def solve_problems(
    problems: Sequence[Problem],
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    run_requests: RunRequests,
    recorded: Collection[str] = (),
    converse: Converse | None = None,
) -> dict[str, list[Any]]:
    """Generate `heldout.num_samples` completions for each problem, and score them.

    Prompts and sampling options are those of training, except for `heldout.temperature`. A completion's seed follows
    from `run.seed`, the problem and the completion's index, so the result is the same in any process.

    Args:
        recorded: ids of the problems whose texts are returned.
        converse: used instead of `run_requests` if completions have several turns.

    Returns:
        Columns with one row per problem, as `score_completions` returns them.
    """
    started, samples, score = time.perf_counter(), range(config.heldout.num_samples), heldout_scores(config)
    sampling = heldout_sampling(config)
    answers: Sequence[Answer]
    if converse is not None:
        rows = [problem.as_row(epoch=0, index=index) for problem in problems for index in samples]
        answers = [
            answer_of(conversation, config.rewards_of(row.get(SOURCE, "")), len(samples))
            for row, conversation in zip(rows, converse(rows, sampling), strict=True)
        ]
    else:
        prompts = tokenize_prompts(tokenizer, [problem.prompt for problem in problems], config.chat_template_kwargs)
        completions = run_requests(
            [prompt for prompt in prompts for _ in samples],
            [
                sampling | {"seed": request_seed(config.run.seed, problem.id, 0, index)}
                for problem in problems
                for index in samples
            ],
        )
        ids = [each.token_ids for each in completions]
        texts = decode_texts(tokenizer, ids)
        messages: list[Any] = [[] for _ in ids]
        if score.reads_messages and uses_plain_prompts(tokenizer):
            messages = texts
        elif score.reads_messages:
            repeated = [prompt for prompt in prompts for _ in samples]
            messages = [[message] for message in assistant_messages(tokenizer, repeated, ids)]
        answers = [
            Answer(text, text, len(each.token_ids), each.truncated, messages=own, token_ids=each.token_ids)
            for text, own, each in zip(texts, messages, completions, strict=True)
        ]
    return score_completions(problems, answers, score, started, recorded)


def answer_of(conversation: Conversation, rewards: Collection[str], samples: int = 1) -> Answer:
    """Return the scored parts of a conversation: its last turn, and the environment's reward.

    Args:
        rewards: `rewards.functions`.
        samples: completions per problem, k.
    """
    return Answer(
        text=completion_text(conversation.messages),
        shown=transcript(conversation.messages),
        length=sum(conversation.own),
        truncated=conversation.ended == "length",
        reward=conversation.reward,
        conversation=record_conversation(conversation, heldout_text_bytes(samples)),
        is_unscorable=conversation.is_unscorable(rewards),
        messages=conversation.messages,
        token_ids=conversation.own_ids,
        columns=conversation.columns,
    )
