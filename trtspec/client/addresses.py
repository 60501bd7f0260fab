"""Checks addresses and keys of OpenAI-compatible servers, as a user gives them.

Both are checked before anything is sent or written. No password or key appears in a message, a
result or a record. An address that may contain a password or key is refused and not shown. A
message about a key contains only what is wrong with it.
"""

from __future__ import annotations

import os
import re

from trtspec.errors import UsageError
from trtspec.foreign import what_is

EXAMPLE = "http://127.0.0.1:8000"
# a header value that every HTTP client and server accepts
SENDABLE = re.compile(r"[!-~](?:[ -~]*[!-~])?")


def shown(text: str) -> str:
    """Returns an address for use in a message.

    An address that may contain a password or a key is replaced by "(not shown)".
    """
    return "(not shown)" if re.search(r"[@?#]", text) else text


def server_url(text: str, option: str = "the URL") -> str:
    """Returns the base URL of a server, without /v1, a request path and a slash at its end.

    The scheme is http if `text` has none. Raises UsageError if `text` is not the URL of a server,
    or contains a user name, a password, a query or a fragment. `option`: beginning of the message.
    """
    import httpx

    remedy = f"write it as {EXAMPLE}"
    # every result repeats the URL, so it must not contain a password or a key
    if re.search(r"[@?#]", text):
        message = (
            f"{option} (not shown) holds a user name, a password, a query or a fragment (@, ? or #)"
        )
        remedy += ", without them; a key belongs in the variable OPENAI_API_KEY"
        raise UsageError(message, remedy)
    what = what_is(text)
    # a host with a path, such as localhost/v1, has the form of a hub id
    names_hub = what == "a hub id" and not re.match(r"[\w-]*[.:]|localhost/|.*/v1$", text)
    if names_hub or what in ("a checkpoint", "a file", "a directory"):
        if what not in ("a file", "a directory"):
            remedy = f"serve it with `trtspec serve {text}`, and pass the URL that it prints"
        raise UsageError(f"{option} {text} is {what}, not the URL of a server", remedy)
    address = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(address)
        # name lookup encodes the host in the same way, and would fail later
        host = url.host and url.raw_host.decode("ascii").encode("idna")
        if url.scheme not in ("http", "https"):
            raise httpx.InvalidURL("its scheme is neither http nor https")
        if not host or re.search(r"\s", text):
            raise httpx.InvalidURL("it holds white space" if host else "it names no host")
        if url.port is not None and not 0 < url.port < 2**16:
            raise httpx.InvalidURL(f"{url.port} is not a port (1 to 65535)")
    except (httpx.InvalidURL, UnicodeError) as error:
        fault = "its host is not a valid name" if isinstance(error, UnicodeError) else error
        raise UsageError(f"{option} {text!r} is not the URL of a server: {fault}", remedy) from None
    base = re.sub(r"(?<=[^/])/v1(/models|(/chat)?/completions)?$", "", address.rstrip("/"))
    return base.rstrip("/")


def key_header() -> dict[str, str]:
    """Returns the HTTP header with the key of the environment variable OPENAI_API_KEY.

    {} if the variable is not set or empty. Raises UsageError if the key cannot be sent in a header.
    """
    return bearer(os.environ.get("OPENAI_API_KEY"))


def bearer(key: str | None, option: str = "OPENAI_API_KEY") -> dict[str, str]:
    """Returns the HTTP header with a key. {} without a key.

    Raises UsageError if the key cannot be sent in a header. The message contains what is wrong, and
    not the key. `option`: name of the key in the message.
    """
    if not key:
        return {}
    if not SENDABLE.fullmatch(key):
        sendable = SENDABLE.match(key)
        position = sendable.end() + 1 if sendable else 1
        fault = (
            f"its character {position} is a line break, other white space or not printable ASCII"
        )
        message = f"{option} (not shown) cannot be sent in a header: {fault}"
        remedy = 'set it without, for example OPENAI_API_KEY="$(tr -d "[:space:]" < KEYFILE)"'
        raise UsageError(message, remedy)
    return {"Authorization": f"Bearer {key}"}
