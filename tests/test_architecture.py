"""The rooms of the design and the direction of their dependencies, read from the sources.

Owns the tables below: a new file gets its place there, on purpose. Never imports what it checks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__: list[str] = []

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "hsgd" / "csrc"
IO_CSRC = ROOT / "io" / "csrc"

# Components of the core, lowest layer first; each may include its own headers and lower layers.
# A component is all files of one stem; reduce_* belong to reduce.
CORE_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"hsgd_core", "kernel_file", "float_mode", "page"}),
    frozenset({"cgroup"}),
    frozenset({"error", "wait", "cores", "fault", "signals", "hsgd_mpi", "prompt"})
    | {"socket_frames"},
    frozenset({"mapping_failure"}),
    frozenset(
        {"segment", "reduce", "record", "secret", "signature", "capi", "transport", "rma", "owner"}
    )
    | {"types", "lars_kernels", "mpi_handle", "mpi_deaths", "square_sums"},
    frozenset({"change", "lars", "options", "layout", "tuning", "store_choice", "process_life"})
    | {"transport_inproc", "parting_mpi", "mpi_threads", "unix_socket", "box_kernels"}
    | {"socket_sender", "socket_receiver", "socket_door", "tcp_socket"},
    frozenset({"rma_mpi", "outbox", "box_layout", "transport_mpi", "mpi_steps"})
    | {"element_update", "listener", "meeting_wait", "socket_listener"},
    frozenset({"rma_sockets", "box_chunks", "box_door", "meeting_messages", "mpi_agreement"}),
    frozenset({"box", "meeting_guest", "meeting_host", "mpi_nodes"}),
    frozenset({"bootstrap", "wire", "box_api"}),
    frozenset({"blocks", "step_messages"}),
    frozenset({"local", "arena"}),
    frozenset({"pipeline", "regroup"}),
    frozenset({"direct", "exchange_pipeline", "scatter_pipeline"}),
    frozenset({"direct_blocks"}),
    frozenset({"hier"}),
    frozenset({"hier_blocks", "async", "shrink", "calls", "notify"}),
    frozenset({"communicator", "tree"}),
    frozenset({"core", "split", "mpi_comm", "notify_api"}),
    frozenset({"mpi_cache", "mpi_exchange", "tree_api"}),
)
# Users of the core: they see its C interface and their own helpers only.
DOORS = {
    "bind": {"array", "gil", "request"}
    | {"bind_box", "bind_change", "bind_exchange", "bind_lars", "bind_tree"},
    "bind_box": {"array", "gil", "request"},
    "bind_change": {"gil"},
    "bind_exchange": {"array", "bind_tree", "gil", "request"},
    "bind_lars": {"gil", "request"},
    "bind_tree": {"gil", "request"},
    "request": {"array", "gil"},
    "array": set[str](),
    "gil": set[str](),
    "pmpi": {"pmpi_take", "pmpi_counters", "pmpi_settings"},
    "pmpi_fortran": {"pmpi", "pmpi_messages"},
    "pmpi_take": {"pmpi_counters", "pmpi_failure", "pmpi_settings", "pmpi_types", "pmpi_user_op"},
    "pmpi_user_op": {"pmpi_types"},
    "pmpi_settings": {"pmpi_counters", "pmpi_failure", "pmpi_library", "pmpi_messages"},
    "pmpi_failure": set[str](),
    "pmpi_library": set[str](),
    "pmpi_messages": set[str](),
    "pmpi_types": set[str](),
    "pmpi_counters": set[str](),
    # What programs preload: finds the engine by name.
    "preload_collectives": {"preload_engine", "preload_forward"},
    "preload_messages": {"preload_engine", "preload_forward"},
    "preload_engine": {"preload_messages"},
    "preload_forward": set[str](),
}
ENGINE = {name for name in DOORS if name.startswith("pmpi")}
C_INTERFACE = {"hsgd_core", "hsgd_mpi"}
# libhsgd_io, which hsgd.io loads: its C interface below, what implements it above; no core.
IO_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"rows.h"}),
    frozenset({"rows.cpp", "crc32c.cpp"}),
)

# Headers that only these components may include.
FOREIGN_HEADERS = {
    r"mpi\.h": {"mpi_handle", "parting_mpi", "mpi_comm", "mpi_cache", "mpi_exchange"}
    | {"mpi_deaths", "mpi_steps", "mpi_threads"}
    | {"preload_collectives", "preload_messages"}  # for its version
    | ENGINE,
    r"Python\.h|nanobind/.*": {"bind", "array", "request", "gil"}
    | {"bind_box", "bind_change", "bind_exchange", "bind_lars", "bind_tree"},
    r"torch/.*|ATen/.*|c10/.*": set[str](),
}
# Calls that only these components may make.
FOREIGN_CALLS = {
    r"\b(?:secure_)?getenv\s*\(": {"options"},
    r"\bMPI_(?:Init|Send|Recv|Isend|Irecv|Allreduce|Reduce_\w+|Bcast|Barrier|Gather|Allgather)"
    r"\w*\s*\(": set[str](),
}

# Python: what a package may import of hsgd besides itself, hsgd.closing and hsgd.errors.
PACKAGE_IMPORTS = {
    "hsgd.io": set[str](),
    "hsgd.optim": {"hsgd._native", "hsgd.comm", "hsgd.box", "hsgd.exchange"},
    "hsgd.c10d": {"hsgd.built", "hsgd.comm", "hsgd.config", "hsgd.job", "hsgd.meeting_path"},
}
# Files that run before or without the package: they may import this much when they are loaded.
ALONE = {"launch_hook": {"sys"}, "errors": set[str]()}
# Packages that take long to import, or that not everybody has, and where they may be at the top.
HEAVY = {"torch", "h5py", "matplotlib", "sklearn", "mpi4py", "horovod"}
HEAVY_ALLOWED = {"torch": ("hsgd.torch", "hsgd.optim", "hsgd.c10d.")}


def component(path: Path) -> str:
    return "reduce" if path.stem.startswith("reduce_") else path.stem


def core_files() -> list[Path]:
    return sorted(p for p in CSRC.iterdir() if p.suffix in (".h", ".hpp", ".cpp"))


def code_of(path: Path) -> str:
    text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def layer_of(name: str) -> int:
    for level, names in enumerate(CORE_LAYERS):
        if name in names:
            return level
    pytest.fail(f"{name} has no place in CORE_LAYERS or DOORS")


def modules() -> Iterator[tuple[str, Path]]:
    """Name and path of each Python module of hsgd."""
    for package, folder in (("hsgd", ROOT / "hsgd"), ("hsgd.io", ROOT / "io")):
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            yield ".".join(part for part in parts if part != "__init__"), path


def imported(tree: ast.AST, *, at_load: bool) -> set[str]:
    """Modules that a module imports: all of them, or only those imported when it is loaded."""
    names: set[str] = set()
    nodes = _load_time(tree) if at_load else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _load_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _load_time(node)


@pytest.mark.parametrize("path", core_files(), ids=lambda path: path.name)
def test_includes_of_the_core_point_downwards(path: Path) -> None:
    name = component(path)
    for header in re.findall(r'#include\s+"([^"]+)"', code_of(path)):
        used = component(Path(header))
        if used == name:
            continue
        if name in DOORS:
            assert used in C_INTERFACE | DOORS[name], f"{path.name} includes {header}"
        else:
            assert layer_of(used) < layer_of(name), f"{path.name} includes {header}, not below it"


@pytest.mark.parametrize("path", sorted(IO_CSRC.iterdir()), ids=lambda path: path.name)
def test_the_library_of_the_reader_stands_alone(path: Path) -> None:
    level = next(n for n, names in enumerate(IO_LAYERS) if path.name in names)
    below = frozenset[str]().union(*IO_LAYERS[:level])
    assert set(re.findall(r'#include\s+"([^"]+)"', code_of(path))) <= below
    for pattern in FOREIGN_HEADERS:
        assert not re.findall(rf"#include\s+[<\"]({pattern})[>\"]", code_of(path))


@pytest.mark.parametrize("path", core_files(), ids=lambda path: path.name)
def test_the_core_knows_no_foreign_headers_or_calls(path: Path) -> None:
    code = code_of(path)
    for pattern, allowed in FOREIGN_HEADERS.items():
        found = re.findall(rf"#include\s+[<\"]({pattern})[>\"]", code)
        assert not found or component(path) in allowed, f"{path.name} includes {found}"
    for pattern, allowed in FOREIGN_CALLS.items():
        found = re.findall(pattern, code)
        assert not found or component(path) in allowed, f"{path.name} calls {found}"


@pytest.mark.parametrize("package", PACKAGE_IMPORTS)
def test_packages_import_only_the_rooms_below_them(package: str) -> None:
    allowed = PACKAGE_IMPORTS[package] | {package, "hsgd.closing", "hsgd.errors"}
    for name, path in modules():
        if name != package and not name.startswith(package + "."):
            continue
        for used in imported(ast.parse(path.read_text()), at_load=False):
            if used.startswith("hsgd."):
                inside = any(used == room or used.startswith(room + ".") for room in allowed)
                assert inside, f"{name} imports {used}"


def test_modules_import_one_another_without_cycles() -> None:
    sources = dict(modules())
    uses = {
        name: imported(ast.parse(path.read_text()), at_load=True) & sources.keys() - {name}
        for name, path in sources.items()
    }
    # importing a.b imports a first, and `from hsgd import x` names hsgd beside hsgd.x
    done: set[str] = set()
    packages = {"hsgd", "hsgd.io", "hsgd.torch"}
    while ready := {n for n in uses.keys() - done if uses[n] - packages <= done}:
        done |= ready
    assert not uses.keys() - done, f"cycle among {sorted(uses.keys() - done)}"


def test_heavy_packages_are_imported_only_where_they_are_used() -> None:
    for name, path in modules():
        for used in imported(ast.parse(path.read_text()), at_load=True):
            package = used.partition(".")[0]
            if package in HEAVY:
                rooms = HEAVY_ALLOWED.get(package, ())
                assert name.startswith(rooms) if rooms else False, f"{name} imports {used} on load"


@pytest.mark.parametrize("stem", ALONE)
def test_files_that_run_alone_load_nothing_of_hsgd(stem: str) -> None:
    tree = ast.parse((ROOT / "hsgd" / f"{stem}.py").read_text())
    used = {name.partition(".")[0] for name in imported(tree, at_load=True)} - {"__future__"}
    assert used <= ALONE[stem]


def test_only_config_reads_the_variables_of_hsgd() -> None:
    # horovod_wheel runs before hsgd is installed and has one variable of its own
    allowed = {"hsgd.config", "hsgd.launch_hook", "hsgd.horovod_wheel"}
    pattern = re.compile(r"environ(?:\.get\(|\[)\s*[\"']HSGD_|getenv\(\s*[\"']HSGD_")
    readers = {name for name, path in modules() if pattern.search(path.read_text())}
    assert readers <= allowed


def test_every_module_says_what_it_owns_and_what_it_exports() -> None:
    for name, path in modules():
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
