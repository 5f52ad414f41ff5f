"""Which ends of a `with` block are failures, of which other ranks must hear."""

from __future__ import annotations

import contextlib

import pytest

from hsgd.base.closing import Closing

__all__: list[str] = []


class Noted(Closing):
    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "is_failure"),
    [
        (None, False),
        (RuntimeError("failed"), True),
        (KeyboardInterrupt(), True),
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(3), True),
        (GeneratorExit(), False),
    ],
)
def test_what_leaves_a_block_by_an_error(error: BaseException | None, is_failure: bool) -> None:
    noted = Noted()
    with contextlib.suppress(BaseException), noted:
        if error is not None:
            raise error
    assert noted.left_by_error is is_failure
