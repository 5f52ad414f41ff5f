"""Compares the loader, `hsgd data convert` and `verify` with h5py on random HDF5 files.

    python tests/io/differential/differential_campaign.py FIRST COUNT

reads the files of COUNT seeds in child processes, which may crash or hang, and prints what was
found: each file is delivered as h5py reads it, or refused by one true line, or it is a finding.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsgd.io import PartitionedLoader, ReadOptions, convert_to_slabs

from h5py_oracle import Truth, rows_of, truth_of
from hsgd.errors import DataError
from hsgd.tools import cli
from random_datasets import Draw
from random_files import random_file

__all__ = ["run_seeds"]

_SEED_S = 60  # for one seed
_MOST_KIB = 1 << 20  # memory beyond that at the start
_CONVERT = "only one axis, of numbers|first dimension is 0|every field has an axis of length 0"


def _rows(batches: Iterable[dict[str, Any]], names: Sequence[str]) -> list[tuple[Any, ...]]:
    return [row for batch in batches for row in rows_of({name: batch[name] for name in names})]


def _check_order(truth: Truth, names: Sequence[str], draw: Draw, **options: Any) -> None:
    """Compare what all ranks read in one order with what h5py reads."""
    least = min((len(truth.values[name]) for name in names if name in truth.values), default=1)
    size, batch = max(1, min(draw.randint(1, 3), least)), draw.randint(1, 9)
    shuffle = draw.choice(["none", "none", "block", "full", "slabs"])
    near = {"local_size": size} if shuffle == "slabs" else {}
    read = ReadOptions(
        block_bytes=draw.choice([64, 4 << 20]),
        window_bytes=draw.choice([256, 64 << 20]),
        threads=draw.randint(1, 3),
        timeout_s=_SEED_S / 2,
        fill_unwritten=options.pop("fill_unwritten"),
    )
    if options.pop("mapped") and draw.chance(0.3):
        read, shuffle, near = replace(read, mapped=True), "none", {}
    elif draw.chance(0.2):
        read = replace(read, direct=True)
    found = []
    for rank in range(size):
        asked = {"batch_size": batch, "rank": rank, "world_size": size, "shuffle": shuffle}
        with PartitionedLoader(
            **asked, seed=7, pad=False, as_numpy=True, read=read, **near, **options
        ) as loader:
            given = {spec.name: (spec.dtype, spec.shape) for spec in loader.fields}
            assert given.keys() == set(names), f"fields {[*given]}, h5py has {names}"
            for name in given.keys() & truth.values.keys():
                values = truth.values[name]
                assert given[name] == (values.dtype, values.shape[1:]), (name, given[name])
            found += _rows(loader, names)
    assert not {*names} & truth.errors.keys(), f"h5py cannot read {truth.errors}"
    expected = rows_of({name: truth.values[name] for name in names})
    _compare(found, expected, in_order=shuffle == "none")


def _compare(found: list[Any], expected: list[Any], *, in_order: bool) -> None:
    if not in_order:
        found, expected = sorted(found), sorted(expected)
    assert len(found) == len(expected), f"{len(found)} samples, h5py has {len(expected)}"
    for at, pair in enumerate(zip(found, expected, strict=True)):
        for field, (one, other) in enumerate(zip(*pair, strict=True)):
            assert one == other, f"sample {at}, field {field}: {one!r}, h5py has {other!r}"


def _read(
    truth: Truth, names: list[str] | None, draw: Draw, *, fill: bool, group: str | None = None
) -> str:
    """Read some or all fields; return the line of a refusal, "" if all was delivered."""
    asked = [*truth.values, *truth.errors] if names is None else names
    options: dict[str, Any] = {"path": truth.made.path, "fields": names, "fill_unwritten": fill}
    options["group"] = group
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            _check_order(truth, asked, draw, **options, mapped=False)
            _check_order(truth, asked, draw, **options, mapped=True)
        for each in seen:
            assert len(str(each.message).splitlines()) == 1, f"warning {each.message}"
    except DataError as error:
        truth.check_refusal(str(error), names)
        return str(error)
    except ValueError as error:
        if "the dataset is empty" in str(error) and not truth.lengths[asked[0]]:
            return str(error)
        if not str(error).startswith("mapped=True: "):  # after another order was right
            raise
    return ""


def _convert(truth: Truth, names: list[str] | None, draw: Draw, target: Path) -> str:
    """Convert and read the slabs; return the line of a refusal, "" if all was delivered."""
    permute = draw.chance(0.5)
    asked = [*truth.values, *truth.errors] if names is None else names
    try:
        convert_to_slabs(
            truth.made.path,
            target,
            fields=names,
            permute=permute,
            num_slabs=draw.choice([1, None]),
            compress=draw.choice([None, None, "gzip", "lz4", "zstd"]),
            fill_unwritten=draw.chance(0.5),
        )
    except DataError as error:
        if not re.search(_CONVERT, str(error)):
            truth.check_refusal(str(error), names)
        return str(error)
    read = ReadOptions(verify=True)
    with PartitionedLoader(target, 5, 0, 1, "none", as_numpy=True, read=read) as loader:
        found = _rows(loader, asked)
    expected = rows_of({name: truth.values[name] for name in asked})
    _compare(found, expected, in_order=not permute)
    for words in (["verify", str(target), "--quiet"], ["info", str(target)]):
        code, lines = _command(words)
        assert code == 0, (words, lines)
    return ""


def _command(words: Sequence[str]) -> tuple[int, list[str]]:
    """Run `hsgd data`; return the exit code and the lines of errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["data", *words])
    lines = [line for line in err.getvalue().splitlines() if "arning" not in line]
    assert code in (0, 1) and len(lines) <= 1, (words, code, lines)
    return code, lines


