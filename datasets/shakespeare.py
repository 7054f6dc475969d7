"""Tiny Shakespeare: predict the next character; every speaker of the plays is a natural client."""

from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError
from .base import Dataset, Source, Split
from .cache import Arrays, Facts, cached, stamp
from .fetch import Wanted, locate

_VERSION = 1
_FOLDER = "tinyshakespeare"
_FILE = "input.txt"
_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
_MD5 = "6fb458f1232090904fb40fe944165e91"


def load(
    source: Source,
    *,
    sequence_length: Annotated[int, Field(ge=2, le=1024)] = 80,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    min_samples: Annotated[int, Field(ge=1)] = 10,
) -> Dataset:
    """Return windows x (n, T) of character tokens and y (n, T), x shifted by one, grouped by speaker.

    A speaker's speeches are joined in order; the last ``test_fraction`` of the characters, the latest in
    time, are test. Each part is cut into windows of T + 1 characters that start T apart, so that every
    character but a part's first is predicted once per epoch; what is left at the end, T characters at most,
    is dropped. No window crosses speakers or the cut. Speakers with fewer than ``min_samples`` training
    windows are left out, which ``note`` tells. Speakers of the same name in two plays are one: the text
    does not mark where a play ends.

    Raises UserError if the text is missing or no speaker is left. Source: Karpathy's Tiny Shakespeare; the
    task and T = 80 are those of McMahan et al., AISTATS 2017, who predict the last character only.
    """
    root = locate(
        source,
        Wanted(
            title="Tiny Shakespeare",
            layout=f"{_FOLDER}/{_FILE} or {_FILE}",
            subfolder=_FOLDER,
            is_in=lambda folder: _text_in(folder) is not None,
            fetch=_fetch,
        ),
    )
    path = _text_in(root)
    assert path is not None

    def build() -> tuple[Arrays, Facts]:
        return _build(path, sequence_length, test_fraction, min_samples)

    settings = {
        "sequence_length": sequence_length,
        "test_fraction": test_fraction,
        "min_samples": min_samples,
    }
    found = cached(source.cache, "shakespeare", _VERSION, settings, stamp(root, [path]), build)
    arrays, facts = found.arrays, found.facts
    return Dataset(
        name="shakespeare",
        train=Split(arrays["train_x"], arrays["train_y"]),
        test=Split(arrays["test_x"], arrays["test_y"]),
        classes=tuple(facts["classes"]),
        sample_shape=(sequence_length,),
        groups=arrays["groups"],
        group_names=tuple(facts["group_names"]),
        note=facts["note"],
        fingerprint=found.fingerprint,
    )


def speeches(text: str) -> dict[str, str]:
    r"""Return what each speaker says, speeches joined by a line break, in order of first appearance.

    >>> speeches("A:\nHear me.\n\nB:\nNo.\n\nA:\nWhy?\nSpeak!\n")
    {'A': 'Hear me.\nWhy?\nSpeak!\n', 'B': 'No.\n'}
    """
    lines: dict[str, list[str]] = {}
    speaker: str | None = None
    opening = True
    for line in text.splitlines():
        if opening and line.endswith(":"):
            speaker = line[:-1]
        elif line and speaker is not None:
            lines.setdefault(speaker, []).append(line)
        opening = not line
    return {name: "\n".join(said) + "\n" for name, said in lines.items()}


def windows(tokens: NDArray[np.unsignedinteger], length: int) -> NDArray[np.unsignedinteger]:
    """Cut tokens (m,) into windows (n, length + 1) that start ``length`` apart; the rest is dropped.

    >>> windows(np.arange(8, dtype=np.uint8), 3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if len(tokens) <= length:
        return np.empty((0, length + 1), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def _build(path: Path, length: int, test_fraction: float, min_samples: int) -> tuple[Arrays, Facts]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    alphabet = sorted({*text, "\n"})
    dtype = np.min_scalar_type(len(alphabet) - 1)
    token = {character: index for index, character in enumerate(alphabet)}
    names, train, test = [], [], []
    spoken = speeches(text)
    for name, said in spoken.items():
        tokens = np.array([token[character] for character in said], dtype)
        cut = len(tokens) - round(test_fraction * len(tokens))
        cuts = windows(tokens[:cut], length)
        if len(cuts) >= min_samples:
            names.append(name)
            train.append(cuts)
            test.append(windows(tokens[cut:], length))
    if not names:
        raise UserError(
            f"shakespeare: none of the {len(spoken)} speakers in {path} has min_samples = {min_samples} "
            f"windows of {length} characters; lower min_samples or sequence_length"
        )
    if not any(len(w) for w in test):
        raise UserError(
            f"shakespeare: no speaker in {path} has {length + 1} characters of test text; raise "
            f"test_fraction or lower sequence_length"
        )
    left_out = len(spoken) - len(names)
    note = f"{left_out} of {len(spoken)} speakers left out: fewer than {min_samples} training windows"
    groups = np.repeat(np.arange(len(names), dtype=np.int64), [len(w) for w in train])
    arrays: dict[str, NDArray[np.generic]] = {"groups": groups}
    for split, parts in (("train", np.concatenate(train)), ("test", np.concatenate(test))):
        arrays[f"{split}_x"] = np.ascontiguousarray(parts[:, :-1])
        arrays[f"{split}_y"] = parts[:, 1:].astype(np.int64)
    return arrays, {"classes": alphabet, "group_names": names, "note": note if left_out else ""}


def _text_in(folder: Path) -> Path | None:
    for path in (folder / _FOLDER / _FILE, folder / _FILE):
        if path.is_file():
            return path
    return None


def _fetch(folder: Path) -> None:
    from torchvision.datasets.utils import download_url

    download_url(_URL, str(folder / _FOLDER), _FILE, md5=_MD5)
