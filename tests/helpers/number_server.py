"""An OpenEnv environment, its server, and classes for both ways to act in it. Needs the package openenv."""

import random
import sys

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from grpo_ray.tools.adapters.openenv import OpenEnv


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class NumberGame(Environment):
    """Guess a number from 1 to 9; the reward is 1 for the number and -0.1 for another guess."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, largest: int = 9, **_: object) -> Hint:
        self.secret = random.Random(seed).randint(1, largest)
        self.guesses = 0
        return Hint(hint=f"a number from 1 to {largest}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: object) -> Hint:
        self.guesses += 1
        if action.number == self.secret:
            return Hint(hint="correct", reward=1.0, done=True)
        return Hint(hint="higher" if action.number < self.secret else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


class NumberTools(OpenEnv):
    """The game with a tool of its own."""

    def __init__(self, base_url: str):
        super().__init__(base_url, action=Guess, observation_field="hint")

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The guess.
        """
        return self._take({"number": number})


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(NumberGame, Guess, Hint, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
