"""Two small rollout functions; both are templates for your own.

rollout: {function: "grpo_ray.inference.rollout_examples:one_turn"}
rollout: {function: "grpo_ray.inference.rollout_examples:second_try"}
"""

from grpo_ray.inference.rollout_function import RolloutPolicy
from grpo_ray.inference.trajectories import RolloutRow, Trajectory


def one_turn(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Let the policy answer each prompt once; this trains the same weights as a run without a function."""
    trajectories = policy.start(rows)
    policy.turn(trajectories)
    return trajectories


def second_try(rows: list[RolloutRow], policy: RolloutPolicy, hint: str = "Wrong. Try again.") -> list[Trajectory]:
    """Let the policy answer once more if its first boxed answer is not the solution.

    Args:
        hint: what the policy reads then.
    """
    trajectories = policy.start(rows)
    policy.turn(trajectories)
    wrong = [each for each in trajectories if f"\\boxed{{{each.row.solution.strip('$')}}}" not in each.text]
    policy.turn([each for each in wrong if policy.respond(each, hint)])
    return trajectories
