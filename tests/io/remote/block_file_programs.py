"""A process that writes, reads and removes blocks of a folder until it is killed.

    block_file_programs.py FOLDER LIMIT SEED

Prints a line when it has begun, and another, and ends, when it reads anything wrong.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time

from hsgd.io.remote.block_files import BlockFiles, DiskOptions

__all__ = ["BLOCK_BYTES", "KEYS", "content_of", "key_of", "open_files"]

BLOCK_BYTES = 200_000  # four pages
KEYS = 40


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def open_files(folder: str, limit: int) -> BlockFiles:
    """Files of which all may be removed."""
    return BlockFiles(DiskOptions(folder, limit, since_ns=2 * time.time_ns()))


def main(folder: str, limit: int, seed: int) -> None:
    chance, files = random.Random(seed), open_files(folder, limit)
    contents = [content_of(number) for number in range(KEYS)]
    out = bytearray(BLOCK_BYTES)
    print("begun", flush=True)
    while True:
        number = chance.randrange(KEYS)
        found = files.read(key_of(number), BLOCK_BYTES, 0, memoryview(out))
        if found == "damaged" or (found == "here" and out != contents[number]):
            print(f"block {number} is {found} and wrong", flush=True)
            return
        if found == "missing":
            files.write(key_of(number), memoryview(contents[number]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
