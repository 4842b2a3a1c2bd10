"""Preflight: a table of named checks that refuse an unusable run before any worker starts.

Every check takes the run's context and returns notices for the user, or raises the one error that refuses the run. The
dataset itself is checked after it has been read (`same_run.check_dataset`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.driver.cluster.connection import (
    connect,
    is_connected,
    require_engine_system,
    require_resources,
    starts_cluster,
)
from grpo_ray.driver.preflight.overlong import PolicyTokenizer
from grpo_ray.driver.preflight.policy_files import fetch_policy_files
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.preflight.same_run import check_old_run, check_same_run
from grpo_ray.errors import ConfigError
from grpo_ray.models.memory import policy_shape
from grpo_ray.observers.trackers.registry import check_trackers
from grpo_ray.resilience.elastic import explain_scaling
from grpo_ray.resilience.nodes import check_nodes, model_issue
from grpo_ray.tools.remote.sandbox import sandbox_issue


@dataclass(frozen=True)
class Check:
    """One row of the table of checks."""

    name: str
    run: Callable[[RunContext], Sequence[str]]
    """Returns notices for the user; raises GrpoRayError to refuse the run."""
    phase: str = "checking the settings"
    """Phase shown while the check runs."""
    beside_connection: bool = False
    """True: the check runs in a thread while the driver connects to the cluster."""


def check_trl(context: RunContext) -> Sequence[str]:
    """Have TRL validate its arguments, and load rewards, advantages and rollout. Raises ConfigError or RewardError."""
    from grpo_ray.evaluation.scores import heldout_scores
    from grpo_ray.inference.rollout_function import load_rollout_function
    from grpo_ray.inference.structured_outputs import require_valid_form
    from grpo_ray.learner.advantages import try_advantage
    from grpo_ray.learner.trl_config import trl_arguments
    from grpo_ray.rewards.registry import load_rewards

    if context.config.run.kind == "sft":
        from grpo_ray.learner.sft_config import sft_arguments

        sft_arguments(context.config, output_dir=".", on_driver=True)
        heldout_scores(context.config)
        return ()
    trl_arguments(context.config, output_dir=".", on_driver=True)
    rewards = load_rewards(context.config.rewards)
    heldout_scores(context.config)
    grpo = context.config.grpo
    try_advantage(grpo.advantages, context.config.sizes.prompts_per_generation, grpo.num_generations, len(rewards))
    if context.config.rollout.function is not None:
        load_rollout_function(context.config.rollout)
    if context.config.rollout.structured_outputs is not None:
        require_valid_form(context.config.rollout.structured_outputs)
    return ()


def check_policy(context: RunContext) -> Sequence[str]:
    """Check that the policy's own config can be read, and its end token for fine-tuning. Raises ConfigError."""
    config = context.config
    if issue := model_issue(config):
        raise ConfigError(issue)
    if config.run.kind == "sft" and config.model.path not in EMBEDDED_POLICIES:
        from grpo_ray.models.tokenizer import require_end_token  # transformers takes seconds

        tokenizer = PolicyTokenizer(config.model.path, config.model.trust_remote_code).load()
        require_end_token(tokenizer, config.model.path)
    return ()


def check_adapter(context: RunContext) -> Sequence[str]:
    """Try the adapter, and the choice of quantized layers, on the policy without its weights. Raises ConfigError."""
    model = context.config.model
    if model.adapter:
        from grpo_ray.models.quantized import require_quantizer  # torch takes seconds

        require_quantizer(model.quantization)
        policy_shape(context.config, fetch_policy_files(model.path))
    return ()


def check_reward_models(context: RunContext) -> Sequence[str]:
    """Check that the configs of the reward models that the run uses can be read. Raises ConfigError."""
    for name in context.config.rewards.models if context.config.uses_reward_models else ():
        from transformers import AutoConfig  # takes seconds, and most runs have no reward model

        try:
            AutoConfig.from_pretrained(name, trust_remote_code=context.config.model.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"rewards.functions: the reward model {name} cannot be read: {str(error).splitlines()[0]}"
            ) from None
    return ()


def check_storage(context: RunContext) -> Sequence[str]:
    """Check that the run folder can be written. Raises ConfigError."""
    context.folder.check_writable()
    return ()


def check_run_trackers(context: RunContext) -> Sequence[str]:
    """Check that the trackers are installed and have the settings that they need. Raises ConfigError."""
    check_trackers(context.config.run.trackers, context.folder.storage_path)
    return ()


