"""What `hsgd info` says of sockets, NUMA nodes and caches: trees of files like other machines'."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsgd.tools.doctor import cpu_domains

__all__: list[str] = []


class Machine:
    """A node as /sys/devices/system shows it."""

    def __init__(self, sys: Path) -> None:
        self.sys = sys

    def add(self, path: str, text: str) -> None:
        file = self.sys / "devices/system" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def build(self, cpus: int, *, socket: int, node: int, cache: int) -> None:
        """Processors: in all, per socket, per NUMA node and per last-level cache."""
        for cpu in range(cpus):
            self.add(f"cpu/cpu{cpu}/topology/package_cpus_list", span(cpu, socket))
            for index, level, sharing in ((0, 1, 1), (1, 1, 1), (2, 2, 1), (3, 3, cache)):
                self.add(f"cpu/cpu{cpu}/cache/index{index}/level", f"{level}\n")
                self.add(f"cpu/cpu{cpu}/cache/index{index}/shared_cpu_list", span(cpu, sharing))
        for first in range(0, cpus, node):
            self.add(f"node/node{first // node}/cpulist", span(first, node))

    def find(self) -> cpu_domains.CpuDomains:
        return cpu_domains.find(self.sys)


def span(cpu: int, size: int) -> str:
    first = cpu // size * size
    return f"{first}-{first + size - 1}\n" if size > 1 else f"{first}\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_process_is_bound_to_the_smallest_domain_that_holds_it(machine: Machine) -> None:
    machine.build(32, socket=16, node=8, cache=4)
    found = machine.find()
    assert str(found) == "2 sockets, 4 NUMA nodes, 8 L3 caches"
    assert found.holding({5, 6}) == "this process is bound to one L3 cache"
    assert found.holding({3, 4}) == "this process is bound to one NUMA node"
    assert found.holding(set(range(16, 32))) == "this process is bound to one socket"
    assert found.holding({15, 16}) == "this process is not bound to one"


def test_a_machine_of_one_domain_has_nothing_to_bind_to(machine: Machine) -> None:
    machine.build(4, socket=4, node=4, cache=4)
    assert str(machine.find()) == "1 socket, 1 NUMA node, 1 L3 cache"
    assert machine.find().holding({0}) == "nothing to bind ranks to"


def test_what_files_do_not_say_is_left_out(machine: Machine) -> None:
    assert str(machine.find()) == "not known"
    assert machine.find().holding({0}) == "nothing to bind ranks to"
    machine.add("cpu/cpu0/topology/core_siblings_list", "0-1\n")
    machine.add("node/node0/cpulist", "0-1\n")
    machine.add("node/node1/cpulist", "\n")  # memory alone
    assert str(machine.find()) == "1 socket, 1 NUMA node"


@pytest.mark.parametrize("text", ["", "all", "0-", "3,", "-1", "0-99999999999", "0 1"])
def test_files_that_hold_something_else_are_passed_over(machine: Machine, text: str) -> None:
    machine.build(2, socket=2, node=2, cache=2)
    for path in ("cpu/cpu0/cache/index3/level", "node/node0/cpulist"):
        machine.add(path, text)
    machine.add("cpu/cpu1/cache/index3/shared_cpu_list", text)
    assert str(machine.find()) == "1 socket"


def test_the_files_of_this_machine_are_read() -> None:
    found = cpu_domains.find()
    assert all(found.sockets | found.nodes | found.caches)
