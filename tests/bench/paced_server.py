"""A server whose truth is known: every answer has the same tokens and times, whatever is asked.

Bytes are written at times that follow from the settings alone, on plain asyncio streams, so that
nothing stands between the clock and the socket. Started as its own process: `python paced_server.py
JSON_SETTINGS` prints its port. /truth gives the times at which it really wrote, for a machine that
is too busy to keep them.
"""

import asyncio
import json
import sys
import time
from typing import Any

SETTINGS: dict[str, Any] = {
    "ttft_s": 0.2,
    "gap_s": 0.05,
    "tokens": 40,
    "per_chunk": 2,
    "hold": False,  # as a buffering proxy: everything at the end
    "burst": 1,  # chunks that are sent at once
    "faults": [],  # what is done instead, request after request: "" answers, see `fault`
}
asked = 0
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
written: list[dict[str, Any]] = []


def chunk(completion: bool, **fields: Any) -> bytes:
    kind = "text_completion" if completion else "chat.completion.chunk"
    event = {"id": "x", "object": kind, "created": 1, "model": "paced", "choices": [], **fields}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def choice(completion: bool, text: str, finish: str | None = None) -> dict[str, Any]:
    said = {"text": text} if completion else {"delta": {"role": "assistant", "content": text}}
    return {"index": 0, **said, "finish_reason": finish, "logprobs": None}


async def answer(writer: asyncio.StreamWriter, body: dict[str, Any], completion: bool) -> None:
    """The stream, at its times counted from the arrival of the request."""
    arrived = time.perf_counter()
    tokens = SETTINGS["tokens"]
    prompt = json.dumps(body.get("messages") or body.get("prompt"))
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens}
    usage["total_tokens"] = sum(usage.values())
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    held, times, sent = b"", [], 0
    sizes = [SETTINGS["per_chunk"]] * (tokens // SETTINGS["per_chunk"])
    for place, size in enumerate(sizes):
        due = arrived + SETTINGS["ttft_s"] + place * SETTINGS["gap_s"]
        text = "".join(f" {WORDS[(sent + i) % len(WORDS)]}" for i in range(size))
        held += chunk(completion, choices=[choice(completion, text)])
        sent += size
        last = place == len(sizes) - 1
        if (SETTINGS["hold"] and not last) or ((place + 1) % SETTINGS["burst"] and not last):
            continue
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        send(writer, held)
        times.append(time.perf_counter() - arrived)
        held = b""
    end = chunk(completion, choices=[choice(completion, "", "length")])
    send(writer, end + chunk(completion, usage=usage) + b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    written.append({"ttft_s": times[0], "gap_s": (times[-1] - times[0]) / max(1, len(times) - 1),
                    "request_s": time.perf_counter() - arrived})  # fmt: skip


async def fault(writer: asyncio.StreamWriter, kind: str) -> None:
    """What broken servers and the proxies before them do."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    good = chunk(False, choices=[choice(False, "alpha")])
    if kind == "503":
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy")
    elif kind == "html":
        writer.write(
            b"HTTP/1.1 200 OK\r\n"
            b"Content-Type: text/html\r\n"
            b"Content-Length: 16\r\n\r\n"
            b"<html>404</html>"
        )
    elif kind == "garbage":
        writer.write(head)
        send(writer, good + b"data: {not json\n\n")
        writer.write(b"0\r\n\r\n")
    elif kind == "cut":
        writer.write(head)
        send(writer, good)
    elif kind == "hang":
        writer.write(head)
        send(writer, good)
        await writer.drain()
        await asyncio.sleep(3600)
    await writer.drain()
    writer.close()  # also "reset", which sends nothing at all


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def plain(writer: asyncio.StreamWriter, value: Any) -> None:
    data = json.dumps(value).encode()
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)


async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            _, path, _ = head.split(" ", 2)
            lengths = [
                int(line.split(":")[1])
                for line in head.lower().split("\r\n")
                if "content-length" in line
            ]
            body = json.loads(await reader.readexactly(sum(lengths)) or b"{}")
            if path.endswith("/completions"):
                global asked
                asked += 1
                kind = (
                    SETTINGS["faults"][asked % len(SETTINGS["faults"])]
                    if SETTINGS["faults"]
                    else ""
                )
                if kind:
                    await fault(writer, kind)
                    return
                await answer(writer, body, completion=not path.endswith("chat/completions"))
            elif path.endswith("/models"):
                plain(
                    writer,
                    {
                        "object": "list",
                        "data": [{"id": "paced", "object": "model", "owned_by": "paced"}],
                    },
                )
            elif path == "/truth":
                plain(writer, written)
            else:
                plain(writer, {})
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    SETTINGS.update(json.loads(sys.argv[1]))
    asyncio.run(main())
