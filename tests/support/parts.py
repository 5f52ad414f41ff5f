"""What ranks do with splits and asynchronous calls, whatever they run over; a line for each wrong.

Owns the expectation of a split, in plain Python. Every rank knows the choices of all, so nothing
here communicates but the communicators under test.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hsgd import Comm

__all__ = ["Choice", "members", "split_and_check", "together"]

Choice = tuple[int | None, int]  # color and key


def members(choices: Sequence[Choice], rank: int) -> list[int]:
    """The ranks of `rank`'s color by (key, rank); none where it takes no part."""
    color = choices[rank][0]
    if color is None or color < 0:
        return []
    same = [other for other, choice in enumerate(choices) if choice[0] == color]
    return sorted(same, key=lambda other: (choices[other][1], other))


def split_and_check(comm: Comm, choices: Sequence[Choice]) -> tuple[Comm | None, list[str]]:
    """The part of this rank, and what is wrong with it."""
    expected = members(choices, comm.rank)
    part = comm.split(*choices[comm.rank])
    if part is None:
        return None, [f"rank {comm.rank} got no part of {choices}"] if expected else []
    wrong = []
    if expected[part.rank : part.rank + 1] != [comm.rank] or part.size != len(expected):
        wrong.append(f"rank {comm.rank} is {part.rank} of {part.size} of {choices}")
    for count in (1, 300, 20_011):
        data = np.full(count, 2.0**comm.rank)
        total = part.allreduce_async(data).wait(60)
        if not (total == sum(2.0**rank for rank in expected)).all():
            wrong.append(f"rank {comm.rank} has sum {total[0]} of {choices}")
        part.broadcast(data, root=part.size - 1)
        if not (data == 2.0 ** expected[-1]).all():
            wrong.append(f"rank {comm.rank} has {data[0]} of the last of {choices}")
    return part, wrong


def together(comms: Mapping[int, Comm], rounds: int) -> list[str]:
    """Blocking and asynchronous calls on all communicators at once, each in a thread of its own.

    The keys tell the communicators apart: the same on all ranks of one.
    """
    wrong: list[str] = []

    def work(index: int, comm: Comm) -> None:
        open_calls: list[tuple[float, Any]] = []
        for turn in range(rounds):
            expected = float(comm.size * (turn + index))
            data = np.full((5, 40_000)[turn % 2], turn + index, float)
            if turn % 5 == 4:
                total = comm.allreduce(data, out=data)
                if not all(handle.done() for _, handle in open_calls):
                    wrong.append(f"communicator {index}: call {turn} overtook others")
                if not (total == expected).all():
                    wrong.append(f"communicator {index}, call {turn}: {total[0]}")
            else:
                open_calls.append((expected, comm.allreduce_async(data, out=data)))
            if len(open_calls) > 6:
                expected, handle = open_calls.pop(turn % 7)
                if not (handle.wait() == expected).all():
                    wrong.append(f"communicator {index}: {handle.wait()[0]} is not {expected}")
        for expected, handle in open_calls:
            if not (handle.wait(60) == expected).all():
                wrong.append(f"communicator {index}: {handle.wait()[0]} is not {expected}")

    def report(index: int, comm: Comm) -> None:
        try:
            work(index, comm)
        except Exception as error:
            wrong.append(f"communicator {index}: {type(error).__name__} {error}")

    threads = [threading.Thread(target=report, args=each) for each in comms.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
