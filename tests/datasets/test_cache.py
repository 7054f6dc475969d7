import multiprocessing
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from fedplat.datasets.cache import Stamp, cached, default_cache, fingerprint, stamp

FILES = [Stamp(("a.bin",), 3, 17)]


def build():
    return {"x": np.arange(60, dtype=np.uint8).reshape(5, 12), "y": np.arange(5)}, {"classes": ["a", "b"]}


def never():
    raise AssertionError("built again")


def load(cache, build=build, *, settings=None, files=FILES, version=1):
    return cached(cache, "toy", version, settings or {"size": 8}, files, build)


def entry(cache: Path) -> Path:
    (folder,) = [p for p in cache.iterdir() if not p.name.startswith(".")]
    return folder


def test_the_second_start_maps_the_arrays_of_the_first(tmp_path):
    first = load(tmp_path)
    again = load(tmp_path, never)
    assert isinstance(again.arrays["x"], np.memmap)
    for name in ("x", "y"):
        np.testing.assert_array_equal(again.arrays[name], build()[0][name])
    assert again.facts == {"classes": ["a", "b"]}
    assert again.fingerprint == first.fingerprint == fingerprint(build()[0])


def test_writing_to_a_mapped_array_leaves_the_cache_as_it_was(tmp_path):
    load(tmp_path).arrays["x"][:] = 0
    np.testing.assert_array_equal(load(tmp_path, never).arrays["x"], build()[0]["x"])


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"size": 9}},
        {"version": 2},
        {"files": [Stamp(("a.bin",), 4, 17)]},
        {"files": [Stamp(("a.bin",), 3, 18)]},
        {"files": [Stamp(("b.bin",), 3, 17)]},
    ],
)
def test_a_changed_setting_version_or_raw_file_makes_a_new_entry(tmp_path, change):
    load(tmp_path)
    with pytest.raises(AssertionError, match="built again"):
        load(tmp_path, never, **change)


def damage_manifest(folder):
    (folder / "manifest.json").write_text("{")


def damage_manifest_kind(folder):
    (folder / "manifest.json").write_text("[]")


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def truncate(folder):
    data = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(data[:-7])


def empty(folder):
    (folder / "x.npy").write_bytes(b"")


def spoil_header(folder):
    data = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(b"garbage!" + data[8:])


def other_shape(folder):
    np.save(folder / "x.npy", build()[0]["x"].reshape(12, 5))


def remove_array(folder):
    (folder / "y.npy").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        damage_manifest,
        damage_manifest_kind,
        remove_manifest,
        truncate,
        empty,
        spoil_header,
        other_shape,
        remove_array,
    ],
)
def test_a_damaged_entry_is_rebuilt_once(tmp_path, damage):
    load(tmp_path)
    damage(entry(tmp_path))
    np.testing.assert_array_equal(load(tmp_path).arrays["x"], build()[0]["x"])
    np.testing.assert_array_equal(load(tmp_path, never).arrays["x"], build()[0]["x"])
    assert [p.name for p in tmp_path.iterdir()] == [entry(tmp_path).name]


def test_a_build_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(AssertionError, match="built again"):
        load(tmp_path / "cache", never)
    assert not (tmp_path / "cache").exists()


def test_what_a_killed_process_left_is_not_read_and_is_swept_after_a_day(tmp_path):
    import os

    left = tmp_path / ".part-toy-123"
    left.mkdir()
    (left / "x.npy").write_bytes(b"half")
    load(tmp_path)
    assert left.exists()
    os.utime(left, (0, 0))
    load(tmp_path, version=2)
    assert not left.exists()


def test_a_cache_that_cannot_be_written_warns_once_and_serves_from_memory(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="FEDPLAT_CACHE") as caught:
        found = load(tmp_path / "file" / "cache")
    assert len(caught) == 1
    np.testing.assert_array_equal(found.arrays["x"], build()[0]["x"])
    assert found.fingerprint == fingerprint(build()[0])


def _start(cache, barrier, results):
    barrier.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = load(Path(cache))
    results.put((found.fingerprint, int(found.arrays["x"].sum())))


def test_processes_that_start_at_once_all_get_a_whole_entry(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_start, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    answers = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert set(answers) == {(fingerprint(build()[0]), int(np.arange(60).sum()))}
    assert [p.name for p in tmp_path.iterdir()] == [entry(tmp_path).name]


def test_an_entry_that_another_process_replaces_while_it_is_open_stays_readable(tmp_path):
    found = load(tmp_path)
    shutil.rmtree(entry(tmp_path))
    load(tmp_path)
    np.testing.assert_array_equal(found.arrays["x"], build()[0]["x"])


def test_an_empty_array_is_cached_too(tmp_path):
    for maker in (lambda: ({"x": np.empty((0, 4), np.uint8)}, {}), never):
        assert load(tmp_path, maker).arrays["x"].shape == (0, 4)


def test_the_fingerprint_depends_on_content_names_types_and_shapes_only(tmp_path):
    x = np.arange(6, dtype=np.int64)
    base = fingerprint({"x": x, "y": x})
    assert base == fingerprint({"y": x.copy(), "x": np.stack([x, x], 1)[:, 0]})
    assert base == fingerprint({"x": x.astype(">i8"), "y": x})
    others = [{"x": x}, {"x": x, "z": x}, {"x": x[::-1], "y": x}, {"x": x.reshape(2, 3), "y": x}]
    others += [{"x": x.astype(np.int32), "y": x}]
    assert len({base, *map(fingerprint, others)}) == 1 + len(others)


def test_stamps_are_relative_and_sorted(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    stamps = stamp(tmp_path, [tmp_path / "b.txt", tmp_path / "a.txt"])
    assert [(s.parts, s.size) for s in stamps] == [(("a.txt",), 5), (("b.txt",), 5)]


def test_the_default_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDPLAT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == tmp_path / ".cache" / "fedplat"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "fedplat"
    monkeypatch.setenv("FEDPLAT_CACHE", "~/mine")
    assert default_cache() == tmp_path / "mine"
