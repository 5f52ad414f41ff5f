"""Processes that stay from turn to turn, so that start-up does not count, and follow orders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["START_S", "StayingProcesses", "memory_mb", "orders"]

START_S = 120.0
_RUN_S = 300.0


class StayingProcesses:
    """main: the body, called with the words of one process and its pipe; it ends in orders()."""

    def __init__(self, main: Callable[..., None], words: Sequence[tuple[Any, ...]]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for own in words:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=main, args=(*own, theirs))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(START_S)

    def ask(self, *order: Any) -> list[dict[str, Any]]:
        """What each answers. Raises RuntimeError for an error there, TimeoutError, EOFError."""
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers(_RUN_S)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(timeout_s):
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            answer = pipe.recv()
            if isinstance(answer, str):
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


def orders(pipe: Any, obey: Callable[..., dict[str, Any]]) -> None:
    """In a process: say that it is there, then answer orders until the pipe is closed."""
    pipe.send({})
    while True:
        try:
            words = pipe.recv()
        except (EOFError, ConnectionResetError):  # the other end is closed
            return
        try:
            pipe.send(obey(*words))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def memory_mb(name: str) -> float:
    """A line of this process's status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024
