"""The page of benchmarks, written from the JSON that benchmarks/ wrote: machine, date, commit,
versions, times, ratios, and the cases that are lost.

    python .ci/site/benchmark_page.py --add FILE --remark "beside other work"   keep a run
    python .ci/site/benchmark_page.py FILE ...                                  print the page

Owns the form of the page and of the kept files, docs/benchmarks/NAME.json. Never measures, and
never leaves out a case in which hsgd is behind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["keep", "page"]

FOLDER = Path(__file__).resolve().parents[2] / "docs/benchmarks"
_KEPT = ("benchmark", "command", "date", "commit", "uncommitted_changes", "host", "versions")
_UNITS = ((30, "GB"), (20, "MB"), (10, "KB"))

Document = Mapping[str, Any]


def page(paths: Sequence[Path]) -> str:
    """The page as Markdown; runs in the order of `paths`."""
    text = [
        "# Benchmarks",
        "",
        "Each section is one run of a program of `benchmarks/`, written from its JSON when this "
        "site was built. Candidates take turns within the run, and every result is compared with "
        "NumPy's. A ratio is a peer's time over that of hsgd: above 1 hsgd is faster. "
        "[What was measured](performance.md) has longer runs.",
    ]
    for path in paths:
        text += ["", *_section(json.loads(path.read_text()))]
    if not paths:
        text += ["", "No run is kept in `docs/benchmarks`."]
    return "\n".join(text) + "\n"


def _section(document: Document) -> Iterator[str]:
    meta = document["meta"]
    yield from (f"## {meta['benchmark']}", "", *_facts(meta))
    for collective, layout in sorted({_case(row) for row in document["results"]} - {("", "")}):
        rows = [row for row in document["results"] if _case(row) == (collective, layout)]
        yield from ("", f"### {collective}, {_layout(meta, layout)}: median microseconds", "")
        yield from _times(rows)
    yield from ("", "### Best peer over hsgd", "", *_ratios(document["ratios"]))
    yield from ("", "### Cases that are lost", "", *_lost(document["ratios"]))
    for failure in document.get("failures", ()):
        yield from ("", f"Failed: {failure}")


def _facts(meta: Document) -> Iterator[str]:
    host = meta["host"]
    versions = ", ".join(f"{name} {value}" for name, value in meta["versions"].items())
    also = {value for machine in meta.get("machine", {}).values() for value in _peers(machine)}
    changes = ", with changes that were not committed" if meta["uncommitted_changes"] else ""
    gib = int(str(host["memory"]).split()[0]) / 2**20
    cores = f"{host['cores_usable']} cores"
    yield f"- Machine: {host['cpu']}, {cores}, {gib:.0f} GiB, Linux {host['kernel']}"
    yield f"- Date: {meta['date'][:10]}"
    yield f"- Commit: `{meta['commit'][:12]}`{changes}"
    yield f"- Versions: {versions}"
    yield from (f"- Peers: {value}" for value in sorted(also))
    yield f"- Command: `{' '.join(map(str, meta['command']))}`"
    if meta.get("remark"):
        yield f"- Remark: {meta['remark']}"


def _peers(machine: Document) -> Iterator[str]:
    yield from (str(machine[name]) for name in ("mpi", "oneccl") if machine.get(name))


def _case(row: Document) -> tuple[str, str]:
    """Collective and layout; empty for rows of another form."""
    if {"bytes", "median_us", "label"} <= row.keys():
        return row.get("collective", "result"), row.get("layout", "")
    return "", ""


def _layout(meta: Document, name: str) -> str:
    return str(meta.get("settings", {}).get("layouts", {}).get(name, name))


def _times(rows: Sequence[Document]) -> Iterator[str]:
    sizes = sorted({row["bytes"] for row in rows})
    yield "| | " + " | ".join(map(_size, sizes)) + " |"
    yield "|---" * (len(sizes) + 1) + "|"
    for candidate in dict.fromkeys(row["candidate"] for row in rows):
        own = [row for row in rows if row["candidate"] == candidate]
        found = {row["bytes"]: _time(row["median_us"]) for row in own}
        label = f"**{own[0]['label']}**" if own[0]["kind"] == "hsgd" else own[0]["label"]
        yield f"| {label} | " + " | ".join(found.get(size, "") for size in sizes) + " |"


def _ratios(ratios: Mapping[str, float]) -> Iterator[str]:
    """A row per case, a column per last word of the keys: a size, for collectives."""
    found: dict[str, dict[str, float]] = {}
    for key, ratio in ratios.items():
        if key.startswith("vs_peer/"):
            case, _, last = key.removeprefix("vs_peer/").rpartition("/")
            found.setdefault(case, {})[last] = ratio
    columns = [*dict.fromkeys(last for row in found.values() for last in row)]
    yield "| case | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for case, row in found.items():
        cells = (f"{row[last]:.2f}" if last in row else "" for last in columns)
        yield f"| {case} | " + " | ".join(cells) + " |"


def _lost(ratios: Mapping[str, float]) -> Iterator[str]:
    lost = {case: ratio for case, ratio in ratios.items() if _is_of_peer(case) and ratio < 1}
    if not lost:
        yield "None in this run."
    for case, ratio in sorted(lost.items(), key=lambda item: item[1]):
        peer, _, what = case.partition("/")
        yield f"- {what}: {ratio:.2f} ({peer.removeprefix('vs_')})"


def _is_of_peer(case: str) -> bool:
    return not case.startswith(("vs_limit/", "vs_goal/"))


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 100 else f"{microseconds:.3g}"


def _size(nbytes: int) -> str:
    for shift, unit in _UNITS:
        if nbytes >> shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B"


def keep(path: Path, remark: str) -> Path:
    """Copy what the page needs of a run to docs/benchmarks; without the host's name."""
    document = json.loads(path.read_text())
    meta = document["meta"]
    kept = {name: meta[name] for name in _KEPT}
    kept["host"] = {name: value for name, value in meta["host"].items() if name != "name"}
    kept["settings"] = {"layouts": meta.get("settings", {}).get("layouts", {})}
    kept["machine"] = meta.get("machine", {})
    kept["command"] = _public(meta["command"])
    if remark:
        kept["remark"] = remark
    parts = {name: document.get(name, []) for name in ("results", "ratios", "failures")}
    target = FOLDER / f"{meta['benchmark']}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"meta": kept, **parts}, indent=1) + "\n")
    return target


def _public(words: Sequence[str]) -> list[str]:
    """A command without folders of the machine on which it ran."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Write the page of benchmarks from JSON.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of a benchmark")
    parser.add_argument("--add", action="store_true", help="keep FILE in docs/benchmarks")
    parser.add_argument("--remark", default="", help="what a reader has to know about the run")
    arguments = parser.parse_args()
    if arguments.add:
        for path in arguments.files:
            print(keep(path, arguments.remark))
    else:
        print(page(arguments.files), end="")


if __name__ == "__main__":
    main()
