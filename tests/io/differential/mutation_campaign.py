"""Changes bytes of HDF5 files and slab folders, which hsgd then reads, describes and converts.

    python tests/io/differential/mutation_campaign.py SEED COUNT [--random N] [--wheels FOLDER]
        [--keep FOLDER]

tries COUNT changes of the files of a seed in child processes, which may crash or hang, and prints
what was found: each is delivered right, or refused by one line, or h5py alone crashes, hangs or
takes as much memory, or it is a finding. `--random` is how many random files there are, `--wheels`
has packages of others with HDF5 files in them, and `--keep` is for files of interest.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import pickle
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import hdf5plugin  # noqa: F401, so that h5py reads what was compressed

from mutant_checks import check, fill_new_memory, good_samples, read_plainly
from mutation_corpus import Subject, subjects
from mutations import mutate

__all__ = ["Campaign"]

_TURN_S = 5  # for one change
_SPARE_BYTES = 3 << 30  # of addresses, beyond those at the start
_MOST_KIB = 1 << 20  # of memory, beyond that at the start
_TURNS = 400  # in one child
_RANDOM_FILES = 30


@dataclass
class Campaign:
    """The changes of one seed, and what became of them."""

    folder: Path
    seed: int
    keep: Path | None = None
    figures: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    corpus: list[tuple[str, Subject]] = field(default_factory=list)

    def prepare(self, random_files: int, wheels: Path | None) -> None:
        """Make the files, each in a child."""
        for name, make in subjects(self.folder, self.seed, random_files, wheels):
            made = _in_child(lambda make=make: _made(make), self.folder)
            if isinstance(made, Subject) and made.files:
                self.corpus.append((name, made))

    def run(self, count: int) -> None:
        """Try changes 0 to `count`."""
        turn = 0
        while turn < count:
            turn = self._run_child(turn, min(count, turn + _TURNS))
            print(turn, dict(self.figures), file=sys.stderr, flush=True)

    def _run_child(self, first: int, stop: int) -> int:
        """Try changes in a child until it ends; return the number of the next one."""
        at = first
        for said in _told_by(lambda tell: self._try_all(first, stop, tell), self.folder):
            if "crash" in said:
                self._restore(at)
                self._judge(at, said["crash"])
                return at + 1
            at = said["turn"] + 1
            if "finding" in said:
                self._judge(said["turn"], said["finding"])
            else:
                self.figures[said["what"]] += 1
        return at

    def _draw(self, turn: int) -> tuple[random.Random, str, Subject, Path]:
        draw = random.Random(self.seed * 1_000_003 + turn)
        name, subject = draw.choice(self.corpus)
        return draw, name, subject, draw.choice([*subject.files])

    def _restore(self, turn: int) -> None:
        _, _, subject, path = self._draw(turn)
        path.write_bytes(subject.files[path][0])
        shutil.rmtree(subject.path.parent / "converted", ignore_errors=True)

    def _changed(self, turn: int) -> tuple[random.Random, Subject, Path]:
        """Write the change of a turn."""
        draw, _, subject, path = self._draw(turn)
        path.write_bytes(mutate(*subject.files[path], draw))
        return draw, subject, path

    def _try(self, turn: int, at_start: int) -> dict[str, Any]:
        """Try one change in this process."""
        faulthandler.dump_traceback_later(_TURN_S, exit=True)
        draw, subject, path = self._changed(turn)
        _forget_peak()
        try:
            what = check(subject, path, draw)
            used = _peak_kib() - at_start
            assert used < _MOST_KIB, f"{used} KiB of memory"
            return {"turn": turn, "what": what}
        except Exception:
            return {"turn": turn, "finding": traceback.format_exc()}
        finally:
            path.write_bytes(subject.files[path][0])
            faulthandler.cancel_dump_traceback_later()

    def _try_all(self, first: int, stop: int, tell: Callable[[Any], None]) -> None:
        at_start = _peak_kib()
        for turn in range(first, stop):
            said = self._try(turn, at_start)
            tell(said)
            if "finding" in said:  # what it left behind is not for others
                return

    def _judge(self, turn: int, why: str) -> None:
        """Count a crash, hang or error as HDF5's if h5py alone does the same, or as a finding."""
        if "of memory" in why or not why.startswith("Traceback"):
            if self._plain_fails(turn):
                self.figures["HDF5 " + _kind(why)] += 1
                self._note(turn, why, "HDF5")
                return
            again = [*_told_by(lambda tell: tell(self._try(turn, _peak_kib())), self.folder)]
            self._restore(turn)
            if "what" in again[0] and len(again) == 1:
                self.figures[f"{_kind(why)} only after other files"] += 1
                self._note(turn, f"not again: {why}", "once")
                return
        self._note(turn, why, "finding")
        self.findings.append(f"seed {self.seed} turn {turn}, {self._draw(turn)[1]}: {why[-6000:]}")

    def _plain_fails(self, turn: int) -> bool:
        """Return whether h5py alone fails, with any content of the memory that HDF5 is given."""
        subject = self._draw(turn)[2]

        def read(filled: int, tell: Callable[[Any], None]) -> None:
            fill_new_memory(filled)
            at_start = _peak_kib()
            faulthandler.dump_traceback_later(_TURN_S, exit=True)
            self._changed(turn)
            _forget_peak()
            for _ in range(3):  # what one reading spoils, the next one may stumble over
                read_plainly(subject)
            tell({"used": _peak_kib() - at_start})

        for filled in (0, 0x55, 0xAA, 0xFF):
            said = [*_told_by(functools.partial(read, filled), self.folder)]
            self._restore(turn)
            if "crash" in said[-1] or said[-1]["used"] >= _MOST_KIB:
                return True
        return False

    def _note(self, turn: int, why: str, kind: str) -> None:
        if self.keep is None:
            return
        home = self.keep / f"{kind}-{self.seed}-{turn}"
        _, name, subject, path = self._draw(turn)
        self._changed(turn)
        shutil.copytree(subject.path if subject.is_slabs else path.parent, home, symlinks=True)
        (home / "why.txt").write_text(f"{name} {path}\n{why}")
        self._restore(turn)


