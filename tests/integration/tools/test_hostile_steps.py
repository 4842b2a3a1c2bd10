"""Steps in which completions run hostile code beside harmless ones: these are the same, and nothing is left."""

import hashlib
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hostile_tools
import psutil
import pytest
from stock_trl import VOCABULARY
from tool_steps import TOOL_TOKENIZER, ToolEngine

from grpo_ray.config.loader import load_config
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.processes.landlock import landlock_version
from grpo_ray.tools.conversation import Conversation
from grpo_ray.tools.template import close_reader

pytestmark = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")

WAIT = 240.0
HOSTILE = (
    "import os\nfor _ in range(8): os.fork()",
    "import os\nwhile True: os.fork()",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)",
    "import os\nos.kill(-1, 9)",
    "import os\nos.kill(os.getppid(), 9)",
    "import os\nos.kill(os.getpid(), 11)",
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'junk')\n    except OSError: pass",
    "import os\nos.close(1)\nos.close(2)",
    "import socket\nsocket.socket()",
    "import os\nfor _ in range(300):\n    os.mkdir('d')\n    os.chdir('d')",
    "import time\nfor n in range(1500): open(str(n), 'w').close()\ntime.sleep(99)",
    "import os\nos.mkfifo('f')",
    "import os\nos.symlink('/', 'root')\nos.mkdir('closed', 0)",
    "x = []\nwhile True: x.append(bytearray(1 << 26))",
    "print('x' * 10 ** 7)",
    "open('/proc/1/environ').read()",
    "import os\nos.listdir('../..')",
    "import ctypes\nctypes.string_at(0)",
    "open('big', 'wb').truncate(1 << 40)",
    "import os\nos._exit(7)",
    "import signal, os\nsignal.setitimer(0, 0.1)\nos.execvp('sleep', ['sleep', '9'])",
)
"""Code of hostile completions, one after another; every 125th step has one that hangs."""
HANG = "import time\ntime.sleep(1000)"


def code_of(step: int) -> str:
    return HANG if step % 125 == 60 else HOSTILE[step % len(HOSTILE)]


class Engine(ToolEngine):
    """Engine whose turns follow the text of the prompt, and depend on every token before them."""

    def turns(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float | None]]]:
        call_end = TOOL_TOKENIZER.convert_tokens_to_ids("<|call|>")
        turns: list[tuple[list[int], list[float | None]]] = []
        for prompt in prompts:
            made = list(prompt).count(call_end)
            kind, step = re.findall(r"(harmless|hostile) (\d+)", TOOL_TOKENIZER.decode(prompt))[0]
            digest = hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=8).digest()
            rng = random.Random(digest)
            if made == 0:
                code = code_of(int(step)) if kind == "hostile" else f"{rng.randint(2, 99)} * {step}"
                text = _call("python", code=code)
            elif made == 1:
                text = _call("increase", by=rng.randint(1, 3))
            else:
                text = f"\\boxed{{{rng.randint(1, 99)}}}<|end|>"
            ids: list[int] = TOOL_TOKENIZER(text, add_special_tokens=False)["input_ids"]
            turns.append((ids, [-math.log(VOCABULARY) + rng.gauss(0, 0.4) for _ in ids]))
        return turns


def _call(name: str, **arguments: object) -> str:
    return f"<|call|>{json.dumps({'name': name, 'arguments': arguments})}<|end|>"


def rows_of(step: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{step:015x}{number:x}", "epoch": 0, "index": 0,
            "prompt": [{"role": "user", "content": f"{kind} {step}"}],
        }
        for number, kind in enumerate(kinds)
    ]  # fmt: skip


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], ConversationSampler]]:
    helpers = str(Path(hostile_tools.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")]))
    made: list[ConversationSampler] = []

    def make() -> ConversationSampler:
        overrides = [
            "rollout.tools=['grpo_ray.tools.python_tool:python']", "rollout.environment=hostile_tools:Counter",
            "rollout.max_turns=4", "rollout.max_files=1000", "rollout.time_limit=10",
            "grpo.max_completion_length=2000", "rewards.functions=['environment']",
        ]  # fmt: skip
        made.append(ConversationSampler(load_config(None, overrides), TOOL_TOKENIZER, folder=str(tmp_path)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def descriptors(pid: int) -> int:
    """Return the number of open files and sockets; those of a supervisor are counted by root only."""
    return len(os.listdir(f"/proc/{pid}/fd")) if pid == os.getpid() or os.geteuid() == 0 else 0


def processes_below(sampler: ConversationSampler) -> list[psutil.Process]:
    assert sampler.pool.pid is not None
    return psutil.Process(sampler.pool.pid).children(recursive=True)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "the condition was not met"
        time.sleep(0.02)


def run_steps(samplers: Callable[[], ConversationSampler], steps: int, folder: Path) -> None:
    """Run steps with and without hostile completions, and compare the others."""
    engine = Engine(0, 0)
    close_reader()  # one for all samplers of a process, and started with the first of them
    before = descriptors(os.getpid())
    kinds = ("harmless", "hostile")
    mixed, control = samplers(), samplers()

    def sample(sampler: ConversationSampler, step: int, kinds: Sequence[str]) -> list[Conversation]:
        with engine.rounds() as run_round:
            return sampler.sample(rows_of(step, kinds), {}, run_round)

    seen: set[str] = set()
    supervisor = 0
    opened = 0
    for step in range(steps):
        (made, hostile), (other,) = sample(mixed, step, kinds), sample(control, step, kinds[:1])
        assert (made.token_ids, made.logps, made.own) == (other.token_ids, other.logps, other.own), step
        assert made.reward == other.reward is not None and {call.status for call in made.calls} == {"ok"}, step
        seen.add(hostile.calls[0].status)
        assert hostile.reward is not None, step  # also of code that was ended
        if step == 0:
            supervisor = mixed.pool.pid or 0
            wait_until(lambda: not processes_below(mixed))
            opened = descriptors(supervisor)
    assert mixed.pool.pid == supervisor  # the same process through all steps
    assert seen >= {"ok", "processes", "disk"}
    wait_until(lambda: not processes_below(mixed))
    wait_until(lambda: descriptors(supervisor) == opened)
    wait_until(lambda: not any(folder.glob("*/*")))
    for each in (mixed, control):
        each.close()
    assert not psutil.pid_exists(supervisor)
    wait_until(lambda: not any(folder.iterdir()))
    close_reader()
    assert descriptors(os.getpid()) == before


def test_hostile_code_changes_no_other_completion(samplers: Callable[[], ConversationSampler], tmp_path: Path) -> None:
    run_steps(samplers, len(HOSTILE), tmp_path)


@pytest.mark.slow
def test_thousand_steps_with_hostile_code_leave_nothing(
    samplers: Callable[[], ConversationSampler], tmp_path: Path
) -> None:
    run_steps(samplers, 1000, tmp_path)
