"""Readers of published file formats, on small files written here byte by byte."""

import gzip
import struct

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_recurrent import byte_text_classification, collate_sequences, sequential_cifar10, sequential_mnist

# ---- MNIST ----


def idx(array):
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def digits(tmp_path):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (5, 28, 28), np.uint8), np.array([3, 0, 9, 1, 1], np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (tmp_path / "t10k-images.idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[:2])))
    (tmp_path / "t10k-labels.idx1-ubyte").write_bytes(idx(labels[:2]))
    return tmp_path, images, labels


def test_mnist(digits):
    directory, images, labels = digits
    data = sequential_mnist(directory)
    assert (len(data), data.length, data.num_labels, data.name) == (5, 784, 10, "sequential_mnist")
    for index in range(5):
        item = data[index]
        assert item["input_values"].dtype == torch.float32 and item["input_values"].shape == (784, 1)
        assert np.allclose(item["input_values"][:, 0].numpy() * 255, images[index].ravel())
        assert item["labels"] == labels[index]
    assert len(sequential_mnist(str(directory), "test")) == 2
    ids = sequential_mnist(directory, as_ids=True)
    assert ids[4]["input_ids"].tolist() == images[4].ravel().tolist() and ids.vocab_size == 256
    batch = next(iter(DataLoader(data, batch_size=3)))
    assert batch["input_values"].shape == (3, 784, 1) and batch["labels"].tolist() == [3, 0, 9]


def test_permuted_mnist(digits):
    directory, images, _ = digits
    data = sequential_mnist(directory, as_ids=True, permutation_seed=1)
    rows = np.stack([data[index]["input_ids"].numpy() for index in range(5)])
    flat = images.reshape(5, -1)
    # One order for all images: the same columns at other places.
    assert sorted(map(tuple, rows.T)) == sorted(map(tuple, flat.T)) and not np.array_equal(rows, flat)
    other = sequential_mnist(directory, "test", as_ids=True, permutation_seed=1)
    assert np.array_equal(other[1]["input_ids"].numpy(), rows[1])
    assert data.name == "permuted_mnist"


def test_damaged_mnist(digits):
    directory, images, labels = digits
    path = directory / "train-images-idx3-ubyte"
    good = path.read_bytes()
    cases = {
        good[:-1]: "is truncated: it has 3935 bytes, but 3936 by its header",
        good + b"x": "is too long",
        good[:9]: "is truncated: its header has 9 of 16 bytes",
        b"": "begins with the magic number 0x; it must be 0x00000803",
        idx(labels): "begins with the magic number 0x00000801; it must be 0x00000803",
        b"\x89PNG" + good: "begins with the magic number 0x89504e47",
        gzip.compress(good)[:-20]: "is damaged",
        gzip.compress(good)[:200] + b"0" * 500: "is damaged",
        idx(images[:0]): "is empty",
        idx(images[:3]): "has 5 labels, but there are 3 images",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            sequential_mnist(directory)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"file not found: .*train-images-idx3-ubyte \(or .gz\)"):
        sequential_mnist(directory)
    with pytest.raises(ValueError, match="`split` is 'validation'; it must be one of train, test"):
        sequential_mnist(directory, "validation")
    (directory / "t10k-labels.idx1-ubyte").write_bytes(idx(np.array([1, 77], np.uint8)))
    with pytest.raises(ValueError, match="it has the label 77; labels must be from 0 to 9"):
        sequential_mnist(directory, "test")


# ---- CIFAR-10 ----


@pytest.fixture
def photos(tmp_path):
    random = np.random.default_rng(1)
    images, labels = random.integers(0, 256, (12, 3, 32, 32), np.uint8), np.arange(12) % 10
    records = [bytes([label]) + image.tobytes() for label, image in zip(labels.tolist(), images, strict=True)]
    for number in range(5):
        (tmp_path / f"data_batch_{number + 1}.bin").write_bytes(b"".join(records[2 * number : 2 * number + 2]))
    (tmp_path / "test_batch.bin").write_bytes(b"".join(records[10:]))
    return tmp_path, images, labels


def test_cifar_in_colour(photos):
    directory, images, labels = photos
    data = sequential_cifar10(directory, grey=False)
    assert (len(data), data.length, data.name) == (10, 1024, "sequential_cifar10")
    for index in (0, 3, 9):
        values = data[index]["input_values"]
        assert values.shape == (1024, 3) and data[index]["labels"] == labels[index]
        for row, column in ((0, 0), (0, 31), (7, 2), (31, 31)):
            assert np.allclose(values[32 * row + column] * 255, images[index, :, row, column])
    ids = sequential_cifar10(directory, "test", grey=False, as_ids=True)
    assert ids.length == 3072 and ids[0]["input_ids"][:6].tolist() == [
        images[10, channel, 0, column] for column in (0, 1) for channel in range(3)
    ]


def test_cifar_in_grey(photos):
    directory, images, _ = photos
    data = sequential_cifar10(directory.parent / directory.name, as_ids=True)
    assert data.name == "sequential_cifar10_grey" and data.images.shape == (10, 1024, 1)
    for row, column in ((0, 0), (5, 30)):
        red, green, blue = images[4, :, row, column].tolist()
        assert data[4]["input_ids"][32 * row + column] == round(0.299 * red + 0.587 * green + 0.114 * blue)


def test_cifar_in_the_folder_of_its_archive(photos, tmp_path):
    folder = tmp_path / "root" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    (folder / "test_batch.bin").write_bytes((photos[0] / "test_batch.bin").read_bytes())
    assert len(sequential_cifar10(folder.parent, "test")) == 2
    with pytest.raises(FileNotFoundError, match=r"file not found: .*data_batch_1.bin"):
        sequential_cifar10(folder.parent)


def test_damaged_cifar(photos):
    directory, _, _ = photos
    path = directory / "data_batch_3.bin"
    good = path.read_bytes()
    cases = {
        good[:-1]: "data_batch_3.bin is truncated .* has 6145 bytes; they must be a multiple of 3073",
        b"": "has 0 bytes",
        b"\x0a" + good[1:]: "it has the label 10; labels must be from 0 to 9",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            sequential_cifar10(directory)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"file not found: .*data_batch_3.bin"):
        sequential_cifar10(directory)


# ---- Texts ----


def test_folders_of_texts(tmp_path):
    for split, label, name, text in [
        ("train", "pos", "0_9.txt", "gr\xfc\xdfe".encode()),
        ("train", "neg", "1_2.txt", b"bad \xff"),
        ("train", "neg", "0_1.txt", b"x" * 9),
        ("test", "pos", "0_8.txt", b"good"),
        ("test", "neg", "0_3.txt", b"no"),
    ]:
        folder = tmp_path / split / label
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    data = byte_text_classification(tmp_path, "train", max_length=6)
    shown = [(bytes(data[index]["input_ids"].tolist()), data[index]["labels"]) for index in range(len(data))]
    assert shown == [(b"x" * 6, 0), (b"bad \xff", 0), ("gr\xfc\xdfe".encode()[:6], 1)]
    assert (data.label_names, data.num_labels, data.vocab_size) == (["neg", "pos"], 2, 256)
    assert len(byte_text_classification(tmp_path / "test")) == 2
    batch = collate_sequences([data[0], data[1]])
    assert batch["input_ids"].shape == (2, 6) and batch["attention_mask"][1].tolist() == [1] * 5 + [0]
    with pytest.raises(FileNotFoundError, match=r"directory not found: .*neg "):
        byte_text_classification(tmp_path)
    (tmp_path / "test" / "pos" / "0_8.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"0_8.txt is empty"):
        byte_text_classification(tmp_path, "test")
    (tmp_path / "test" / "pos" / "0_8.txt").unlink()
    with pytest.raises(ValueError, match=r"holds no .txt files"):
        byte_text_classification(tmp_path, "test")


def test_lengths_of_texts(tmp_path):
    with pytest.raises(ValueError, match="`max_length` is 0"):
        byte_text_classification(tmp_path, max_length=0)
    for label in ("neg", "pos"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "0.txt").write_bytes(b"x" * 5000)
    assert len(byte_text_classification(tmp_path)[1]["input_ids"]) == 4096
    assert len(byte_text_classification(tmp_path, max_length=None)[1]["input_ids"]) == 5000
