"""What goes over the verifier's sockets: items to be judged one way, a status and a float the other.

Nothing else ever leaves a worker: a parsed answer can hang whoever prints or unpickles it.
"""

import struct

OK, TIMEOUT, MEMORY, CRASH, ERROR = range(5)
STATUSES = ("ok", "timeout", "memory", "crash", "error")
"""`error`: a worker met an exception that `correctness` does not name; counted, and its type goes to stderr.
"""

ITEM = struct.Struct("<QIIB")
RESULT = struct.Struct("<QBd")
READY = 2**64 - 1
"""The item number of the frame with which a helper says that it has started."""


def pack_item(number: int, completion: str, solution: str, strict: bool) -> bytes:
    """One item as a frame. Any text passes, lone surrogates and null bytes included."""
    completion_bytes = completion.encode("utf-8", "surrogatepass")
    solution_bytes = solution.encode("utf-8", "surrogatepass")
    return ITEM.pack(number, len(completion_bytes), len(solution_bytes), strict) + completion_bytes + solution_bytes


def pack_result(number: int, status: int, reward: float | None) -> bytes:
    """One result as a frame; NaN stands for a reward of None."""
    return RESULT.pack(number, status, float("nan") if reward is None else reward)


def unpack_results(buffer: bytearray) -> list[tuple[int, int, float | None]]:
    """Takes the whole result frames off the buffer: (item number, status, reward)."""
    whole = len(buffer) // RESULT.size * RESULT.size
    results = [
        (number, status, None if reward != reward else reward)
        for number, status, reward in RESULT.iter_unpack(bytes(buffer[:whole]))
    ]
    del buffer[:whole]
    return results
