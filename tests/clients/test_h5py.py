"""HDF5 through h5py: chunked and compressed data, appending, in-place changes, its own locks."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.target import Target

pytestmark = pytest.mark.clients


def values(*, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, (3000, 251), dtype=np.uint16)


def test_datasets(target: Target, directory: Path) -> None:
    path = directory / "data.h5"
    expected = values(seed=1)
    with h5py.File(path, "w") as file:
        file.create_dataset("plain", data=expected)
        file.create_dataset("packed", data=expected, chunks=(100, 251), compression="gzip")
        file["plain"].attrs["step"] = 17
    for _ in range(2):
        with h5py.File(path, "r") as file:
            np.testing.assert_array_equal(file["plain"][:], expected)
            np.testing.assert_array_equal(file["packed"][:], expected)
            assert file["plain"].attrs["step"] == 17
        target.remount()


def test_append_and_change_in_place(target: Target, directory: Path) -> None:
    path = directory / "growing.h5"
    expected = values(seed=2)
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=expected[:0], maxshape=(None, 251), chunks=(64, 251))
    for start in range(0, 3000, 700):
        with h5py.File(path, "r+") as file:
            rows = file["rows"]
            rows.resize(min(start + 700, 3000), axis=0)
            rows[start : start + 700] = expected[start : start + 700]
    target.remount()
    with h5py.File(path, "r+") as file:
        file["rows"][5:2995:13, 3:200] = expected[5:2995:13, 3:200] = 9
    with h5py.File(path, "r") as file:
        np.testing.assert_array_equal(file["rows"][:], expected)


def test_deleted_space_is_used_again(directory: Path) -> None:
    path = directory / "reuse.h5"
    expected = values(seed=3)
    with h5py.File(path, "w") as file:
        for round_number in range(10):
            file.create_dataset("temporary", data=expected)
            file.flush()
            if round_number < 9:
                del file["temporary"]
    with h5py.File(path, "r") as file:
        np.testing.assert_array_equal(file["temporary"][:], expected)
    assert path.stat().st_size < 3 * expected.nbytes
