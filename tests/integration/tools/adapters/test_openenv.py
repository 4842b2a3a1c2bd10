"""The OpenEnv adapter with the real client, in sandbox processes, and a real server."""

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import EpisodePool, SandboxLimits

pytest.importorskip("openenv.core", reason="needs the package openenv")

HELPERS = Path(__file__).parents[3] / "helpers"
WAIT = 240.0
"""Seconds after which a test gives up; far more than any of them takes."""
SECRET = random.Random(3).randint(1, 9)
"""The number of the server's game with seed 3."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(HELPERS / "number_server.py"), str(port)])
    end = time.monotonic() + WAIT
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert server.poll() is None and time.monotonic() < end, "the server did not start"
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(WAIT)


def open_pool(path: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> EpisodePool:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")]))
    config = RolloutConfig(environment=path, settings={path: settings}, time_limit=60.0, memory_gib=4.0)
    return EpisodePool(load_definition(config), SandboxLimits.of(config))


def test_text_is_the_action(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"base_url": url, "text_field": "number", "observation_field": "hint", "reset_columns": ["largest"]}
    with open_pool("grpo_ray.tools.adapters.openenv:OpenEnvText", settings, monkeypatch) as pool:
        episode = pool.open(None, seed=3, columns={"largest": 9, "id": "x"}, call_seed=0)
        assert episode.reset().result(WAIT).text == "a number from 1 to 9"
        wrong = episode.step("0").result(WAIT)
        assert (wrong.status, wrong.text, wrong.done) == ("ok", "higher", False)
        refused = episode.step("no number").result(WAIT)
        assert refused.status == "error" and refused.text is not None and "VALIDATION_ERROR" in refused.text
        right = episode.step(str(SECRET)).result(WAIT)
        assert (right.text, right.done) == ("correct", True)
        assert episode.reward().result(WAIT).value == pytest.approx(0.9)  # -0.1 + 1


def test_any_action_through_one_tool(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"base_url": url, "reward": "last"}
    with open_pool("grpo_ray.tools.adapters.openenv:OpenEnvActions", settings, monkeypatch) as pool:
        episode = pool.open(None, seed=3, columns={}, call_seed=0)
        assert episode.reset().result(WAIT).text == '{"hint": "a number from 1 to 9"}'
        assert episode.call("act", {"action": {"number": 10}}).result(WAIT).text == '{"hint": "lower"}'
        assert episode.call("act", {"action": {"number": SECRET}}).result(WAIT).done
        assert episode.reward().result(WAIT).value == 1.0


def test_tools_of_a_subclass_in_sessions_of_their_own(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool("number_server:NumberTools", {"base_url": url}, monkeypatch) as pool:
        episodes = [pool.open(None, seed=seed, columns={}, call_seed=0) for seed in range(4)]
        for episode in episodes:
            episode.reset()
        secrets = [random.Random(seed).randint(1, 9) for seed in range(4)]
        calls = [each.call("guess", {"number": number}) for each, number in zip(episodes, secrets, strict=True)]
        assert [call.result(WAIT).text for call in calls] == ["correct"] * 4


def test_server_that_is_missing_is_an_error_of_the_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"base_url": "http://127.0.0.1:9"}
    with open_pool("grpo_ray.tools.adapters.openenv:OpenEnvActions", settings, monkeypatch) as pool:
        result = pool.open(None, seed=0, columns={}, call_seed=0).reset().result(WAIT)
        assert result.status == "error" and result.text is not None and "ConnectionError" in result.text
