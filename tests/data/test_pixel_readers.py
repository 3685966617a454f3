"""Images as corpora, on small files written here, and images made from tokens."""

import gzip
import math
import struct
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hf_recurrent import (
    ByteTokenizer,
    HawkConfig,
    HawkForCausalLM,
    MultiStreamTrainer,
    MultiStreamTrainingArguments,
    evaluate_bits_per_byte,
    load_corpus,
    load_splits,
    sample_images,
    save_image_sheet,
    tokens_to_images,
)
from hf_recurrent.data.pixel_readers import binary_patches
from hf_recurrent.data.streams import MultiStreamDataset

RANDOM = np.random.default_rng(0)
DIGITS = RANDOM.integers(0, 256, (5, 28, 28), np.uint8)


def idx(array):
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def load(tmp_path):
    return lambda source, function=load_corpus, **options: function(source, cache_dir=tmp_path / "cache", **options)


@pytest.fixture
def mnist(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(idx(DIGITS))
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(DIGITS[:2] // 2)))
    return folder


def save_png(path, pixels):
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(pixels).save(path)


# ---- MNIST ----


def test_mnist_as_episodes(mnist, load):
    train = load(f"mnist:{mnist}")
    assert (len(train), train.num_bytes, train.vocab_size, train.end_token_id) == (5, 5 * 784, 256, None)
    assert isinstance(train._store, np.memmap) and train.name == f"mnist:{mnist}"
    assert all(np.array_equal(episode, image.ravel()) for episode, image in zip(train, DIGITS, strict=True))
    assert np.array_equal(tokens_to_images(np.stack(list(train))), DIGITS)
    test = load(f"mnist:{mnist}", split="test")
    assert np.array_equal(tokens_to_images(np.stack(list(test))), DIGITS[:2] // 2)
    # A tokenizer has no effect, and max_bytes takes whole images.
    same = load(f"mnist:{mnist}", tokenizer=ByteTokenizer(), max_bytes=2000)
    assert len(same) == 2 and same.end_token_id is None
    batch = next(iter(MultiStreamDataset(train, 5, 784)))
    assert (batch["shift_labels"][:, -1] == -100).all()  # no end token, and no target crosses images
    assert torch.equal(batch["shift_labels"][:, :-1], batch["input_ids"][:, 1:])


def test_test_files_are_the_validation(mnist, load):
    train, validation = load(f"mnist:{mnist}", load_splits, validation_fraction=0.4)
    assert (len(train), len(validation)) == (5, 2) and np.array_equal(validation[1], DIGITS[1].ravel() // 2)
    (mnist / "t10k-images-idx3-ubyte.gz").unlink()
    train, validation = load(f"mnist:{mnist}", load_splits, validation_fraction=0.4)
    assert (len(train), len(validation)) == (3, 2)
    (mnist / "train-images-idx3-ubyte").rename(mnist / "t10k-images-idx3-ubyte")
    with pytest.raises(FileNotFoundError, match=r"file not found: .*train-images-idx3-ubyte"):
        load(f"mnist:{mnist}", load_splits)
    train, validation = load(f"mnist:{mnist}", load_splits, split="test", validation_fraction=0.2)
    assert (len(train), len(validation)) == (4, 1)


def test_text_is_split_as_ever(tmp_path, load):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    source = str(tmp_path / "*.txt")
    parts = load(source, load_splits, validation_fraction=0.3, split_seed=4)
    for part, wanted in zip(parts, load(source).split(0.3, 4), strict=True):
        assert part.fingerprint == wanted.fingerprint and part.end_token_id == 0


def test_bad_mnist(mnist, load, tmp_path):
    path = mnist / "train-images-idx3-ubyte"
    for content, message in {
        idx(DIGITS)[:-1]: "is truncated: it has 3935 bytes, but 3936 by its header",
        idx(DIGITS[:, :, :20]): r"train-images-idx3-ubyte holds images of 28 x 20 pixels; they must be 28 x 28",
        idx(DIGITS[0]): "begins with the magic number 0x00000802; it must be 0x00000803",
        gzip.compress(idx(DIGITS))[:-9]: "is damaged",
    }.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load(f"mnist:{mnist}")
    path.unlink()
    (mnist / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"file not found: .*train-images-idx3-ubyte \(or .gz\)$"):
        load(f"mnist:{mnist}")
    with pytest.raises(FileNotFoundError, match=r"`source` is 'mnist:.*nowhere'; directory not found: .*nowhere$"):
        load(f"mnist:{tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="`split` is 'validation'; for mnist: sources it must be one of train, test"):
        load(f"mnist:{mnist}", split="validation")
    with pytest.raises(ValueError, match=r"`source` is mnist:.*; mnist: and images: sources must not be mixed"):
        load([f"mnist:{mnist}", "python"])
    with pytest.raises(ValueError, match=r"`source` is mnist:.*; mnist: and images: sources must not be mixed"):
        load([f"mnist:{mnist}", f"images:{mnist}"])


# ---- Folders of images ----


def test_patches_one_by_one():
    """Each of the 16 patches, written out: top left, top right, bottom left, bottom right."""
    for token in range(16):
        ink = np.array([bit == "1" for bit in f"{token:04b}"]).reshape(2, 2)
        assert binary_patches(ink).tolist() == [token]
        assert np.array_equal(tokens_to_images([token], 16), ink * 255)
    ink = np.zeros((4, 4), bool)
    ink[0, 3] = ink[3, 0] = True
    assert binary_patches(ink).tolist() == [0, 4, 2, 0]


@given(arrays(bool, st.sampled_from([(2, 2), (8, 8), (64, 64)])))
def test_patches_and_back(ink):
    assert np.array_equal(tokens_to_images(binary_patches(ink), 16), ink * np.uint8(255))


@pytest.fixture
def sketch():
    """Strokes on paper as in Sketchy: (256, 256) uint8, of which every 4 × 4 is one pixel after resizing."""
    ink = np.zeros((64, 64), bool)
    ink[20:24, 8:50], ink[8:60, 30:35] = True, True
    return np.where(ink.repeat(4, 0).repeat(4, 1), 20, 250).astype(np.uint8), ink


def test_sketches_as_episodes(tmp_path, load, sketch):
    pixels, ink = sketch
    folder = tmp_path / "sketches"
    save_png(folder / "cat" / "a.png", pixels)
    transparent = np.zeros((256, 256, 4), np.uint8)
    transparent[..., 3] = 255 * (pixels < 128)  # black strokes on nothing
    save_png(folder / "cat" / "b.png", transparent)
    save_png(folder / "dog" / "c.PNG", pixels[:64, :128])
    (folder / "dog" / "list.txt").write_text("c.PNG")
    corpus = load(f"images:{folder}")
    assert (len(corpus), corpus.vocab_size, corpus.end_token_id) == (3, 16, None)
    assert corpus.num_bytes == 3 * 1024 and isinstance(corpus._store, np.memmap) and max(corpus.store) < 16
    images = tokens_to_images(np.stack(list(corpus)), 16)
    assert images.shape == (3, 64, 64) and set(np.unique(images)) == {0, 255}
    for image in images[:2]:
        # Lanczos may ring, but its half level stays at the border of the ink, so nothing moves.
        assert np.array_equal(image, ink * 255)
    # Another size is stretched: the piece of 64 × 128 pixels holds the top of the upright stroke.
    assert images[2][:32].max() == 0 and images[2][40:, 61:].all()
    train, validation = load(f"images:{folder}", load_splits, validation_fraction=0.34)
    assert (len(train), len(validation)) == (2, 1)


def test_folders_of_splits(tmp_path, load, sketch):
    pixels, _ = sketch
    for number in range(3):
        save_png(tmp_path / "own" / ("test" if number == 2 else "train") / f"{number}.png", pixels)
    train, validation = load(f"images:{tmp_path / 'own'}", load_splits)
    assert (len(train), len(validation)) == (2, 1)
    with pytest.raises(FileNotFoundError, match=r"`split` is 'test', but .* have the directories train and test"):
        load(f"images:{tmp_path / 'own' / 'train'}", split="test")


def test_resizing_is_lanczos(tmp_path, load):
    image = pytest.importorskip("PIL.Image")
    pixels = RANDOM.integers(0, 256, (90, 70), np.uint8)
    save_png(tmp_path / "noise" / "a.png", pixels)
    small = np.asarray(image.fromarray(pixels).resize((64, 64), image.Resampling.LANCZOS))
    corpus = load(f"images:{tmp_path / 'noise'}")
    assert np.array_equal(tokens_to_images(corpus[0], 16) == 255, small < 128)


def test_bad_images(tmp_path, load, sketch):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"folder holds no images; their names must end in .bmp"):
        load(f"images:{folder}")
    save_png(folder / "good.png", sketch[0])
    whole = (folder / "good.png").read_bytes()
    for content in (b"", b"not an image", whole[: len(whole) // 2], whole[:60] + b"\xff" * 40 + whole[100:]):
        (folder / "bad.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"bad.png cannot be read as an image: "):
            load(f"images:{folder}")
    assert not any(path.suffix == ".incomplete" for path in (tmp_path / "cache").iterdir())


def test_without_pillow(tmp_path, load, sketch, monkeypatch):
    save_png(tmp_path / "one" / "a.png", sketch[0])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"one needs the Pillow package: pip install pillow"):
        load(f"images:{tmp_path / 'one'}")
    with pytest.raises(ImportError, match=r"sheet.png needs the Pillow package"):
        save_image_sheet(DIGITS, tmp_path / "sheet.png")


WITHOUT_PILLOW = """
import sys
for name in [name for name in sys.modules if name.startswith(("PIL", "hf_recurrent.data"))]:
    del sys.modules[name]
sys.modules["PIL"] = None
import hf_recurrent.data.readers
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.loading import load_corpus
from hf_recurrent.data.pixel_readers import tokens_to_images
print(Corpus.from_documents(["a"]).num_bytes)
"""


def test_pillow_is_needed_only_for_images(commands, tmp_path):
    done = commands.python(["-c", WITHOUT_PILLOW], tmp_path)
    assert done.stdout.strip() == "1", done.stderr


# ---- Tokens to images ----


def test_generated_tokens_become_images():
    tokens = torch.arange(2 * 3 * 784).reshape(2, 3, 784) % 256
    images = tokens_to_images(tokens)
    assert images.shape == (2, 3, 28, 28) and images.dtype == np.uint8
    assert images[1, 2, 27, 27] == (2 * 3 * 784 - 1) % 256


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "message"),
    [
        (np.zeros(784, int), 4, "`vocab_size` is 4; it must be 256"),
        (np.zeros(783, int), 256, "`tokens` has 783 steps; they must be a square number"),
        (np.full(16, 16), 16, "it must hold integers from 0 to 15"),
        (np.full(16, -100), 256, "it must hold integers from 0 to 255"),
        (np.zeros(16), 256, "`tokens` is float64"),
    ],
)
def test_bad_tokens(tokens, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        tokens_to_images(tokens, vocab_size)


def test_sheets(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    path = tmp_path / "sheet.png"
    save_image_sheet(DIGITS, path, columns=3, scale=2, gap=1)
    with pillow.open(path) as file:
        sheet = np.asarray(file)
    assert sheet.shape == (2 * 57 + 1, 3 * 57 + 1)
    for number in range(5):
        top, left = 1 + 57 * (number // 3), 1 + 57 * (number % 3)
        assert np.array_equal(sheet[top : top + 56 : 2, left : left + 56 : 2], DIGITS[number])
        assert np.array_equal(sheet[top + 1 : top + 56 : 2, left : left + 56 : 2], DIGITS[number])
    assert (sheet[::57] == 128).all() and (sheet[:, ::57] == 128).all() and (sheet[58:, 115:] == 128).all()
    for arguments, message in (
        ({"columns": 0}, "`columns` is 0; it must be at least 1"),
        ({"gap": -1}, "`gap` is -1; it must be at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            save_image_sheet(DIGITS, path, **arguments)
    with pytest.raises(ValueError, match=r"`images` is uint8 \(28, 28\)"):
        save_image_sheet(DIGITS[0], path)


# ---- Training ----


def test_train_evaluate_and_draw(tmp_path, load):
    """Images of one constant level each: the first pixel determines all others."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    levels = np.array([0, 90, 255, 90, 0, 255], np.uint8)
    (folder / "train-images-idx3-ubyte").write_bytes(idx(np.broadcast_to(levels[:, None, None], (6, 28, 28))))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(np.full((2, 28, 28), 90, np.uint8)))
    train, validation = load(f"mnist:{folder}", load_splits)
    torch.manual_seed(0)
    model = HawkForCausalLM(HawkConfig(hidden_size=16, state_size=16, num_hidden_layers=1, eos_token_id=None))
    arguments = MultiStreamTrainingArguments(
        str(tmp_path / "run"), max_steps=25, block_size=98, per_device_train_batch_size=6, learning_rate=3e-2,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = MultiStreamTrainer(model, arguments, train, validation)
    trainer.train()
    bits = trainer.evaluate()["eval_bits_per_byte"]
    assert bits < 0.5
    measured = evaluate_bits_per_byte(model, validation, progress=False)
    # Bits per pixel: all pixels but the first, which is given, over all pixels.
    assert measured["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.full((1, 784), 90)).logits[0, :-1].double()
    nats = -logits.log_softmax(-1)[:, 90].sum().item()
    assert measured["bits_per_byte"] == pytest.approx(nats / math.log(2) / 784, rel=1e-4)
    drawn = model.generate(torch.tensor([[0], [255]]), max_new_tokens=783, do_sample=False)
    assert tokens_to_images(drawn).shape == (2, 28, 28)


def test_drawing_leaves_everything_as_it_was(monkeypatch):
    monkeypatch.setattr("hf_recurrent.evaluation.samples._IMAGE_LENGTHS", {256: 49, 16: 64})
    torch.manual_seed(0)
    model = HawkForCausalLM(HawkConfig(vocab_size=16, hidden_size=8, state_size=8, num_hidden_layers=1)).train()
    assert model.config.eos_token_id == 0  # which must not end an image
    state = torch.get_rng_state()
    images = sample_images(model, 31, vocab_size=16, batch_size=16)
    assert images.shape == (31, 16, 16) and set(np.unique(images)) == {0, 255} and images[:, 0, 0].max() == 0
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(images, sample_images(model, 31, vocab_size=16, batch_size=16))
    tokens = np.stack([binary_patches(image > 0) for image in images])
    assert np.bincount(tokens.ravel(), minlength=16).min() > 40  # a fresh model draws all patches
    with pytest.raises(ValueError, match="`vocab_size` is 4; it must be one of 256, 16"):
        sample_images(model, vocab_size=4)
    with pytest.raises(ValueError, match="`num_images` is 0; it must be at least 1"):
        sample_images(model, 0)
