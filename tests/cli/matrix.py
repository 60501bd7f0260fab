"""Runs a command in this process and collects everything that it left to see.

The rows are in matrix_making.py and matrix_serving.py, by command and mode. test_matrix.py runs
each one with and without its words, and fails if both leave the same.
"""

import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.command_line import LocalHandler, LocalServer, trtspec

MEASURED = (
    "seconds", "created", "peak_rss_bytes", "free_bytes", "free_memory_bytes", "sha256",
    "memory_bytes_estimate",
)  # fmt: skip
CLOCK = re.compile(rf'"({"|".join(MEASURED)})": ("[^"]*"|[\d.]+)')


@dataclass(frozen=True)
class Effect:
    """Words that show that an option is honoured.

    Added to `base`, or to the situation's, they change what is seen; so does the whole line
    `instead`, for what every line has. `before` prepares the place of output for both runs.
    """

    words: tuple[str, ...] = ()
    base: tuple[str, ...] | None = None
    instead: tuple[str, ...] | None = None
    before: Callable[[Path], None] | None = None
    slow: bool = False
    launches: bool = False  # the situation's line without --dry-run


@dataclass(frozen=True)
class Situation:
    """One mode of a command.

    `base` selects it and works; `cheap` selects it and ends soon after the options are read
    (default: base). Words may hold {target}, {head}, {out} (a path made anew for each run), {url}
    ...
    """

    base: tuple[str, ...]
    effects: Mapping[str, Effect]
    cheap: tuple[str, ...] = ()
    floats: bool = (
        True  # whether figures with a decimal point are looked at; not where they are timings
    )
    before: Callable[[Path], None] | None = None


def effects(options: str = "", **words: str | Effect) -> dict[str, Effect]:
    """A table of options by field: those of `options` are named as their field is."""
    for option in re.findall(r"--.+?(?=\s+--|$)", options):
        name = option.split()[0][2:].replace("-", "_")
        words[{"json": "json_"}.get(name, name)] = option
    return {
        name: item if isinstance(item, Effect) else Effect(tuple(item.split()))
        for name, item in words.items()
    }


def slowly(table: dict[str, Effect]) -> dict[str, Effect]:
    """Marks rows that take long, or that another mode shows by default through the same code."""
    return {name: replace(effect, slow=True) for name, effect in table.items()}


def conversations(questions: list[str]) -> list[dict[str, Any]]:
    """A row of training data for each question."""
    return [
        {
            "conversation_id": str(number),
            "conversations": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{question} indeed"},
            ],
        }
        for number, question in enumerate(questions)
    ]


