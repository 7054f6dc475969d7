from __future__ import annotations

import gc

import numpy as np
import torch

from fedplat.arrays import Layout
from fedplat.runtime.buffers import BufferPool, arrange, rows_nbytes

LAYOUT = Layout.of({"w": ((3,), "float32"), "n": ((), "int64")})


def test_memory_is_used_again_only_when_no_array_or_tensor_refers_to_it() -> None:
    pool = BufferPool()
    lease = pool.lease(100)
    first = lease.buffer.id
    kept = torch.from_numpy(lease.memory()[10:20])
    del lease
    assert pool.lease(100).buffer.id != first
    del kept
    gc.collect()
    assert first in {pool.lease(100).buffer.id, pool.lease(100).buffer.id}


def test_a_much_larger_buffer_is_not_wasted_on_a_small_request() -> None:
    pool = BufferPool()
    big = pool.lease(1 << 20).buffer.id
    gc.collect()
    assert pool.lease(1000).buffer.id != big
    assert pool.lease(1 << 20).buffer.id == big


def test_few_free_buffers_are_kept() -> None:
    pool = BufferPool()
    leases = [pool.lease(5000) for _ in range(20)]
    assert len(pool.open_ids()) == 20
    del leases
    gc.collect()
    assert len(pool.open_ids()) <= 4


def test_arrays_stay_valid_after_the_pool_is_closed() -> None:
    pool = BufferPool()
    memory = pool.lease(64).memory()
    memory[:] = 7
    pool.close()
    assert memory[:64].tolist() == [7] * 64


def test_rows_are_separate_models_one_after_another() -> None:
    memory = np.zeros(rows_nbytes(LAYOUT, 4), np.uint8)
    rows = arrange(memory, LAYOUT, 4)
    for i in range(4):
        rows.row(i).view("w")[:] = i
        rows.row(i).view("n")[...] = 100 + i
    assert rows.matrix.tolist() == [[i] * 3 for i in range(4)]
    assert rows.matrix.flags.c_contiguous
    assert [int(rows.row(i).view("n")) for i in range(4)] == [100, 101, 102, 103]
