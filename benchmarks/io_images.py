"""How fast decoded images reach the training loop: hsgd.io, its peers, and decoding alone.

Candidates are in images/image_loaders.py, the files in images/image_files.py; each candidate is a
process of its own (images/image_reader.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import report
from harness.stopping import keeping
from images.image_files import make_images
from images.image_loaders import CANDIDATES
from images.image_reader import read
from studies.io_packages import Candidate, usable
from workers.staying_processes import StayingProcesses

__all__ = ["main"]

CASES = {
    "random": "a random part of each image, mirrored or not, at 224 x 224",
    "center": "the middle of each image at 224 x 224",
}
EPILOG = """\
Images are JPEGs of about 150 KB and 500 x 375 to 640 x 480 pixels, made from photos that
scikit-learn and matplotlib bring along; hsgd.io reads what `hsgd data convert --encoded` makes of
them. All lie in the page cache. Batches are of 64, uint8. Everyone has two threads or, DataLoader
and those that live in it, two processes, which stay. A turn is one epoch; candidates take turns,
--rounds times after one that does not count, and medians count, of images per second and of
processor seconds per image, of all threads and processes. Before the first turn each one's images
are counted, and some are compared with Pillow's.

Equal decode work: all but torchvision reduce an image by 2, 4 or 8 while it is decoded, as far as
the part that is taken stays as large as what is wanted. The limit "decoding alone" are two threads
that call simplejpeg (libjpeg-turbo) on images in memory, whole images, each as far reduced as
hsgd.io's in that epoch, and drop the pixels; "decoding, scaling" also scales the part as hsgd.io
does.

Ratios in the JSON, within this run, above 1 is ahead: vs_peer/CASE is the seconds of the fastest
peer / those of hsgd.io, vs_limit/CASE those of decoding alone, vs_limit-scaled/CASE those of
decoding and scaling, vs_NAME/CASE those of one peer; cpu/... is the same of processor time.
flat_memory/CASE is hsgd.io's resident memory after 5 epochs / after --memory-epochs.

Peers that are not there are installed once, into hsgd's cache: LitData, SPDL, Grain, OpenCV and
torchvision, which needs a torch with CUDA. WebDataset and Streaming must be in the environment.
Those that cannot be used are named, with the reason. SPDL's own decoder needs libraries of FFmpeg;
here its threads call simplejpeg.

examples:
  python benchmarks/io_images.py --quick
  python benchmarks/io_images.py --json images.json --png images.png
  python benchmarks/io_images.py --case random --candidates hsgd decode spdl loader-opencv
