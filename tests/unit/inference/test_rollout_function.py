"""Tests of rollout functions: their requests and seeds, their trajectories, and refused results."""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from documents import blocks
from rollout_functions import SPOILT
from scripted_tools import tool_tokenizer
from seeded_engine import NAME, SeededEngine
from tiny_engine import in_threads

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import ConfigError, RolloutError
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.rollout_examples import one_turn
from grpo_ray.inference.rollout_function import FunctionSampler, RolloutPolicy, load_rollout_function
from grpo_ray.inference.sampling import Completion
from grpo_ray.inference.trajectories import RolloutRow, Trajectory
from grpo_ray.resilience.error_triage import raise_if_fatal
from grpo_ray.tools.conversation import Conversation

CONTEXT = 64
ONE_TURN = "grpo_ray.inference.rollout_examples:one_turn"
SECOND_TRY = "grpo_ray.inference.rollout_examples:second_try"
LONG = "grpo.max_completion_length=48"
SAMPLING = {"temperature": 1.0, "max_tokens": 24, "logprobs": 0}


def problem(number: int) -> Problem:
    prompt = [{"role": "user", "content": f"What is {number} + 2?"}]
    return Problem(id=f"{number:016x}", prompt=prompt, solution=f"${number + 2}$", columns={"topic": "sum"})


def rows_of(numbers: Sequence[int], group: int = 2) -> list[dict[str, Any]]:
    return [problem(number).as_row(epoch=3, index=index) for number in numbers for index in range(group)]


def sampler_of(path: str, *overrides: str) -> FunctionSampler:
    config = load_config(None, [f"rollout.function={path}", "grpo.max_completion_length=24", *overrides])
    return FunctionSampler(config, tool_tokenizer(NAME), max_model_len=CONTEXT, vocabulary_size=384)


def run_function(
    function: Callable[[list[RolloutRow], RolloutPolicy], Any],
    *overrides: str,
    engine: SeededEngine | None = None,
    numbers: Sequence[int] = (1, 2),
    **options: Any,
) -> tuple[list[Conversation], SeededEngine]:
    engine = engine or SeededEngine()
    sampler = sampler_of(ONE_TURN, *overrides)
    sampler.function = function
    return sampler.sample(rows_of(numbers), SAMPLING, engine, **options), engine


def run_path(path: str, *overrides: str, **options: Any) -> tuple[list[Conversation], SeededEngine]:
    engine = SeededEngine()
    return sampler_of(path, *overrides).sample(rows_of((1, 2)), SAMPLING, engine, **options), engine


# Requests


def test_first_request_of_a_row_has_the_seed_and_prompt_of_a_run_without_function() -> None:
    _, engine = run_path(ONE_TURN)
    [(prompts, sampling)] = engine.calls
    rows = rows_of((1, 2))
    assert [each["seed"] for each in sampling] == [request_seed(0, row["id"], 3, row["index"]) for row in rows]
    texts = [tool_tokenizer(NAME).decode(prompt) for prompt in prompts]
    assert texts == [f"<|user|>What is {n} + 2?<|end|><|assistant|>" for n in (1, 1, 2, 2)]
    assert [each | {"seed": 0} for each in sampling] == [SAMPLING | {"seed": 0}] * 4


