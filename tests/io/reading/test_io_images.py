"""Encoded images: kept as they are at conversion, decoded into batches by the loader."""

from __future__ import annotations

import io as standard_io
import re
import shutil
import tarfile
import weakref

import numpy as np
import psutil
import pytest
from hsgd.io import (
    PartitionedDataset,
    PartitionedLoader,
    ReadOptions,
    RowReader,
    convert_to_slabs,
    images,
    open_map,
)
from hsgd.io.batches import decode_stage
from hsgd.io.batches.image_decoder import UnreadableImage
from hsgd.io.convert.find_damage import find_damage
from hsgd.io.reading.row_copies import crop_image
from PIL import Image

from hsgd.errors import DataError
from loaders import loader_of

torch = pytest.importorskip("torch")
pytest.importorskip("simplejpeg")

SIZE = 16
COUNT = 30
MODES = ("RGB", "L", "CMYK")


def pixels_of(number):
    """A smooth image of a form of its own; a few are very long, and one is a single pixel."""
    height, width = 20 + number, 50 - number
    if number % 10 == 3:
        height, width = 3, 200
    if number == 7:
        height = width = 1
    y, x = np.mgrid[:height, :width]
    planes = (x * 255 // width, y * 255 // height, np.full_like(x, number * 8))
    return np.stack(planes, axis=-1).astype(np.uint8)


def encoded(number):
    """Name and bytes: PNG, or JPEG in different colours."""
    memory = standard_io.BytesIO()
    image = Image.fromarray(pixels_of(number))
    if number % 3 == 0:
        image.save(memory, "PNG")
        return f"{number:03d}.png", memory.getvalue()
    image.convert(MODES[number % 4 % 3]).save(memory, "JPEG", quality=95)
    return f"{number:03d}.jpg", memory.getvalue()


def write_folder(folder):
    for number in range(COUNT):
        name, data = encoded(number)
        home = folder / f"class{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    convert_to_slabs(write_folder(folder / "photos"), folder / "data", num_slabs=4, encoded=True)
    return folder / "data"


def read_whole(folder):
    """Bytes and label of each sample, in the order of the files."""
    data = open_map(folder)
    with RowReader(data) as reader:
        labels = np.empty(data.num_samples, np.int64)
        reader.read("label", 0, labels)
        whole = reader.read_ragged("image", 0, data.num_samples)
    return [np.asarray(each).tobytes() for each in whole], labels.tolist()


def decoded_by_pillow(data):
    with Image.open(standard_io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def make(folder, batch_size=8, rank=0, world_size=1, **options):
    decoder = options.pop("decoder", images(SIZE, "random", flip=True))
    settings = {"decode": {"image": decoder}, "shuffle": "none", "as_numpy": True, **options}
    return loader_of(folder, batch_size, rank, world_size, **settings)


def by_sample(loaders):
    """Images of one epoch, by the number of the sample, with shuffle="none"."""
    found = [image for loader in loaders for batch in loader for image in batch["image"].copy()]
    return np.stack(found)


def test_conversion_keeps_the_bytes(original):
    stored, labels = read_whole(original)
    expected = {encoded(number)[1]: number % 2 for number in range(COUNT)}
    assert dict(zip(stored, labels, strict=True)) == expected
    assert list(find_damage(open_map(original))) == []


def test_tar_files_keep_their_bytes_too(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in (0, 3, 6):
            for suffix, data in (("png", encoded(number)[1]), ("cls", b"%d" % number)):
                entry = tarfile.TarInfo(f"{number}.{suffix}")
                entry.size = len(data)
                archive.addfile(entry, standard_io.BytesIO(data))
    convert_to_slabs(tmp_path / "a.tar", tmp_path / "data", permute=False, encoded=True)
    with RowReader(open_map(tmp_path / "data")) as reader:
        found = reader.read_ragged("png", 0, 3)
    assert [bytes(each) for each in found] == [encoded(number)[1] for number in (0, 3, 6)]


def test_the_middle_of_an_image_is_what_pillow_makes_of_it(original):
    stored, _ = read_whole(original)
    found = by_sample([make(original, decoder=images(SIZE))])
    for data, image in zip(stored, found, strict=True):
        whole = Image.fromarray(decoded_by_pillow(data))
        side = min(whole.size) * 224 / 256
        left, top = (whole.width - side) / 2, (whole.height - side) / 2
        box = (left, top, left + side, top + side)
        expected = np.asarray(whole.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box))
        # at the edge Pillow looks at pixels outside of the box, and decoders differ in colours
        inner = np.s_[2:-2, 2:-2]
        assert np.abs(image.transpose(1, 2, 0)[inner] - expected[inner].astype(int)).mean() < 6


@pytest.mark.parametrize(("height", "width"), [(300, 407), (16, 16), (9, 5), (1, 1), (1500, 1100)])
@pytest.mark.parametrize("flip", [False, True])
def test_a_part_is_scaled_as_pillow_does_it_but_for_a_level(height, width, flip):
    random = np.random.default_rng(height)
    whole = random.integers(0, 256, (height + 7, width + 3, 3), np.uint8)
    whole[: height // 2] |= 0x80  # also what is as bright as can be
    whole[: height // 3] = 255
    expected = Image.fromarray(whole[5 : 5 + height, 2 : 2 + width]).resize(
        (SIZE, SIZE), Image.Resampling.BILINEAR
    )
    found = np.full((SIZE * SIZE * 3 + 1,), 77, np.uint8)
    target = found[:-1].reshape(SIZE, SIZE, 3)
    scratch = crop_image(whole, (2, 5, width, height), target, flip=flip, scratch=None)
    assert crop_image(whole, (2, 5, width, height), target, flip=flip, scratch=scratch) is scratch
    upright = target[:, ::-1] if flip else target
    assert np.abs(upright.astype(int) - np.asarray(expected)).max() <= 1
    assert found[-1] == 77


def test_large_images_are_reduced_while_they_are_decoded_and_look_the_same():
    y, x = np.mgrid[:600, :800]
    smooth = np.stack([x * 255 // 800, y * 255 // 600, x * 0 + 90], axis=-1).astype(np.uint8)
    memory = standard_io.BytesIO()
    Image.fromarray(smooth).save(memory, "JPEG", quality=95)
    data = np.frombuffer(memory.getvalue(), np.uint8)
    decoder = images(64)
    draws = decoder.draw(0, 0, np.arange(1))[0]
    pixels, _ = decoder._decode_jpeg(data, draws)
    assert pixels.shape[0] < 300
    found, expected = np.empty((2, 64, 64, 3), np.uint8)
    decoder.decode(data, draws, found)
    decoder._place(smooth, decoder.part(600, 800, draws), draws, expected)
    assert np.abs(found.astype(int) - expected).max() <= 4


def test_what_is_random_depends_on_seed_epoch_and_sample_alone(original):
    first = by_sample([make(original, seed=3)])
    others = [make(original, 5, rank, 3, pad=False, seed=3, threads=1) for rank in range(3)]
    np.testing.assert_array_equal(by_sample(others), first)
    np.testing.assert_array_equal(by_sample([make(original, seed=3, decode_threads=3)]), first)
    assert (by_sample([make(original, seed=4)]) != first).any(axis=(1, 2, 3)).sum() > COUNT // 2
    loader = make(original, seed=3)
    loader.set_epoch(1)
    assert (by_sample([loader]) != first).any(axis=(1, 2, 3)).sum() > COUNT // 2


def test_shuffled_and_resumed_images_are_those_of_their_samples(original):
    stored, labels = read_whole(original)
    plain = by_sample([make(original, seed=3)])
    number_of = {image.tobytes(): number for number, image in enumerate(plain)}
    tiny = {"shuffle": "block", "seed": 3, "block_bytes": 2000, "window_bytes": 6000}
    loader = make(original, 4, **tiny)
    iteration = iter(loader)
    seen = [(image.tobytes(), label) for b in (next(iteration),) for image, label in pairs(b)]
    state = loader.state_dict()
    iteration.close()
    for rank in range(2):
        loader = make(original, 3, rank, 2, pad=False, **tiny)
        loader.load_state_dict(state)
        seen += [(image.tobytes(), label) for batch in loader for image, label in pairs(batch)]
    assert sorted(number_of[data] for data, _ in seen) == list(range(len(stored)))
    assert all(labels[number_of[data]] == label for data, label in seen)


def pairs(batch):
    return zip(batch["image"].copy(), batch["label"].tolist(), strict=True)


def test_parts_lie_inside_and_have_the_area_and_form_that_were_asked_for():
    decoder = images(SIZE, "random", scale=(0.2, 0.6), ratio=(0.5, 2.0))
    draws = decoder.draw(1, 2, np.arange(500))
    assert ((draws >= 0) & (draws < 1)).all()
    assert abs(draws.mean() - 0.5) < 0.02
    for row in draws:
        left, top, width, height = decoder.part(300, 400, row)
        assert left >= 0 and top >= 0 and left + width <= 400 and top + height <= 300
        assert 0.19 < width * height / 120_000 < 0.61
        assert 0.48 < width / height < 2.05
    flips = images(SIZE, flip=True).draw(1, 2, np.arange(1000))[:, 0] < 0.5
    assert 400 < flips.sum() < 600


def test_batches_are_tensors_in_channels_last_that_live_as_long_as_they_are_kept(original):
    loader = PartitionedLoader(original, 7, decode={"image": images(SIZE)}, shuffle="none")
    kept = list(loader)
    assert [spec.shape for spec in loader.fields] == [(3, SIZE, SIZE), ()]
    assert all(b["image"].is_contiguous(memory_format=torch.channels_last) for b in kept)
    found = torch.cat([batch["image"] for batch in kept])
    again = torch.cat([batch["image"].clone() for batch in loader])
    assert torch.equal(found, again)


def test_the_memory_of_decoded_batches_goes_when_the_iteration_ends(original):
    iteration = iter(make(original, 7))
    kept = next(iteration)["image"]
    found = kept.copy()
    arenas = [weakref.ref(arena) for arena in iteration.source._ring._arenas]
    iteration.close()
    assert any(arena() is not None for arena in arenas)
    np.testing.assert_array_equal(kept, found)
    del kept
    assert all(arena() is None for arena in arenas)


def test_single_samples_and_empty_batches_come_decoded(original):
    dataset = PartitionedDataset(original, decode={"image": images(SIZE)})
    assert [item["image"].shape for item in dataset] == [(3, SIZE, SIZE)] * COUNT
    batches = list(make(original, 1, 3, 4, pad=False))
    assert [len(batch["image"]) for batch in batches] == [1] * 7 + [0]
    assert batches[-1]["image"].shape == (0, 3, SIZE, SIZE)


def test_a_header_that_claims_too_much_takes_no_memory():
    memory = standard_io.BytesIO()
    Image.fromarray(pixels_of(1)).save(memory, "JPEG")
    data = bytearray(memory.getvalue())
    frame = data.find(b"\xff\xc0")
    data[frame + 5 : frame + 9] = bytes([255, 220] * 2)
    decoder, target = images(SIZE), np.empty((SIZE, SIZE, 3), np.uint8)
    with pytest.raises(UnreadableImage, match="4290250000 pixels"):
        decoder.decode(np.frombuffer(data, np.uint8), decoder.draw(0, 0, np.arange(1))[0], target)


@pytest.fixture
def damaged(original, tmp_path):
    """Sample 12 is no image any more, and sample 20 ends within its pixels."""
    folder = shutil.copytree(original, tmp_path / "data")
    data = open_map(folder)
    for sample, keep in ((12, 0), (20, 60)):
        slab = next(s for s in data.slabs if s.start <= sample < s.start + s.count)
        with RowReader(data) as reader:
            ends = reader.read_offsets(data.slabs.index(slab), "image", sample - slab.start, 1)
        with open(slab.path, "r+b") as file:
            file.seek(slab.extents["image"].offset + int(ends[0]) + keep)
            file.write(bytes(int(ends[1] - ends[0]) - keep))
    return folder


def test_an_image_that_cannot_be_decoded_is_an_error_that_names_it(damaged):
    text = r"slab-00001\.h5: 'image' of sample 12 \(row 5 of .*cannot be decoded: .*batch 1 of"
    with pytest.raises(DataError, match=text):
        list(make(damaged))


def test_images_that_cannot_be_decoded_are_left_out_or_replaced(damaged, original):
    good = by_sample([make(original)])
    loader = make(damaged, 5, on_error="skip")
    with pytest.warns(UserWarning, match="2 of 6 batches of this epoch were left out"):
        found = by_sample([loader])
    np.testing.assert_array_equal(found, good[[*range(10), *range(15, 20), *range(25, 30)]])
    loader = make(damaged, 5, on_error="substitute")
    found = by_sample([loader])
    assert loader.metrics()["substituted"] == 2
    kept = [n for n in range(COUNT) if n not in (12, 20)]
    np.testing.assert_array_equal(found[kept], good[kept])
    assert any((found[12] == good[n]).all() for n in range(10, 15))


def test_the_least_memory_that_is_asked_for_is_enough(original):
    """Batches that are decoded ahead hold slots too."""
    with pytest.raises(ValueError, match="need") as refused:
        make(original, 4, memory_limit=1)
    least = int(re.search(r"need (\d+) bytes", str(refused.value))[1])
    loader = make(original, 4, memory_limit=least)
    assert len(by_sample([loader, loader])) == 2 * COUNT


def test_decoded_batches_count_in_the_memory_limit_and_in_the_metrics(original, monkeypatch):
    monkeypatch.setattr(decode_stage, "RELEASE_S", 0.05)
    each = -(-4 * SIZE * SIZE * 3 // 4096) * 4096

    def needed(read_ahead):
        with pytest.raises(ValueError, match="need") as refused:
            make(original, 4, memory_limit=1, read_ahead=read_ahead)
        return int(re.search(r"need (\d+) bytes", str(refused.value))[1])

    assert needed(9) - needed(5) == 4 * each
    loader = make(original, 4, memory_limit=needed(3), read_ahead=3)
    kept = []
    with pytest.raises(MemoryError, match="keeps decoded batches of 0 MiB, all that memory_limit"):
        kept.extend(batch["image"] for batch in loader)
    kept.clear()
    iteration = iter(loader)
    next(iteration)
    assert loader.metrics()["decoded_bytes"] == 3 * each
    iteration.close()
    assert loader.metrics()["decoded_bytes"] == 0


def test_an_error_of_decoding_is_that_of_its_batch_and_ends_the_iteration(original, monkeypatch):
    loader = make(original, 4)
    batches = iter(loader)
    next(batches)

    def fail(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(decode_stage.DecodeStage, "_finish", fail)
    with pytest.raises(MemoryError, match="no more"):
        for _ in batches:
            pass
    assert next(batches, None) is None


@pytest.mark.parametrize(
    ("decode", "error", "text"),
    [
        ({"pixels": images(SIZE)}, ValueError, "no field 'pixels'; there are: image, label"),
        ({"label": images(SIZE)}, ValueError, "does not hold encoded samples"),
        ({"image": "jpeg"}, TypeError, r"use hsgd\.io\.images"),
    ],
)
def test_what_cannot_be_decoded_is_refused(original, decode, error, text):
    with pytest.raises(error, match=text):
        PartitionedLoader(original, 4, decode=decode)


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": 8.5},
        {"size": True},
        {"crop": "left"},
        {"scale": (0.5, 0.1)},
        {"ratio": (0, 1)},
    ],
)
def test_images_refuses_other_values(options):
    with pytest.raises(ValueError, match="images: "):
        images(**{"size": SIZE, **options})
    with pytest.raises(ValueError, match="decode_threads=0"):
        ReadOptions(decode_threads=0)


def test_encoded_and_image_size_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match="leave out --image-size or --encoded"):
        convert_to_slabs(write_folder(tmp_path / "a"), tmp_path / "b", image_size=8, encoded=True)


@pytest.mark.long
def test_fifty_epochs_need_no_more_memory_than_ten(tmp_path):
    """One image that stays in each epoch, of 32, would be 6 MB of pixels."""
    for number in range(32):
        noise = np.random.default_rng(number).integers(0, 256, (256, 256, 3), np.uint8)
        (tmp_path / "photos" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise).save(tmp_path / "photos" / "a" / f"{number}.jpg")
    convert_to_slabs(tmp_path / "photos", tmp_path / "data", num_slabs=2, encoded=True)
    loader = make(tmp_path / "data", decoder=images(224, "random"), shuffle="block")
    resident = []
    for epoch in range(50):
        assert sum(len(batch["image"]) for batch in loader) == 32
        if epoch in (9, 49):
            resident.append(psutil.Process().memory_info().rss)
    assert resident[1] - resident[0] < 5 << 20


@pytest.mark.parametrize("threads", [0, 2])
def test_batches_decoded_ahead_are_all_transformed(original, threads):
    loader = make(original, 4, transform=lambda batch: batch, transform_threads=threads)
    for _ in range(3):
        assert sum(len(batch["image"]) for batch in loader) == COUNT
