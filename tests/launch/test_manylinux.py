"""The compiler for wheels: what it links asks for nothing newer than manylinux_2_28 has.

Owns the proof on a small library; `make wheels` makes the wheels, which auditwheel checks as well.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
COMPILER = [sys.executable, str(ROOT / ".ci/manylinux/cxx.py"), "g++", "-std=c++17", "-fPIC"]
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Of each kind one: a condition variable with a deadline (glibc 2.30, libstdc++ 3.4.30), a stream
# and a folder (3.4.26), an array (3.4.29), a file's facts (glibc 2.33), threads, dlopen (2.34).
USES = """
#include <dlfcn.h>
#include <string.h>
#include <sys/stat.h>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>
extern "C" int waited_ms(int most) {
  using Clock = std::chrono::steady_clock;
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock<std::mutex> lock(mutex);
  const Clock::time_point begin = Clock::now();
  while (changed.wait_for(lock, std::chrono::milliseconds(most)) != std::cv_status::timeout) {}
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
}
extern "C" int length_of(const char* folder) {
  struct stat found;
  std::ostringstream text;
  std::vector<int*> many(text.str().size() + 3);
  std::thread([&] { text << many.size(); }).join();
  for (const auto& entry : std::filesystem::directory_iterator(folder)) text << entry.path();
  try {
    throw std::runtime_error(text.str());
  } catch (const std::exception& error) {
    return stat(folder, &found) == 0 && dlopen(nullptr, RTLD_NOW) ? int(strlen(error.what())) : -1;
  }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manylinux")
    words = ["-x", "c++", "-c", "-", "-o", "uses.o"]
    subprocess.run([*COMPILER, *words], cwd=folder, check=True, input=USES, text=True)
    subprocess.run([*COMPILER, "-shared", "uses.o", "-o", "uses.so"], cwd=folder, check=True)
    return folder / "uses.so"


def test_nothing_newer_is_asked_for(library: Path) -> None:
    shown = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", library], capture_output=True, text=True, check=True
    )
    undefined = [line.split()[-1] for line in shown.stdout.splitlines() if " UND " in line]
    asked = re.findall(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", shown.stdout)
    assert len(asked) > 30
    for family, version in asked:
        assert tuple(map(int, version.split("."))) <= NEWEST[family], (family, version)
    assert not [name for name in undefined if name in ("fstat", "stat", "pthread_cond_clockwait")]


def test_what_it_links_runs_here(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loaded = ctypes.CDLL(str(library))
    assert loaded.length_of(str(tmp_path).encode()) == len(f'3"{tmp_path}/file"')
    assert loaded.waited_ms(30) >= 30


def test_a_name_that_nobody_has_is_refused(tmp_path: Path) -> None:
    code = "int of_glibc_2_99(); int use() { return of_glibc_2_99(); }"
    words = [*COMPILER, "-x", "c++", "-c", "-", "-o", "new.o"]
    subprocess.run(words, cwd=tmp_path, check=True, input=code, text=True)
    words = [*COMPILER, "-shared", "new.o", "-Wl,--no-undefined", "-o", "new.so"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "undefined reference to `of_glibc_2_99()'" in done.stderr
