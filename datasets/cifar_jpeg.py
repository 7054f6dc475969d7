"""CIFAR-10 re-encoded as JPEG: the tree ``CIFAR10/{train,test}/<class>/*.jpg`` or an archive of that tree.

Both give the same arrays: files are taken in path order, whatever their order in the archive.
"""

import io
import lzma
import tarfile
from pathlib import Path, PurePosixPath

from ..errors import UserError
from .cache import Arrays, Facts, Stamp
from .images import Read, decode, is_image, list_images, reader, resize
from .labelled import labels_of, train_and_test

FOLDER = "CIFAR10"
ARCHIVE = "cifar10-jpeg.tar.xz"
LAYOUT = f"{FOLDER}/{{train,test}}/<class>/*.jpg or {ARCHIVE}"
NOTE = "this copy of CIFAR-10 was re-encoded as JPEG (lossy): accuracies differ from those on the original"


def has_tree(root: Path) -> bool:
    """Whether the folder holds the image tree."""
    return (root / FOLDER / "train").is_dir() and (root / FOLDER / "test").is_dir()


def has_archive(root: Path) -> bool:
    """Whether the folder holds the archive."""
    return (root / ARCHIVE).is_file()


def open_tree(root: Path) -> tuple[list[Stamp], Read]:
    """List the image tree and return (files, how to read one)."""
    folder = root / FOLDER
    return list_images(folder), reader(folder)


def open_archive(root: Path) -> tuple[list[Stamp], Read]:
    """Read the archive into memory and return (files, how to read one); raises UserError if it is damaged."""
    path = root / ARCHIVE
    found: dict[tuple[str, ...], bytes] = {}
    try:
        # Unpacked at once: slices of the bytes are far faster than 60,000 extracted members.
        with lzma.open(path) as file:
            raw = file.read()
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if member.isreg() and parts[0] == FOLDER and is_image(member.name):
                    found[parts[1:]] = raw[member.offset_data : member.offset_data + member.size]
    except (lzma.LZMAError, tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    files = sorted(Stamp(parts, len(data), 0) for parts, data in found.items())
    return files, lambda file: found[file.parts]


def build(files: list[Stamp], read: Read, size: int | None, where: str) -> tuple[Arrays, Facts]:
    """Decode listed files to train and test arrays (n, H, W, 3) with labels; raises UserError."""
    train, test, classes = train_and_test(files, where)
    images = {"train_x": decode(train, read), "test_x": decode(test, read)}
    if size is not None:
        images = {name: resize(pixels, size) for name, pixels in images.items()}
    labels = {"train_y": labels_of(train, classes, 1), "test_y": labels_of(test, classes, 1)}
    return {**images, **labels}, {"classes": classes}
