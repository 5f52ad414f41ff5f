"""torch's own tests of torch.distributed, which every torch brings, over several backends.

    python tests/c10d/suite/torch_suite.py                      all backends, a table
    python tests/c10d/suite/torch_suite.py --over hsgd NAME ... some tests over one

Owns the running: the tests are those of torch.testing._internal.distributed.distributed_test, each
in processes of its own, forked where torch's own runner starts Python anew. "as gloo" is the name
gloo served by hsgd. The exit code is 1 where a test fails that passes over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["BACKENDS", "outcomes", "worse"]

BACKENDS = ("gloo", "as gloo", "hsgd")
LIMIT_S = 3000.0
_MARK = "outcome "


def outcomes(over: str, names: Collection[str] = (), size: int = 2) -> dict[str, str]:
    """What became of each test: "passed", "skipped: why" or "failed: why"; local, blocking.

    over: of BACKENDS. names: of the tests; none: all. size: ranks of each.
    """
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HSGD_")},
            "BACKEND": "hsgd" if over == "hsgd" else "gloo",
            "HSGD_AS_GLOO": "1" if over == "as gloo" else "0",
            "WORLD_SIZE": str(size),
            "TEMP_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        words = [sys.executable, __file__, "--here", *names]
        done = subprocess.run(
            words, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    lines = [line[len(_MARK) :] for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{over}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(line) for line in lines)


def worse(
    mine: Mapping[str, str], gloos: Mapping[str, str], *, skips: bool = False
) -> dict[str, str]:
    """The tests that fail, or are lost, though they pass over gloo. skips: torch may skip them, as
    it does where it asks for gloo by name.
    """
    good = ("passed", "skipped") if skips else ("passed",)
    return {
        name: mine.get(name, "not run")
        for name, outcome in gloos.items()
        if outcome == "passed" and not mine.get(name, "not run").startswith(good)
    }


def _run_here(names: Collection[str]) -> int:
    """Run them over the backend of the environment, and tell the outcomes."""
    import unittest

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.distributed_test import (
        DistributedTest,
        TestDistBackend,
    )

    from hsgd.c10d import as_gloo

    class TestsOfTorch(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    class Teller(unittest.TestResult):
        def startTest(self, test: Any) -> None:
            super().startTest(test)
            self.began = time.monotonic()
            self.outcome = "passed"

        def addSkip(self, test: Any, reason: str) -> None:
            self.outcome = f"skipped: {reason}"

        def addError(self, test: Any, error: Any) -> None:
            self.outcome = f"failed: {str(error[1])[-1500:]}"

        addFailure = addError

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            name = test._testMethodName
            print(_MARK + json.dumps([name, self.outcome]), flush=True)
            took = time.monotonic() - self.began
            print(f"{took:6.1f} s {name}: {self.outcome[:60]!r}", file=sys.stderr, flush=True)

    wanted = os.environ["HSGD_AS_GLOO"] == "1"
    if as_gloo.is_installed(dist.distributed_c10d) != wanted:
        print("the start-up hook of hsgd does not run in this Python", file=sys.stderr)
        return 2
    every = unittest.TestLoader().getTestCaseNames(TestsOfTorch)
    unknown = set(names) - set(every)
    if unknown:
        print(f"torch {torch.__version__} has no {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    unittest.TestSuite(map(TestsOfTorch, names or every)).run(Teller())
    return 0


def _table(found: Mapping[str, Mapping[str, str]]) -> str:
    kinds = ("passed", "skipped", "failed")
    rows = [f"{'':10}" + "".join(f"{kind:>9}" for kind in kinds)]
    for over, results in found.items():
        counts = [sum(each.startswith(kind) for each in results.values()) for kind in kinds]
        rows.append(f"{over:10}" + "".join(f"{count:9}" for count in counts))
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> int:
    """See --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--over", choices=BACKENDS, action="append", help="default: all")
    parser.add_argument("--size", type=int, default=2, metavar="N", help="ranks of each test")
    parser.add_argument("--json", metavar="FILE", help="write all outcomes")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests; default: all")
    arguments = parser.parse_args(words)
    if arguments.here:
        return _run_here(arguments.names)
    found = {}
    for over in arguments.over or BACKENDS:
        print(f"running torch's tests over {over} ...", file=sys.stderr, flush=True)
        found[over] = outcomes(over, arguments.names, arguments.size)
    print(_table(found))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)
    gloos = found.get("gloo", {})
    lost = {over: worse(found[over], gloos, skips=over == "hsgd") for over in found}
    for over, tests in lost.items():
        for name, outcome in tests.items():
            print(f"{over}: {name}: {outcome}")
    return int(any(lost.values()))


if __name__ == "__main__":
    raise SystemExit(main())