"""


@dataclass
class Found(report.Measured):
    """What was measured so far."""

    turns: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=dict)
    memory: dict[str, list[float]] = field(default_factory=dict)


def measure(chosen: Sequence[Candidate], options: argparse.Namespace, found: Found) -> None:
    """All turns into `found`, also when they are broken off."""
    readers: dict[str, StayingProcesses] = {}
    with tempfile.TemporaryDirectory(prefix="hsgd-images-") as temporary:
        folder = options.folder or Path(temporary)
        images = make_images(folder, options.images, {candidate.files for candidate in chosen})
        try:
            for case in options.case:
                for turn in range(options.rounds + 1):
                    for candidate in chosen:
                        _turn(candidate, readers, images, case, turn, found)
                    print(f"{case}: turn {turn} of {options.rounds}", file=sys.stderr, flush=True)
                if "hsgd" in readers:
                    few = make_images(folder / "few", min(options.images, 64), {"slabs"})
                    told = readers["hsgd"].ask("memory", few, case, options.memory_epochs)
                    found.memory[case] = told[0]["rss_mb"]
        finally:
            for reader in readers.values():
                reader.close()


def _turn(
    candidate: Candidate,
    readers: dict[str, StayingProcesses],
    images: Any,
    case: str,
    turn: int,
    found: Found,
) -> None:
    """One epoch of one candidate; one that failed is not asked again in this case."""
    name = candidate.name
    if turn and (case, name) not in found.turns:
        return
    try:
        if name not in readers:
            readers[name] = StayingProcesses(read, [(name,)])
        if turn == 0:
            readers[name].ask("check", images, case)
        (one,) = readers[name].ask("epoch", images, case, turn)
    except (RuntimeError, TimeoutError, EOFError, OSError) as error:
        found.failures.append(f"{candidate.label}, {case}: {error}")
        found.turns.pop((case, name), None)
        if name in readers:
            readers.pop(name).close()
        return
    found.turns.setdefault((case, name), []).extend([one] if turn else [])


def rows_of(chosen: Sequence[Candidate], images: int, found: Found) -> list[dict[str, Any]]:
    """A row of results for each candidate and case."""
    rows = []
    for case in CASES:
        for candidate in chosen:
            turns = found.turns.get((case, candidate.name))
            if not turns:
                continue
            seconds = statistics.median(turn["seconds"] for turn in turns)
            cpu_s = statistics.median(turn["cpu_s"] for turn in turns)
            rows.append(
                {
                    "candidate": candidate.name,
                    "label": candidate.label,
                    "kind": candidate.kind,
                    "case": case,
                    "layout": "np1",
                    "images_per_s": round(images / seconds, 1),
                    "cpu_ms_per_image": round(1e3 * cpu_s / images, 4),
                    "images_per_cpu_s": round(images / cpu_s, 1),
                    "seconds": [round(turn["seconds"], 4) for turn in turns],
                    "cpu_s": [round(turn["cpu_s"], 3) for turn in turns],
                }
            )
    return rows


def ratios(
    rows: Sequence[Mapping[str, Any]], memory: Mapping[str, list[float]]
) -> dict[str, float]:
    """Costs of the others over those of hsgd.io."""
    found = {}
    for own in [row for row in rows if row["kind"] == "hsgd"]:
        case = own["case"]
        others = [row for row in rows if row["case"] == case and row is not own]
        peers = [row for row in others if row["kind"] == "peer"]
        named = {f"vs_{row['candidate']}": [row] for row in peers} | {"vs_peer": peers}
        for name, limit in (("vs_limit", "decode"), ("vs_limit-scaled", "decode-scale")):
            named[name] = [row for row in others if row["candidate"] == limit]
        for name, same in named.items():
            if same:
                best = max(row["images_per_s"] for row in same)
                least = min(row["cpu_ms_per_image"] for row in same)
                found[f"{name}/{case}"] = round(own["images_per_s"] / best, 3)
                found[f"cpu/{name}/{case}"] = round(least / own["cpu_ms_per_image"], 3)
    for case, values in memory.items():
        found[f"flat_memory/{case}"] = round(values[0] / values[-1], 3)
    return found


def document(
    chosen: Sequence[Candidate], options: argparse.Namespace, found: Found, stopped: int
) -> dict[str, Any]:
    """Everything, as it goes into the JSON."""
    rows = rows_of(chosen, options.images, found)
    settings = {
        "images": options.images,
        "rounds": options.rounds,
        "memory_epochs": options.memory_epochs,
        "layouts": {"np1": "one rank"},
    }
    return report.document(
        *("io_images", settings, ratios(rows, found.memory), rows, found.failures, stopped),
        left_out=found.left_out,
        memory={case: {"rss_mb": values} for case, values in found.memory.items()},
    )


def tables(doc: Mapping[str, Any]) -> str:
    """The document as text, a table for each case."""
    columns: dict[str, Any] = {
        "candidate": "label",
        "images/s": lambda row: f"{row['images_per_s']:,.0f}",
        "CPU ms/image": lambda row: f"{row['cpu_ms_per_image']:.3f}",
        "images/CPU s": lambda row: f"{row['images_per_cpu_s']:,.0f}",
    }
    parts = []
    for (case,), rows in report.grouped(doc["results"], "case").items():
        shown = ("vs_peer", "vs_limit", "vs_limit-scaled", "flat_memory")
        keys = [f"{cpu}{name}/{case}" for name in shown for cpu in ("", "cpu/")]
        values = [f"{key}: {doc['ratios'][key]:g}" for key in keys if key in doc["ratios"]]
        parts += [CASES[case], report.rows_table(rows, columns), "  ".join(values)]
    for case, memory in doc["memory"].items():
        kept = memory["rss_mb"]
        parts.append(
            f"{case}: {kept[0]:.1f} MB resident after the first epochs, {kept[-1]:.1f} MB "
            f"{len(kept) - 1} epochs later, at most {max(kept):.1f}"
        )
    return "\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = report.argument_parser(
        *("Encoded images from files to the training loop.", EPILOG),
        quick="192 images, 2 rounds, few peers: under a minute",
        png="plot there",
    )
    add = parser.add_argument
    add("--case", nargs="+", choices=CASES, default=list(CASES), help="default: both")
    add("--images", type=int, help="how many (default 1000)")
    add("--rounds", type=int, help="turns of each candidate (default 9)")
    add("--memory-epochs", type=int, default=50, help="of 64 images, for memory (default 50)")
    names = ", ".join(candidate.name for candidate in CANDIDATES)
    add("--candidates", nargs="+", metavar="NAME", help=f"of {names}")
    add("--peers", action="store_true", help="download peers that are not there yet")
    add("--folder", type=Path, help="where images are made and kept; default: a temporary one")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when nothing was measured."""
    parser = _parser()
    options = report.parse(parser, argv)
    options.images = options.images or (192 if options.quick else 1000)
    options.rounds = options.rounds or (2 if options.quick else 9)
    unknown = set(options.candidates or ()) - {candidate.name for candidate in CANDIDATES}
    if unknown:
        parser.error(f"--candidates: nobody is called {', '.join(sorted(unknown))}")
    names = options.candidates or [c.name for c in CANDIDATES if not options.quick or c.quick]
    found = Found()
    chosen = [candidate for candidate in CANDIDATES if candidate.name in names]
    with keeping() as stopped:
        chosen = usable(chosen, options.peers, found.left_out)
        measure(chosen, options, found)
    doc = document(chosen, options, found, stopped.code)
    report.publish(options, doc, tables(doc), plot)
    return stopped.code or (0 if doc["results"] else 1)


def plot(doc: Mapping[str, Any], target: Path) -> None:
    """Bars of both rates, a column for each case."""
    heights = {
        "images per second": lambda row: row["images_per_s"],
        "images per processor second": lambda row: row["images_per_cpu_s"],
    }
    report.plot_bars(doc["results"], target, heights)


if __name__ == "__main__":
    sys.exit(main())
