"""Recognition of the tools in `rollout.tools` that run code, in a process on this machine or in a remote sandbox."""

from collections.abc import Iterable

NO_ENVIRONMENT = "none"
"""Value of a problem's column `environment` that stands for none, in a run whose environments have names."""


def runs_policy_code(tool: str) -> bool:
    """Return True if a tool of `rollout.tools` runs code that the policy writes."""
    return tool.startswith("grpo_ray.tools.python_tool:")


def uses_python_tool(tools: Iterable[str]) -> bool:
    """Return True if one of `rollout.tools` runs code that the policy writes."""
    return any(map(runs_policy_code, tools))


def is_remote(tool: str) -> bool:
    """Return True if a tool of `rollout.tools` runs code in the remote sandbox."""
    return tool.startswith("grpo_ray.tools.remote_python:")
