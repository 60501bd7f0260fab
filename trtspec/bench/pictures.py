"""Pictures in rows of data: taken out before the words are read, and passed to servers as parts of content."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

from trtspec.bench.dataset_rows import LISTS
from trtspec.checkpoint.rows import CODE, DataRow
from trtspec.errors import UsageError

PICTURES = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


def without_pictures(row: DataRow) -> tuple[DataRow, dict[int, list[dict[str, Any]]]]:
    """The row without its pictures, and these as parts of content, by the message's place counted from the end (1 is
    the last). A row's own `images` belong to its first question."""
    if not isinstance(row.value, dict):
        return row, {}
    value, found = dict(row.value), {}
    for key in LISTS:
        items = value.get(key)
        if not isinstance(items, list):
            continue
        value[key] = [_words_only(item) for item in items]
        for place, item in enumerate(reversed(items), 1):
            if parts := _picture_parts(item):
                found[place] = parts
    images = value.pop("images", None)
    if images is not None and images != []:
        single = images if isinstance(images, list) else [images]
        turns = value.get("turns")
        place = len(turns) if isinstance(turns, list) else 1
        found.setdefault(place, []).extend(
            {"type": "image_url", "image_url": {"url": url_of(row, one)}} for one in single
        )
    return replace(row, value=value), found


def _picture_parts(message: Any) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return []
    return [part for part in content if isinstance(part, dict) and part.get("type") in ("image_url", "video_url")]


def _words_only(message: Any) -> Any:
    pictures = _picture_parts(message)
    if not pictures:
        return message
    return {**message, "content": [part for part in message["content"] if part not in pictures]}


def url_of(row: DataRow, image: Any) -> str:
    """A picture as a URL: an address stays, bytes become a data: URL. Raises UsageError for anything else."""
    if isinstance(image, str) and image.startswith(("http://", "https://", "data:image/")):
        return image
    data: Any = image.get("bytes") if isinstance(image, dict) else image
    if hasattr(data, "save"):  # as the datasets library decodes it
        buffer = io.BytesIO()
        data.save(buffer, format="PNG")
        data = buffer.getvalue()
    kind = next((name for magic, name in PICTURES if isinstance(data, bytes) and data.startswith(magic)), None)
    if kind is None:
        raise UsageError(f"{CODE} {row.where} has an image that is neither a URL nor PNG, JPEG, GIF or WebP bytes",
                         "give a URL, a data: URL, or the bytes of a picture")  # fmt: skip
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
