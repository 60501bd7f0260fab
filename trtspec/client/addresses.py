"""Addresses and keys of OpenAI-compatible servers, as a user gives them.

They are checked before anything is sent or written. No password or key appears in a message, a
result or a record. An address that may contain one is refused without being shown. A message about
a key names its fault alone.
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
    """An address for a message, left out if it may contain a password or a key."""
    return "(not shown)" if re.search(r"[@?#]", text) else text


def server_url(text: str, option: str = "the URL") -> str:
    """The base URL of a server.

    It has a scheme (http if `text` has none), and ends without /v1, request path and slash. Raises
    UsageError, which begins with `option`, if no request can be sent there, and for a user name, a
    password, a query or a fragment, which every result would repeat.
    """
    import httpx

    remedy = f"write it as {EXAMPLE}"
    if re.search(r"[@?#]", text):
        message = (
            f"{option} (not shown) holds a user name, a password, a query or a fragment (@, ? or #)"
        )
        remedy += ", without them; a key belongs in the variable OPENAI_API_KEY"
        raise UsageError(message, remedy)
    what = what_is(text)
    names_hub = what == "a hub id" and not re.match(r"[\w-]*[.:]|localhost/|.*/v1$", text)
    if names_hub or what in ("a checkpoint", "a file", "a directory"):
        if what not in ("a file", "a directory"):
            remedy = f"serve it with `trtspec serve {text}`, and pass the URL that it prints"
        raise UsageError(f"{option} {text} is {what}, not the URL of a server", remedy)
    address = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(address)
        host = url.host and url.raw_host.decode("ascii").encode("idna")  # as name lookup does
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
    """The key of OPENAI_API_KEY as a header. Raises UsageError if no header can carry it."""
    return bearer(os.environ.get("OPENAI_API_KEY"))


def bearer(key: str | None, option: str = "OPENAI_API_KEY") -> dict[str, str]:
    """The header with the key. {} for an empty key.

    Raises UsageError with the fault, not the key, if no header can carry it.
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
