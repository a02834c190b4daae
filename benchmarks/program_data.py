"""Data for the programs of `predict_programs.toml`: the right sizes and formats, made-up contents.

Every kind is a function that takes the path to write to. Contents come from a fixed seed: every machine has
the same data. What a program computes from them means nothing.
"""

from __future__ import annotations

import gzip
import pickle
import string
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

WORDS: Final = 33278 - 1
"""Different words in WikiText-2; the program adds its own end of line."""
SHARD_DOCUMENTS: Final = 4000
MERGES: Final = 32768 - 256 - 9
"""nanochat's vocabulary, less the bytes and its special tokens."""
VGG16: Final = "vgg16-397923af.pth"


def _random() -> np.random.Generator:
    return np.random.default_rng(7)


def text(path: Path) -> None:
    """A million characters of an alphabet of 65."""
    alphabet = np.array(list(string.ascii_letters + "\n !$&',-.:;?3"))
    path.write_text("".join(_random().choice(alphabet, 1_000_000)))


def names(path: Path) -> None:
    """32,000 words of 2 to 15 small letters."""
    random = _random()
    letters = np.array(list(string.ascii_lowercase))
    sizes = random.integers(2, 16, 32_000)
    path.write_text("\n".join("".join(random.choice(letters, size)) for size in sizes))


def tokens(path: Path) -> None:
    """Two million tokens of 16 bits, below 32,000."""
    _random().integers(0, 32_000, 2_000_000, dtype=np.uint16).tofile(path)


def words(path: Path) -> None:
    """WikiText-2's shape: train, valid and test, with as many different words."""
    path.mkdir()
    random = _random()
    for name, lines in (("train", 20_000), ("valid", 2_000), ("test", 2_000)):
        drawn = random.integers(0, WORDS, (lines, 35))
        if name == "train":
            drawn.flat[:WORDS] = np.arange(WORDS)
        text = "\n".join(" ".join(f"w{each}" for each in line) for line in drawn)
        (path / f"{name}.txt").write_text(text)


