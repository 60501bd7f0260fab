"""Requests that no server wants: odd bodies, bytes that are not HTTP, clients without manners.

`Attacks(seed)` gives an endless, reproducible sequence. Each attack is bytes to send and how to
behave while sending.
"""

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

Manner = Literal["plain", "half-closed", "leaves", "large"]
LARGE = 50_000_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def words(text: str) -> list[str]:
    return text.split()


GRAMMARS = (
    "(a{1000}){1000}",
    "(?:a?){3000}a{3000}",
    "(.*a.{18})&(.*b.{15})",
    ".*a.{22}",
    "(x+x+)+y",
    "(" * 4000 + ")" * 4000,
    "(?=a)b",
    "\\p{L}{0,4000}\\p{N}",
)
SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"$ref": "file:///etc/passwd"},
    {"type": "nothing"},
    {"not": {}},
    {"enum": []},
    {"type": "string", "pattern": ".*a.{22}"},
    {"type": "string", "minLength": 10**6, "maxLength": 10**6},
    {"type": "number", "multipleOf": 1e-300},
    {
        "type": "object",
        "properties": {f"p{n}": {"enum": [f"v{n}{m}" for m in range(20)]} for n in range(400)},
    },
    {"anyOf": [{"type": "object", "properties": {f"a{n}": {"$ref": "#"}}} for n in range(300)]},
    {"type": "object", "patternProperties": {".*a.{20}": {}}},
    {"x-guidance": {"lark": "start: x"}},
)
NUMBERS = (2**63, -(2**63) - 1, 2**64, 2**31, -1, 0, 1, 1e308, -1e308, 1e-308, 5e-324, 1.5, 10**400)
TEXTS = (
    "",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "é" * 3000,
    "<|im_end|>",
    "</think>",
    "../../etc/passwd",
    "%s%n{}",
)
WORDS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "01",
    "[",
    "{",
    '"',
    "tru",
    "\x00",
    "\x7f",
    "/*x*/1",
)
FIELDS = words(
    "model stream stream_options temperature top_p top_k seed stop stop_token_ids n ignore_eos "
    "frequency_penalty presence_penalty repetition_penalty min_p min_tokens logit_bias "
    "response_format return_token_ids reasoning_effort modalities verbosity best_of suffix "
    "max_tokens logprobs echo prompt messages top_logprobs tools tool_choice parallel_tool_calls "
    "chat_template_kwargs max_completion_tokens"
)
IGNORED = words("partial prefix refusal audio function_call reasoning annotations name nonsense")
PATHS = words(
    "/v1/completions /v1/chat/completions /health /v1/models /metrics "
    "/openapi.json / /../etc/passwd /%00 /v1"
)
JUNK = (
    b"\x16\x03\x01\x02\x00\x01",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\r\n" * 500,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 99,
)

PRIVATE_USE = "".join(map(chr, range(0xE000, 0xF900)))
CHUNKS = (b"zz\r\n", b"-1\r\n", b"5\r\nabc", b"FFFFFFFFFFFFFFFFF\r\n")


@dataclass(frozen=True)
class Attack:
    """Bytes to send, and the manner of sending.

    At once, closing the sending side, leaving before the answer, or with `LARGE` bytes of body to
    follow.
    """

    name: str
    data: bytes
    manner: Manner = "plain"


