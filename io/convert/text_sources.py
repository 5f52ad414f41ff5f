"""Sources of UTF-8 documents: text files, lines of JSON, and token ids made of text."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsgd.errors import DataError

from ..format.opening import first_line
from ..format.ragged import Block, Ragged, ragged_of
from ..format.slab_folder import FieldSpec
from ..needed_for import needed_for
from .source import Source, read_file, reading

__all__ = ["TEXT_SUFFIXES", "TextSource", "TokenizedSource", "Tokenizer", "load_tokenizer"]

TEXT_SUFFIXES = frozenset({".txt", ".jsonl"})
TEXT = "text"
TOKENS = "tokens"
_BYTES = np.dtype(np.uint8)
_DOCUMENTS = 64  # per call of a tokenizer

# From texts to the token ids of each.
Tokenizer = Callable[[list[str]], Sequence[Sequence[int]]]


class TextSource(Source):
    """Documents as field text: lines or whole files of .txt, or lines of .jsonl; UTF-8 bytes.

    A .txt file has a document on each line; with `whole` each file is one document. A .jsonl file
    has one in the "text" of each line that is not blank.
    """

    def __init__(self, paths: Sequence[Path], fields: Sequence[str] | None, *, whole: bool) -> None:
        if fields is not None and list(fields) != [TEXT]:
            raise ValueError(f"no field {', '.join(fields)}; there is: {TEXT}")
        self.files, self._whole = list(paths), whole
        self.specs = (FieldSpec(TEXT, (), _BYTES, ragged=True),)
        self.text_fields = frozenset({TEXT})
        self.num_samples = sum(1 for _ in self._lines()) if not whole else len(self.files)

    def lengths(self, spec: FieldSpec) -> NDArray[np.int64] | None:
        if not self._whole:
            return None
        return np.array([path.stat().st_size for path in self.files], np.int64)

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        held: list[NDArray[Any]] = []
        for number, document in enumerate(self._documents()):
            if number < start:
                continue
            held.append(np.frombuffer(document, _BYTES))
            if len(held) == rows:
                yield ragged_of(held, (), _BYTES)
                held = []
        if held:
            yield ragged_of(held, (), _BYTES)

    def _documents(self) -> Iterator[bytes]:
        if self._whole:
            yield from map(read_file, self.files)
            return
        for path, number, line in self._lines():
            yield _text_of(line, f"{path}:{number}") if path.suffix == ".jsonl" else line

    def _lines(self) -> Iterator[tuple[Path, int, bytes]]:
        for path in self.files:
            with reading(path), open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    text = line.rstrip(b"\r\n")
                    if text.strip() or path.suffix != ".jsonl":
                        yield path, number, text


class TokenizedSource(Source):
    """Another source, with the field tokens in place of its text; `name` identifies `tokenizer`."""

    def __init__(
        self, source: Source, tokenizer: Tokenizer, dtype: np.dtype[Any], name: str, where: str
    ) -> None:
        texts = [spec for spec in source.specs if spec.name in source.text_fields]
        if len(texts) != 1:
            found = ", ".join(spec.name for spec in texts) or "none"
            raise ValueError(
                f"a tokenizer needs one field of text; {where} has: {found}; choose one with "
                "--fields"
            )
        if any(spec.name == TOKENS and spec is not texts[0] for spec in source.specs):
            raise ValueError(f"{where} has a field {TOKENS!r} already; choose others with --fields")
        self._source, self._text, self._tokenizer = source, texts[0], tokenizer
        self._name, self._where = name, where
        self._tokens = FieldSpec(TOKENS, (), dtype, ragged=True)
        self.specs = tuple(self._tokens if s is texts[0] else s for s in source.specs)
        self.num_samples = source.num_samples

    def identity(self) -> str:
        """Identify the source, and the tokenizer by its name and its tokens of some documents."""
        first = next(iter(self.stream(self._tokens, _DOCUMENTS)), None)
        made = first.values.tobytes() if isinstance(first, Ragged) else b""
        return f"{self._source.identity()} {self._name} {hashlib.sha256(made).hexdigest()}"

    def stream(self, spec: FieldSpec, rows: int, start: int = 0) -> Iterator[Block]:
        if spec is not self._tokens and spec.name != TOKENS:
            yield from self._source.stream(spec, rows, start)
            return
        done = start
        for block in self._source.stream(self._text, min(rows, _DOCUMENTS), start):
            assert isinstance(block, Ragged)
            texts = [self._decoded(each, done + number) for number, each in enumerate(block)]
            found = [self._checked(ids, done + n) for n, ids in enumerate(self._tokenizer(texts))]
            if len(found) != len(texts):
                raise ValueError(f"the tokenizer made {len(found)} lists of {len(texts)} texts")
            yield ragged_of(found, (), self._tokens.dtype)
            done += len(found)

    def _decoded(self, data: NDArray[np.uint8], sample: int) -> str:
        try:
            return data.tobytes().decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{self._where}: document {sample} is not UTF-8: {error}") from None

    def _checked(self, ids: Sequence[int], sample: int) -> NDArray[Any]:
        """Return token ids as an array; raise ValueError for anything else."""
        array = np.asarray(ids if len(ids) else np.empty(0, np.int64))
        most = np.iinfo(self._tokens.dtype).max
        plain = array.ndim == 1 and array.dtype.kind in "iu"
        if not plain or array.min(initial=0) < 0 or array.max(initial=0) > most:
            raise ValueError(
                f"{self._where}: the tokenizer made {str(ids)[:60]} of document {sample}; token "
                f"ids are whole numbers from 0 to {most}"
            )
        return array.astype(self._tokens.dtype)


def load_tokenizer(
    tokenizer: str | os.PathLike[str] | Tokenizer,
) -> tuple[Tokenizer, np.dtype[Any], str]:
    """Return a function from texts to token ids, the smallest dtype for these, and its identity.

    `tokenizer` is a tokenizer.json file, for the package tokenizers, or such a function (int32).
    Raises DataError for any other file, MissingExtra without the package.
    """
    if callable(tokenizer):
        name = f"{getattr(tokenizer, '__module__', '')}.{getattr(tokenizer, '__qualname__', '')}"
        return tokenizer, np.dtype(np.int32), name
    path = Path(tokenizer)
    data = read_file(path)
    with needed_for("a tokenizer.json", "tokenizers"):
        from tokenizers import Tokenizer as Loaded
    try:
        loaded = Loaded.from_buffer(data)
    except Exception as error:  # tokenizers raises no class of its own
        raise DataError(f"{path}: not a tokenizer.json: {first_line(error)}") from None

    loaded.no_truncation()  # files often ask for truncation and padding, which change documents
    loaded.no_padding()

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in loaded.encode_batch(texts)]

    small = loaded.get_vocab_size() <= 1 << 16
    return encode, np.dtype(np.uint16 if small else np.int32), hashlib.sha256(data).hexdigest()


def _text_of(line: bytes, where: str) -> bytes:
    try:
        found = json.loads(line)[TEXT]
        if isinstance(found, str):
            return found.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the text is no valid Unicode: {error.reason}") from None
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(f'{where}: not a line of JSON with a "{TEXT}"')
