"""Two hundred programs for the reward `code_tests`: right, wrong, hanging, and hostile ones that earn nothing."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """One problem with its tests, and programs that solve it."""

    name: str
    tests: Any
    right: tuple[str, ...]
    entry_point: str | None = None


TASKS = (
    Task(
        "mbpp-add",
        ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(a=2, b=2) == 4"],
        (
            "def add(a, b): return a + b",
            "add = lambda a, b: sum([a, b])",
            "from operator import add as plus\ndef add(a, b):\n    print('noise')\n    return plus(a, b)",
            "import numpy\ndef add(a, b): return numpy.int64(a) + b",
            "class Solution:\n    def add(self, a, b): return a + b",
        ),
    ),
    Task(
        "mbpp-prime",
        "assert is_prime(7)\nassert not is_prime(8)\nassert is_prime(2) is True\nassert is_prime(1) is False",
        (
            "def is_prime(n): return n > 1 and all(n % d for d in range(2, n))",
            "def is_prime(n):\n    if n < 2: return False\n    d = 2\n    while d * d <= n:\n"
            "        if n % d == 0: return False\n        d += 1\n    return True",
            "import math\nis_prime = lambda n: n > 1 and not any(n % d == 0 for d in range(2, math.isqrt(n) + 1))",
        ),
    ),
    Task(
        "humaneval-sort",
        "def check(candidate):\n    for n in range(40):\n"
        "        assert candidate(list(range(n, 0, -1))) == list(range(1, n + 1))\n"
        "    assert candidate(candidate([3, 1])) == [1, 3]\n    assert candidate([]) == []\n",
        (
            "def order(values): return sorted(values)",
            "def order(values):\n    values.sort()\n    return values",
            "def order(values):\n    if not values: return []\n    first, *rest = values\n"
            "    return order([v for v in rest if v < first]) + [first] + order([v for v in rest if v >= first])",
        ),
        entry_point="order",
    ),
    Task(
        "in-place",
        ["a = [1, 2, 3]\nreverse(a)\nassert a == [3, 2, 1]", "d = {'x': 1}\nassert invert(d) == {1: 'x'}"],
        (
            "def reverse(a): a.reverse()\ndef invert(d): return {v: k for k, v in d.items()}",
            "def reverse(a): a[:] = a[::-1]\ndef invert(d): return dict(map(reversed, d.items()))",
        ),
    ),
    Task(
        "kinds",
        [
            "assert pair(1) == (1, {1}, 1j, b'1', None, [1.5])", "assert set(pair(2)[1]) == {2}",
            "import math\nassert math.isclose(pair(1)[5][0], 1.5)",
            "try:\n    pair('x')\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        ],
        ("def pair(n): return (n, {n}, int(n) * 1j, str(n).encode(), None, [n * 1.5])",),
    ),
    Task(
        "apps-function",
        {"fn_name": "swap", "inputs": [[[1, 2]], [[0.1, 5]]], "outputs": [[2, 1], [[5, 0.1]]]},
        (
            "def swap(p): return p[::-1]",
            "class Solution:\n    def swap(self, p): return (p[1], p[0])",
        ),
    ),
    Task(
        "livecodebench-function",
        '[{"input": "[1, 2]\\n3", "output": "6", "testtype": "functional"}]',
        ("class Solution:\n    def total(self, values, more): return sum(values) + more",),
        entry_point="total",
    ),
    Task(
        "stdin-sum",
        {"inputs": ["1 2\n", "4 5", "-1 1\n"], "outputs": ["3\n", "9", "0  \n\n"]},
        (
            "a, b = map(int, input().split())\nprint(a + b)",
            "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
            "print(sum(int(word) for word in open(0).read().split()))\nexit()",
            "import sys\ndef main():\n    sys.stdout.write(str(sum(map(int, sys.stdin))) + '\\n')\n"
            "if __name__ == '__main__':\n    import io\n    sys.stdin = sys.stdin.read().split()\n    main()",
            "import os\nos.write(1, str(sum(map(int, os.read(0, 100).split()))).encode())",
        ),
    ),
    Task(
        "stdin-echo",
        '[{"input": "a\\nb", "output": "b\\na", "testtype": "stdin"}]',
        (
            "print(*reversed([input(), input()]), sep='\\n')",
            "import sys\nfor line in list(sys.stdin)[::-1]: print(line.strip())",
        ),
    ),
)  # fmt: skip

WRONG_FUNCTIONS = (
    "def {name}(*args, **kwargs): return None",
    "def {name}(*args, **kwargs): return True",
    "def {name}(*args, **kwargs): return 3",
    "def {name}(*args, **kwargs): return args[0]",
    "def {name}(*args, **kwargs): raise RuntimeError('no')",
    "def other(): pass",
    "def {name}(",
    "{name} = 5",
)
WRONG_PROGRAMS = ("print(3)", "print('passed')", "", "raise SystemExit(1)", "input()", "print(open(0).read())", "a = (")
NAMES = {
    "mbpp-add": "add", "mbpp-prime": "is_prime", "humaneval-sort": "order", "in-place": "reverse", "kinds": "pair",
    "apps-function": "swap", "livecodebench-function": "total",
}  # fmt: skip

FORGED = """
import json, os, sys
lines = ''.join('\\x1e' + json.dumps({{'number': n, 'value': v, 'args': {{'tuple': []}}, 'hash': 'x'}}) + '\\n'
                for n in range(9) for v in (True, 3, None))
