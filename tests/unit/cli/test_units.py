"""Sizes and rates as people write and read them."""

import pytest

from fpfs.core.refusal import Refused
from fpfs.core.units import format_rate, format_size, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64K", 65536),
        ("64k", 65536),
        ("64KB", 65536),
        ("1.5G", 3 * 2**29),
        ("2 GiB", 2**31),
        ("1T", 2**40),
        (" 8M ", 2**23),
    ],
)
def test_sizes_are_powers_of_1024(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text, name="staging") == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1.5", "0.3K", "1 2", "1e9", "1GG", "٣"])
def test_other_sizes_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(Refused, match=r"^staging=.*not a size in whole bytes; write a number") as e:
        parse_size_bytes(text, name="staging")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "1" + "0" * 30, str(2**63), "8192P"])
def test_absurd_sizes_are_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"^staging=.*not a size in whole bytes"):
        parse_size_bytes(text, name="staging")
    assert parse_size_bytes(str(2**63 - 1), name="staging") == 2**63 - 1


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (10 * 1024**2, "10.0 MiB"),
        (200 * 1024**3, "200 GiB"),
        (5 * 1024**5, "5.00 PiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


def test_rates_are_powers_of_1000() -> None:
    assert [format_rate(rate) for rate in (2.314e9, 315e6, 12e3)] == [
        "2.31 GB/s",
        "315 MB/s",
        "12 kB/s",
    ]
