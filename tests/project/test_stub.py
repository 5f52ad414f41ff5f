"""hsgd/_native.pyi says what the native module says of itself."""

from __future__ import annotations

import ast
from pathlib import Path

from nanobind.stubgen import StubGen

from hsgd import _native

__all__: list[str] = []

STUB = Path(__file__).resolve().parents[2] / "hsgd" / "_native.pyi"


def test_the_stub_is_the_generated_one() -> None:
    generator = StubGen(_native)
    generator.put(_native)
    generated = ast.unparse(ast.parse(generator.get()))
    assert ast.unparse(ast.parse(STUB.read_text())) == generated, "make stub writes it"