def check_resources(context: RunContext) -> Sequence[str]:
    """Check that the cluster has the resources of the workers, or an autoscaler. Raises ConfigError."""
    return _notices(require_resources(context.config))


def check_engine_system(context: RunContext) -> Sequence[str]:
    """Check that vLLM runs on this node's system (GPU driver, libnuma); `check_other_nodes` checks the others.

    Raises ConfigError.
    """
    require_engine_system(context.config)
    return ()


def check_remote_sandbox(context: RunContext) -> Sequence[str]:
    """Run a trivial program in the remote sandbox, if the run has one. Raises ConfigError."""
    rollout = context.config.rollout
    if rollout.sandbox_url is None:
        return ()
    if issue := sandbox_issue(rollout):
        raise ConfigError(
            f"rollout.sandbox_url={rollout.sandbox_url}: {issue}; start the service, or correct the address"
        )
    return (f"the remote sandbox at {rollout.sandbox_url} runs code",)


def explain_worker_counts(context: RunContext) -> Sequence[str]:
    """Return a notice of the worker counts that an elastic run can have. Raises nothing."""
    return _notices(explain_scaling(context.config))


def explain_code_memory(context: RunContext) -> Sequence[str]:
    """Return a notice if completions that run code of the policy may use more memory than this node has.

    Raises nothing.
    """
    rollout = context.config.rollout
    at_once = min(rollout.max_active, context.config.sizes.completions_per_generation)
    node_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if not rollout.runs_policy_code or at_once * rollout.memory_gib <= node_gib:
        return ()
    return _notices(
        f"code of the policy may use up to {at_once * rollout.memory_gib:g} GiB at once ({at_once} completions, "
        f"rollout.memory_gib={rollout.memory_gib:g}), and this node has {node_gib:.0f} GiB; lower "
        "rollout.memory_gib or rollout.max_active to rule out that it exhausts the node"
    )


def check_other_nodes(context: RunContext) -> Sequence[str]:
    """Check versions, storage, policy and data on every other node of the cluster. Raises ConfigError or DataError."""
    training, heldout = context.splits
    first_shards = [split.shards[0] for split in (*training.values(), *heldout.values()) if split.shards]
    check_nodes(context.config, context.folder, first_shards)
    return ()


def _notices(text: str | None) -> Sequence[str]:
    return (text,) if text else ()


CHECKS = (
    # Importing TRL takes as long as starting a cluster, and either leaves cores idle: run them in parallel.
    Check("TRL arguments", check_trl, beside_connection=True),
    Check("trackers", check_run_trackers, beside_connection=True),
    Check("policy", check_policy),
    Check("adapter", check_adapter),
    Check("reward models", check_reward_models),
    Check("old run", check_old_run),
    Check("same run", check_same_run),
    Check("storage", check_storage),
    Check("resources", check_resources),
    Check("engine system", check_engine_system),
    Check("remote sandbox", check_remote_sandbox, phase="trying the remote sandbox", beside_connection=True),
    Check("worker counts", explain_worker_counts),
    Check("memory of code", explain_code_memory),
    Check("other nodes", check_other_nodes, phase="reading the problems"),
)
"""Checks before training, in order."""

AUDIT_CHECKS = tuple(
    check for check in CHECKS if check.name in ("TRL arguments", "storage", "engine system", "remote sandbox")
)
"""Checks before `grpo-ray check` reads the data."""


def run_preflight(context: RunContext, checks: Sequence[Check] = CHECKS) -> None:
    """Connect to the cluster and run the checks in order, showing their notices.

    Raises:
        GrpoRayError: the first check that fails; later ones are not run.
    """
    early = [check for check in checks if check.beside_connection]
    if not is_connected():
        context.progress.phase("starting Ray" if starts_cluster() else "connecting to the cluster")
    with ThreadPoolExecutor(max_workers=1) as pool:
        results = [pool.submit(check.run, context) for check in early]
        _show(context, connect(context.config))
        context.progress.phase(checks[0].phase)
        for result in results:
            _show(context, result.result())
    for check in checks:
        if not check.beside_connection:
            context.progress.phase(check.phase)
            _show(context, check.run(context))


def _show(context: RunContext, notices: Sequence[str]) -> None:
    for notice in notices:
        context.progress.notice(notice)
