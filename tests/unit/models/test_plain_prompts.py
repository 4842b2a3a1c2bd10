"""Tests of prompts for policies without a chat template: their tokens, and the plain text that rewards receive."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_rewards import RECEIVED, characters
from seeded_engine import SeededEngine
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, TrainerState

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import RewardsConfig
from grpo_ray.data.problem import Problem
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.solve import solve_problems
from grpo_ray.inference.sampling import ignore_finished
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.rollout import Completions
from grpo_ray.learner.rollouts.scoring import Reward, Scorer
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.plain_prompts import uses_plain_prompts
from grpo_ray.models.tokenizer import load_tokenizer, overlong_lengths, tokenize_prompts
from grpo_ray.rewards import dry_run
from grpo_ray.telemetry.profiler import PhaseProfiler
from grpo_ray.tools.template import ReplyTemplate, ToolTemplate

ASKED = [[{"role": "user", "content": "1 + 1"}], [{"role": "user", "content": "What is \u00e9?"}]]


@pytest.fixture(autouse=True)
def nothing_received() -> None:
    RECEIVED.clear()


def saved(folder: Path, change: Callable[[Any], None] = lambda tokenizer: None) -> PreTrainedTokenizerBase:
    """Save the embedded policy's tokenizer without its chat template, and load it as a run does."""
    tokenizer: Any = load_tokenizer(str(embedded_policy("tiny-arithmetic")))
    tokenizer.chat_template = None
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return saved(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def with_beginning(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """Return a tokenizer that begins each text with a token, as Llama's does."""

    def change(tokenizer: Any) -> None:
        tokenizer.bos_token = tokenizer.pad_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
        )

    return saved(tmp_path_factory.mktemp("beginning"), change)


@pytest.mark.parametrize("name", ["plain", "with_beginning"])
def test_tokens_are_those_of_the_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    assert uses_plain_prompts(tokenizer)
    tokens = tokenize_prompts(tokenizer, ASKED, {"enable_thinking": False})
    # As TRL tokenizes prompts in its standard format.
    assert tokens == tokenizer(text=["1 + 1", "What is \u00e9?"])["input_ids"]
    assert (tokens[0][0] == tokenizer.bos_token_id) == (name == "with_beginning")
    assert tokenize_prompts(copy.deepcopy(tokenizer), ASKED, {}) == tokens
    assert tokenizer.apply_chat_template(ASKED[0], return_dict=False) == tokens[0]


def test_template_of_a_tokenizer_is_used() -> None:
    tokenizer = load_tokenizer(str(embedded_policy("tiny-arithmetic")))
    assert not uses_plain_prompts(tokenizer)
    assert tokenize_prompts(tokenizer, ASKED, {}) != tokenizer(["1 + 1", "What is \u00e9?"])["input_ids"]


def test_system_prompt_and_turns_are_paragraphs(plain: PreTrainedTokenizerBase) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    (tokens,) = tokenize_prompts(plain, [messages], {})
    assert plain.decode(tokens) == "system\n\nuser\n\nassistant\n\nuser"


def test_saved_tokenizer_has_no_template(plain: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    plain.save_pretrained(tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert uses_plain_prompts(load_tokenizer(str(tmp_path), limits_template=True))


def test_lengths_count_the_beginning_of_a_text(with_beginning: PreTrainedTokenizerBase) -> None:
    prompts = [[{"role": "user", "content": "7" * count}] for count in (3, 4, 5)]
    assert overlong_lengths(with_beginning, prompts, 4, {}) == {1: 5, 2: 6}


def test_several_turns_are_refused(plain: PreTrainedTokenizerBase) -> None:
    for template in (ReplyTemplate, ToolTemplate):
        with pytest.raises(ConfigError, match="has no chat template, which completions of several turns need"):
            template(plain, {})


def test_rewards_of_training_receive_text(plain: PreTrainedTokenizerBase) -> None:
    ids = plain(["so 2", "so 34"])["input_ids"]
    rows = [
        Problem(id=f"{number:016x}", prompt=prompt, solution="").as_row(epoch=0, index=0)
        for number, prompt in enumerate(ASKED)
    ]
    scorer = Scorer(
        rewards=[Reward("characters", characters)], functions=("own_rewards:characters",), tokenizer=plain,
        workers=Workers(gather_objects=lambda own: [own]), profiler=PhaseProfiler(), state=TrainerState,
        notify=lambda line: None,
    )  # fmt: skip
    scores = scorer.score(rows, Completions([[5]] * 2, ids, [[0.0] * len(each) for each in ids]))
    assert RECEIVED == [(["1 + 1", "What is \u00e9?"], ["so 2", "so 34"])]
    assert scores.own.tolist() == [[4.0], [5.0]]


def test_rewards_of_the_dry_run_receive_text(plain: PreTrainedTokenizerBase) -> None:
    problem = Problem(id="0" * 16, prompt=ASKED[0], solution="")
    config = RewardsConfig(functions=("own_rewards:characters",))
    dry_run.dry_run_reward(config, 0, [problem], plain)
    assert [(["1 + 1"] * 2, list(dry_run.PLAIN_TEXTS))] == RECEIVED


def test_heldout_scores_receive_text(plain: PreTrainedTokenizerBase) -> None:
    config = load_config(None, ["heldout.score=own_rewards:characters", "grpo.max_completion_length=8"])
    problems = [Problem(id=f"{number:016x}", prompt=prompt, solution="") for number, prompt in enumerate(ASKED)]
    engine = SeededEngine()
    solve_problems(problems, config, plain, lambda prompts, sampling: engine(prompts, sampling, ignore_finished))
    ((prompts, completions),) = RECEIVED
    assert prompts == ["1 + 1", "What is \u00e9?"] and all(isinstance(each, str) for each in completions)
