"""The main job from outside: examples/train_digits.py on plain Horovod, with the plugin, and as
hsgd.torch, on one node and on two virtual ones.

Equal means bitwise unless a test names a bound. Every run is made once and shared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hsgd.io import convert_to_slabs
from torch import Tensor

from hsgd.metrics import Counters
from tiers import short_form
from toolkit.cluster import Cluster

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "examples" / "train_digits.py"
LIMIT_S = 240.0  # of one run; a crowded machine needs it
STEPS = 14  # per epoch: 1438 training images in batches of 96
PAYLOAD_BYTES = 4 * 9930  # float32 gradients of all parameters, one allreduce per step
PLUGIN = {"HOROVOD_PLUGIN": "hsgd-mpi"}
LONG = ("--epochs", "10", "--target-accuracy", "97")
SHORT = ("--epochs", "2")

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * LIMIT_S)]

Mpirun = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Run:
    """What one training left behind."""

    results: dict[str, Any]
    weights: list[dict[str, Tensor]]  # of each rank
    output: str

    def column(self, key: str) -> list[Any]:
        return [epoch[key] for epoch in self.results["epochs"]]


class Trainer:
    """Starts trainings, and keeps their results for the tests that ask for the same one."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "digits"
        self._folder = folder
        self._runs: dict[str, Run] = {}
        convert_to_slabs("digits", self.data, progress=False)

    def run(
        self,
        name: str,
        np: int,
        launch: Callable[[list[str]], subprocess.CompletedProcess[str]],
        *options: str,
    ) -> Run:
        """The run called `name`; started now if it is new, with the words after `python`."""
        if name not in self._runs:
            output = self._folder / name
            words = [str(SCRIPT), "--data", str(self.data), "--output", str(output)]
            done = launch([*words, "--dump-weights", str(output) + "-weights", *options])
            assert done.returncode == 0, done.stdout + done.stderr
            files = [f"{output}-weights.{rank}" for rank in range(np)]
            results = json.loads((output / "training.json").read_text())
            weights = [torch.load(file, weights_only=True) for file in files]
            assert (output / "training.png").read_bytes().startswith(b"\x89PNG")
            self._runs[name] = Run(results, weights, done.stdout)
        return self._runs[name]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("training"))


@pytest.fixture
def on_one_node(trainer: Trainer, mpirun: Mpirun) -> Callable[..., Run]:
    """on_one_node(name, np, *options, env=None): the run called `name` under mpirun."""

    def start(name: str, np: int, *options: str, env: Mapping[str, str] | None = None) -> Run:
        def launch(words: list[str]) -> subprocess.CompletedProcess[str]:
            return mpirun(np, *words, env=env, timeout_s=LIMIT_S)

        return trainer.run(name, np, launch, *options)

    return start


@pytest.fixture
def on_two_nodes(trainer: Trainer, cluster: Callable[..., Cluster]) -> Callable[..., Run]:
    """on_two_nodes(hosts): a short run under horovodrun --plugin hsgd-mpi."""

    def start(hosts: str) -> Run:
        np = sum(int(host.split(":")[1]) for host in hosts.split(","))

        def launch(words: list[str]) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, *words]
            return cluster(2).horovodrun(
                np, argv, hosts=hosts, plugin="hsgd-mpi", timeout_s=LIMIT_S
            )

        return trainer.run(f"nodes-{np}", np, launch, *SHORT)

    return start


def assert_same_weights(runs: Sequence[dict[str, Tensor]]) -> None:
    for run in runs[1:]:
        for name, weight in runs[0].items():
            assert torch.equal(weight, run[name]), name


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """|actual - expected| / |expected| over all parameters as one vector."""
    difference = torch.cat([(actual[name] - expected[name]).flatten() for name in expected])
    return float(difference.norm() / torch.cat([w.flatten() for w in expected.values()]).norm())


def test_two_ranks_of_plain_horovod_reach_the_accuracy(on_one_node: Callable[..., Run]) -> None:
    run = on_one_node("plain-2", 2, *LONG)
    assert run.column("test_accuracy")[-1] >= 0.97
    assert_same_weights(run.weights)


def test_plain_horovod_has_no_counters_and_the_table_says_so(
    on_one_node: Callable[..., Run],
) -> None:
    run = on_one_node("plain-2", 2, *LONG)
    for key in ("two_level_calls", "intra_bytes", "inter_bytes", "communication_share"):
        assert set(run.column(key)) == {None}
    table = run.output.splitlines()
    assert table[0].split()[:3] == ["epoch", "loss", "train"]
    assert all(line.split()[-3:] == ["-", "-", "-"] for line in table[1:11])


def test_two_ranks_with_the_plugin_equal_plain_horovod(on_one_node: Callable[..., Run]) -> None:
    plain = on_one_node("plain-2", 2, *LONG)
    plugin = on_one_node("plugin-2", 2, *LONG, env=PLUGIN)
    for key in ("loss", "train_accuracy", "test_accuracy"):
        assert plugin.column(key) == plain.column(key)
    assert_same_weights([*plain.weights, *plugin.weights])


def test_hsgd_torch_equals_the_plugin(on_one_node: Callable[..., Run]) -> None:
    plugin = on_one_node("plugin-2", 2, *LONG, env=PLUGIN)
    environ = {"HSGD_CHECK_REPLICAS": "0"}  # it has collectives of its own
    own = on_one_node("api-2", 2, *LONG, "--api", "hsgd", env=environ)
    assert own.results["api"] == "hsgd"
    assert own.column("loss") == plugin.column("loss")
    # The first step also agrees on the buckets.
    assert own.column("two_level_calls")[1:] == plugin.column("two_level_calls")[1:]
    assert own.column("two_level_calls")[0] > STEPS * 2
    assert_same_weights([*plugin.weights, *own.weights])


