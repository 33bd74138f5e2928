"""Options of a mount, as -o and fstab give them."""

import pytest

from fpfs.core.options import (
    _EXAMPLES,
    STAGING_BYTES_DEFAULT_MAX,
    Backend,
    Checksums,
    Idle,
    MountOptions,
    default_staging_bytes,
    parse_mount_options,
)
from fpfs.core.policy import Acknowledge
from fpfs.core.refusal import Refused


def test_defaults() -> None:
    options = parse_mount_options([])
    assert options == MountOptions()
    assert (options.ack, options.backend) == (Acknowledge.EARLY, Backend.AUTO)
    assert options.staging_bytes == default_staging_bytes() <= STAGING_BYTES_DEFAULT_MAX


def test_every_option_can_be_given() -> None:
    options = parse_mount_options(
        [
            "ack=close,backend=threads,staging=64M,chunk=256K,depth=4,receivers=3,idle=deep",
            "checksums=off,device=/a,device=/b,log=/l,fsname=/a:/b,allow_other,adopt,ro,nosuid",
            "whole=*.a:*.b,degraded,metrics=[::1]:9464,reuse=10",
        ]
    )
    assert options == MountOptions(
        ack=Acknowledge.CLOSE,
        backend=Backend.THREADS,
        staging_bytes=64 * 1024**2,
        chunk_bytes=256 * 1024,
        depth=4,
        receivers=3,
        reuse=10,
        idle=Idle.DEEP,
        checksums=Checksums.OFF,
        devices=("/a", "/b"),
        log="/l",
        metrics="[::1]:9464",
        source="/a:/b",
        whole=("*.a", "*.b"),
        allow_other=True,
        adopt=True,
        degraded=True,
        kernel=("ro", "nosuid"),
    )


def test_every_example_of_a_value_is_one() -> None:
    for name, value in _EXAMPLES.items():
        parse_mount_options([f"{name}={value}"])


def test_a_large_chunk_is_checked_against_the_staging_that_follows_it() -> None:
    """Also where the default staging, by little memory, would be too small for it."""
    small = 128 * 1024**2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fpfs.core.options.STAGING_BYTES_DEFAULT_MAX", small)
        assert parse_mount_options(["chunk=16M", "staging=256M"]).chunk_bytes == 16 * 1024**2
        with pytest.raises(Refused, match=r"^chunk=16M and staging=128M: .*; take staging=256M"):
            parse_mount_options(["chunk=16M"])


def test_words_for_other_programs_are_passed_over() -> None:
    line = "defaults,relatime,noauto,nofail,_netdev,user,x-systemd.automount,comment=mine,x-gvfs,,"
    assert parse_mount_options([line]) == MountOptions()


def test_words_without_effect_are_passed_over() -> None:
    line = (
        "norelatime,strictatime,nostrictatime,diratime,nodiratime,lazytime,nolazytime,iversion,"
        "noiversion,mand,nomand,silent,loud,default_permissions"
    )
    assert parse_mount_options([line]) == MountOptions()


def test_the_last_of_two_opposites_wins() -> None:
    assert parse_mount_options(["nosymfollow"]).follows_symlinks is False
    assert parse_mount_options(["nosymfollow,symfollow,sync"]).follows_symlinks is True
    assert parse_mount_options(["nosymfollow,symfollow,sync"]).for_fusermount == ("sync",)
    assert parse_mount_options(["allow_other,noallow_other"]).allow_other is False
    assert parse_mount_options(["rw,ro,nosuid"]).read_only is True
    assert parse_mount_options(["ro,rw"]).read_only is False
    assert parse_mount_options([]).read_only is False
    assert parse_mount_options(["fsname=/a,fsname=/b"]).source == "/b"


def test_one_value_given_twice_is_one_value() -> None:
    options = parse_mount_options(["ack=close,chunk=2M", "ack=close,chunk=2048K", "adopt,adopt"])
    assert (options.ack, options.chunk_bytes) == (Acknowledge.CLOSE, 2 * 1024**2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ack=early", "ack=close"),
        ("backend=auto", "backend=threads"),
        ("staging=1G", "staging=2048M"),
        ("chunk=1M", "chunk=2M"),
        ("depth=16", "depth=1"),
        ("receivers=1", "receivers=2"),
        ("log=/a", "log=/b"),
    ],
)
def test_two_values_of_one_option_are_refused(first: str, second: str) -> None:
    """mount(8) lets the last win: how durable a mount is must not depend on an order."""
    message = f"^{first} and {second}: one option is given twice with different values; leave one"
    for words in ([f"{first},{second}"], [first, second]):
        with pytest.raises(Refused, match=message):
            parse_mount_options(words)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("bogus", r"-o bogus: fpfs has no such option; known are ack=, backend=.*adopt.*nosuid"),
        ("bogus=1", r"-o bogus=1: fpfs has no such option; known are"),
        ("nosymfollow=1", r"-o nosymfollow=1: nosymfollow takes no value; write nosymfollow$"),
        ("ack", r"-o ack: ack needs a value; write ack=close$"),
        ("ack=", r"-o ack=: ack needs a value; write ack=close$"),
        ("ack=never", r"ack=never: ack has no such setting; take one of early, close, durable"),
        ("backend=aio", r"backend=aio: .*take one of auto, io_uring, threads"),
        ("whole=*.a:steps/*.b", r"whole=.*: whole cannot be .*; take .* names \(without /\)"),
        ("whole=*.a:", r"whole=\*.a:: whole cannot be '\*.a:'; take shell patterns of names"),
        ("staging=lots", r"staging=lots: this is not a size in whole bytes"),
        ("staging=1M", r"staging=1M: staging needs at least 16M"),
        ("chunk=100K", r"chunk=100K: a chunk is 128K to 16M, in steps of 64K"),
        ("chunk=128M", r"chunk=128M: a chunk is 128K to 16M"),
        ("chunk=64K", r"chunk=64K: a chunk is 128K to 16M"),
        ("chunk=0", r"chunk=0: a chunk is 128K to 16M"),
        ("depth=0", r"depth=0: the depth of a device's queue is 1 to 1024"),
        ("chunk=8M,staging=64M", r"chunk=8M and staging=64M: .*at least 16 chunks; take"),
        ("receivers=0", r"receivers=0: 1 to 64 threads receive writes; take 1"),
        ("depth=-1", r"depth=-1: this is not a number"),
        ("depth=9999", r"depth=9999: the depth"),
        (f"depth={'9' * 5000}", r"depth=9+: this number is far too large; write at most 9 digits"),
        ("chunk", r"-o chunk: chunk needs a value; write chunk=1M$"),
        ("device", r"-o device: device needs a value; write device=/nvme0/fpfs$"),
        ("adopt=1", r"-o adopt=1: adopt takes no value; write adopt$"),
        ("allow_other=", r"-o allow_other=: allow_other takes no value; write allow_other$"),
        ("ro=yes", r"-o ro=yes: ro takes no value; write ro$"),
        ("remount,ack=close", r"-o remount: the options of .* while it is mounted; unmount it and"),
    ],
)
def test_refusals_say_what_is_wrong_and_what_to_do(item: str, message: str) -> None:
    with pytest.raises(Refused, match=f"^{message}"):
        parse_mount_options([item])
