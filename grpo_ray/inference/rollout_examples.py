"""Three small rollout functions, templates for your own.

rollout: {function: "grpo_ray.inference.rollout_examples:one_turn"}
rollout: {function: "grpo_ray.inference.rollout_examples:second_try"}
rollout: {function: "grpo_ray.inference.rollout_examples:external_program"}
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from grpo_ray.inference.rollout_function import RolloutPolicy
from grpo_ray.inference.trajectories import EndpointAccess, RolloutRow, Trajectory

PROGRAM = Path(__file__).with_name("example_program.py")


def one_turn(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Let the policy answer each prompt once; this trains the same weights as a run without a function."""
    trajectories = policy.start(rows)
    policy.turn(trajectories)
    return trajectories


def second_try(rows: list[RolloutRow], policy: RolloutPolicy, hint: str = "Wrong. Try again.") -> list[Trajectory]:
    """Let the policy answer once more if its first boxed answer is not the solution.

    Args:
        hint: user message before the second answer.
    """
    trajectories = policy.start(rows)
    policy.turn(trajectories)
    wrong = [each for each in trajectories if f"\\boxed{{{each.row.solution.strip('$')}}}" not in each.text]
    policy.turn([each for each in wrong if policy.respond(each, hint)])
    return trajectories


def external_program(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Do the same as `second_try` in a separate program, which gets only the address of an endpoint and a key.

    A completion whose program fails has no reward.
    """
    trajectories = policy.run_programs(rows, _run_example)
    policy.turn([each for each in trajectories if not each.token_ids])  # a program failed before its first request
    return trajectories


def _run_example(access: EndpointAccess) -> None:
    problem = json.dumps({"prompt": access.row.prompt, "solution": access.row.solution})
    variables = {"PATH": os.environ.get("PATH", ""), **access.variables}  # without the worker's secrets
    done = subprocess.run([sys.executable, "-I", str(PROGRAM)], env=variables, input=problem, text=True)
    access.trajectory.failed = done.returncode != 0
