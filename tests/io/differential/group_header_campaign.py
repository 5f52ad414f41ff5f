"""group_header_campaign.py SEED COUNT: changed files with groups, by h5py alone and by headers.

Prints a line for each file of which the two say something else, and figures as JSON: files with a
map, with an error, and those that HDF5 does not survive.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from group_files import outcome, random_group_file
from mutation_corpus import values_in
from mutations import layout_of, mutate

__all__: list[str] = []

_PER_FILE = 50


def _judge(path: Path) -> str:
    """Return what a child says of a file: it may not survive HDF5."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        plain = outcome(path, by_headers=False)
        os.write(writing, b"known ")
        found = outcome(path, by_headers=True)
        what = "map" if plain.startswith("DataMap") else "error"
        os.write(writing, (what if found == plain else f"{plain}\n  {found}").encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said.removeprefix("known ") or ("crash of the headers" if said else "crash of h5py")


def main(seed: int, count: int) -> int:
    figures = Counter({"map": 0, "error": 0, "crash of h5py": 0})
    odd = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.h5")
        for turn in range(count):
            draw = random.Random(f"{seed} {turn}")
            if turn % _PER_FILE == 0:
                random_group_file(path, seed * count + turn, most=5)
                content = path.read_bytes()
                layout = layout_of(content, values_in(path))
            path.write_bytes(mutate(content, layout, draw))
            said = _judge(path)
            if said in figures:
                figures[said] += 1
            else:
                odd += 1
                print(f"turn {turn}: {said}", flush=True)
    print(json.dumps(figures))
    return odd


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
