"""Progress of work that is counted in bytes, in lines."""

from __future__ import annotations

import pytest

from hybridtron.progress import byte_progress_bar


def test_bytes_are_printed_with_their_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([0.0, 40.0, 60.0, 100.0])
    monkeypatch.setattr("hybridtron.progress.time.monotonic", lambda: next(seconds))
    with byte_progress_bar("copy") as report:
        for gigabytes in (2, 3, 8):
            report(gigabytes * 10**9, 10 * 10**9)
    assert capsys.readouterr().err.splitlines() == [
        "copy: 2.00 of 10.00 GB, 0.050 GB/s, 0:02:40 left",
        "copy: 8.00 of 10.00 GB, 0.080 GB/s, 0:00:25 left",
    ]
