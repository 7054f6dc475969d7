from __future__ import annotations

import pytest

from fedplat.errors import UserError
from fedplat.experiments.benchmarks import compression
from fedplat.experiments.benchmarks.common import Report


def test_the_benchmark_tells_bytes_and_errors_of_every_compressor() -> None:
    report = Report("compression", {})
    compression.measure(compression.Options(megabytes=(1,), repeats=1), report)
    (section,) = report.sections
    rows = {row["what"]: row for row in section.rows}
    assert rows.keys() == compression.COMPRESSORS.keys()
    assert all(set(section.columns) == set(row) for row in section.rows)
    assert rows["fp16"]["bytes"] == 500_000
    assert rows["qsgd 4 bits"]["bytes"] == 125_000 + 4 * 489
    assert rows["top-k 1 %"]["bytes"] == 2500 * 8
    assert rows["sparse, 90 % zeros"]["relative error"] == 0
    assert all(row["smaller"] == pytest.approx(1e6 / row["bytes"]) for row in section.rows)


def test_sizes_of_the_benchmark_are_whole_megabytes() -> None:
    with pytest.raises(UserError, match="from 1; found 0"):
        compression.check(compression.Options(megabytes=(0, 1)))
