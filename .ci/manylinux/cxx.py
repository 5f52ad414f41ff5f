"""A C++ compiler whose shared libraries run on older systems than this one: manylinux_2_28.

Use: CXX="python3 .ci/manylinux/cxx.py g++" pip wheel . Compiles as the compiler does; links shared
libraries against stubs (stubs.py) that have only what glibc 2.28 and GCC 8's libstdc++ have. What
newer headers ask for beyond that comes from libstdc++.a, hidden, as GCC's toolsets for Enterprise
Linux have it in libstdc++_nonshared.a, and from since_2_28.cpp. The linker refuses the rest.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import stubs

__all__: list[str] = []

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "manylinux"


def _file_of(compiler: list[str], name: str) -> Path:
    """Where the compiler's linker finds the library."""
    found = subprocess.run(
        [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())


def _prepared(compiler: list[str]) -> Path:
    """The folder of stubs and of what is compiled beside them; made once."""
    shown = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
    machine = shown.stdout.strip()
    folder = BUILD / machine
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        made = folder / ".made"
        sources = [*HERE.glob("*.py"), *HERE.glob("*.cpp")]
        if not made.exists() or any(os.stat(s).st_mtime > made.stat().st_mtime for s in sources):
            names = stubs.sources(machine.partition("-")[0])
            stubs.make(compiler, {name: _file_of(compiler, name) for name in names}, folder)
            source, target = HERE / "since_2_28.cpp", folder / "since_2_28.o"
            words = ["-O2", "-fPIC", "-fvisibility=hidden", "-c", str(source), "-o", str(target)]
            subprocess.run([*compiler, *words], check=True)
            ar = subprocess.run(
                [*compiler, "-print-prog-name=ar"], capture_output=True, text=True, check=True
            )
            words = [ar.stdout.strip(), "rcs", str(folder / "libsince_2_28.a"), str(target)]
            subprocess.run(words, check=True)
            made.touch()
    return folder


def _main(words: list[str]) -> None:
    compiler = words[:1]
    if "-shared" in words:
        folder = _prepared(compiler)
        standard = _file_of(compiler, "libstdc++.a")
        known = [str(path) for path in sorted(folder.glob("*.so.*[0-9]"))]
        stubs_first = ["-Wl,--push-state,--as-needed", *known, "-Wl,--pop-state"]
        first = next((i for i, word in enumerate(words) if word.startswith("-l")), len(words))
        words[first:first] = stubs_first  # other libraries may have parts of libstdc++, too
        words += ["-nodefaultlibs", "-Wl,--as-needed", *known, str(standard)]
        words += [str(folder / "libsince_2_28.a"), *known, "-lgcc", "-lc_nonshared"]
        words += ["-Wl,--no-as-needed", "-Wl,--exclude-libs,ALL"]
    os.execvp(words[0], words)


if __name__ == "__main__":
    _main(sys.argv[1:])
