import numpy as np
import pytest

from fedplat.datasets import shakespeare
from fedplat.errors import UserError
from tests.datasets import real_data, source

LONG = "The quick brown fox jumps over the lazy dog and runs away."
PLAY = "\n\n".join(
    f"{name}:\n{LONG} {i}\nAnd {name} says more." for i in range(12) for name in ("ANN", "BOB")
)
PLAY += "\n\nPAGE:\nShort.\n\nANN:\n\nBOB:\nThe end.\n"


@pytest.fixture
def play(tmp_path):
    (tmp_path / "plays").mkdir()
    (tmp_path / "plays" / "input.txt").write_text(PLAY)
    return tmp_path / "plays"


def text(data, tokens):
    return "".join(data.classes[token] for token in np.ravel(tokens))


def test_every_position_predicts_the_next_character(tmp_path, play):
    data = shakespeare.load(source(tmp_path, play), sequence_length=20)
    assert data.train.x.dtype == np.uint8
    assert data.train.y.dtype == np.int64
    assert data.train.x.shape == data.train.y.shape == (len(data.train), 20)
    for split in (data.train, data.test):
        np.testing.assert_array_equal(split.x[:, 1:], split.y[:, :-1])
    assert data.classes == tuple(sorted(set(PLAY)))
    assert data.is_text
    assert data.sample_shape == (20,)
    assert tuple(data.prepare(data.train.x[:3]).shape) == (3, 20)


def test_a_window_holds_the_words_of_its_speaker_only_and_never_crosses_the_cut(tmp_path, play):
    data = shakespeare.load(source(tmp_path, play), sequence_length=20, test_fraction=0.25)
    assert data.group_names == ("ANN", "BOB")
    said = shakespeare.speeches(PLAY)
    start = {}
    for split in ("train", "test"):
        x, y = getattr(data, split).x, getattr(data, split).y
        spoken = [text(data, x[i]) + text(data, y[i, -1:]) for i in range(len(x))]
        start[split] = spoken
    for group, name in enumerate(data.group_names):
        words = said[name]
        cut = len(words) - round(0.25 * len(words))
        mine = [start["train"][i] for i in np.flatnonzero(data.groups == group)]
        assert mine == [words[i : i + 21] for i in range(0, cut - 20, 20)]
        assert all(words[i : i + 21] in start["test"] for i in range(cut, len(words) - 20, 20))


def test_each_character_is_predicted_once_per_epoch(tmp_path, play):
    data = shakespeare.load(source(tmp_path, play), sequence_length=20)
    words = shakespeare.speeches(PLAY)["ANN"]
    predicted = text(data, data.train.y[data.groups == 0])
    assert words[1:].startswith(predicted)
    assert len(predicted) > 0.8 * len(words) - 22


def test_small_speakers_are_left_out_and_reported(tmp_path, play):
    data = shakespeare.load(source(tmp_path, play), sequence_length=20)
    assert "PAGE" not in data.group_names
    assert data.note == "1 of 3 speakers left out: fewer than 10 training windows"
    assert np.bincount(data.groups).min() >= 10


def test_the_settings_are_part_of_the_cache_key(tmp_path, play):
    first = shakespeare.load(source(tmp_path, play), sequence_length=20)
    other = shakespeare.load(source(tmp_path, play), sequence_length=10)
    again = shakespeare.load(source(tmp_path, play), sequence_length=20)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_the_usual_subfolder_is_found_too(tmp_path, play):
    (tmp_path / "data").mkdir()
    play.rename(tmp_path / "data" / "tinyshakespeare")
    assert shakespeare.load(source(tmp_path, tmp_path / "data"), sequence_length=20).num_classes > 10


def test_a_missing_text_and_a_text_without_speakers_are_said(tmp_path, play):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"tinyshakespeare/input\.txt or input\.txt"):
        shakespeare.load(source(tmp_path, tmp_path / "empty"))
    (play / "input.txt").write_text("No one speaks here.\n" * 50)
    with pytest.raises(UserError, match="none of the 0 speakers"):
        shakespeare.load(source(tmp_path, play))
    (play / "input.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match="cannot read"):
        shakespeare.load(source(tmp_path, play))


def test_a_text_too_short_for_a_test_window_is_said(tmp_path, play):
    with pytest.raises(UserError, match="characters of test text"):
        shakespeare.load(source(tmp_path, play), sequence_length=60, test_fraction=0.01)


def test_tiny_shakespeare_has_65_characters_and_many_speakers(tmp_path):
    data = shakespeare.load(source(tmp_path, real_data("tinyshakespeare/input.txt")))
    assert data.num_classes == 65
    assert len(data.group_names) == 141
    assert len(data.train) == 9692
    assert {"ROMEO", "JULIET"} <= set(data.group_names)