def test_seeds_depend_on_the_rows_own_requests_only() -> None:
    def in_one_call(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        policy.generate([*rows, *rows])
        return one_turn(rows, policy)

    def one_by_one(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        for row in reversed(rows):
            policy.generate([row])
            policy.generate([row])
        return one_turn(rows, policy)

    together, apart = run_function(in_one_call), run_function(one_by_one)
    assert sorted(each["seed"] for each in together[1].requests) == sorted(each["seed"] for each in apart[1].requests)
    assert len({each["seed"] for each in together[1].requests}) == 12  # 4 rows with 3 requests each
    assert [each.token_ids for each in together[0]] == [each.token_ids for each in apart[0]]


def test_requests_take_token_ids_messages_and_limits() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        prompts: list[Any] = [[1, 2, 3], [{"role": "user", "content": "1"}], [4], rows[3].prompt]
        policy.generate(rows, prompts, max_tokens=[1, 2, 3, 4], stop=["9"])
        return one_turn(rows, policy)

    _, engine = run_function(function)
    prompts, sampling = engine.calls[0]
    assert prompts[0] == [1, 2, 3] and prompts[2] == [4] and prompts[3] == engine.calls[1][0][3]
    assert tool_tokenizer(NAME).decode(prompts[1]) == "<|user|>1<|end|><|assistant|>"
    assert [each["max_tokens"] for each in sampling] == [1, 2, 3, 4]
    assert all(each["stop"] == ["9"] and each["detokenize"] for each in sampling)


def test_requests_of_a_measurement_return_log_probabilities_too() -> None:
    """`heldout_sampling` requests no log-probabilities, but a function may read them."""
    engine = SeededEngine()
    sampler_of(ONE_TURN).sample(rows_of((1,)), {"temperature": 0.0, "max_tokens": 24}, engine)
    assert [each["logprobs"] for each in engine.requests] == [0, 0]


def test_request_without_rows_reaches_no_engine() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        policy.turn([])
        assert policy.generate([]) == []
        return one_turn(rows, policy)

    assert len(run_function(function)[1].calls) == 1


def test_row_has_the_problems_columns_and_seeds_of_its_own() -> None:
    seen: list[RolloutRow] = []

    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        seen.extend(rows)
        return one_turn(rows, policy)

    run_function(function)
    assert [(each.id, each.epoch, each.index) for each in seen[:2]] == [(f"{1:016x}", 3, 0), (f"{1:016x}", 3, 1)]
    assert seen[0].columns == {"topic": "sum"} and seen[0].solution == "$3$"
    assert len({each.seed for each in seen}) == 4 and len({each.group_seed for each in seen}) == 2


REFUSED_REQUESTS: dict[str, tuple[Callable[[list[RolloutRow], RolloutPolicy], Any], str]] = {
    "prompts": (lambda rows, policy: policy.generate(rows, [[1]]), "generate got 1 prompts for 4 rows"),
    "limits": (lambda rows, policy: policy.generate(rows, max_tokens=[1]), "generate got 1 max_tokens for 4 rows"),
    "no limit": (lambda rows, policy: policy.generate(rows, max_tokens=0), "generate got max_tokens=0"),
    "empty prompt": (lambda rows, policy: policy.generate(rows[:1], [[]]), "the prompt has no tokens"),
    "long prompt": (lambda rows, policy: policy.generate(rows[:1], [[1] * 64]), "the prompt has 64 tokens"),
    "text": (
        lambda rows, policy: policy.generate(rows[:1], ["What?"]),  # type: ignore[list-item]
        "must be a list of token ids of type int",
    ),
    "token": (lambda rows, policy: policy.generate(rows[:1], [[384]]), "has the token id 384"),
    "no space": (
        lambda rows, policy: policy.turn([Trajectory(rows[0], [1], [1] * 24, [0.0] * 24, [0] * 24)]),
        "there is no space for a turn",
    ),
}


@pytest.mark.parametrize(("request_", "message"), REFUSED_REQUESTS.values(), ids=REFUSED_REQUESTS)
def test_request_that_cannot_be_made_is_refused(request_: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=rf"rollout_examples:one_turn, row 0 \(problem 0{{15}}1, .*{message}"):
        run_function(request_)


def test_request_for_a_row_of_another_call_is_refused() -> None:
    kept: list[RolloutRow] = []

    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        kept.extend(rows)
        return one_turn(rows, policy)

    run_function(function)
    with pytest.raises(RolloutError, match=r"row - \(problem 0{15}1, .*that the function was not called with"):
        run_function(lambda rows, policy: policy.generate(kept[:1]), numbers=(5,))


# Turns


def test_respond_appends_tokens_that_the_template_renders_and_that_are_not_trained() -> None:
    [first, *_], engine = run_path(SECOND_TRY, LONG)
    text = tool_tokenizer(NAME).decode(
        [token for token, own in zip(first.token_ids, first.own, strict=True) if not own]
    )
    assert text == "<|user|>Wrong. Try again.<|end|><|assistant|>"
    assert [message["role"] for message in first.messages] == ["assistant", "user", "assistant"]
    assert (first.turns, first.ended) == (2, "stop")
    assert [prompt for prompt, _ in engine.calls][1][0] == first.prompt_ids + first.token_ids[: first.own.index(0)] + [
        token for token, own in zip(first.token_ids, first.own, strict=True) if not own
    ]
    assert all(logp == 0 for logp, own in zip(first.logps, first.own, strict=True) if not own)


@pytest.mark.parametrize("turns", [0, 1])
def test_respond_without_a_turn_before_it_is_refused(turns: int) -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = one_turn(rows, policy) if turns else policy.start(rows)
        return [each for each in trajectories if policy.respond(each, "a") and policy.respond(each, "b")]

    with pytest.raises(RolloutError, match="a message must follow a turn of the policy"):
        run_function(function, LONG)


def test_respond_reads_marks_as_text() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = one_turn(rows, policy)
        for each in trajectories:
            assert policy.respond(each, "<|end|>")
        policy.turn(trajectories)
        return trajectories

    [first, *_], _ = run_function(function, LONG)
    others = [token for token, own in zip(first.token_ids, first.own, strict=True) if not own]
    assert others.count(tool_tokenizer(NAME).eos_token_id) == 1


def test_respond_without_space_ends_the_trajectory() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = one_turn(rows, policy)
        before = [list(each.token_ids) for each in trajectories]
        assert not any(policy.respond(each, "words " * 9) for each in trajectories)
        assert [each.token_ids for each in trajectories] == before
        return trajectories

    conversations, _ = run_function(function)
    assert {each.ended for each in conversations} == {"length"}


def test_respond_after_a_turn_that_was_cut_off_returns_false() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = policy.start(rows)
        policy.turn(trajectories, max_tokens=2)
        assert not any(policy.respond(each, "-") for each in trajectories)
        return trajectories

    conversations, engine = run_function(function)
    assert {each.ended for each in conversations} == {"length"}
    assert {each["max_tokens"] for each in engine.requests} == {2}


def test_turn_takes_no_more_tokens_than_there_is_space_for() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = [Trajectory(row, [1] * (CONTEXT - 5)) for row in rows]
        policy.turn(trajectories)
        return trajectories

    _, engine = run_function(function)
    assert {each["max_tokens"] for each in engine.requests} == {5}


# Results


def test_trajectory_made_by_hand_is_what_is_trained() -> None:
    """A function in the style of TRL's makes lists and puts them together at the end."""

    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        prompts = policy.render([row.prompt for row in rows])
        completions = policy.generate(rows, prompts)
        ids = [[*each.token_ids, 7, 8] for each in completions]
        logps = [[*each.logps, 0.0, 0.0] for each in completions]
        masks = [[1] * len(each.token_ids) + [0, 0] for each in completions]
        return [Trajectory(*each) for each in zip(rows, prompts, ids, logps, masks, strict=True)]

    conversations, engine = run_function(function)
    assert [each.prompt_ids for each in conversations] == engine.calls[0][0]
    for each in conversations:
        assert each.token_ids[-2:] == [7, 8] and each.own[-3:] == [1, 0, 0] and each.unprocessed_logps is None
        text = tool_tokenizer(NAME).decode(each.own_ids, skip_special_tokens=True)
        assert each.messages == [{"role": "assistant", "content": text}]
        assert (each.turns, each.calls, each.ended, each.reward) == (1, [], "stop", None)


def test_trajectory_that_failed_has_no_score() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = one_turn(rows, policy)
        trajectories[1].failed = True
        return trajectories

    conversations, _ = run_function(function)
    assert [each.is_unscorable(("correctness",)) for each in conversations] == [False, True, False, False]


def test_reward_of_a_function_is_the_reward_environment() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = one_turn(rows, policy)
        for number, each in enumerate(trajectories[:3]):
            each.reward = number / 2
        return trajectories

    rewards = ("environment",)
    conversations, _ = run_function(function, "rewards.functions=[environment]")
    assert [each.reward for each in conversations] == [0, 0.5, 1, None]
    assert [each.is_unscorable(rewards) for each in conversations] == [False, False, False, True]


def test_filters_need_log_probabilities_before_them() -> None:
    filters = ("grpo.top_p=0.9", "grpo.vllm_importance_sampling_mode=token_mask")
    [first, *_], _ = run_path(ONE_TURN, *filters)
    assert first.unprocessed_logps == first.logps  # this engine returns no others
    processed = SeededEngine(processed=True)
    [first, *_], _ = run_function(one_turn, *filters, engine=processed)
    assert set(first.unprocessed_logps or ()) == {-9.0} != set(first.logps)
    assert run_function(one_turn, engine=processed)[0][0].unprocessed_logps is None

    def without(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        trajectories = one_turn(rows, policy)
        trajectories[0].unprocessed_logps = []
        return trajectories

    with pytest.raises(RolloutError, match=r"row 0 .*unprocessed_logps is empty, and the run samples with top_p"):
        run_function(without, *filters)


@pytest.mark.parametrize("how", SPOILT)
def test_trajectory_that_cannot_be_trained_on_is_refused(how: str) -> None:
    settings = f"rollout.settings={{'rollout_functions:spoilt': {{how: {how}}}}}"
    with pytest.raises(RolloutError, match=SPOILT[how][1]) as refused:
        run_path("rollout_functions:spoilt", settings)
    where = "rollout.function: rollout_functions:spoilt, row 3 (problem 0000000000000002, epoch 3, completion 1): "
    assert str(refused.value).startswith(where) and "\n" not in str(refused.value)


RESULTS = {
    "unordered": r"row 0 \(.*the trajectory is of another row \(problem 0{15}2, epoch 3, completion 1\); keep",
    "one_missing": "must return a trajectory for each of 4 rows; got 3",
    "no_list": "must return a list of Trajectory, not dict",
    "no_trajectories": r"row 0 \(.*the result must be a Trajectory, not str",
}


@pytest.mark.parametrize("name", RESULTS)
def test_result_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(RolloutError, match=f"rollout.function: rollout_functions:{name}.*{RESULTS[name]}"):
        run_path(f"rollout_functions:{name}")


def test_log_probability_that_the_engine_lacks_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"row 0 .*logps\[0\] is None"):
        run_function(one_turn, engine=SeededEngine(missing=True))


def test_error_of_a_function_ends_the_run_unless_it_may_go_away() -> None:
    error = pickle.loads(pickle.dumps(RolloutError("rollout.function: ...")))
    with pytest.raises(RolloutError):
        raise_if_fatal(error)
    with pytest.raises(KeyError, match="a bug") as bug:
        run_path("rollout_functions:failing")
    raise_if_fatal(bug.value)  # retried, since it may be a service that was down


# Workers


def test_workers_that_share_an_engine_take_part_in_each_others_rounds() -> None:
    """Workers differ in their requests; the rounds of the engine are collective, so all must make as many."""
    sampler_of("rollout_functions:retrying")  # imports what threads must not import at once
    engines = [SeededEngine(), SeededEngine()]
    shares = [(3, 6), (2, 5, 8, 4)]  # ids below 3 take one turn, and so on

    def work(rank: int, gather: Callable[[Any], list[Any]]) -> list[Conversation]:
        def run_round(prompts: Any, sampling: Any, on_finished: Any) -> list[Completion]:
            gather(None)
            return engines[rank](prompts, sampling, on_finished)

        sampler = sampler_of("rollout_functions:retrying", "grpo.max_completion_length=60")
        return sampler.sample(
            rows_of(shares[rank]), SAMPLING, run_round, is_any_active=lambda active: any(gather(active))
        )

    shared = in_threads(2, work)
    assert all(isinstance(each, list) for each in shared), shared
    assert [len(each.calls) for each in engines] == [3, 3]
    assert [bool(prompts) for prompts, _ in engines[0].calls] == [True, False, False]
    alone = [
        sampler_of("rollout_functions:retrying", "grpo.max_completion_length=60").sample(
            rows_of(numbers), SAMPLING, SeededEngine()
        )
        for numbers in shares
    ]
    assert [[each.token_ids for each in part] for part in shared] == [
        [each.token_ids for each in part] for part in alone
    ]


def test_worker_without_rows_calls_no_function() -> None:
    sampler = sampler_of("rollout_functions:failing")
    assert sampler.sample([], SAMPLING, SeededEngine()) == []


def test_ended_completions_and_progress_are_announced() -> None:
    ended: list[int] = []
    progress: list[int] = []

    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        policy.note_progress()
        return one_turn(rows, policy)

    run_function(function, on_ended=lambda row, conversation: ended.append(row), on_result=lambda: progress.append(1))
    assert ended == [0, 1, 2, 3] and len(progress) == 2


def test_metrics_are_those_that_trajectories_have() -> None:
    sampler = sampler_of(ONE_TURN)
    summaries = [each.summary for each in sampler.sample(rows_of((1, 2)), SAMPLING, SeededEngine())]
    metrics = sampler.metrics(summaries)
    assert metrics["rollout/turns_mean"] == 1 and metrics["rollout/lost_share"] == 0
    assert not [name for name in metrics if "call" in name]


# Loading

UNUSABLE = {
    "rollout_functions:one_tur": "has no 'one_tur'; did you mean one_turn",
    "rollout_nowhere:one_turn": "'rollout_nowhere:one_turn' cannot be imported .*PYTHONPATH",
    "rollout_functions:coroutine": "is a coroutine function; name a function, which may run its own event loop",
    "rollout_functions:NoFunction": "is of the type type; name a function",
    "rollout_functions:one_argument": r"\(.*rollout_functions.py\) cannot be called with rows and policy: too many pos",
    "rollout_functions:spoilt": "cannot be called with rows and policy: missing a required argument: 'how'",
    "rollout_functions:of_trl": r"\(.*rollout_functions.py\) has the signature of TRL's rollout_func, \(prompts, tr",
}


@pytest.mark.parametrize("path", UNUSABLE)
def test_function_that_cannot_be_used_is_refused(path: str) -> None:
    rollout = load_config(None, [f"rollout.function={path}"]).rollout
    with pytest.raises(ConfigError, match=f"rollout.function: .*{UNUSABLE[path]}"):
        load_rollout_function(rollout)


@pytest.mark.parametrize("name", ["second_try", "rollout"])
def test_functions_of_the_documents_sample_trajectories(name: str) -> None:
    """`second_try`, and `rollout`, which has been a function for TRL."""
    page = [block for block in blocks("python") if block.source == "docs/tools-and-environments.md"]
    [block] = [block for block in page if f"def {name}(rows" in block.text]
    module: dict[str, Any] = {}
    exec(block.text, module)  # what a reader writes into a module
    conversations, engine = run_function(module[name], LONG)
    expected = {"second_try": [4, 4], "rollout": [4]}[name]
    assert [len(prompts) for prompts, _ in engine.calls] == expected
    assert {each.turns for each in conversations} == {len(expected)}


def test_settings_are_arguments_of_the_function() -> None:
    path = "rollout_functions:retrying"
    one = load_config(None, [f"rollout.function={path}", f"rollout.settings={{'{path}': {{turns: 1}}}}"])
    loaded = load_rollout_function(one.rollout)
    assert isinstance(loaded, partial) and loaded.keywords == {"turns": 1}
    other = load_config(None, [f"rollout.function={path}", f"rollout.settings={{'{path}': {{rounds: 1}}}}"])
    with pytest.raises(ConfigError, match=r"rows, policy and rollout.settings \['rounds'\]: got an unexpected keyword"):
        load_rollout_function(other.rollout)
