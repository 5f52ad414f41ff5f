"""What setup.py makes again, and what it leaves: a stand-in for the compiler notes its calls.

Owns nothing of the build. The stand-in makes empty files, so that nothing of this is ever loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
COMPILER = """#!/bin/sh
echo "$*" >> "$0.log"
while [ $# -gt 0 ]; do
  case $1 in
    -dumpmachine) echo x86_64-linux-gnu ;;
    -MF) depends=$2 ;;
    -o) output=$2 ;;
    -c) source=$2 ;;
  esac
  shift
done
[ -z "$depends" ] || echo "object: $source" > "$depends"
[ -z "$output" ] || : > "$output"
case $source in *"/${WARNED:-none}") echo "$source: warning: unused" >&2 ;; esac
"""


@dataclass
class Rebuild:
    """Builds without MPI into a folder, by the stand-in."""

    compiler: Path

    @property
    def output(self) -> Path:
        return self.compiler.parent / "out" / "hsgd"

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib"]
        settings = {"CXX": str(self.compiler), "HSGD_BUILD_WITHOUT_MPI": "1", **variables}
        return subprocess.run(
            [*command, str(self.output.parent)],
            cwd=ROOT,
            env={**{k: v for k, v in os.environ.items() if k != "WERROR"}, **settings},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def made(self, **variables: str) -> list[str]:
        """The names of the sources that a build compiled, and of the files that it linked."""
        log = Path(f"{self.compiler}.log")
        log.unlink(missing_ok=True)
        done = self.run(**variables)
        assert done.returncode == 0, done.stderr
        calls = [line.split() for line in log.read_text().splitlines()]
        sources = [Path(words[words.index("-c") + 1]).name for words in calls if "-c" in words]
        linked = [Path(words[words.index("-o") + 1]).name for words in calls if "-shared" in words]
        return sorted([*sources, *(name.removeprefix(".") for name in linked)])


@pytest.fixture
def rebuild(tmp_path: Path) -> Iterator[Rebuild]:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    yield Rebuild(compiler)
    made_by = hashlib.sha256(str(compiler).encode()).hexdigest()[:8]
    (objects,) = (ROOT / "build" / "native").glob(f"*-{made_by}")
    shutil.rmtree(objects)


def test_what_did_not_change_is_neither_compiled_nor_linked(rebuild: Rebuild) -> None:
    first = rebuild.made()
    assert {"shared_memory.cpp", "libhsgd_core.so", "libhsgd_io.so"} <= {*first}
    assert rebuild.made() == []
    assert rebuild.made(CXXFLAGS="-DOTHER") == first


def test_a_library_is_linked_again_with_those_that_need_it(rebuild: Rebuild) -> None:
    libraries = {name for name in rebuild.made() if name.endswith(".so")}
    (rebuild.output / "libhsgd_core.so").write_text("of another build")
    assert {*rebuild.made()} == libraries - {"libhsgd_io.so", "libnccl-net-hsgd.so"}
    (rebuild.output / "libhsgd_io.so").unlink()
    (rebuild.output / "libhsgd_gone.so").write_text("of a source that was removed")
    assert rebuild.made() == ["libhsgd_io.so"]
    assert not (rebuild.output / "libhsgd_gone.so").exists()


def test_what_warns_is_compiled_and_warns_again(rebuild: Rebuild) -> None:
    assert "dtypes.cpp" in rebuild.made(WARNED="dtypes.cpp")
    done = rebuild.run(WARNED="dtypes.cpp", WERROR="1")
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert last == "hsgd: error: the compiler warned of base-dtypes.o, and WERROR is set"
    again = rebuild.made()
    assert [name for name in again if name.endswith(".cpp")] == ["dtypes.cpp"]
    assert "libhsgd_core.so" in again and rebuild.made() == []