for descriptor in range(1, 64):
    try: os.write(descriptor, lines.encode())
    except OSError: pass
"""
ALWAYS_EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __hash__ = int.__hash__
"""
HOSTILE = {
    "leaves": "import os\nos._exit(0)",
    "exits": "raise SystemExit",
    "exits in the function": "import sys\ndef {name}(*a, **k): sys.exit(0)",
    "leaves in the function": "import os\ndef {name}(*a, **k): os._exit(0)",
    "equals everything": ALWAYS_EQUAL + "def {name}(*a, **k): return Equal()",
    "pretends to be a list": "class L:\n    __class__ = list\n    def __iter__(self): return iter(())\n"
    "    def __eq__(self, o): return True\ndef {name}(*a, **k): return L()",
    "forges results": FORGED,
    "forges results in the function": FORGED + "def {name}(*a, **k): return lines",
    "patches json": 'import json\njson.dumps = lambda *a, **k: \'{{"value": true, "args": {{"tuple": []}}}}\'\n'
    "def {name}(*a, **k): return 0",
    "patches builtins": "import builtins\nbuiltins.AssertionError = ValueError\n"
    "builtins.isinstance = lambda *a: True\ndef {name}(*a, **k): return 0",
    "searches the frames": "import sys\ndef {name}(*a, **k):\n    frame = sys._getframe()\n    while frame:\n"
    "        for key in ('expected', 'known', 'tests', 'source'):\n"
    "            if key in frame.f_locals: return frame.f_locals[key]\n"
    "        frame = frame.f_back",
    "searches all objects": "import gc\ndef {name}(*a, **k):\n    return [o for o in gc.get_objects() "
    "if type(o) is dict and 'expected' in o][0]['expected']",
    "reads the command line": "def {name}(*a, **k): return open('/proc/self/cmdline').read()",
    "reads its parent": "import os\ndef {name}(*a, **k): return open(f'/proc/{{os.getppid()}}/mem', 'rb').read(9)",
    "reads the home folder": "import os\ndef {name}(*a, **k): return os.listdir(os.path.expanduser('~root'))",
    "connects": "import socket\ndef {name}(*a, **k): socket.create_connection(('127.0.0.1', 80), 1)",
    "kills its parent": "import os, signal\ndef {name}(*a, **k): os.kill(os.getppid(), signal.SIGKILL)",
    "forks and leaves": "import os\nif os.fork(): os._exit(0)",
    "forks without end": "import os\ndef {name}(*a, **k):\n    while True:\n"
    "        try: os.fork()\n        except OSError: pass",
    "never ends": "def {name}(*a, **k):\n    while True: pass",
    "never loads": "while True: pass",
    "ignores its timer": "import signal\nfor n in (signal.SIGPROF, signal.SIGALRM, signal.SIGXCPU): signal.signal(n, "
    "signal.SIG_IGN)\ndef {name}(*a, **k):\n    while True: pass",
    "takes all memory": "def {name}(*a, **k): return [bytes(1 << 30) for _ in range(64)]",
    "recurses": "def {name}(*a, **k): return {name}(*a, **k)",
    "nests": "def {name}(*a, **k):\n    value = []\n    for _ in range(10**5): value = [value]\n    return value",
    "refers to itself": "def {name}(*a, **k):\n    value = []\n    value.append(value)\n    return value",
    "returns too much": "def {name}(*a, **k): return '\\x1e' * 10**7",
    "returns a huge number": "def {name}(*a, **k): return 10 ** 10**5",
    "returns without end": "def {name}(*a, **k):\n    while True: yield 1",
    "prints too much": "print('x' * 10**8)",
    "prints marks": 'print(\'\\x1e{{"number": 0, "hash": "x"}}\')',
    "nests its source": "a = " + "(" * 100_000,
    "repeats an operator": "a = " + "-" * 1_000_000 + "1",
    "has a null byte": "a = '\0'",
    "has half a surrogate": "a = '\udcff'",
    "is not a number": "def {name}(*a, **k): return float('nan')",
    "raises what is expected": "def {name}(*a, **k): raise ValueError",
    "raises an assertion": "def {name}(*a, **k): raise AssertionError",
    "raises to leave": "def {name}(*a, **k): raise SystemExit(0)",
    "closes its files": "import os\nos.closerange(0, 100)\ndef {name}(*a, **k): return 0",
    "deletes its folder": "import shutil, os\nshutil.rmtree(os.getcwd(), ignore_errors=True)\n"
    "def {name}(*a, **k): return 0",
}
"""Programs that must pass no problem; {name} is the function that is asked for."""


@dataclass(frozen=True)
class Case:
    """One program, and whether it passes."""

    name: str
    task: Task
    program: str
    passes: bool


def cases() -> list[Case]:
    """Return all programs."""
    found = []
    for task in TASKS:
        found += [Case(f"{task.name} right {n}", task, program, True) for n, program in enumerate(task.right)]
        name = NAMES.get(task.name)
        for number, program in enumerate(WRONG_PROGRAMS if name is None else WRONG_FUNCTIONS):
            found.append(Case(f"{task.name} wrong {number}", task, program.replace("{name}", name or "f"), False))
    for task in (TASKS[0], TASKS[1], TASKS[7]):
        for title, program in HOSTILE.items():
            found.append(Case(f"{task.name} {title}", task, program.format(name=NAMES.get(task.name, "f")), False))
    return found