def test_each_step_is_one_call_of_the_two_level_path(on_one_node: Callable[..., Run]) -> None:
    run = on_one_node("plugin-2", 2, *LONG, env=PLUGIN)
    epochs = len(run.results["epochs"])
    assert run.column("two_level_calls") == [STEPS * 2] * epochs
    assert run.column("inter_bytes") == [0] * epochs
    # Each rank reads or writes its payload at least twice in shared memory.
    assert min(run.column("intra_bytes")) >= STEPS * 2 * 2 * PAYLOAD_BYTES
    assert all(0 < share < 1 for share in run.column("communication_share"))


@pytest.mark.torch
def test_three_ranks_give_the_same_weights_in_every_run(on_one_node: Callable[..., Run]) -> None:
    first = on_one_node("plugin-3", 3, *SHORT, env=PLUGIN)
    again = on_one_node("plugin-3-again", 3, *SHORT, env=PLUGIN)
    assert first.column("loss") == again.column("loss")
    assert_same_weights([*first.weights, *again.weights])


@pytest.mark.torch
def test_four_ranks_start_as_on_plain_horovod(on_one_node: Callable[..., Run]) -> None:
    plain = on_one_node("plain-4", 4, *SHORT)
    plugin = on_one_node("plugin-4", 4, *SHORT, env=PLUGIN)
    assert plugin.column("loss")[0] == pytest.approx(plain.column("loss")[0], abs=1e-5)
    assert plugin.column("two_level_calls") == [STEPS * 4] * 2
    assert_same_weights(plugin.weights)


@pytest.mark.torch
def test_four_ranks_of_hsgd_torch_start_as_on_plain_horovod(
    on_one_node: Callable[..., Run],
) -> None:
    plain = on_one_node("plain-4", 4, *SHORT)
    own = on_one_node("api-4", 4, *SHORT, "--api", "hsgd")
    assert own.column("loss")[0] == pytest.approx(plain.column("loss")[0], abs=1e-5)
    assert_same_weights(own.weights)


@pytest.mark.parametrize(
    "hosts", short_form("torch", ["node1:2,node2:2", "node1:2,node2:1"], keep=[1])
)
def test_two_nodes_send_no_more_than_the_floor_and_agree(
    on_one_node: Callable[..., Run], on_two_nodes: Callable[..., Run], hosts: str
) -> None:
    run = on_two_nodes(hosts)
    ranks = len(run.weights)
    plain = on_one_node(f"plain-{ranks}", ranks, *SHORT)
    assert run.results["nodes"] == 2
    assert_same_weights(run.weights)
    assert run.column("loss")[0] == pytest.approx(plain.column("loss")[0], abs=1e-5)
    assert run.column("two_level_calls") == [STEPS * ranks] * 2
    # 2 (N - 1) / N of the payload leaves each of the N = 2 nodes, plus headers.
    floor = STEPS * 2 * PAYLOAD_BYTES
    assert all(floor <= sent <= 1.05 * floor for sent in run.column("inter_bytes"))


@pytest.mark.torch
def test_two_ranks_train_as_one_process_with_the_whole_batch(
    trainer: Trainer, on_one_node: Callable[..., Run], mpirun: Mpirun, tmp_path: Path
) -> None:
    run = on_one_node("small-steps", 2, *SHORT, "--lr", "0.25", env=PLUGIN)
    target = tmp_path / "serial"
    words = [str(trainer.data), "2", "2", "0.25", str(target)]
    done = mpirun(1, HERE / "serial_digits.py", *words, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    serial = torch.load(target, weights_only=True)
    assert run.column("loss") == pytest.approx(serial["losses"], rel=1e-6)
    assert relative_error(run.weights[0], serial["weights"]) < 1e-6


def alone(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """One rank without a launcher, and without the file that Open MPI 5 then leaves in /dev/shm."""
    argv, env = [sys.executable, *words], {**os.environ, "OMPI_MCA_btl": "self"}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def test_one_rank_needs_no_launcher(trainer: Trainer) -> None:
    run = trainer.run("alone", 1, alone, *SHORT)
    assert run.results["ranks"] == 1
    assert run.column("test_accuracy")[-1] > run.column("test_accuracy")[0]


def test_bad_input_ends_with_one_line_and_an_exit_code(
    trainer: Trainer, mpirun: Mpirun, tmp_path: Path
) -> None:
    def two_ranks(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return mpirun(2, *words, timeout_s=LIMIT_S)

    digits = ["--data", str(trainer.data), "--output", str(tmp_path), "--epochs", "1"]
    cases = [
        (two_ranks, ["--data", str(tmp_path)], f"{tmp_path}/train: no such file"),
        (two_ranks, [*digits, "--global-batch", "63"], "63 does not split over 2 ranks; use a"),
        (alone, [*digits, "--target-accuracy", "99.9"], "is below the target of 99.9 %; train"),
    ]
    for launch, options, message in cases:
        done = launch([str(SCRIPT), *options])
        lines = [line for line in done.stderr.splitlines() if "train_digits:" in line]
        assert done.returncode == 1
        assert len(lines) == 1, done.stderr
        assert message in lines[0]
        assert "Traceback" not in done.stderr


def test_a_process_without_the_interposer_has_no_counters() -> None:
    code = "from hsgd.metrics import interposer_counters as f; raise SystemExit(f() is not None)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0


def test_counters_subtract_field_by_field() -> None:
    later, earlier = Counters(9, 8, 7, 6, 5, 4.5, 3.5), Counters(1, 2, 3, 4, 5, 0.5, 1.5)
    assert later - earlier == Counters(8, 6, 4, 2, 0, 4.0, 2.0)
    with pytest.raises(TypeError):
        later - 1  # type: ignore[operator]
