"""Tests of the checks across fields."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from config_cases import config_error, examples, with_sizes
from hypothesis import given

from grpo_ray.config import checks
from grpo_ray.config.checks import CHECKS, FIELDS_OF_TURNS
from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config, GrpoConfig, RolloutConfig
from grpo_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.settings={soft_overlong: {cache: .inf}}", "rewards.settings.soft_overlong.cache=inf"),
        ("grpo.generation_kwargs={logit_bias: {3: .nan}}", "grpo.generation_kwargs.logit_bias.3=nan"),
        ("grpo.lr_scheduler_kwargs={factors: [1, -.inf]}", "grpo.lr_scheduler_kwargs.factors[1]=-inf"),
    ],
)
def test_config_infinite_number_inside_mapping_raises(override: str, message: str) -> None:
    assert config_error(override) == f"{message} must be a finite number"


def test_config_workers_not_dividing_prompts_raises() -> None:
    # 16 = 3 x 5 + 1, so 15 is the nearest below that three workers can share.
    assert config_error("cluster.num_workers=3") == (
        "grpo.prompts_per_step=16 must be a multiple of cluster.num_workers=3; try grpo.prompts_per_step=15"
    )


def test_config_fewer_prompts_than_workers_suggests_more() -> None:
    assert config_error("cluster.num_workers=8", "grpo.prompts_per_step=3").endswith("try grpo.prompts_per_step=8")


def test_config_micro_batch_not_dividing_step_raises() -> None:
    # 16 x 8 = 128 completions; 32 is the largest divisor up to 48 that two workers can share.
    message = config_error("grpo.micro_batch_size=48")
    assert "grpo.micro_batch_size=48 must divide the step's 128 completions" in message
    assert message.endswith("try grpo.micro_batch_size=32")


def test_config_micro_batch_not_shareable_raises() -> None:
    # 1 divides 128, but two workers cannot share it; 2 is the nearest number that they can.
    assert config_error("grpo.micro_batch_size=1") == (
        "grpo.micro_batch_size=1 must be a multiple of cluster.num_workers=2; try grpo.micro_batch_size=2"
    )


def test_config_checkpoint_inside_a_batch_raises() -> None:
    message = config_error("grpo.save_steps=50", "grpo.num_iterations=4")
    assert "grpo.save_steps=50" in message and "grpo.num_iterations=4" in message
    assert message.endswith("try grpo.save_steps=48")  # 12 x 4


def test_pause_in_the_middle_of_a_batch_is_refused() -> None:
    message = config_error("run.pause_at=7", "grpo.steps_per_generation=2", "grpo.save_steps=2")
    assert message == (
        "run.pause_at=7 must be a multiple of grpo.steps_per_generation=2, so that no checkpoint is saved in the "
        "middle of a batch; try run.pause_at=6"
    )


def test_config_last_step_inside_a_batch_raises() -> None:
    # After step 7 the fourth batch would have taken one of its two steps, and an extended run would draw a fifth.
    message = config_error("grpo.max_steps=7", "grpo.save_steps=2", "grpo.num_iterations=2")
    assert message == (
        "grpo.max_steps=7 must be a multiple of grpo.num_iterations=2, so that no checkpoint is saved in the middle of "
        "a batch; try grpo.max_steps=6"
    )


@pytest.mark.parametrize(
    ("metric", "meant"),
    {
        "heldout/acuracy": "; did you mean heldout/accuracy?",
        "accuracy": "; did you mean heldout/accuracy?",
        "reward/correctness": "; did you mean reward/correctness_mean?",
        "reward/boxed_format_mean": "",  # not one of the rewards
        "completion/length_mean": "",  # a metric, but no ranking
        "learner/loss": "",
        "checkpoint/score": "",
    }.items(),
)
def test_config_best_metric_that_ranks_nothing_raises(metric: str, meant: str) -> None:
    message = config_error(f"run.best_metric={metric}")
    assert message.startswith(
        f"run.best_metric={metric} must be one of heldout/accuracy, heldout/low, reward/mean, reward/correctness_mean"
    )
    assert meant in message


SETS = "data.heldout={math: m.jsonl, gsm8k: gsm8k}"


@pytest.mark.parametrize(
    ("best_metric", "ranking", "primary"),
    [
        ("heldout/accuracy", "heldout/math/accuracy", "heldout/math"),  # the first set
        ("heldout/low", "heldout/math/low", "heldout/math"),
        ("heldout/gsm8k/accuracy", "heldout/gsm8k/accuracy", "heldout/gsm8k"),
        ("heldout/gsm8k/low", "heldout/gsm8k/low", "heldout/gsm8k"),
        ("reward/mean", "reward/mean", "heldout/math"),
    ],
)
def test_config_several_heldout_sets_one_ranks_checkpoints(best_metric: str, ranking: str, primary: str) -> None:
    config = load_config(None, [SETS, f"run.best_metric={best_metric}"])
    assert config.heldout_keys == ["heldout/math", "heldout/gsm8k"]
    assert (config.ranking_metric, config.primary_heldout) == (ranking, primary)


@pytest.mark.parametrize("heldout", ["null", "arithmetic"])
def test_config_only_heldout_set_has_no_name(heldout: str) -> None:
    config = load_config(None, [f"data.heldout={heldout}"])
    assert (config.heldout_keys, config.primary_heldout) == (["heldout"], "heldout")
    assert config.ranking_metric == "heldout/accuracy"


def test_config_best_metric_of_unknown_set_raises() -> None:
    message = config_error(SETS, "run.best_metric=heldout/gsm/accuracy")
    assert message.endswith("; did you mean heldout/gsm8k/accuracy?")
    assert "heldout/math/low" in message


def test_config_best_metric_of_any_reward_is_accepted() -> None:
    rewards = "rewards.functions=[correctness, my.rewards:short, org/reward-model]"
    for metric in ("heldout/low", "reward/mean", "reward/short_mean", "reward/reward-model_mean"):
        assert load_config(None, [rewards, f"run.best_metric={metric}"]).run.best_metric == metric


def test_config_reward_ranks_checkpoints_at_any_interval_of_logs() -> None:
    load_config(None, ["run.best_metric=reward/mean", "grpo.logging_steps=4", "grpo.save_steps=50"])


@pytest.mark.parametrize(
    "functions",
    ["[correctness, correctness]", "['one:style', 'other:style']", "['mine:correctness']", "['mine:environment']"],
)
def test_config_rewards_of_one_name_raise(functions: str) -> None:
    message = config_error(f"rewards.functions={functions}")
    assert message.startswith("rewards.functions has '") and "rename" in message


def test_config_eased_conciseness_without_the_rate_of_each_step_raises() -> None:
    rewards = "rewards.functions=[correctness, eased_conciseness]"
    message = config_error(
        rewards, "rewards.settings.eased_conciseness={target: 8, max_length: 64}", "grpo.logging_steps=5"
    )
    assert message.startswith("grpo.logging_steps=5 must be 1 with `eased_conciseness`")


SUGGESTION = re.compile(r"^(grpo\.\w+)=(\d+) must .*; try \1=(\d+)$")


def suggestion(message: str) -> tuple[str, int]:
    """Return the field and the value that an error message suggests."""
    found = SUGGESTION.match(message)
    assert found, f"no suggestion in: {message}"
    return found[1].removeprefix("grpo."), int(found[3])


@pytest.mark.long
@given(
    workers=st.integers(1, 8),
    prompts=st.integers(1, 20),
    generations=st.integers(2, 8),
    share=st.floats(0, 1.1) | st.none(),
)
@examples(400)
def test_config_refused_size_suggestion_is_accepted(
    workers: int, prompts: int, generations: int, share: float | None
) -> None:
    step = prompts * generations
    micro = None if share is None else 1 + int(share * step)
    sizes: dict[str, Any] = {
        "num_workers": workers,
        "prompts_per_step": prompts,
        "num_generations": generations,
        "micro_batch_size": micro,
    }
    fits = prompts % workers == 0 and (micro is None or (step % micro == 0 and micro % workers == 0))
    changed: list[str] = []
    while True:
        try:
            config = with_sizes(**sizes)
            break
        except ConfigError as error:
            field, value = suggestion(str(error))
            assert field not in changed, f"{field} is changed twice"
            changed.append(field)
            sizes[field] = value
    assert fits == (not changed)
    assert config.sizes.prompts_per_worker * workers == config.grpo.prompts_per_step
    assert config.sizes.completions_per_step % config.sizes.micro_batch_size == 0
    assert config.sizes.micro_batch_size % workers == 0


def test_config_token_limit_below_longest_row_raises() -> None:
    assert config_error("grpo.tokens_per_micro_batch=256").startswith(
        "grpo.tokens_per_micro_batch=256 must be at least 257, the tokens of the longest completion with its prompt"
    )
    message = config_error("grpo.tokens_per_micro_batch=300", "data.max_prompt_length=100")
    assert "must be at least 356" in message
    load_config(None, ["grpo.tokens_per_micro_batch=356", "data.max_prompt_length=100"])


@given(save=st.integers(1, 40), last=st.integers(1, 40), parts=st.integers(1, 3), epochs=st.integers(1, 5))
@examples(100)
def test_config_refused_checkpoint_steps_suggestions_are_accepted(
    save: int, last: int, parts: int, epochs: int
) -> None:
    steps: dict[str, Any] = {"save_steps": save, "max_steps": last}
    names: tuple[dict[str, Any], ...] = ({"epochs": epochs}, {"trl": {"num_iterations": epochs}})
    for batch in ({"steps_per_generation": parts, **name} for name in names):
        for name in ("save_steps", "max_steps"):
            if steps[name] % (parts * epochs):
                with pytest.raises(ConfigError) as caught:
                    Config(grpo=GrpoConfig(**steps, **batch))
                field, value = suggestion(str(caught.value))
                assert field == name
                steps[name] = value
        assert Config(grpo=GrpoConfig(**steps, **batch)).steps_per_batch == parts * epochs


def test_config_steps_on_a_batch_are_named_as_they_are_set() -> None:
    message = config_error("grpo.steps_per_generation=2", "grpo.epochs=3", "grpo.save_steps=12", "grpo.max_steps=8")
    assert message == (
        "grpo.max_steps=8 must be a multiple of grpo.steps_per_generation=2 x grpo.epochs=3, so that no checkpoint is "
        "saved in the middle of a batch; try grpo.max_steps=6"
    )


@pytest.mark.parametrize("name", ["steps_per_generation", "epochs", "num_iterations"])
def test_config_reward_ranks_checkpoints_only_where_each_has_one(name: str) -> None:
    overrides = [f"grpo.{name}=2", "run.best_metric=reward/correctness_mean"]
    message = config_error(*overrides)
    assert message.startswith("run.best_metric=reward/correctness_mean is measured once for each generation batch of ")
    assert f"of grpo.{name}=2 steps, and grpo.logging_steps=1 " in message
    load_config(None, [*overrides, "grpo.logging_steps=2"])
    load_config(None, [*overrides, "run.best_metric=heldout/low"])


def test_config_curriculum_without_correctness_raises() -> None:
    with pytest.raises(ConfigError, match=r"data\.prefer_mixed=true require .* put correctness"):
        load_config(None, ["data.prefer_mixed=true", "rewards.functions=[boxed_format]"])


def test_checks_are_named_and_described() -> None:
    names = [check.__name__ for check in CHECKS]
    assert len(set(names)) == len(CHECKS)
    assert all((check.__doc__ or "").startswith(("Require ", "Refuse ")) for check in CHECKS)


VIOLATIONS = {
    "numbers_are_finite": ["grpo.generation_kwargs.logit_bias.3=.nan"],
    "run_name_is_no_checkpoint": ["run.name=checkpoint-study"],
    "worker_range_is_ordered": ["cluster.num_workers=[4, 2]"],
    "engine_range_is_ordered": ["engine.replicas=[3, 2]"],
    "best_metric_ranks_checkpoints": ["run.best_metric=learner/loss"],
    "fine_tuning_goes_with_options": ["run.kind=sft", "grpo.dynamic_sampling=1"],
    "ranking_reward_is_of_each_checkpoint": ["run.best_metric=reward/mean", "grpo.epochs=2"],
    "solved_problems_are_known": ["data.skip_solved=2", "rewards.functions=[boxed_format]"],
    "dynamic_sampling_scales_by_group": ["grpo.dynamic_sampling=1", "grpo.scale_rewards=batch"],
    "sampling_is_supported": ["grpo.mask_truncated_completions=true", "grpo.generation_kwargs={stop: [a]}"],
    "structured_outputs_are_one_form": ["rollout.structured_outputs={regex: a, choice: [b]}"],
    "sampling_is_corrected_by_token": ["grpo.top_p=0.9", "grpo.vllm_importance_sampling_mode=sequence_truncate"],
    "heldout_sampling_is_possible": ["heldout.num_samples=4"],
    "staleness_is_not_sharded": ["rollout.max_staleness=1", "cluster.shard_learner=true"],
    "staleness_goes_with_options": ["rollout.max_staleness=1", "grpo.dynamic_sampling=1"],
    "segments_continue_completions": ["rollout.max_staleness=2", "grpo.importance_sampling_level=sequence"],
    "followed_reference_is_not_sharded": ["grpo.sync_ref_model=true", "cluster.shard_learner=true"],
    "prompts_fit_into_a_pass_on_the_cpu": ["engine.vllm={enable_chunked_prefill: true}"],
    "quantized_engine_has_16_bits": ["engine.vllm={quantization: fp8}"],
    "workers_share_prompts": ["cluster.num_workers=3"],
    "workers_share_micro_batches": ["grpo.micro_batch_size=1", "cluster.num_workers=2"],
    "some_worker_count_shares_step": ["cluster.num_workers=[3, 3]"],
    "micro_batches_divide_step": ["grpo.micro_batch_size=48"],
    "micro_batches_have_one_limit": ["grpo.micro_batch_size=16", "grpo.tokens_per_micro_batch=4096"],
    "token_limit_holds_a_completion": ["grpo.tokens_per_micro_batch=256"],
    "token_limit_keeps_the_loss": ["grpo.tokens_per_micro_batch=4096", "grpo.loss_type=bnpo"],
    "router_loss_is_of_one_pass": ["grpo.router_aux_loss_coef=0.01"],
    "vespo_keeps_a_ratio_of_one": ["grpo.loss_type=vespo", "grpo.vllm_importance_sampling_clip_max=0.9"],
    "epochs_have_one_name": ["grpo.epochs=2", "grpo.num_iterations=2"],
    "checkpoints_are_between_batches": ["grpo.save_steps=50", "grpo.num_iterations=4"],
    "engines_are_counted_if_dedicated": ["engine.replicas=2"],
    "dedicated_engines_share_nothing": ["engine.placement=dedicated", "grpo.vllm_enable_sleep_mode=true"],
    "transport_has_gpus": ["engine.transport=nccl"],
    "dedicated_engines_have_prompts": ["engine.placement=dedicated", "engine.replicas=17"],
    "engines_have_equal_workers": ["grpo.vllm_tensor_parallel_size=4", "cluster.num_workers=2"],
    "sharded_learner_has_workers": ["cluster.shard_learner=true", "cluster.num_workers=1"],
    "policy_has_one_adapter": ["model.lora={rank: 8}", "model.peft={type: LORA}"],
    "reference_is_the_first_policy": ["model.peft={type: FOURIERFT}", "grpo.beta=0.1"],
    "adapter_can_be_sharded": ["model.peft={type: VERA}", "cluster.shard_learner=true"],
    "int4_is_of_the_engine_too": ["model.quantization=int4", "engine.adapter=merge"],
    "shared_base_is_constant": ["model.share_base=true", "engine.adapter=merge"],
    "quantized_policy_has_an_adapter": ["model.quantization=nf4"],
    "adapter_optimizer_fits": ["model.adapter_optimizer={name: loraplus}", "model.peft={type: OFT}"],
    "adapter_can_be_requested": ["engine.adapter=request", "model.peft={type: OFT}"],
    "every_reward_has_a_weight": ["grpo.reward_weights=[1, 2]"],
    "reward_names_differ": ["rewards.functions=[correctness, correctness]"],
    "limits_are_of_isolated_rewards": ["rewards.isolate_seconds=5"],
    "reward_models_have_a_share": ["rewards.functions=[a/model]", "rewards.model_gpus=0.6", "cluster.use_gpu=true"],
    "settings_are_of_rewards": ["rewards.settings={choice: {choices: AB}}"],
    "benchmarks_have_plain_completions": [
        "data.heldout=math500",
        "rollout.environment='grpo_ray.tools.examples:Guess'",
    ],
    "sources_name_what_exists": ["data.train={a: {path: arithmetic, rewards: [boxed_format]}}"],
    "heldout_score_is_known": ["heldout.score=corectness"],
    "eased_conciseness_knows_the_success_rate": ["rewards.functions=[eased_conciseness]"],
    "entropy_bounds_are_ordered": ["grpo.entropy_coef_min=2.0", "grpo.entropy_coef_max=1.0"],
    "trl_fields_have_an_effect": ["grpo.sapo_temperature_pos=2.0", "grpo.loss_type=dapo"],
    "optimizer_arguments_are_known": ["grpo.optim_args=eps=1", "grpo.optim=sgd"],
    "scheduler_arguments_fit": ["grpo.lr_scheduler_kwargs={power: 2}", "grpo.lr_scheduler_type=cosine"],
    "model_arguments_are_supported": ["grpo.model_init_kwargs={quantization_config: {load_in_4bit: true}}"],
    "sharding_options_are_supported": [
        "cluster.shard_learner=true",
        "grpo.fsdp_config={fsdp_activation_checkpointing: true}",
    ],
    "vespo_masks_tokens": ["grpo.loss_type=vespo", "grpo.vllm_importance_sampling_mode=sequence_mask"],
    "importance_bounds_are_ordered": [
        "grpo.vllm_importance_sampling_clip_min=9",
        "grpo.vllm_importance_sampling_clip_max=3.0",
    ],
    "stop_on_names_active_warnings": ["run.stop_on=[truncation]", "health.truncation=null"],
    "notify_is_a_web_address": ["run.notify=ftp://host/"],
    "turns_go_with_options": ["rollout.max_staleness=3", "rollout.max_turns=2", "rollout.tools=['package.tools:add']"],
    "rollout_function_goes_with_options": ["rollout.function=package.rollouts:play", "rollout.confine=true"],
    "environments_are_named_alike": ["rewards.functions=[environment]", "rollout.environment=null"],
    "remote_sandbox_is_complete": ["rollout.sandbox_url=http://sandbox:8080"],
}
"""Check -> overrides that violate it and no check before it."""


def test_violations_cover_every_check() -> None:
    assert list(VIOLATIONS) == [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_violation_names_fields_and_raises_its_message(
    check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = VIOLATIONS[check.__name__]
    message = config_error(*overrides)
    assert all(override.partition("=")[0] in message for override in overrides)
    monkeypatch.setattr(checks, "CHECKS", ())
    config = load_config(None, overrides)  # now nothing refuses it
    assert check(config) == message
    assert check(Config()) is None


@pytest.mark.parametrize(
    ("kind", "of_step"),
    [("sft", "10 demonstrations (prompts_per_step)"), ("grpo", "80 completions (prompts_per_step x num_generations)")],
)
def test_config_micro_batches_are_parts_of_what_a_step_has(kind: str, of_step: str) -> None:
    step = ["grpo.prompts_per_step=10", "grpo.num_generations=8", "grpo.micro_batch_size=3"]
    message = config_error(f"run.kind={kind}", "data.train=a.jsonl", *step)
    assert f"grpo.micro_batch_size=3 must divide the step's {of_step}; try grpo.micro_batch_size=2" in message


DEDICATED = "engine.placement=dedicated"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine.replicas=[1, 2]"],
            "engine.replicas=[1, 2] has no effect with engine.placement=colocated, which gives each worker an engine; "
            "set engine.placement=dedicated, or leave engine.replicas out",
        ),
        (
            ["engine.tensor_parallel_size=2"],
            "engine.tensor_parallel_size=2 has no effect with engine.placement=colocated; set "
            "engine.placement=dedicated, or grpo.vllm_tensor_parallel_size=2, which lets 2 workers share an engine",
        ),
        (
            [DEDICATED, "grpo.vllm_tensor_parallel_size=2", "cluster.num_workers=2"],
            "engine.placement=dedicated does not go with grpo.vllm_tensor_parallel_size=2, which is the number of "
            "workers that share a colocated engine; set engine.tensor_parallel_size=2 instead, or "
            "engine.placement=colocated",
        ),
        (
            [DEDICATED, "model.quantization=int4", "model.lora={}", "model.dtype=bfloat16"],
            "engine.placement=dedicated does not go with model.quantization=int4, which needs an engine that reads the "
            "learner's base in its own process; set model.quantization=nf4, or engine.placement=colocated",
        ),
        (
            [DEDICATED, "model.share_base=true", "model.lora={}"],
            "engine.placement=dedicated does not go with model.share_base=true, which lets the learner read the "
            "weights of an engine on the same GPU; set model.share_base=false, or engine.placement=colocated",
        ),
        (
            [DEDICATED, "rollout.structured_outputs={regex: a+}"],
            "engine.placement=dedicated does not go with rollout.structured_outputs, which needs an engine in the "
            "learner's process, whose grammar the learner follows; set rollout.structured_outputs=null, or "
            "engine.placement=colocated",
        ),
        (
            [DEDICATED, "engine.replicas=[2, 6]", "grpo.prompts_per_step=4"],
            "engine.placement=dedicated divides the groups of a generation batch among 6 engines, and "
            "grpo.prompts_per_step=4 gives it 4, so that engine.replicas=[2, 6] would leave engines without work; set "
            "engine.replicas=[2, 4], or a larger grpo.prompts_per_step",
        ),
    ],
)
def test_config_of_engines_names_reason_and_remedy(overrides: list[str], message: str) -> None:
    assert config_error(*overrides) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.replicas=4", "engine.tensor_parallel_size=2"],
        ["engine.replicas=[1, 4]"],
        ["engine.replicas=16"],
        ["engine.replicas=32", "grpo.steps_per_generation=2"],
        ["grpo.vllm_tensor_parallel_size=1", "grpo.vllm_enable_sleep_mode=false"],
        ["model.quantization=nf4", "model.lora={}", "model.dtype=bfloat16"],
    ],
)
def test_config_of_dedicated_engines_is_accepted(overrides: list[str]) -> None:
    assert load_config(None, [DEDICATED, *overrides]).engine.is_dedicated


def test_engine_fraction_follows_the_placement() -> None:
    assert load_config().engine_fraction == 0.3
    assert load_config(None, [DEDICATED]).engine_fraction == 0.9
    assert load_config(None, [DEDICATED, "engine.gpu_memory_utilization=0.5"]).engine_fraction == 0.5


def test_reward_models_beside_large_dedicated_engines_raise() -> None:
    settings = ["rewards.functions=[a/model]", "run.measure=background", "cluster.use_gpu=true"]
    raised = config_error(*settings, DEDICATED, "engine.tensor_parallel_size=2")
    assert "and engine.tensor_parallel_size=2 needs 2 whole ones; set rewards.model_gpus=1 or 0" in raised


@pytest.mark.parametrize("settings", [["cluster.num_workers=2"], ["cluster.num_workers=1"]])
def test_config_router_loss_over_several_parts_raises(settings: list[str]) -> None:
    message = config_error("grpo.router_aux_loss_coef=0.01", *settings)
    assert "set grpo.router_aux_loss_coef=0, or cluster.num_workers=1 and grpo.micro_batch_size=128" in message


def test_config_router_loss_over_one_part_or_off_is_accepted() -> None:
    load_config(None, ["grpo.router_aux_loss_coef=0.01", "cluster.num_workers=1", "grpo.micro_batch_size=128"])
    load_config(None, ["grpo.router_aux_loss_coef=0"])


def test_config_vespo_with_clipped_ratio_of_one_raises() -> None:
    bound = "grpo.vllm_importance_sampling_clip_max=0.9"
    assert "must be at least 1 with grpo.loss_type=vespo" in config_error("grpo.loss_type=vespo", bound)
    load_config(None, [bound])
    without = "grpo.vllm_importance_sampling_correction=false"
    load_config(None, ["grpo.loss_type=vespo", without])
    assert "has no effect with grpo.vllm_importance_sampling_correction=false" in config_error(bound, without)
    low = "grpo.vllm_importance_sampling_clip_min=1.5"
    assert "must be at most 1 with grpo.loss_type=vespo" in config_error("grpo.loss_type=vespo", low)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.stop_on=[high_kl]"], "run.stop_on=high_kl has no effect with grpo.beta=0"),
        (["run.stop_on=[reward_stuck]", "data.prefer_mixed=true"], "run.stop_on=reward_stuck has no effect with data"),
        (["run.stop_on=[no_signals]"], "run.stop_on=['no_signals'] must be a list of \"no_signal\""),
        (["health.window=1"], "health.window=1 must be a whole number of at least 2"),
    ],
)
def test_config_stop_on_without_effect_raises(overrides: list[str], message: str) -> None:
    assert config_error(*overrides).startswith(message)


def test_config_stop_on_active_warnings_is_accepted() -> None:
    config = load_config(None, ["run.stop_on=[high_kl, no_signal]", "grpo.beta=0.1"])
    assert config.run.stop_on == ("high_kl", "no_signal") and config.to_dict()["run"]["stop_on"][0] == "high_kl"


@pytest.mark.parametrize(
    "address",
    ["ftp://host/s3cr3t", "file:///s3cr3t", "s3cr3t", "http://", "https:///s3cr3t", "http://host:s3cr3t/",
     "http://a:s3cr3t@host/", "http://host/s3cr3t x", "http://[s3cr3t", "javascript:s3cr3t", "http://h\u00f6st/s3cr3t"],
)  # fmt: skip
def test_config_notify_other_address_is_refused_without_showing_it(address: str) -> None:
    message = config_error(f"run.notify={address}")
    assert "run.notify must be http://HOST/" in message and "s3cr3t" not in message and "\n" not in message


FUNCTION = "rollout.function=package.rollouts:play"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([FUNCTION, "rollout.tools=['package.tools:add']"], r"rollout\.function=.* does not go with rollout\.tools"),
        ([FUNCTION, "rollout.environment=games:Guess"], r"does not go with rollout\.environment: the function makes"),
        ([FUNCTION, "rollout.max_staleness=1"], r"rollout\.max_staleness=1 does not go with rollout\.function"),
        (
            [FUNCTION, "rollout.sandbox_url=http://sandbox"],
            r"rollout\.sandbox_url has no effect without",
        ),
        (
            ["rollout.function=rollouts.py"],
            r"rollout\.function=rollouts\.py must have the form package\.module:f",
        ),
        (["rollout.function=':play'"], r"must have the form package\.module:function"),
        (["rollout.function='package.rollouts:play:1'"], r"must have the form package\.module:function"),
        ([FUNCTION, "rollout.time_limit=5"], r"rollout\.time_limit has no effect with rollout\.function=package\."),
        (
            [FUNCTION, "rollout.variables=[KEY]"],
            r"rollout\.variables has no effect .* such a limit in rollout\.settings",
        ),
        (
            [FUNCTION, "rollout.settings={'package.rollout:play': {turns: 3}}"],
            r"rollout\.environment and rollout\.function do not name; did you mean package\.rollouts:play",
        ),
    ],
)
def test_config_rollout_function_with_what_does_not_go_with_it_raises(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_config_fields_of_rollout_are_of_turns_or_of_functions_too() -> None:
    """A new field must be in one of these lists: a function must not be thought to obey a limit that it ignores."""
    also_of_functions = {"tools", "environment", "function", "settings", "max_active", "max_result_tokens", "confine"}
    remote = {"sandbox_url", "sandbox_provider", "sandbox_token_variable"}
    fields = {field.name for field in dataclasses.fields(RolloutConfig)}
    not_of_functions = {"structured_outputs", "max_staleness", "anchor"}  # refused with a function
    assert fields == {*FIELDS_OF_TURNS, *also_of_functions, *remote, *not_of_functions}


def test_config_rollout_function_may_score_and_have_settings() -> None:
    config = load_config(
        None,
        [
            FUNCTION,
            "rewards.functions=[environment]",
            "rollout.settings={'package.rollouts:play': {turns: 3}}",
            "run.best_metric=heldout/reward",
        ],
    )
    assert config.rollout.has_conversations and not config.rollout.has_turns and not config.needs_solutions
    assert load_config(None, [FUNCTION]).needs_solutions


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["rewards.model_gpus=0.6"], r"^rewards\.model_gpus=0\.6 must be at most 0\.45, beside a worker, or 1"),
        (["cluster.num_workers=[1, 2]"], r"^rewards\.model_gpus=0\.25 .* a varying number of workers; set .*=1,"),
        (
            ["grpo.vllm_tensor_parallel_size=2", "cluster.num_workers=2", "heldout.score=reward"],
            r"^rewards\.model_gpus=0\.25 .* needs 2 whole ones",
        ),
    ],
)
def test_config_reward_models_share_what_ray_can_count(more: list[str], message: str) -> None:
    settings = ["rewards.functions=[correctness, a/model]", "cluster.use_gpu=true", *more]
    assert re.search(message, config_error(*settings))
    for harmless in ("rewards.functions=[correctness]", "rewards.model_gpus=1", "rewards.model_gpus=0"):
        load_config(None, [*settings, harmless])


@pytest.mark.parametrize("limit", ["rewards.isolate_seconds=5.0", "rewards.isolate_memory_gib=4.0"])
def test_config_limits_of_isolated_rewards_need_isolation(limit: str) -> None:
    assert config_error(limit) == f"{limit} has no effect with rewards.isolate=false; set rewards.isolate=true"
    assert load_config(None, [limit, "rewards.isolate=true"]).rewards.isolate


def test_config_isolated_calls_longer_than_the_watchdog_waits_raise() -> None:
    settings = ["rewards.functions=[correctness, 'a:b']", "rewards.isolate=true", "run.hang_seconds=240"]
    assert "4 calls of up to rewards.isolate_seconds=60 seconds of 1 functions may take longer than" in config_error(
        *settings
    )
    assert load_config(None, [*settings, "rewards.isolate_seconds=59"]).rewards.isolate


REMOTE = "rollout.tools=['grpo_ray.tools.remote_python:python']"
TOKEN = "rollout.sandbox_token_variable=TOKEN"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([REMOTE], r"needs the address of a remote sandbox; set rollout\.sandbox_url"),
        ([TOKEN], r"has no effect without rollout\.sandbox_url"),
        ([REMOTE, "rollout.sandbox_url=http://10.0.0.1", TOKEN], r"token that is sent over http://; .* https://"),
        ([REMOTE, "rollout.sandbox_url=http://sandbox", "rollout.confine=true"], r"rollout\.confine=true takes the"),
        *(
            ([REMOTE, f"rollout.sandbox_url={address}"], r"rollout\.sandbox_url must be http://HOST")
            for address in (
                "sandbox:8080", "ftp://host", "http://", "http://user:s3cr3t@host", "http://host:port", "http://host:0",
                "http://host/?key=s3cr3t", "http://host/#s3cr3t", "http://hö", "http://host\\@other",
            )
        ),
    ],
)  # fmt: skip
def test_config_remote_sandbox_that_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    raised = config_error(*overrides)
    assert re.search(message, raised) and "s3cr3t" not in raised


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.sandbox_url=http://sandbox.cluster.local:8080"],
        ["rollout.sandbox_url=https://host/path/", TOKEN],
        ["rollout.sandbox_url=http://localhost:8080", TOKEN],
        ["rollout.sandbox_url=http://[::1]:8080", TOKEN, "rollout.sandbox_provider=package.module:Class"],
    ],
)
def test_config_remote_sandbox_is_accepted(overrides: list[str]) -> None:
    assert load_config(None, [REMOTE, *overrides]).rollout.uses_remote_python


@pytest.mark.parametrize("address", ["http://host", "https://hooks.example.org/services/x?y=1", "http://[::1]:8080/a"])
def test_config_notify_web_address_is_accepted(address: str) -> None:
    assert load_config(None, [f"run.notify={address}"]).run.notify == address


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "freezes the policy's weights, so nothing would be trained; set model.lora or model.peft"),
        (["model.lora={}", "cluster.shard_learner=true"], "does not go with cluster.shard_learner=true"),
        (["model.peft={type: GLORA}"], r"model\.peft\.type=GLORA, which PEFT builds on plain linear layers only"),
        (["model.peft={type: LORA, init_lora_weights: pissa}"], "changes the frozen weights"),
    ],
)
@pytest.mark.parametrize("method", ["nf4", "int4"])
def test_quantized_policy_needs_an_adapter_on_frozen_weights(method: str, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.quantization={method} .*{reason}"):
        load_config(None, [f"model.quantization={method}", "model.dtype=bfloat16", *overrides])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.quantization=nf4"], "model.quantization=nf4, which gives learner and engine weights of different"),
        (["cluster.shard_learner=true"], "cluster.shard_learner=true, which gives each worker a part"),
        (["grpo.vllm_tensor_parallel_size=2"], "grpo.vllm_tensor_parallel_size=2, which gives"),
        (["grpo.vllm_enable_sleep_mode=true"], "grpo.vllm_enable_sleep_mode=true, which frees"),
    ],
)
def test_shared_base_names_what_would_change_it(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.share_base=true does not go with {reason}"):
        load_config(None, ["model.share_base=true", "model.lora={}", *overrides])
    with pytest.raises(ConfigError, match=r"^model\.share_base=true needs LoRA.*model\.share_base=false"):
        load_config(None, ["model.share_base=true"])
    assert load_config(None, ["model.share_base=true", "model.lora={}"]).adapter_sync == "request"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model.lora={}", "engine.adapter=merge"], "does not go with engine.adapter=merge: a sum of base and update"),
        (["model.lora={}", "model.dtype=float32"], "needs 16 bits"),
        (["model.lora={}", "grpo.vllm_tensor_parallel_size=2"], "vllm_tensor_parallel_size=2, whose engine would"),
        (["model.peft={type: OFT}"], "needs LoRA, the only adapter that vLLM applies"),
        (["model.peft={type: LORA, use_dora: true}"], r"model\.peft\.use_dora=true: vLLM applies the two matrices"),
        (["model.lora={rank: 600}"], "vLLM takes at most 512; set a smaller rank"),
    ],
)
def test_int4_names_what_the_engine_cannot_apply(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.quantization=int4 .*{reason}.*model\.quantization=nf4") as caught:
        load_config(None, ["model.quantization=int4", "model.dtype=bfloat16", *overrides])
    assert "engine.adapter=merge" not in str(caught.value).rpartition(";")[2]


def test_int4_gives_the_engine_requests() -> None:
    settings = ["model.lora={}", "model.dtype=bfloat16"]
    assert load_config(None, ["model.quantization=int4", *settings]).adapter_sync == "request"
    assert load_config(None, ["model.quantization=nf4", *settings]).adapter_sync == "merge"
    assert load_config(None, ["model.quantization=nf4", "engine.adapter=request", *settings]).adapter_sync == "request"


@pytest.mark.parametrize(
    "adapter",
    [
        "model.lora={rank: 512, dropout: 0.1, target_modules: [q_proj]}",
        "model.peft={type: LORA, r: 8, use_rslora: true, bias: none, use_dora: false, modules_to_save: null}",
        "model.peft={type: LORA, init_lora_weights: pissa, rank_pattern: {q_proj: 512}, alpha_pattern: {v_proj: 4}}",
        "model.peft={type: LORA, layers_to_transform: [1]}",
    ],
)
def test_adapter_request_takes_lora_of_two_matrices(adapter: str) -> None:
    config = load_config(None, [adapter, "engine.adapter=request"])
    assert config.adapter_sync == "request"
    assert load_config(None, [adapter]).adapter_sync == "merge"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "needs LoRA"),
        (["model.peft={type: IA3}"], "needs LoRA"),
        (["model.peft={type: LORA, use_dora: true}"], r"model\.peft\.use_dora=true"),
        (["model.peft={type: LORA, lora_bias: true}"], r"model\.peft\.lora_bias=true"),
        (["model.peft={type: LORA, bias: all}"], r"model\.peft\.bias=all"),
        (["model.peft={type: LORA, modules_to_save: [norm]}"], r"model\.peft\.modules_to_save="),
        (["model.peft={type: LORA, trainable_token_indices: [3]}"], r"model\.peft\.trainable_token_indices=\[3\]"),
        (["model.peft={type: LORA, init_lora_weights: mica}"], r"model\.peft\.init_lora_weights=mica"),
        (["model.lora={rank: 513}"], r"a rank of 513 \(model\.lora\.rank\): vLLM takes at most 512"),
        (["model.peft={type: LORA, rank_pattern: {q_proj: 600}}"], r"a rank of 600 \(model\.peft"),
        (["model.lora={}", "engine.vllm={quantization: fp8}", "model.dtype=bfloat16"], "quantization: fp8"),
        (["model.lora={}", "cluster.use_gpu=true", "model.dtype=float32"], r"model\.dtype=float32 on GPUs"),
    ],
)
def test_adapter_request_names_what_vllm_cannot_apply(overrides: list[str], reason: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^engine\.adapter=request .*{reason}.*; (set|leave).*engine\.adapter=merge"
    ):
        load_config(None, [*overrides, "engine.adapter=request"])