class Attacks:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds = {
            self._odd_field: 50,
            self._odd_text: 14,
            self._grammar: 4,
            self._framing: 10,
            self._manners: 16,
            self._tokens: 5,
            self._marks: 1,
            self._scores: 0.3,
            self._ignored: 8,
            self._deep: 5,
            self._large: 0.1,
        }

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, *options: Any) -> Any:
        return self.random.choice(options)

    def next(self) -> Attack:
        (make,) = self.random.choices(list(self.kinds), list(self.kinds.values()))
        return make()

    def _body(self) -> tuple[str, dict[str, Any]]:
        """A request that is served, of four tokens at most."""
        common: dict[str, Any] = {
            "max_tokens": self.random.randint(1, 4),
            "stream": self.chance(0.4),
        }
        if self.chance(0.5):
            common["temperature"] = 0
        if self.chance(0.5):
            return COMPLETIONS, {"prompt": f"once {self.random.randint(0, 9)}", **common}
        return CHAT, {"messages": [{"role": "user", "content": "hello"}], **common}

    def _value(self, depth: int = 0) -> Any:
        if depth < 3 and self.chance(0.3):
            items = [self._value(depth + 1) for _ in range(self.random.randint(0, 3))]
            return items if self.chance(0.5) else {str(key): item for key, item in enumerate(items)}
        return self.pick(None, True, False, *NUMBERS, *TEXTS)

    def _odd_field(self) -> Attack:
        path, body = self._body()
        for _ in range(self.random.randint(1, 2)):
            body[self.pick(*FIELDS, "unknown")] = self._value()
        for name in ("max_tokens", "max_completion_tokens"):
            if type(body.get(name)) is int and 4 < body[name] < 10**9:
                body[name] = 4
        if path == CHAT and not (body.get("max_tokens") or body.get("max_completion_tokens")):
            body["max_tokens"] = 4
        return Attack("odd field", post_json(path, body))

    def _odd_text(self) -> Attack:
        """JSON that Python would not write: one value's text replaced, or the whole cut off."""
        path, body = self._body()
        body[self.random.choice(FIELDS)] = "@@"
        text = json.dumps(body).replace('"@@"', self.random.choice(WORDS)).encode()
        if self.chance(0.2):
            text = text[: self.random.randrange(len(text))]
        if self.chance(0.2):
            text = text.replace(b"o", self.pick(b"\xff", b"\xc0\x80", b"\xed\xa0\x80"), 1)
        return Attack("odd text", post(path, text))

    def _grammar(self) -> Attack:
        path, body = self._body()
        if self.chance(0.5):
            body["response_format"] = {"type": "regex", "regex": self.random.choice(GRAMMARS)}
        else:
            schema = {"name": "x", "schema": self.random.choice(SCHEMAS)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return Attack("grammar", post_json(path, body))

    def _tokens(self) -> Attack:
        _, body = self._body()
        ids = [self.pick(0, 5, 300, 10**6, -1, 2**63) for _ in range(self.random.randint(0, 5))]
        body["prompt"] = self.pick(ids, [ids, ids], [[]], ids * 500, [1] * 5000)
        body |= {
            "echo": self.chance(0.5),
            "logprobs": self.pick(None, 0, 20, 21),
        }
        return Attack("tokens", post_json(COMPLETIONS, body))

    def _scores(self) -> Attack:
        """More log-probabilities than fit into memory: many prompts with those of all tokens."""
        count = self.pick(4, 300, 1000)
        body = {"prompt": [[1] * 500] * count, "max_tokens": 0, "echo": True, "logprobs": 20}
        return Attack("scores", post_json(COMPLETIONS, body))

    def _ignored(self) -> Attack:
        """What other servers honour or drop, in messages, tools and formats."""
        role = self.pick("user", "developer", "wizard", "function")
        message: dict[str, Any] = {"role": role, "content": "x"}
        message[self.random.choice(IGNORED)] = self._value()
        body: dict[str, Any] = {"messages": [message], "max_tokens": 4}
        function = {
            "name": "f",
            "strict": self.random.choice((True, self._value())),
            "parameters": self._value(),
        }
        if self.chance(0.5):
            body |= {
                "tools": [{"type": "function", "function": function}],
                "ignore_eos": self.chance(0.2),
            }
        if self.chance(0.3):
            key = self.pick("json_schema", "regex")
            body["response_format"] = {"type": "json_object", key: self._value()}
        return Attack("ignored", post_json(CHAT, body))

    def _marks(self) -> Attack:
        """Characters and names by which servers could tell special tokens of text and template."""
        texts = [
            PRIVATE_USE,
            PRIVATE_USE[:3000],
            "<|im_end|>",
            "\ue000",
            "<|im_\ue000end|>",
            "[EOS]",
        ]
        said = "".join(self.random.choices(texts, k=3))
        role = self.pick("user", "assistant", "tool")
        body = {"messages": [{"role": role, "content": said}], "max_tokens": 4}
        return Attack("marks", post_json(CHAT, body))

    def _deep(self) -> Attack:
        path, body = self._body()
        depth = self.pick(50, 500, 900, 990, 100_000)
        body[self.random.choice(FIELDS)] = "@@"
        opening, closing = self.random.choice((("[", "]"), ('{"a":', "}")))
        nested = f"{opening * depth}1{closing * depth}"
        return Attack("deep", post(path, json.dumps(body).replace('"@@"', nested).encode()))

    def _framing(self) -> Attack:
        """Methods, paths, headers and lengths that do not fit."""
        path, body = self._body()
        text = json.dumps(body).encode()
        method = self.random.choice(
            ("POST", "GET", "PUT", "DELETE", "TRACE", "OPTIONS", "HEAD", "BREW")
        )
        length = self.random.choice((len(text), len(text) - 1, 0, "x", "-1", "1" * 30, "+5"))
        chunked = (
            b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
        )
        return self.random.choice(
            (
                Attack("junk", self.random.choice(JUNK), "half-closed"),
                Attack("method or path", post(self.random.choice(PATHS), text, method)),
                Attack("length", post(path, text, length=length), "half-closed"),
                Attack("chunks", chunked + self.random.choice(CHUNKS), "half-closed"),
                Attack(
                    "header",
                    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
                ),
                Attack("pipelined", post(path, text, close=False) * 3 + post(path, text)),
            )
        )

    def _manners(self) -> Attack:
        path, body = self._body()
        manner: Manner = self.pick("half-closed", "leaves", "leaves")
        if manner == "leaves":
            body["max_tokens"] = 200
        data = post_json(path, body)
        return Attack(
            manner, data[: self.random.choice((len(data), len(data), len(data) - 5, 30))], manner
        )

    def _large(self) -> Attack:
        length = self.pick(LARGE, None)
        head = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % LARGE
        return Attack(
            "large", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n" % head, "large"
        )


def post_json(path: str, body: Any) -> bytes:
    return post(path, json.dumps(body).encode())


def post(
    path: str, body: bytes, method: str = "POST", length: Any = None, close: bool = True
) -> bytes:
    """One request, as bytes."""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body) if length is None else length}\r\n"
    head += "Connection: close\r\n" if close else ""
    return head.encode() + b"\r\n" + body