def enwik8(path: Path) -> None:
    """95 million bytes, compressed: a text that repeats."""
    once = _random().integers(32, 127, 1 << 16, dtype=np.uint8).tobytes()
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(95_000_000 // len(once) + 1):
            file.write(once)


def nanochat(path: Path) -> None:
    """A tokenizer of 32,768 tokens and two shards of documents."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    pairs = (bytes((first, second)) for first in range(256) for second in range(256))
    ranks = {bytes((each,)): each for each in range(256)}
    ranks.update((pair, 256 + place) for place, pair in zip(range(MERGES), pairs, strict=False))
    roles = ("user", "assistant", "python", "output")
    special = ["<|bos|>", *(f"<|{role}_{end}|>" for role in roles for end in ("start", "end"))]
    encoding = tiktoken.Encoding(
        name="made-up",
        pat_str=r"\s?\S+|\s+",
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + place for place, name in enumerate(special)},
    )
    (path / "tokenizer").mkdir(parents=True)
    (path / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = torch.tensor([len(rank) for rank in ranks] + [0] * len(special), dtype=torch.int32)
    torch.save(lengths, path / "tokenizer" / "token_bytes.pt")
    random = _random()
    letters = np.array(list(string.ascii_lowercase + "    "))
    (path / "base_data_climbmix").mkdir()
    for shard in range(2):
        documents = [
            "".join(random.choice(letters, size)) for size in random.integers(200, 4000, SHARD_DOCUMENTS)
        ]
        table = pyarrow.table({"text": documents})
        pyarrow.parquet.write_table(table, path / "base_data_climbmix" / f"shard_{shard:05d}.parquet")


def cora(path: Path) -> None:
    """A graph of Cora's size: 2,708 papers with 1,433 features each, 7 classes, 5,429 links."""
    path.mkdir(parents=True)
    random = _random()
    features = random.random((2708, 1433)) < 0.0127
    with (path / "cora.content").open("w") as file:
        for paper, has in enumerate(features):
            columns = (str(paper), *("1" if each else "0" for each in has), f"class{paper % 7}")
            file.write("\t".join(columns) + "\n")
    links = random.integers(0, 2708, (5429, 2))
    (path / "cora.cites").write_text("".join(f"{cited}\t{citing}\n" for cited, citing in links))


def mnist(path: Path) -> None:
    """MNIST's files, as torchvision unpacks them."""
    raw = path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    random = _random()
    for name, count in (("train", 60_000), ("t10k", 10_000)):
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        size = struct.pack(">4i", 2051, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(size + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def _pictures(width: int, height: int, count: int, suffix: str) -> list[bytes]:
    """Encoded pictures of a few smooth color spots."""
    import io

    from PIL import Image

    random = _random()
    made = []
    for _ in range(count):
        small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8), "RGB")
        file = io.BytesIO()
        small.resize((width, height), Image.Resampling.BICUBIC).save(file, suffix)
        made.append(file.getvalue())
    return made


def _picture_folder(path: Path, width: int, height: int, count: int, suffix: str = "jpeg") -> None:
    """Eight different pictures, over and over."""
    path.mkdir(parents=True)
    made = _pictures(width, height, 8, suffix)
    for place in range(count):
        (path / f"{place:05d}.{suffix}").write_bytes(made[place % len(made)])


def image_classes(path: Path) -> None:
    """A folder of two classes for training and for validation."""
    for split, count in (("train", 1280), ("validation", 128)):
        for name in ("first", "second"):
            _picture_folder(path / split / name, 256, 256, count // 2)


def faces(path: Path) -> None:
    """Pictures of 64 x 64 pixels in one class."""
    _picture_folder(path / "one", 64, 64, 4096, "png")


def bsd300(path: Path) -> None:
    """BSDS300's folders and sizes."""
    for split, count in (("train", 200), ("test", 100)):
        _picture_folder(path / split, 481, 321, count, "jpeg")
    for each in path.rglob("*.jpeg"):
        each.rename(each.with_suffix(".jpg"))


def facades(path: Path) -> None:
    """Pairs of pictures, next to each other."""
    for split, count in (("train", 400), ("val", 20)):
        _picture_folder(path / split, 512, 256, count)


def carvana(path: Path) -> None:
    """Pictures of Carvana's size and their masks."""
    from PIL import Image

    _picture_folder(path / "imgs", 1918, 1280, 160)
    (path / "masks").mkdir()
    random = _random()
    for each in sorted((path / "imgs").iterdir()):
        mask = Image.fromarray(random.integers(0, 2, (5, 8), dtype=np.uint8))
        mask.resize((1918, 1280), Image.Resampling.NEAREST).save(path / "masks" / f"{each.stem}_mask.gif")


def vgg16(path: Path) -> None:
    """Weights for torchvision's VGG16, in the folder where torchvision keeps what it has downloaded."""
    import torch
    import torchvision

    torch.manual_seed(7)
    path.mkdir(parents=True)
    torch.save(torchvision.models.vgg16(weights=None).state_dict(), path / VGG16)


def wandb(path: Path) -> None:
    """A module that replaces the package, which needs a network: it takes every call and does nothing."""
    path.write_text(
        "class Nothing:\n"
        "    def __getattr__(self, name):\n        return Nothing()\n"
        "    def __call__(self, *args, **kwargs):\n        return Nothing()\n\n"
        "run = config = Nothing()\n"
        "init = log = finish = Image = Histogram = Nothing()\n"
    )


KINDS: Final[dict[str, Callable[[Path], None]]] = {
    each.__name__: each
    for each in (
        text,
        names,
        tokens,
        words,
        enwik8,
        nanochat,
        cora,
        mnist,
        image_classes,
        faces,
        bsd300,
        facades,
        carvana,
        vgg16,
        wandb,
    )
}
