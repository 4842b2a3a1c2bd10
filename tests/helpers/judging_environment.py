"""Environment that judges a file which the policy's code has written, and keeps a file of its own."""

from pathlib import Path
from typing import Any

from grpo_ray.tools.python_tool import code_folder


class Judge:
    """The answer is 42, in `answer.txt`."""

    def reset(self, **columns: Any) -> str:
        """Write the solution to the environment's own folder."""
        Path("solution.txt").write_text("42")
        return "secret is kept"

    def get_reward(self) -> float:
        """Compare the answer with the solution."""
        answer = code_folder() / "answer.txt"
        if answer.is_symlink() or not answer.is_file():
            return 0.0
        return float(answer.read_text() == Path("solution.txt").read_text())
