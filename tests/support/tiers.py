"""Which tests are long: `make test` runs a short form of them, and targets of their own the rest.

Long tests bear one of the marks long, chaos, torch, bench and suites, of `make test-long`,
`make chaos`, `make test-torch`, `make test-bench` and `make suites`; those that need Horovod itself
bear the mark long. What needs a GPU, and fails without one, bears the mark gpu, of `make test-gpu`.
Plain pytest runs everything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["points_wanted", "short_form"]


def short_form(tier: str, cases: Iterable[Any], keep: int | Collection[int] = 3) -> list[Any]:
    """Cases for parametrize: those outside of the short form bear the mark `tier`.

    keep: every keep-th case stays in the short form, or those of these numbers.
    """
    kept = list(cases)
    numbers = range(0, len(kept), keep) if isinstance(keep, int) else keep
    mark = getattr(pytest.mark, tier)
    return [
        case
        if number in numbers
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for number, case in enumerate(kept)
    ]


def points_wanted(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Values of the parameter `name` in the tests of this file that were selected, each once: what
    a fixture that prepares all of them at once has to prepare.
    """
    specs = (
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.path == request.path
    )
    return list(dict.fromkeys(spec.params[name] for spec in specs if spec and name in spec.params))
