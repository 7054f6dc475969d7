from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from fedplat.errors import UserError
from fedplat.spill import RowFile, give_back_freed_memory, spill_folder


def test_rows_come_back_in_blocks_of_any_size_as_often_as_asked(tmp_path: Path) -> None:
    rows = torch.randn(11, 7)
    file = RowFile(7, 11, tmp_path)
    for start, stop in ((0, 4), (4, 4), (4, 5), (5, 11)):
        file.append(rows[start:stop])
    assert file.rows == 11
    for at_a_time in (1, 3, 11, 50):
        blocks = [block.clone() for block in file.blocks(at_a_time)]
        assert [len(block) for block in blocks[:-1]] == [at_a_time] * (len(blocks) - 1)
        assert torch.equal(torch.cat(blocks), rows)
    file.append(rows[:1])  # behind the end, wherever one has been reading
    assert torch.equal(next(iter(file.blocks(12)))[-1], rows[0])
    file.close()


def test_rows_that_are_columns_of_a_wider_matrix_are_written_as_they_look(tmp_path: Path) -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    file = RowFile(2, folder=tmp_path)
    file.append(wide[:, 1:3])
    assert [block.tolist() for block in file.blocks(3)] == [[[1, 2], [5, 6], [9, 10]]]
    file.close()


def test_an_empty_file_has_no_blocks(tmp_path: Path) -> None:
    file = RowFile(3, folder=tmp_path)
    assert list(file.blocks(5)) == []
    file.close()


def test_the_file_cannot_be_seen_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = RowFile(1000, 10, tmp_path)
    file.append(torch.zeros(10, 1000))
    assert list(tmp_path.iterdir()) == []
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_enough_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 10**10))
    with pytest.raises(UserError) as caught:
        RowFile(1_663_370, 10_000, tmp_path)
    for part in (str(tmp_path), "66.53 GB", "10.00 GB free", "10,000 clients", "TMPDIR"):
        assert part in str(caught.value)


def test_a_disk_that_fills_up_half_way_is_told_as_such(tmp_path: Path) -> None:
    file = RowFile(1000, 100, tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        for _ in range(25):
            file.append(torch.zeros(1, 1000))
        with pytest.raises(UserError, match=r"needs 0\.00 GB for the updates of 100 clients.*TMPDIR"):
            file.append(torch.zeros(1, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.rows == 25
    file.close()


def test_a_folder_that_is_not_there_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No such file.*TMPDIR"):
        RowFile(10, 1, tmp_path / "nowhere")


def test_the_folder_is_the_one_that_the_user_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert spill_folder() == tmp_path
    # Trap: /tmp is often kept in memory.
    monkeypatch.delenv("TMPDIR")
    assert os.access(spill_folder(), os.W_OK)
    if os.access("/var/tmp", os.W_OK):
        assert spill_folder() == Path("/var/tmp")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_freed_memory_goes_back_to_the_system_even_where_small_pieces_stay() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    large, small = [], []
    for _ in range(2000):
        large.append(torch.zeros(12_500))  # 50 kB, which glibc takes from its heap
        small.append(torch.zeros(8))
    full = resident()
    large.clear()
    give_back_freed_memory()
    assert full - resident() > 60_000_000
    assert len(small) == 2000