def _check_seed(seed: int, folder: Path) -> list[str]:
    """Read the file of a seed in several ways; return the refusals, "" for what was delivered."""
    truth, draw = truth_of(random_file(seed, folder)), Draw(seed + (1 << 32))
    print(json.dumps({"begun": seed}), flush=True)
    told = [_read(truth, None, draw, fill=False)]
    assert told[0] or not truth.has_gaps(), "rows that were never written were delivered"
    if told[0]:
        if names := truth.alike(truth.numeric()):
            told.append(_read(truth, names, draw, fill=True))
        if told[-1] and (names := truth.alike(truth.sound())):
            line = _read(truth, names, draw, fill=False)
            assert not line or "the dataset is empty" in line, f"{names} are sound: {line}"
            told.append(line)
    for group in sorted({name.split("/")[0] for name in truth.lengths if "/" in name}):
        told.append(_read(truth.inside(group), None, draw, fill=True, group=group))
    if seed % 4 == 0:
        names = truth.alike(truth.convertible()) if told[0] and draw.chance(0.7) else None
        if names != []:
            told.append(_convert(truth, names, draw, folder / "slabs"))
        _command(["info", str(truth.made.path)])
    return told


def _run_here(first: int, count: int) -> None:
    """Print a line of JSON for each seed; a seed that hangs ends the process."""
    warnings.simplefilter("ignore")
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(first, first + count):
        faulthandler.dump_traceback_later(_SEED_S, exit=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                line: dict[str, Any] = {"told": _check_seed(seed, folder)}
                used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start
                assert used < _MOST_KIB, f"{used} KiB of memory"
            except Exception:
                line = {"finding": traceback.format_exc(), "file": _described(seed, folder)}
        print(json.dumps({"seed": seed, **line}), flush=True)


def _described(seed: int, folder: Path) -> str:
    (folder / "again").mkdir()
    return str(random_file(seed, folder / "again"))


def run_seeds(first: int, count: int) -> tuple[Counter[str], list[str]]:
    """Return how often files were delivered or refused, and the findings, each with its seed."""
    figures: Counter[str] = Counter()
    findings: list[str] = []
    seed, stop = first, first + count
    while seed < stop:
        words = [sys.executable, __file__, "--here", str(seed), str(stop - seed)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        begun = -1
        # Filters print lines of their own.
        for one in map(json.loads, re.findall(r"^\{.*\}$", done.stdout, re.MULTILINE)):
            if "begun" in one:
                begun = one["begun"]
                continue
            seed = one["seed"] + 1
            if "finding" in one:
                findings.append(f"seed {one['seed']}: {one['finding']}\n{one['file']}")
            else:
                figures.update("refused" if told else "delivered" for told in one["told"])
        if done.returncode and begun < seed:
            figures["HDF5 crashed"] += 1  # when the file was written, or read by h5py alone
            seed += 1
        elif done.returncode:
            findings.append(f"seed {seed}: exit code {done.returncode}: {done.stderr[-4000:]}")
            seed += 1
    return figures, findings


def main(words: Sequence[str]) -> int:
    if words[0] == "--here":
        _run_here(*map(int, words[1:]))
        return 0
    began = time.monotonic()
    figures, findings = run_seeds(*map(int, words))
    print(*findings, sep="\n\n")
    print(dict(figures), f"{len(findings)} findings, {time.monotonic() - began:.0f} s")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