class Recorder(LocalServer):
    """An OpenAI-compatible server that keeps every request: path, key and body.

    Its answers follow from the prompt.
    """

    request_queue_size = 128  # a check asks 32 at once; the default of 5 resets some of them

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.pages = {"/v1/models": '{"data": [{"id": "tiny"}, {"id": "other"}]}', "/health": "{}"}
        self.busy, self.together = 0, threading.Event()
        super().__init__(_Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(LocalHandler):
    server: Recorder
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        self.answer(200 if page else 404, (page or "{}").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers.get("Authorization")
        with self.server.lock:
            self.server.requests.append(json.dumps([self.path, key, body], sort_keys=True))
            self.server.busy += 1
            if self.server.busy > 1:
                self.server.together.set()
        self.server.together.wait(body.get("delay", 0.005))  # as --extra-body asks, or for another
        with self.server.lock:
            self.server.busy -= 1
        if body.get("echo"):
            self.send(scored(body["prompt"]))
        elif body.get("stream"):
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in streamed(body)]
            text = "".join([*events, "data: [DONE]\n\n"])
            self.answer(200, text.encode(), Content_Type="text/event-stream")
        else:
            text = " ".join(answer_to(body))
            message = {"message": {"role": "assistant", "content": text}}
            choice = {"text": text} if "prompt" in body else message
            self.send({"choices": [choice | {"finish_reason": "stop"}], "usage": usage_of(body)})

    def send(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def write(self, body: bytes) -> None:
        """Pauses after the first event of a stream."""
        first, end, others = body.partition(b"\n\n")
        self.wfile.write(first + end)
        if others:
            threading.Event().wait(0.005)
            self.wfile.write(others)


def answer_to(body: dict[str, Any]) -> list[str]:
    """The words of an answer, which begins with a thought."""
    asked = body.get("prompt") or body["messages"]
    numbers = range(min(12, body["max_tokens"]))
    words = [hashlib.sha256(f"{asked}{n}".encode()).hexdigest()[:5] for n in numbers]
    return ["<think>", "why", "</think>", *words]


def usage_of(body: dict[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": 5, "completion_tokens": len(answer_to(body)) - 3}


def scored(text: str) -> dict[str, Any]:
    """Log-probabilities of a prompt: 0.4 nats behind the best token everywhere."""
    tokens = {"token_logprobs": [-0.5], "top_logprobs": [{"best": -0.1, "this": -0.5}]}
    lists = {name: values * len(text) for name, values in tokens.items()}
    return {"choices": [{"text": "", "logprobs": lists, "finish_reason": "length"}]}


def streamed(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks of a stream: a word each, or three words a step with `drafts` in --extra-body."""
    words, drafts, usage = answer_to(body), body.get("drafts"), usage_of(body)
    end: dict[str, Any] = {"finish_reason": "stop", "delta": {}}
    if drafts:
        words = [" ".join(words[at : at + 3]) for at in range(0, len(words), 3)]
        accepted = usage["completion_tokens"] - len(words)
        counts = {"steps": len(words), "accepted": accepted, "drafted": len(words) * drafts}
        end["spec_decode"] = counts
    ids = {"token_ids": [5]} if body.get("return_token_ids") else {}
    choices = [
        ({"text": w} if "prompt" in body else {"delta": {"content": w}}) | ids for w in words
    ]
    return [{"choices": [choice]} for choice in choices] + [{"choices": [end], "usage": usage}]


@dataclass
class Stage:
    """Directories of the runs, the recording server, and records that were handed on."""

    places: dict[str, str]
    out: Path
    server: Recorder
    handed: list[str] = field(default_factory=list)

    def words(self, words: tuple[str, ...]) -> list[str]:
        return [word.format(**self.places, out=self.out, url=self.server.url) for word in words]

    def line(self, text: str) -> list[str]:
        return self.words(tuple(text.split()))

    def see(
        self,
        words: tuple[str, ...],
        before: Callable[[Path], None] | None,
        floats: bool,
        **environment: str,
    ) -> dict[str, Any]:
        """Everything one run left in a clean directory, without clock and memory figures."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir(parents=True)
        if before is not None:
            before(self.out)
        self.server.requests.clear()
        self.server.together.clear()
        self.handed.clear()
        done = trtspec(*self.words(words), **environment)
        assert "unexpected" not in done.stderr, done.stderr
        files = {
            str(path.relative_to(self.out.parent)): _digest(path, floats)
            for path in sorted(self.out.parent.rglob("*"))
            if path.is_file()
        }
        return {
            "status": done.status,
            "stdout": _steady(done.stdout, floats),
            "stderr": _steady(done.stderr, floats),
            "files": files,
            "requests": sorted(self.server.requests),
            "together": self.server.together.is_set(),
            "handed": list(self.handed),
        }


def _steady(text: str, floats: bool) -> str:
    text = CLOCK.sub(r'"\1": 0', text)
    text = re.sub(r'"timing": \{[^}]*\}', '"timing": {}', text)
    text = re.sub(r"[\d.]+ times (?:as long|without speculation)|(\"ratio\"): [\d.]+", r"\1", text)
    text = re.sub(r"(in|took|about) +[\d.,]+ (s|min)\b", r"\1 0 s", text)
    text = re.sub(r"peak memory [\d,]+|[\d,]+ free", "0", text)
    text = re.sub(
        r"^((?:\w+ )*(?:seconds|free bytes|estimate|rss bytes)) +[\d.,]+ *$",
        r"\1 0",
        text,
        flags=re.M,
    )
    text = re.sub(
        r"(here|hub cache|shared memory) [\d,]+ GB", r"\1", text
    )  # free now, on a disk of others
    if floats:
        return text
    text = re.sub(r"\d[\d,]*\.\d+(e-?\d+)?|\b\d+ %|\b\d[\d,]{2,}\b", "#", text)
    # a table is as wide as its figures, and so are the lines below it
    return re.sub(r"[\s\u2500\u2501]+", " ", text)


def _digest(path: Path, floats: bool) -> str:
    if path.suffix in (".json", ".jsonl", ".md", ".html", ".yaml", ""):
        return _steady(path.read_text(encoding="utf-8", errors="replace"), floats)
    return hashlib.sha256(path.read_bytes()).hexdigest()
