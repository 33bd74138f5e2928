"""Limits of fpfs, with units; where ext4 has the same limit, its figure is taken.

The limits come first from what a program may rely on (POSIX minima, what ext4 gives), and then from
what the formats can hold. docs/format.md names the fields.
"""

from __future__ import annotations

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS

NAME_BYTES_MAX = 255
"""One name in a directory, as on ext4 and XFS."""

PATH_BYTES_MAX = 4096
"""A path with its final zero byte; enforced by the kernel before fpfs sees it."""

SYMLINK_BYTES_MAX = PATH_BYTES_MAX - 1
"""A symbolic link's target without its final zero byte."""

XATTR_NAME_BYTES_MAX = 255
"""An extended attribute's name, namespace prefix included (the kernel's XATTR_NAME_MAX)."""

XATTR_VALUE_BYTES_MAX = 64 * 1024
"""An extended attribute's value (the kernel's XATTR_SIZE_MAX)."""

LINK_COUNT_MAX = 65_000
"""Names of one file, as on ext4. Subdirectories are not limited (ext4's dir_nlink)."""

TIME_NS_MAX = 9_223_372_036 * 10**9
"""The latest time that an inode can have, in nanoseconds since 1970, and negated the earliest: the
whole seconds that 64 bits can hold as nanoseconds, from the year 1677 to 2262."""

FILE_BYTES_MAX = (1 << 32) * SEGMENT_BLOCKS * BLOCK_BYTES - 1
"""A file's size, 2**58 - 1 bytes: what a 32-bit segment number can describe. EFBIG beyond."""
