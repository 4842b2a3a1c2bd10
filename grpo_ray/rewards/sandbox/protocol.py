"""Binary messages between the verifier pool, its supervisor and the workers.

A worker receives items (completion and solution) and sends a status and a float for each. Nothing else ever leaves a
worker: printing or unpickling a parsed answer can hang. There are about 10,000 results per second, so they have a fixed
size and are not framed (`processes/messages.py`).
"""

import struct

OK, TIMEOUT, MEMORY, CRASH, ERROR, UNDECIDED = range(6)
STATUSES = ("ok", "timeout", "memory", "crash", "error", "ok")
"""Names of the status codes. `error`: the grading raised an unexpected exception, whose type goes to stderr.

UNDECIDED is a verdict like any other, on an answer whose form could not be compared.
"""

ITEM = struct.Struct("<QIIB")
"""Header of an item: number, bytes of the completion, bytes of the solution, strict. Both texts follow."""
RESULT = struct.Struct("<QBd")
"""A result: item number, status code, reward (NaN for None)."""
READY = 2**64 - 1
"""Item number of the result that a supervisor sends when it has started."""


def pack_item(number: int, completion: str, solution: str, strict: bool) -> bytes:
    """Pack an item. Any text is accepted, including lone surrogates and null bytes."""
    completion_bytes = completion.encode("utf-8", "surrogatepass")
    solution_bytes = solution.encode("utf-8", "surrogatepass")
    return ITEM.pack(number, len(completion_bytes), len(solution_bytes), strict) + completion_bytes + solution_bytes


def unpack_items(buffer: bytearray) -> list[tuple[int, bytes]]:
    """Remove all complete items from the start of the buffer and return them as (item number, packed item)."""
    items = []
    start = 0
    while len(buffer) >= start + ITEM.size:
        number, completion_size, solution_size, _ = ITEM.unpack_from(buffer, start)
        end = start + ITEM.size + completion_size + solution_size
        if len(buffer) < end:
            break
        items.append((number, bytes(buffer[start:end])))
        start = end
    del buffer[:start]
    return items


def pack_result(number: int, status: int, reward: float | None) -> bytes:
    """Pack a result; NaN stands for a reward of None."""
    return RESULT.pack(number, status, float("nan") if reward is None else reward)


def unpack_results(buffer: bytearray) -> list[tuple[int, int, float | None]]:
    """Remove all complete results from the start of the buffer and return them as (item number, status, reward)."""
    complete = len(buffer) // RESULT.size * RESULT.size
    results = [
        (number, status, None if reward != reward else reward)
        for number, status, reward in RESULT.iter_unpack(bytes(buffer[:complete]))
    ]
    del buffer[:complete]
    return results
