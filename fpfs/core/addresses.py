"""Where a server may be asked to listen: an address and a port, or a Unix socket."""

from __future__ import annotations

import ipaddress

import msgspec

from fpfs.core.refusal import Refused

PORT_MAX = 65535
UNIX_PATH_BYTES_MAX = 107
"""What sockaddr_un holds, without the zero at the end."""

_UNIX = "unix:"


class ListenAddress(msgspec.Struct, frozen=True):
    """`path` is that of a Unix socket; with an empty one it is TCP, at a numeric address `host`."""

    host: str = ""
    port: int = 0
    path: str = ""


def parse_listen_address(text: str, *, name: str) -> ListenAddress:
    """The address that ``ADDRESS:PORT`` or ``unix:PATH`` means, as the value of option `name`.

    Raises `Refused`. Names of machines are none: what they mean may change between two servers.
    """
    asked = f"{name}={text}"
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        if not path.startswith("/") or len(path.encode(errors="surrogateescape")) > (
            UNIX_PATH_BYTES_MAX
        ):
            raise Refused(
                asked=asked,
                wrong=f"a socket's path begins with / and has at most {UNIX_PATH_BYTES_MAX} bytes",
                remedy=f"write {name}=unix:/run/fpfs/metrics.sock",
            )
        return ListenAddress(path=path)
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= PORT_MAX
    if not colon or not is_port or not _is_address(bare) or (":" in bare) is (bare == host):
        raise Refused(
            asked=asked,
            wrong="this is neither a numeric address with a port nor a Unix socket",
            remedy=f"write {name}=127.0.0.1:9464, {name}=[::1]:9464 or {name}=unix:/PATH",
        )
    return ListenAddress(host=bare, port=int(port))


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text
