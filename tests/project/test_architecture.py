"""The rooms of the design and the direction of their dependencies, read from the sources.

Circles through the `__init__` of a package are not seen, nor what importlib imports. Never imports
what it checks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "hsgd" / "csrc"
IO_CSRC = ROOT / "io" / "csrc"

# The wings of hsgd/csrc with their rooms, all bottom up: a file includes headers of its own room
# and of those before. docs/architecture.md says what they hold.
CPP_WINGS = {
    "include": ("include",),
    "core": ("core/base", "core/os", "core/status", "core/topology", "core/kernels"),
    "node": ("node/rendezvous", "node/segments"),
    "network": (
        *("network/transport", "network/rounds", "network/tcp_common", "network/tcp_messages"),
        *("network/tcp_window", "network/mpi"),
    ),
    "collectives": ("collectives/context", "collectives/kinds", "collectives/queue"),
    "onesided": ("onesided/box", "onesided/window", "onesided/tree"),
    "bindings/c": ("bindings/c",),
    "device": ("device",),
    "bindings": (
        *("bindings/mpi_communicators", "bindings/mpi_interposer", "bindings/mpi_preload"),
        *("bindings/torch_operators", "bindings/nccl_net", "bindings/arrays", "bindings/python"),
    ),
}
ROOMS = [room for wing in CPP_WINGS.values() for room in wing]
# Of another language, or library: they see the C interface only.
OUTSIDE = {
    *("bindings/mpi_interposer", "bindings/mpi_preload", "bindings/torch_operators"),
    "bindings/arrays",
}
MPI_ROOMS = {
    *("network/mpi", "bindings/mpi_communicators"),
    *("bindings/mpi_interposer", "bindings/mpi_preload"),
}
# Headers that only these rooms may include.
FOREIGN_HEADERS: dict[str, set[str]] = {
    r"mpi\.h": MPI_ROOMS,
    r"Python\.h|datetime\.h|nanobind/.*": {"bindings/arrays", "bindings/python"},
    r"torch/csrc/stable/.*": {"bindings/torch_operators"},
    r"torch/(?!csrc/stable/).*|ATen/.*|c10/.*": set(),
}
# Calls that only these files may make.
FOREIGN_CALLS: dict[str, set[str]] = {
    r"\b(?:secure_)?getenv\s*\(": {
        "core/base/options.cpp",
        "bindings/nccl_net/network_devices.cpp",  # NCCL loads it: nobody passes it settings
    },
    r"\bMPI_(?:Init|Send|Recv|Isend|Irecv|Allreduce|Reduce_\w+|Bcast|Barrier|Gather|Allgather)"
    r"\w*\s*\(": set(),
}
MOST_FILES = 20  # in a room

# The wings of the Python part with their packages, all bottom up: a module imports its own package,
# the fronts of the packages that it lies in, and what stands before these.
WINGS = {
    "base": "hsgd.base",
    "jobs": "hsgd.jobs hsgd.jobs.environment hsgd.jobs.stores hsgd.jobs.launch hsgd.jobs.elastic",
    "comm": "hsgd.comm.connect hsgd.comm.device hsgd.comm",
    "onesided": "hsgd.onesided",
    "operators": "hsgd.operators",
    "optim": (
        "hsgd.optim.replicas hsgd.optim.triggers hsgd.optim.large_batch hsgd.optim.diloco "
        "hsgd.optim.node_shared hsgd.optim.notified_tree hsgd.optim.gossip "
        "hsgd.optim.elastic_averaging hsgd.optim"
    ),
    "c10d": "hsgd.c10d.diagnostics hsgd.c10d.devices hsgd.c10d",
    "torch": (
        "hsgd.torch.negotiation hsgd.torch.operations hsgd.torch.job hsgd.torch.collectives "
        "hsgd.torch.elastic hsgd.torch.gradients hsgd.torch"
    ),
    "io": (
        "hsgd.io.order hsgd.io.remote hsgd.io.format hsgd.io.layouts hsgd.io.reading hsgd.io.cache "
        "hsgd.io.batches hsgd.io.convert hsgd.io"
    ),
    "tools": "hsgd.tools hsgd.tools.status hsgd.tools.plan hsgd.tools.doctor hsgd.tools.cli",
    "front": "hsgd",
}
PACKAGES = [package for wing in WINGS.values() for package in wing.split()]
FOR_ALL = {"hsgd", "hsgd.config", "hsgd.errors", "hsgd.metrics", "hsgd.world"}  # of the front
# All that the reader takes from the front of hsgd: it can be used without the core. "agree" needs
# it, and a Comm.
READER_TAKES = {
    *("hsgd.base.bytes_text", "hsgd.base.forked"),
    *("hsgd.comm.agree", "hsgd.base.closing", "hsgd.errors"),
    *("hsgd.jobs.environment.launchers", "hsgd.jobs.environment.launched_once"),
}
# Files that run before or without the package: they may import this much when they are loaded.
ALONE = {"launch_hook": {"sys"}, "errors": {"collections"}}
# Packages that take long to import, or that not everybody has, and where they may be at the top.
HEAVY = {"torch", "h5py", "matplotlib", "sklearn", "mpi4py", "horovod"}
HEAVY_ALLOWED = {
    "torch": (
        *("hsgd.torch", "hsgd.optim", "hsgd.operators", "hsgd.c10d."),
        "hsgd.jobs.launch.loopback_torchrun",  # a program: nothing imports it
    )
}


def files_of(room: str) -> list[Path]:
    return sorted(p for p in (CSRC / room).iterdir() if p.suffix in (".h", ".hpp", ".cpp"))


def code_of(path: Path) -> str:
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def included(path: Path) -> list[str]:
    """Our own headers that a file includes, as room/name."""
    names = re.findall(r'#include\s+"([^"]+)"', code_of(path))
    return [name if "/" in name else f"include/{name}" for name in names]


def modules() -> Iterator[tuple[str, Path]]:
    """Name and path of each Python module of hsgd."""
    for package, folder in (("hsgd", ROOT / "hsgd"), ("hsgd.io", ROOT / "io")):
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            yield ".".join(part for part in parts if part != "__init__"), path


SOURCES = dict(modules())


def package_of(name: str) -> str:
    return name if SOURCES[name].name == "__init__.py" else name.rpartition(".")[0]


def imported(name: str, *, at_load: bool = False, for_types: bool = True) -> set[str]:
    """What a module imports: when it is loaded, later, and for types."""
    names: set[str] = set()
    for node in _statements(ast.parse(SOURCES[name].read_text()), at_load, for_types):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package_of(name).split(".") if node.level else []
            base = [*parts[: len(parts) + 1 - node.level], node.module or ""]
            module = ".".join(part for part in base if part)
            below = {f"{module}.{alias.name}" for alias in node.names}
            names |= {module} if not below <= SOURCES.keys() else set()
            names |= below & SOURCES.keys() | {n for n in below if n.startswith("hsgd._")}
    return names


def _statements(tree: ast.AST, at_load: bool, for_types: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        is_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_types and (at_load or not for_types):
            continue
        yield node
        yield from _statements(node, at_load, for_types)


def test_every_source_is_in_a_room_and_no_room_is_crowded() -> None:
    folders = {path.parent.relative_to(CSRC) for path in CSRC.rglob("*") if path.is_file()}
    assert {str(folder) for folder in folders} == set(ROOMS)
    for room in ROOMS:
        files = [path.name for path in (CSRC / room).iterdir()]
        assert len(files) == len(files_of(room)), f"{room} holds {files}"
        assert len(files) <= MOST_FILES, f"{room} has {len(files)} files"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_include_only_what_stands_below_them(room: str) -> None:
    below = {"include"} if room in OUTSIDE else {*ROOMS[: ROOMS.index(room)]}
    for path in files_of(room):
        above = {name for name in included(path) if str(Path(name).parent) not in {*below, room}}
        assert not above, f"{path.name} includes {sorted(above)}"


def test_headers_include_one_another_without_cycles() -> None:
    headers = {
        f"{room}/{path.name}": set(included(path))
        for room in ROOMS
        for path in files_of(room)
        if path.suffix != ".cpp"
    }
    done: set[str] = set()
    while ready := {name for name in headers.keys() - done if headers[name] <= done}:
        done |= ready
    assert not headers.keys() - done, f"cycle among {sorted(headers.keys() - done)}"


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_knows_no_foreign_headers_or_calls(room: str) -> None:
    for path in files_of(room):
        code, name = code_of(path), f"{room}/{path.name}"
        for pattern, rooms in FOREIGN_HEADERS.items():
            found = re.findall(rf"#include\s+[<\"]({pattern})[>\"]", code)
            assert not found or room in rooms, f"{name} includes {found}"
        for pattern, files in FOREIGN_CALLS.items():
            found = re.findall(pattern, code)
            assert not found or name in files, f"{name} calls {found}"


def test_the_library_of_the_reader_stands_alone() -> None:
    """libhsgd_io, which hsgd.io loads: its C interface, and what implements it; no core."""
    own = {path.name for path in IO_CSRC.glob("*.h")}
    for path in IO_CSRC.iterdir():
        assert set(re.findall(r'#include\s+"([^"]+)"', code_of(path))) <= own
        for pattern in FOREIGN_HEADERS:
            assert not re.findall(rf"#include\s+[<\"]({pattern})[>\"]", code_of(path))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_stands_below_them(package: str) -> None:
    fronts = {package[:end] for end, letter in enumerate(package) if letter == "."} - {"hsgd"}
    below = {*PACKAGES[: PACKAGES.index(package)], *fronts, package}
    for name in SOURCES:
        if package_of(name) == package:
            used = imported(name) & SOURCES.keys() - FOR_ALL
            above = sorted(other for other in used if package_of(other) not in below)
            assert not above, f"{name} imports {above}"


def test_every_package_is_in_the_table() -> None:
    assert {package_of(name) for name in SOURCES} == set(PACKAGES)
    assert len(PACKAGES) == len(set(PACKAGES))


def test_the_reader_needs_nothing_of_the_core() -> None:
    for name in SOURCES:
        if name.startswith("hsgd.io"):
            used = {n for n in imported(name) if n.startswith("hsgd")}
            outside = {n for n in used if not n.startswith("hsgd.io")}
            assert outside <= READER_TAKES, f"{name} imports {sorted(outside)}"


def test_modules_import_one_another_without_circles() -> None:
    """Also those that are imported when a function is called, but not for types alone."""
    used = {name: imported(name, for_types=False) & SOURCES.keys() - {name} for name in SOURCES}
    # importing a.b imports a first
    done: set[str] = set()
    packages = set(PACKAGES)
    while ready := {n for n in used.keys() - done if used[n] - packages <= done}:
        done |= ready
    assert not used.keys() - done, f"circle among {sorted(used.keys() - done)}"


def test_heavy_packages_are_imported_only_where_they_are_used() -> None:
    for name in SOURCES:
        for used in imported(name, at_load=True):
            package = used.partition(".")[0]
            if package in HEAVY:
                rooms = HEAVY_ALLOWED.get(package, ())
                assert name.startswith(rooms) if rooms else False, f"{name} imports {used} on load"


@pytest.mark.parametrize("file", ALONE)
def test_files_that_run_alone_load_nothing_of_hsgd(file: str) -> None:
    name = "hsgd." + file.replace("/", ".")
    used = {other.partition(".")[0] for other in imported(name, at_load=True)} - {"__future__"}
    assert used <= ALONE[file]


def test_only_config_reads_the_variables_of_hsgd() -> None:
    # horovod_wheel runs before hsgd is installed and has one variable of its own
    allowed = {"hsgd.config", "hsgd.launch_hook", "hsgd.jobs.launch.horovod_wheel"}
    pattern = re.compile(r"environ(?:\.get\(|\[)\s*[\"']HSGD_|getenv\(\s*[\"']HSGD_")
    readers = {name for name, path in SOURCES.items() if pattern.search(path.read_text())}
    assert readers <= allowed


def test_every_module_says_what_it_owns_and_what_it_exports() -> None:
    for name, path in SOURCES.items():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{name} has no docstring"
        targets = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        assert "__all__" in targets, f"{name} has no __all__"


def test_the_page_names_each_room_and_package_once_in_the_row_of_its_wing() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    wings = [*CPP_WINGS.items(), *((wing, names.split()) for wing, names in WINGS.items())]
    known = {*ROOMS, *PACKAGES}
    rows = [
        (wing, [name for name in re.findall(r"`([^`]+)`", row) if name in known])
        for wing, row in re.findall(r"^\| \*\*([\w/]+)\*\* \| (.+) \|$", page, re.M)
    ]
    assert rows == [(wing, list(names)) for wing, names in wings]
