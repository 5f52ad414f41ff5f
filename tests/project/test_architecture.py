"""The rooms of the design and the direction of their dependencies, read from the sources.

Owns the tables of folders below, none of files. Never imports what it checks.
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

# The rooms of hsgd/csrc, bottom up: each may include its own headers and those of the rooms that it
# names. docs/architecture.md says what they hold.
ROOMS = {
    "include": "",
    "base": "include",
    "os": "base",
    "topology": "os",
    "kernels": "include base",
    "rendezvous": "include base os",
    "node": "include base os topology rendezvous",
    "internode": "include base os kernels node",
    "status": "base os",
    "context": "include base os kernels node internode status",
    "collectives": "include base kernels node internode context",
    "communicator": "include base os rendezvous node context collectives",
    "box": "include base os kernels rendezvous node",
    "onesided": "include base os communicator",
    "tcp": "base os rendezvous onesided",
    "tcp_transport": "base os rendezvous internode tcp",
    "tree": "base os kernels onesided",
    "capi": "include base os topology kernels context communicator onesided tcp tcp_transport",
    "device": "include base os capi",
    "mpi": "include base os internode onesided",
    "mpi_setup": "include base os rendezvous status onesided capi mpi",
    # Of another language, or library: they see the C interface only.
    "interposer": "include",
    "preload": "include",
    "operators": "include",
    "arrays": "include",
    "binding": "arrays include base kernels box onesided tree capi device mpi_setup",
}
MPI_ROOMS = {"mpi", "mpi_setup", "interposer", "preload"}
# Headers that only these rooms may include.
FOREIGN_HEADERS: dict[str, set[str]] = {
    r"mpi\.h": MPI_ROOMS,
    r"Python\.h|datetime\.h|nanobind/.*": {"arrays", "binding"},
    r"torch/csrc/stable/.*": {"operators"},
    r"torch/(?!csrc/stable/).*|ATen/.*|c10/.*": set(),
}
# Calls that only these files may make.
FOREIGN_CALLS: dict[str, set[str]] = {
    r"\b(?:secure_)?getenv\s*\(": {"base/options.cpp"},
    r"\bMPI_(?:Init|Send|Recv|Isend|Irecv|Allreduce|Reduce_\w+|Bcast|Barrier|Gather|Allgather)"
    r"\w*\s*\(": set(),
}
MOST_FILES = 20  # in a room

# Python packages, bottom up: each imports its own modules, those at the front of the packages that
# it lies in, and those of the packages that it names.
PACKAGES = {
    "hsgd.testing": "",
    "hsgd.trace": "",
    "hsgd.job": "",
    "hsgd.plan": "",
    "hsgd.status": "hsgd.job",
    "hsgd.box": "",
    "hsgd.operators": "",
    "hsgd.device": "",
    "hsgd.optim.replicas": "",
    "hsgd.c10d.diagnostics": "",
    "hsgd.c10d.devices": "hsgd.device",
    "hsgd.c10d": "hsgd.c10d.devices hsgd.c10d.diagnostics hsgd.job hsgd.optim.replicas",
    "hsgd.launch": "hsgd.c10d hsgd.job",
    "hsgd.agent": "hsgd.job hsgd.launch",
    "hsgd.doctor": "hsgd.job hsgd.launch hsgd.status",
    "hsgd.io.order": "",
    "hsgd.io.remote": "",
    "hsgd.io.format": "hsgd.io.order hsgd.io.remote",
    "hsgd.io.reading": "hsgd.io.format hsgd.io.order hsgd.io.remote",
    "hsgd.io.cache": "hsgd.io.format hsgd.io.order hsgd.io.reading",
    "hsgd.io.batches": "hsgd.io.cache hsgd.io.format hsgd.io.order hsgd.io.reading hsgd.io.remote",
    "hsgd.io.convert": (
        "hsgd.io.batches hsgd.io.format hsgd.io.order hsgd.io.reading hsgd.io.remote"
    ),
    "hsgd.io": (
        "hsgd.io.batches hsgd.io.cache hsgd.io.convert hsgd.io.format hsgd.io.order "
        "hsgd.io.reading hsgd.io.remote hsgd.job"
    ),
    "hsgd.cli": (
        "hsgd.agent hsgd.doctor hsgd.io hsgd.job hsgd.launch hsgd.plan hsgd.status hsgd.trace"
    ),
    "hsgd": "hsgd.box hsgd.cli hsgd.device hsgd.job hsgd.launch hsgd.status hsgd.trace",
    "hsgd.optim.triggers": "",
    "hsgd.optim.diloco": "hsgd.optim.replicas",
    "hsgd.optim.large_batch": "",
    "hsgd.optim.node_shared": "hsgd.optim.large_batch hsgd.optim.replicas",
    "hsgd.optim.notified_tree": "hsgd.optim.large_batch",
    "hsgd.optim.gossip": "hsgd.optim.replicas hsgd.optim.triggers",
    "hsgd.optim.elastic_averaging": "hsgd.box hsgd.optim.triggers",
    "hsgd.optim": (
        "hsgd.optim.diloco hsgd.optim.elastic_averaging hsgd.optim.gossip hsgd.optim.large_batch "
        "hsgd.optim.node_shared hsgd.optim.notified_tree hsgd.optim.replicas hsgd.optim.triggers"
    ),
    "hsgd.torch.negotiation": "",
    "hsgd.torch.operations": "hsgd.torch.negotiation",
    "hsgd.torch.job": (
        "hsgd.job hsgd.launch hsgd.torch.negotiation hsgd.torch.operations hsgd.trace"
    ),
    "hsgd.torch.collectives": "hsgd.torch.job hsgd.torch.negotiation hsgd.torch.operations",
    "hsgd.torch.elastic": "hsgd.job hsgd.optim hsgd.torch.job",
    "hsgd.torch.gradients": (
        "hsgd.optim hsgd.optim.replicas hsgd.torch.collectives hsgd.torch.job hsgd.torch.operations"
    ),
    "hsgd.torch.strategies": (
        "hsgd.job hsgd.optim hsgd.optim.diloco hsgd.optim.elastic_averaging hsgd.optim.gossip "
        "hsgd.optim.node_shared hsgd.optim.notified_tree hsgd.torch.job hsgd.torch.operations"
    ),
    "hsgd.torch": (
        "hsgd.c10d hsgd.launch hsgd.optim hsgd.optim.node_shared hsgd.optim.replicas "
        "hsgd.torch.collectives hsgd.torch.elastic hsgd.torch.gradients hsgd.torch.job "
        "hsgd.torch.negotiation hsgd.torch.operations hsgd.torch.strategies"
    ),
    "hsgd.testing.chaos": "hsgd.c10d hsgd.io hsgd.job hsgd.launch hsgd.optim hsgd.torch",
    "hsgd.testing.soak": "hsgd.c10d hsgd.io hsgd.job",
}
# All that the reader takes from the front of hsgd: it can be used without the core. "agree" needs
# it, and a Comm.
READER_TAKES = {
    *("hsgd.agree", "hsgd.closing", "hsgd.errors"),
    *("hsgd.job.launchers", "hsgd.job.launched_once"),
}
# Files that run before or without the package: they may import this much when they are loaded.
ALONE = {"launch/launch_hook": {"sys"}, "errors": set[str]()}
# Packages that take long to import, or that not everybody has, and where they may be at the top.
HEAVY = {"torch", "h5py", "matplotlib", "sklearn", "mpi4py", "horovod"}
HEAVY_ALLOWED = {
    "torch": (
        *("hsgd.torch", "hsgd.optim", "hsgd.operators", "hsgd.c10d."),
        *("hsgd.testing.chaos.", "hsgd.testing.soak."),
        "hsgd.launch.loopback_torchrun",  # a program: nothing imports it
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


def imported(name: str, *, at_load: bool) -> set[str]:
    """What a module imports: everything, or only what is imported when it is loaded."""
    names: set[str] = set()
    tree = ast.parse(SOURCES[name].read_text())
    for node in _load_time(tree) if at_load else ast.walk(tree):
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


def _load_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _load_time(node)


def test_every_source_is_in_a_room_and_no_room_is_crowded() -> None:
    assert {path.name for path in CSRC.iterdir()} == ROOMS.keys()
    for room in ROOMS:
        files = [path.name for path in (CSRC / room).iterdir()]
        assert len(files) == len(files_of(room)), f"{room} holds {files}"
        assert len(files) <= MOST_FILES, f"{room} has {len(files)} files"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_include_only_what_stands_below_them(room: str) -> None:
    order = list(ROOMS)
    below = ROOMS[room].split()
    assert all(order.index(name) < order.index(room) for name in below)
    used = {name.partition("/")[0] for path in files_of(room) for name in included(path)}
    assert used - {room} == set(below), f"{room} includes {sorted(used)}"


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
    for path in IO_CSRC.iterdir():
        assert set(re.findall(r'#include\s+"([^"]+)"', code_of(path))) <= {"rows.h"}
        for pattern in FOREIGN_HEADERS:
            assert not re.findall(rf"#include\s+[<\"]({pattern})[>\"]", code_of(path))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_is_allowed(package: str) -> None:
    used = {
        package_of(other)
        for name in SOURCES
        if package_of(name) == package
        for other in imported(name, at_load=False) & SOURCES.keys()
    }
    fronts = {package[:end] for end, letter in enumerate(package) if letter == "."} | {package}
    below, order = PACKAGES[package].split(), list(PACKAGES)
    assert used - fronts == set(below), f"{package} imports {sorted(used)}"
    assert all(order.index(name) < order.index(package) for name in below)


def test_every_package_is_in_the_table() -> None:
    assert {package_of(name) for name in SOURCES} == PACKAGES.keys()


def test_the_reader_needs_nothing_of_the_core() -> None:
    for name in SOURCES:
        if name.startswith("hsgd.io"):
            used = {n for n in imported(name, at_load=False) if n.startswith("hsgd")}
            outside = {n for n in used if not n.startswith("hsgd.io")}
            assert outside <= READER_TAKES, f"{name} imports {sorted(outside)}"


def test_modules_import_one_another_without_cycles() -> None:
    uses = {name: imported(name, at_load=True) & SOURCES.keys() - {name} for name in SOURCES}
    # importing a.b imports a first
    done: set[str] = set()
    packages = set(PACKAGES)
    while ready := {n for n in uses.keys() - done if uses[n] - packages <= done}:
        done |= ready
    assert not uses.keys() - done, f"cycle among {sorted(uses.keys() - done)}"


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
    allowed = {"hsgd.config", "hsgd.launch.launch_hook", "hsgd.launch.horovod_wheel"}
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


def test_the_page_lists_exactly_the_folders() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    folders = {f"hsgd/csrc/{room}" for room in ROOMS} | PACKAGES.keys()
    assert {name for name in listed if name.startswith(("hsgd/csrc/", "hsgd"))} == folders
    assert len(listed) == len(set(listed))
