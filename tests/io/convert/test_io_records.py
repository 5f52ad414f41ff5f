"""Converting single records: image folders, tar files, tables."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from hsgd.io import class_names, convert_to_slabs

from hdf5_samples import collect
from hsgd.errors import DataError
from loaders import loader_of

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
image_module = pytest.importorskip("PIL.Image")

COUNT = 23


def pixels(number, shape=(4, 5, 3)):
    return ((number * 7 + np.arange(np.prod(shape))) % 251).astype(np.uint8).reshape(shape)


def png(array):
    stream = io.BytesIO()
    image_module.fromarray(array).save(stream, "png")
    return stream.getvalue()


def read(path):
    return collect(loader_of(path, 5, as_numpy=True, verify=True))


def write_images(folder):
    for number in range(COUNT):
        place = folder / f"class{number % 3}" / f"{number:03d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(pixels(number)))
    return folder


def write_tar(path, first=0, last=COUNT):
    with tarfile.open(path, "w") as archive:
        for number in range(first, last):
            array = io.BytesIO()
            np.save(array, np.full(2, number, ">f4"))
            members = {"cls": str(number).encode(), "png": png(pixels(number)), "npy": None}
            members |= {"npy": array.getvalue(), "bin": bytes([number] * 6)}
            for name, data in members.items():
                entry = tarfile.TarInfo(f"part/{number:03d}.{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return path


def test_an_image_folder_becomes_images_and_labels_by_sorted_class(tmp_path):
    convert_to_slabs(write_images(tmp_path / "photos"), tmp_path / "out", num_slabs=3)
    found = read(tmp_path / "out")
    assert (found["image"].shape, found["image"].dtype) == ((COUNT, 4, 5, 3), np.uint8)
    expected = sorted((pixels(n).tobytes(), n % 3) for n in range(COUNT))
    pairs = zip(found["image"], found["label"], strict=True)
    assert sorted((image.tobytes(), int(label)) for image, label in pairs) == expected


def test_images_of_many_sizes_need_image_size_and_get_it(tmp_path):
    folder = write_images(tmp_path / "photos")
    (folder / "class0" / "odd.png").write_bytes(png(pixels(1, (9, 6, 3))))
    with pytest.raises(DataError, match=r"odd\.png is \(9, 6, 3\).*--image-size"):
        convert_to_slabs(folder, tmp_path / "out")
    convert_to_slabs(folder, tmp_path / "out", image_size=4)
    assert read(tmp_path / "out")["image"].shape == (COUNT + 1, 4, 4, 3)


def test_a_broken_image_is_named_and_nothing_is_left(tmp_path):
    folder = write_images(tmp_path / "photos")
    (folder / "class2" / "002.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(DataError, match=r"002\.png: not a readable image"):
        convert_to_slabs(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("shards", [1, 2])
def test_tar_files_become_a_field_for_each_extension(tmp_path, shards):
    (tmp_path / "tars").mkdir()
    if shards == 1:
        source = write_tar(tmp_path / "a.tar")
    else:
        source = tmp_path / "tars"
        write_tar(source / "0.tar", 0, 9)
        write_tar(source / "1.tar", 9)
    convert_to_slabs(source, tmp_path / "out", num_slabs=4)
    found = read(tmp_path / "out")
    numbers = found["cls"].tolist()
    assert sorted(numbers) == list(range(COUNT))
    for row, number in enumerate(numbers):
        np.testing.assert_array_equal(found["png"][row], pixels(number))
        assert found["npy"][row].tolist() == [number] * 2
        assert found["bin"][row].tolist() == [number] * 6


def test_tar_samples_that_lack_a_field_are_refused(tmp_path):
    write_tar(tmp_path / "a.tar", 0, 3)
    with tarfile.open(tmp_path / "a.tar", "a") as archive:
        archive.addfile(tarfile.TarInfo("part/9.cls"))
    with pytest.raises(DataError, match=r"3 of 4 samples have \."):
        convert_to_slabs(tmp_path / "a.tar", tmp_path / "out")


def test_a_file_that_is_no_tar_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match="not a readable tar file"):
        convert_to_slabs(tmp_path / "a.tar", tmp_path / "out")


def table():
    number = np.arange(COUNT)
    return pandas.DataFrame(
        {
            "number": number,
            "half": number / 2,
            "even": number % 2 == 0,
            "name": ["x"] * COUNT,
            "day": [pandas.Timestamp("2001-02-03")] * COUNT,
        }
    )


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_numbers_become_fields_and_text_is_left_aside(tmp_path, suffix):
    path = tmp_path / f"t.{suffix}"
    table().to_csv(path, index=False) if suffix == "csv" else table().to_parquet(path)
    convert_to_slabs(path, tmp_path / "out", num_slabs=3)
    found = read(tmp_path / "out")
    assert found.keys() == {"number", "half", "even"}
    assert sorted(found["number"].tolist()) == list(range(COUNT))
    assert (found["half"] * 2 == found["number"]).all()
    assert (found["even"] == (found["number"] % 2 == 0)).all()
    with pytest.raises(DataError, match="column 'day' holds no numbers"):
        convert_to_slabs(path, tmp_path / "out2", fields=["day"])
    with pytest.raises((DataError, ValueError), match="other"):
        convert_to_slabs(path, tmp_path / "out2", fields=["other"])


def test_a_csv_column_that_turns_into_fractions_late_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr("hsgd.io.convert.record_sources.CsvSource._CHUNK", 4)
    (tmp_path / "t.csv").write_text("x\n" + "\n".join(map(str, [*range(10), 0.5])) + "\n")
    convert_to_slabs(tmp_path / "t.csv", tmp_path / "out", permute=False)
    found = collect(loader_of(tmp_path / "out", 20, shuffle="none", as_numpy=True))
    assert found["x"].tolist() == [*range(10), 0.5]


def test_missing_values_are_refused(tmp_path):
    frame = table().astype({"number": "Int64"})
    frame.loc[3, "number"] = pandas.NA
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match="'number' has missing values"):
        convert_to_slabs(tmp_path / "t.parquet", tmp_path / "out")


def test_the_names_of_classes_stay_with_the_labels(tmp_path):
    convert_to_slabs(write_images(tmp_path / "photos"), tmp_path / "out", num_slabs=3)
    convert_to_slabs(tmp_path / "out", tmp_path / "again")
    for folder in (tmp_path / "out", tmp_path / "again", tmp_path / "out/index.h5"):
        assert class_names(folder) == ["class0", "class1", "class2"]
    table().to_parquet(tmp_path / "t.parquet")
    convert_to_slabs(tmp_path / "t.parquet", tmp_path / "table")
    assert class_names(tmp_path / "table", "number") == []
    with pytest.raises(DataError, match="no field 'label'; there are: even, half, number"):
        class_names(tmp_path / "table")


def test_parquet_columns_of_dictionaries_and_of_vectors(tmp_path):
    """pandas writes categories as dictionaries; embeddings are lists of a fixed length."""
    import pyarrow
    from pyarrow import parquet

    number = np.arange(40)
    vectors = number[:, None] + np.arange(3, dtype=np.float32)
    grids = number[:, None, None] + np.arange(4, dtype=np.int16).reshape(2, 2)
    fixed = pyarrow.FixedSizeListArray.from_arrays
    places = fixed(fixed(pyarrow.array(grids.astype(np.int16).ravel()), 2), 2)
    lists = pyarrow.array([[[n, n + 1]] * (n % 3) for n in number.tolist()])
    columns = {
        "number": number,
        "city": pandas.Categorical([("Bern", "Genf", "Z\u00fcrich")[n % 3] for n in number]),
        "vector": fixed(pyarrow.array(vectors.ravel()), 3),
        "grid": places,
        "walk": lists.cast(pyarrow.list_(pyarrow.list_(pyarrow.int64(), 2))),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet", row_group_size=7)
    convert_to_slabs(tmp_path / "t.parquet", tmp_path / "out", num_slabs=3, fields=list(columns))
    for batch in loader_of(tmp_path / "out", 5, as_numpy=True, verify=True):
        for row, n in enumerate(batch["number"].tolist()):
            assert bytes(batch["city"][row]).decode() == ("Bern", "Genf", "Z\u00fcrich")[n % 3]
            assert batch["walk"][row].tolist() == [[n, n + 1]] * (n % 3)
            np.testing.assert_array_equal(batch["vector"][row], vectors[n])
            np.testing.assert_array_equal(batch["grid"][row], grids[n])


def test_a_vector_with_a_gap_is_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.array([[1.0, 2.0], [3.0, None]], pyarrow.list_(pyarrow.float32(), 2))
    parquet.write_table(pyarrow.table({"x": column}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="'x' has missing values"):
        convert_to_slabs(tmp_path / "t.parquet", tmp_path / "out")