def _kind(why: str) -> str:
    return "hung" if "Timeout" in why else "took memory" if "of memory" in why else "crashed"


def _made(make: Callable[[], Subject]) -> Subject:
    subject = make()
    subject.good = good_samples(subject)
    return subject


def _in_child(call: Callable[[], Any], folder: Path) -> Any:
    """Return what a call returns in a child; None if that crashes or raises."""
    path = folder / "returned"
    for said in _told_by(lambda tell: tell(path.write_bytes(pickle.dumps(call()))), folder):
        if "crash" in said if isinstance(said, dict) else False:
            return None
    return pickle.loads(path.read_bytes())


def _told_by(call: Callable[[Callable[[Any], None]], None], folder: Path) -> Any:
    """Yield what a call tells in a child, and {"crash": why} if that ends by itself."""
    told, tell = os.pipe()
    trace = folder / "trace"
    child = os.fork()
    if child == 0:
        _be_child(call, tell, trace)
    os.close(tell)
    with open(told, "rb") as pipe:
        yield from map(json.loads, _lines(pipe, child))
    status = os.waitpid(child, 0)[1]
    if status:
        why = f"signal {status & 127}" if status & 127 else f"exit code {status >> 8}"
        yield {"crash": f"{why}\n{trace.read_text(errors='replace')}"}


def _lines(pipe: BinaryIO, child: int) -> Any:
    """Yield lines; kill a child that says nothing for too long."""
    while True:
        if not select.select([pipe], [], [], 3 * _TURN_S)[0]:
            os.kill(child, signal.SIGKILL)
        line = pipe.readline()
        if not line.endswith(b"\n"):
            return
        yield line


def _be_child(call: Callable[[Callable[[Any], None]], None], tell: int, trace: Path) -> None:
    """Run a call with limits, and end without the end of the interpreter."""
    code = 1
    try:
        with open(trace, "wb", 0) as file:
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        faulthandler.enable(2)
        with open("/proc/self/statm") as statm:
            limit = int(statm.read().split()[0]) * resource.getpagesize() + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        call(lambda said: _write_line(tell, said))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _write_line(pipe: int, said: Any) -> None:
    left = memoryview(json.dumps(said).encode() + b"\n")
    while left:
        left = left[os.write(pipe, left) :]


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--random", type=int, default=_RANDOM_FILES)
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        campaign = Campaign(Path(name), asked.seed, asked.keep)
        campaign.prepare(asked.random, asked.wheels)
        began = time.monotonic()
        campaign.run(asked.count)
        took = time.monotonic() - began
    print(*campaign.findings, sep="\n\n")
    print(
        json.dumps(campaign.figures),
        f"{len(campaign.findings)} findings, {len(campaign.corpus)} files, {took:.0f} s",
    )
    return int(bool(campaign.findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
