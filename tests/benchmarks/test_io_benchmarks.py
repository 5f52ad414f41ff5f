"""The benchmark of the reader runs, checks its arguments, and writes what it promises."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import io_throughput
import shuffle_quality
from images import image_loaders
from studies import io_files, io_packages
from studies.io_candidates import CANDIDATES
from toolkit.processes import run_marked
from workers import io_ranks, remote_reader

__all__: list[str] = []

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_run_writes_facts_rows_ratios_a_table_and_a_plot(tmp_path: Path) -> None:
    file, png = tmp_path / "a.json", tmp_path / "a.png"
    names = ["hsgd", "hsgd-order", "h5py-fancy", "h5py-slabs", "preadv", "memmap"]
    names += ["hsgd-packed", "hsgd-packed-order", "h5py-packed-fancy", "h5py-packed-slabs"]
    words = ["--quick", "--sizes", "3KB", "--total", "4", "--rounds", "1", "--np", "1", "2"]
    words += ["--candidates", *names]
    words += ["--json", str(file), "--png", str(png), "--folder", str(tmp_path / "data")]
    program = str(ROOT / "benchmarks" / "io_throughput.py")
    done = run_marked([sys.executable, program, *words], dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    rows = {(row["candidate"], row["ranks"]): row for row in document["results"]}
    assert rows.keys() == {(name, ranks) for name in names for ranks in (1, 2)}
    assert all(row["samples_per_s"] > 0 and row["bytes"] == 3072 for row in rows.values())
    expected = {
        f"vs_{other}/warm/{order}/3KB/np{ranks}"
        for order, peer in (
            ("block", "h5py-fancy"),
            ("block", "memmap"),
            ("in-order", "h5py-slabs"),
        )
        for other in (peer, "peer", "limit")
        for ranks in (1, 2)
    }
    for ranks in (1, 2):
        expected |= {
            f"vs_{what}/warm/{order}-packed/3KB/np{ranks}"
            for order, peer in (("block", "fancy"), ("in-order", "slabs"))
            for what in (f"h5py-packed-{peer}", "peer")
        }
        expected.add(f"vs_half_a_second/warm/3KB/np{ranks}")
    assert document["ratios"].keys() == expected
    assert [row["ranks"] for row in document["openings"]] == [1, 2]
    assert "hsgd.io in order" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ["--quick", "--sizes", "3KB", "--total", "4", "--rounds", "100000", "--budget", "0.1"]
    words += ["--candidates", "hsgd", "preadv", "--json", str(file)]
    program = str(ROOT / "benchmarks" / "io_throughput.py")
    with subprocess.Popen(
        [sys.executable, program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        try:
            report = next(line for line in process.stderr if "turn 2 of" in line)
            assert report == "warm, samples of 3KB, 1 rank(s): turn 2 of 100000\n"
            process.terminate()
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 143, err
    assert "interrupted; this is what had been measured" in err
    document = json.loads(file.read_text())
    assert document["meta"]["interrupted"] is True
    assert {row["candidate"] for row in document["results"]} == {"hsgd", "preadv"}
    assert all(len(row["rates"]) >= 2 for row in document["results"])
    assert "preadv" in out
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_models_side_by_side_learn_what_each_would_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    image = torch.randn(3, 20, 5, generator=draw)
    label = torch.randint(0, 4, (3, 20), generator=draw)
    together = shuffle_quality.Models([7, 8, 9], 5, 4)
    torch.manual_seed(8)
    hidden = shuffle_quality.HIDDEN
    alone = torch.nn.Sequential(
        torch.nn.Linear(5, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 4)
    )
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for low in (0, 8, 16):  # the last batch is smaller
        part = slice(low, low + 8)
        together.step(image[:, part], label[:, part])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(alone(image[1, part]), label[1, part]).backward()
        optimizer.step()
    torch.testing.assert_close(together(image)[1], alone(image[1]))
    right = (alone(image[1]).argmax(1) == label[1]).double().mean()
    assert together.accuracies(image[1], label[1])[1] == pytest.approx(100 * float(right))
    shares = torch.tensor([[0, 1, 2, 3], [1, 1, 1, 1], [0, 0, 1, 1]])
    assert shuffle_quality.entropies(shares, 4).tolist() == pytest.approx([2, 0, 1])


def test_seeds_that_were_trained_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(found: Any, folder: Path, seeds: Any, epochs: int) -> None:
        if seeds.start == 50:
            sys.exit(143)
        for values in found.values.values():
            values += [(90.0 + seed, 3.0) for seed in seeds]

    monkeypatch.setattr(shuffle_quality, "extend", extend)
    file = tmp_path / "a.json"
    words = ["--seeds", "60", "--data", "digits", "--json", str(file)]
    assert shuffle_quality.main(words) == 143
    document = json.loads(file.read_text())
    assert document["meta"]["interrupted"] is True
    assert {row["seeds"] for row in document["results"]} == {50}


@pytest.mark.parametrize("words", [["--candidates", "nobody"], ["--sizes", "3 apples"]])
def test_bad_arguments_are_an_error_of_use(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        io_throughput.main(words)
    assert caught.value.code == 2
    assert "nobody" in (text := capsys.readouterr().err) or "apples" in text


@pytest.mark.bench
def test_slabs_of_another_node_are_measured_against_the_files(
    virtual_nodes: None, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    program = str(ROOT / "benchmarks" / "io_throughput.py")
    words = ["--exchange", "--total", "16", "--turns", "1", "--rate", "1gbit", "--no-cold"]
    words += ["--json", str(file)]
    done = run_marked([sys.executable, program, *words], dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["ratios"].keys() == {"vs_files/2x1@1gbit", "vs_link/2x1@1gbit"}
    comm, files = document["results"]
    assert comm["exchanged_bytes"] > 0 == comm["read_bytes"]
    assert files["read_bytes"] > 0 == files["exchanged_bytes"]


def test_chunks_are_measured_against_h5py_and_the_decoders(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ["--chunks", "--total", "4", "--rounds", "1"]
    program = str(ROOT / "benchmarks" / "io_throughput.py")
    command = [sys.executable, program, *words, "--json", str(file)]
    done = run_marked(command, dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    ratios = json.loads(file.read_text())["ratios"]
    for kind in ("gzip-auto", "shuffle-gzip", "lzf-auto", "bitshuffle"):
        assert {f"vs_limit/{kind}/block/b64", f"vs_peer/{kind}/in-order/b64"} <= ratios.keys()


def test_records_are_measured_against_peers_and_preadv(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    words = ["--records", "--total", "4", "--rounds", "1", "--budget", "0.2"]
    program = str(ROOT / "benchmarks" / "io_throughput.py")
    command = [sys.executable, program, *words, "--json", str(file)]
    done = run_marked(command, dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["failures"] == []
    cases = [f"{kind}/b{b}" for kind, b in (("tokens", 64), ("tokens", 512), ("table", 4096))]
    orders = [case.replace("/", f"/{order}/") for case in cases for order in ("block", "in-order")]
    assert document["ratios"].keys() == {
        f"vs_{what}/{case}" for what in ("peer", "limit") for case in orders
    }


@pytest.mark.bench
def test_shuffle_quality_pairs_orders_and_reports_entropy(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    program = str(ROOT / "benchmarks" / "shuffle_quality.py")
    words = ["--seeds", "1", "--epochs", "1", "--json", str(file)]
    done = run_marked([sys.executable, program, *words], dict(os.environ), 200)
    assert done.returncode == 0, done.stderr
    ratios = json.loads(file.read_text())["ratios"]
    cases = {f"{d}/{o}" for d in ("digits", "synthetic") for o in shuffle_quality.ORDERS}
    kinds = ("accuracy", "half_width", "entropy")
    assert ratios.keys() == {f"{kind}/{case}" for kind in kinds for case in cases}
    for name in ("digits", "synthetic"):
        assert ratios[f"entropy/{name}/block"] > 0.9  # batches are as mixed as with full
        assert ratios[f"entropy/{name}/sorted"] < 0.3


def test_each_candidate_reads_files_that_are_written_with_packages_that_are_declared() -> None:
    names = [candidate.name for candidate in CANDIDATES]
    assert len(set(names)) == len(names)
    needed = {name for candidate in CANDIDATES for name in candidate.needs()}
    needed |= {name for candidate in image_loaders.CANDIDATES for name in candidate.needs()}
    needed |= set(remote_reader.FETCHED)
    assert needed == io_packages.PACKAGES.keys()
    peers = {"pyfive", "h5coro", "litdata", "spdl", "grain", "tensorstore"}
    pinned = {
        name for name in peers if "==" in "".join(io_packages.PACKAGES[name].requirements[:1])
    }
    assert pinned == peers
    for name in peers:  # each one shuffled and in order
        orders = {c.order for c in CANDIDATES if name in c.needs()}
        assert orders == {"block", "in-order"}, name


def test_a_peer_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HSGD_CACHE", str(tmp_path))
    nobody = io_packages.Package(("no_such_package",), ("no-such-package==1",))
    nowhere = io_packages.Package(("no_such_module",))
    monkeypatch.setattr(io_packages, "PACKAGES", {"nobody": nobody, "nowhere": nowhere})
    io_packages.reason_against.cache_clear()
    read = next(c for c in CANDIDATES if c.name == "memmap")
    chosen = [
        read,
        *(dataclasses.replace(read, packages=(name,)) for name in ("nobody", "nowhere")),
    ]
    left_out: dict[str, str] = {}
    assert io_packages.usable(chosen, False, left_out) == [read]
    assert left_out == {
        "nobody": "it is not there yet; --peers downloads it",
        "nowhere": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert "left out: nobody (it is not there yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("order", "rows", "message"),
    [
        ("block", [2, 0, 3, 1], ""),
        ("in-order", [1, 2, 3], ""),
        ("block", [2, 0, 2], "of 3 rows 2 are different ones"),
        ("in-order", [0, 2, 3], "rows are not in-order: they begin with [0, 2, 3]"),
        ("block", [0, 1, 2], "rows are not block: they begin with [0, 1, 2]"),
        ("block", [], "of 0 rows 0 are different ones"),
    ],
)
def test_rows_are_compared_with_the_file(
    order: str, rows: list[int], message: str, tmp_path: Path
) -> None:
    data = io_files.make(tmp_path, 16, 64, set())
    with h5py.File(tmp_path / "one.h5") as file:
        stored = torch.from_numpy(file["data"][:4])
    batches = [stored[row : row + 1] for row in rows]
    if not message:
        io_ranks.check(iter(batches), order, data)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        io_ranks.check(iter(batches), order, data)


def test_a_row_with_another_byte_is_found(tmp_path: Path) -> None:
    data = io_files.make(tmp_path, 16, 64, set())
    with h5py.File(tmp_path / "one.h5") as file:
        stored = torch.from_numpy(file["data"][:4])
    stored[3, 9] += 1
    with pytest.raises(ValueError, match="row 3 is not row 3 of the file"):
        io_ranks.check(iter([stored]), "in-order", data)
