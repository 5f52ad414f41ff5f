"""Converting documents: text files, lines of JSON, text in Parquet, and tokens in their place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hsgd.io import RowReader, convert_to_slabs, open_map
from hsgd.io.convert import text_sources
from hsgd.io.convert.sources import lengths_of, open_source

from hsgd.errors import DataError
from hsgd.tools import cli
from loaders import loader_of

parquet = pytest.importorskip("pyarrow.parquet")
tokenizers = pytest.importorskip("tokenizers")
arrow = pytest.importorskip("pyarrow")

WORDS = ["[UNK]", "a", "short", "document", "of", "words", "grün"]


def document(number):
    """Every fourth is empty; others have umlauts and words that no vocabulary has."""
    return " ".join(WORDS[(number + k) % 7] + ("x" * (k == 5)) for k in range(number % 4 * 3))


def ids_of(number):
    words = document(number).split()
    return [WORDS.index(word) if word in WORDS else 0 for word in words]


COUNT = 70
DOCUMENTS = [document(number) for number in range(COUNT)]


@pytest.fixture
def vocabulary(tmp_path):
    model = tokenizers.models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def write_lines(folder):
    (folder / "a.txt").write_text("\r\n".join(DOCUMENTS) + "\n")
    return folder / "a.txt"


def write_files(folder):
    (folder / "texts").mkdir()
    for number, text in enumerate(DOCUMENTS):
        (folder / f"texts/{number:03d}.txt").write_text(text)
    return folder / "texts"


def write_json(folder):
    (folder / "lines").mkdir()
    for name, part in (("a", DOCUMENTS[:30]), ("b", DOCUMENTS[30:])):
        lines = [json.dumps({"text": text, "id": 1}) for text in part]
        (folder / f"lines/{name}.jsonl").write_text("\n".join(lines))
    return folder / "lines"


def table_of(first, last, kind):
    texts = arrow.array(DOCUMENTS[first:last], kind)
    return arrow.table({"text": texts, "number": np.arange(first, last)})


def write_parquet(folder, kind="string"):
    (folder / "shards").mkdir()
    for name, first, last in (("a", 0, 30), ("b", 30, COUNT)):
        table = table_of(first, last, kind)
        parquet.write_table(table, folder / f"shards/{name}.parquet", row_group_size=11)
    return folder / "shards"


WRITERS = {
    "lines": write_lines,
    "files": write_files,
    "json": write_json,
    "parquet": write_parquet,
    "parquet-binary": lambda folder: write_parquet(folder, "large_binary"),
}


def samples_of(folder, name):
    data = open_map(folder)
    with RowReader(data) as reader:
        return [np.asarray(each) for each in reader.read_ragged(name, 0, data.num_samples)]


@pytest.mark.parametrize("form", WRITERS)
def test_documents_are_a_ragged_field_of_bytes(tmp_path, form):
    source = WRITERS[form](tmp_path)
    convert_to_slabs(source, tmp_path / "out", fields=["text"], permute=False)
    found = [each.tobytes().decode() for each in samples_of(tmp_path / "out", "text")]
    assert found == DOCUMENTS


@pytest.mark.parametrize("form", WRITERS)
def test_a_tokenizer_makes_tokens_of_text(tmp_path, vocabulary, form):
    source = WRITERS[form](tmp_path)
    convert_to_slabs(source, tmp_path / "out", permute=False, tokenizer=vocabulary)
    found = samples_of(tmp_path / "out", "tokens")
    assert [each.tolist() for each in found] == [ids_of(number) for number in range(COUNT)]
    assert found[1].dtype == np.uint16
    fields = [spec.name for spec in open_map(tmp_path / "out").fields]
    assert sorted(fields) == (["number", "tokens"] if "parquet" in form else ["tokens"])


def test_a_function_may_be_the_tokenizer_and_windows_have_all_its_tokens(tmp_path):
    source = write_lines(tmp_path)
    convert_to_slabs(
        source,
        tmp_path / "out",
        tokenizer=lambda texts: [[*text.encode(), 256] for text in texts],
    )
    total = sum(len(text.encode()) + 1 for text in DOCUMENTS)
    batches = list(loader_of(tmp_path / "out", 8, pack=16, as_numpy=True))
    found = np.concatenate([batch["tokens"] for batch in batches]).reshape(-1)
    assert found.dtype == np.int32
    assert len(found) == total // 16 * 16
    assert COUNT - 16 <= (found == 256).sum() <= COUNT
    stored = np.sort(np.concatenate(samples_of(tmp_path / "out", "tokens")))
    assert len(stored) == total


def test_text_in_parquet_is_no_field_unless_it_is_named(tmp_path):
    convert_to_slabs(write_parquet(tmp_path), tmp_path / "out")
    assert [spec.name for spec in open_map(tmp_path / "out").fields] == ["number"]


def test_a_column_of_categories_is_not_the_text_that_is_tokenized(tmp_path):
    languages = arrow.array(["de", "rm"] * (COUNT // 2)).dictionary_encode()
    table = table_of(0, COUNT // 2 * 2, "string").append_column("language", languages)
    parquet.write_table(table, tmp_path / "a.parquet")
    convert_to_slabs(
        tmp_path / "a.parquet",
        tmp_path / "out",
        tokenizer=lambda texts: [[len(each)] for each in texts],
    )
    fields = {spec.name for spec in open_map(tmp_path / "out").fields}
    assert fields == {"number", "tokens"}


def test_the_command_tokenizes(tmp_path, vocabulary, capsys):
    arguments = ["data", "convert", str(write_json(tmp_path)), str(tmp_path / "out"), "--quiet"]
    assert cli.main([*arguments, "--tokenizer", str(vocabulary)]) == 0
    assert len(samples_of(tmp_path / "out", "tokens")) == COUNT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tokenizer", "error", "text"),
    [
        (
            lambda texts: [[-1]] * len(texts),
            ValueError,
            r"made \[-1\] of document 0; token ids are",
        ),
        (lambda texts: [["a"]] * len(texts), ValueError, r"made \['a'\] of document 0"),
        (lambda texts: [], ValueError, "made 0 lists of 64 texts"),
        ("a.txt", DataError, "a.txt: not a tokenizer.json"),
        ("b.txt", DataError, "b.txt: cannot be read: No such file"),
    ],
)
def test_a_tokenizer_that_makes_no_tokens_is_refused(tmp_path, tokenizer, error, text):
    source = write_lines(tmp_path)
    tokenizer = tokenizer if callable(tokenizer) else tmp_path / tokenizer
    with pytest.raises(error, match=text):
        convert_to_slabs(source, tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_what_is_no_text_is_refused(tmp_path, vocabulary):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"words": "b"}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:2: not a line of JSON with a "text"'):
        convert_to_slabs(tmp_path / "a.jsonl", tmp_path / "out")
    (tmp_path / "b.txt").write_bytes(b"good\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"b\.txt: document 1 is not UTF-8"):
        convert_to_slabs(tmp_path / "b.txt", tmp_path / "out", tokenizer=vocabulary)
    np.save(tmp_path / "c.npy", np.arange(9))
    with pytest.raises(ValueError, match=r"needs one field of text; .* has: none"):
        convert_to_slabs(tmp_path / "c.npy", tmp_path / "out", tokenizer=vocabulary)
    with pytest.raises(ValueError, match="no field tokens; there is: text"):
        convert_to_slabs(tmp_path / "b.txt", tmp_path / "out", fields=["tokens"])


def test_a_source_that_changes_its_lengths_meanwhile_is_an_error(tmp_path):
    calls = []

    def tokenize(texts):
        calls.append(len(texts))
        return [[1] * (1 + len(calls))] * len(texts)

    with pytest.raises(DataError, match="sample 0 of the source had 2 elements and now has"):
        convert_to_slabs(write_lines(tmp_path), tmp_path / "out", tokenizer=tokenize)


def test_a_tokenizer_that_would_cut_and_fill_documents_does_not(tmp_path, vocabulary):
    made = tokenizers.Tokenizer.from_file(str(vocabulary))
    made.enable_truncation(2)
    made.enable_padding(length=5)
    made.save(str(vocabulary))
    convert_to_slabs(write_lines(tmp_path), tmp_path / "out", permute=False, tokenizer=vocabulary)
    found = samples_of(tmp_path / "out", "tokens")
    assert [each.tolist() for each in found] == [ids_of(number) for number in range(COUNT)]


def test_tokenizers_of_one_name_that_differ_are_told_apart(tmp_path):
    def shifted(by):
        return lambda texts: [[byte + by for byte in text.encode()] for text in texts]

    source = text_sources.TextSource([write_lines(tmp_path)], None, whole=False)
    found = []
    for by in (0, 0, 1):
        encode, dtype, name = text_sources.load_tokenizer(shifted(by))
        found.append(text_sources.TokenizedSource(source, encode, dtype, name, "a").identity())
    assert found[0] == found[1] != found[2]


def test_blank_lines_of_json_are_no_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n  \n{"text": ""}\n\n')
    convert_to_slabs(tmp_path / "a.jsonl", tmp_path / "out", permute=False)
    assert [each.tobytes() for each in samples_of(tmp_path / "out", "text")] == [b"a", b""]
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:2: the text is no valid Unicode"):
        convert_to_slabs(tmp_path / "b.jsonl", tmp_path / "other")


def test_lengths_of_whole_files_come_from_the_file_system(tmp_path, monkeypatch):
    folder = write_files(tmp_path)
    source = open_source(str(folder), None, None)
    monkeypatch.setattr(text_sources, "read_file", lambda path: pytest.fail("was read"))
    lengths = lengths_of(source)["text"]
    assert lengths.tolist() == [len(text.encode()) for text in DOCUMENTS]


@pytest.mark.parametrize("option", [{"encoded": True}, {"tokenizer": len}])
def test_options_for_files_are_refused_for_arrays(tmp_path, option):
    with pytest.raises(ValueError, match="are for files"):
        convert_to_slabs({"x": np.zeros(3)}, tmp_path / "out", **option)
