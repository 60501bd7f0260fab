"""A toy target behind the HTTP API of an engine, honest or with one fault: for the gate's corpus.

The target is a known distribution: of each context, eight words with probabilities that a hash
decides. So honest answers, their probabilities and what each fault makes of them are exact, and a
whole check takes a second.

A new fault is a name of faults.yaml and a branch here, at the step that it spoils:

    if fault == "long-altered" and long:
"""

import json
import math
import random
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from trtspec.bench.check.asking import TOP
from trtspec.bench.check.prompts import CALLED, SAID, TEXT_AND_CALL, VALUES
from trtspec.checkpoint.chat_parser import (
    CALL_BEGIN,
    SECTION_END,
    parse_reply,
    reply_text,
)
from trtspec.checkpoint.tokenizer import KimiTokenizer

CITIES = ("Paris", "Rome")
OWNERS = {"reference": "trtspec", "trtllm": "tensorrt_llm"}
Body = dict[str, Any]
DISTRIBUTIONS: dict[tuple[int, bool], dict[int, float]] = {}  # of the next word, by hash
OPENINGS: set[tuple[int, ...]] = set()  # prompts that any toy was asked


class Chunks(httpx.AsyncByteStream):
    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Made:
    """One answer: its tokens, how many came at each step, and the context it was written for."""

    ids: list[int]
    finish: str
    sizes: list[int] = field(default_factory=list)


@dataclass
class Toy:
    """`kind`: reference or trtllm.

    `fault`: what is wrong with it ("": nothing); `drafts` 0 is the plain server.
    """

    tokenizer: KimiTokenizer
    fault: str = ""
    drafts: int = 3
    kind: str = "reference"
    seen: set[tuple[int, ...]] = field(default_factory=set)
    asked: list[Body] = field(default_factory=list)
    contexts: dict[tuple[int, ...], tuple[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        told = enumerate(self.tokenizer.token_bytes[: self.tokenizer.base_size])
        words = [
            token
            for token, text in told
            if len(text) > 3 and text[:1] == b" " and text[1:].isalpha()
        ]
        self.words, self.rare = words[:24], words[24:64]
        self.rare_gaps = [4.6 + 0.02 * index for index in range(40)]
        self.end = self.tokenizer.special_tokens["<|im_end|>"]

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://toy", transport=httpx.MockTransport(self.handle))

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            if request.url.path != "/v1/models":
                return httpx.Response(404)
            return httpx.Response(
                200,
                json={"data": [{"id": "toy", "owned_by": OWNERS[self.kind], "max_model_len": 900}]},
            )
        body = json.loads(request.content)
        self.asked.append(body)
        try:
            return self.answer(body, "prompt" in body)
        except Refused as refused:
            return httpx.Response(refused.status, json={"error": {"message": str(refused)}})

    # --- the target ---

    def target(self, prompt: Sequence[int], ids: Sequence[int], body: Body) -> dict[int, float]:
        """Natural logarithms of the probabilities of the next token."""
        place, script = self.context(tuple(prompt))
        script = self.forced(body) or script
        if script:
            return {script[len(ids)] if len(ids) < len(script) else self.end: 0.0}
        key = zlib.crc32(repr((place, list(ids)[-5:], len(ids))).encode())
        ended = len(ids) >= 20 + place % 30
        if (key, ended) not in DISTRIBUTIONS:
            DISTRIBUTIONS[key, ended] = self.distribution(random.Random(key), ended)
        return DISTRIBUTIONS[key, ended]

    def distribution(self, dice: random.Random, ended: bool) -> dict[int, float]:
        """The likeliest word first."""
        words, gaps = dice.sample(self.words, 8), [0.0]
        while len(gaps) < 8:
            gaps.append(gaps[-1] + 0.6 + dice.random())
        if ended:
            words = [self.end, *words[:7]]
            gaps = [0.0, *(gap + 3 for gap in gaps[1:])]
        words, gaps = words + self.rare, gaps + self.rare_gaps
        total = math.log(sum(math.exp(-gap) for gap in gaps))
        pairs = sorted(zip(gaps, words, strict=True))
        return {word: -gap - total for gap, word in pairs}

    def context(self, prompt: tuple[int, ...]) -> tuple[int, list[int]]:
        """A hash of the prompt, and the fixed answer: two calls if a tool is offered."""
        if prompt in self.contexts:
            return self.contexts[prompt]
        text, script = self.tokenizer.decode(prompt), []
        if "tool_declare" in text and "Return of" not in text:
            name = json.loads(text.split("<|im_middle|>")[1].split("<|im_end|>")[0])[0]["function"][
                "name"
            ]
            calls = "".join(
                f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>"
                f'{{"city": "{city}"}}<|tool_call_end|>'
                for n, city in enumerate(CITIES)
            )
            written = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
            script = self.tokenizer.encode(written, allow_special=True)
        self.contexts[prompt] = zlib.crc32(repr(prompt).encode()), script
        return self.contexts[prompt]

    def forced(self, body: Body) -> list[int]:
        """The answer that a grammar leaves no choice in."""
        form = body.get("response_format")
        if form == TEXT_AND_CALL:
            text = SAID
        elif form:
            text = json.dumps({"name": "chair", **VALUES}, ensure_ascii=False)
        elif isinstance(body.get("tool_choice"), dict):
            text = reply_text({"tool_calls": [CALLED]}, True, False)
        elif body.get("tool_choice") == "required":
            begin, mark, calls = SAID.removesuffix(SECTION_END).partition(CALL_BEGIN)
            text = begin + 16 * (mark + calls)
        else:
            return []
        return self.tokenizer.encode(text, allow_special=True)

    # --- the engine ---

    def generate(self, prompt: list[int], body: Body) -> Made:
        fault, ids = self.fault, []
        seed = body.get("seed", "")
        seed = len(self.asked) if seed is None else seed
        dice = random.Random(f"{seed}{prompt}")
        warm, self.seen = tuple(prompt) in self.seen, self.seen | {tuple(prompt)}
        long, turns = len(prompt) > 250, self.tokenizer.decode(prompt).count("<|im_user|>")
        read = list(prompt)
        if (
            fault == "cross-talk"
            or (fault == "stale-turn-2" and turns > 1)
            or (fault == "stale-warm" and warm)
        ):
            read = read[20:]
        if fault == "long-altered" and long:
            read = read[len(read) // 2 :]
        temperature = 0.0 if fault == "temperature-ignored" else body.get("temperature", 0.0)
        limit = body["max_tokens"] * (3 if fault == "max-tokens-dropped" else 1)
        least = 0 if fault == "min-tokens-dropped" else body.get("min_tokens", 0)
        banned = (
            {}
            if fault == "logit-bias-dropped"
            else {int(key) for key in body.get("logit_bias", {})}
        )
        stops = [] if fault == "stop-ids-dropped" else body.get("stop_token_ids", [])
        top_p = 1.0 if fault == "top-p-dropped" else body.get("top_p", 1.0)
        truncated = {
            "top_p": top_p <= 0.5,
            "top_k": body.get("top_k", 0) == 1 and fault != "top-k-dropped",
            "min_p": body.get("min_p", 0) == 1 and fault != "min-p-dropped",
        }
        temperature = 0.0 if any(truncated.values()) else temperature
        neutral = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
        bonus = 30 * sum(neutral[key] - body[key] for key in neutral.keys() & body.keys())
        bonus = 0 if fault == "penalties-dropped" else bonus
        words = self.stops(body)
        finish = "length"
        while len(ids) < limit:
            told = {
                token: value + bonus * (token in ids)
                for token, value in self.target(read, ids, body).items()
                if token not in banned and not (token == self.end and len(ids) < least)
            }
            ids.append(self.choose(told, temperature, dice))
            if (
                (ids[-1] == self.end and not body.get("ignore_eos"))
                or ids[-1] in stops
                or any(word in self.tokenizer.decode(ids) for word in words)
            ):
                finish = "stop"
                break
        return Made(ids, finish, self.steps(len(ids), prompt, warm, long))

    def stops(self, body: Body) -> list[str]:
        kept = {"stop-ignored": 0, "second-stop-ignored": 1}.get(self.fault)
        return list(body.get("stop", [])[:kept])

    def choose(self, told: dict[int, float], temperature: float, dice: random.Random) -> int:
        best = max(told, key=lambda token: told[token])
        rest = [token for token in told if token != best]
        if not temperature:
            near = [token for token in rest if told[best] - told[token] < 1.2]
            return (
                near[0]
                if self.fault == "relaxed-acceptance" and near and dice.random() < 0.3
                else best
            )
        if self.fault == "drafts-kept" and math.exp(told[best]) > 0.1:
            return best
        drawn = dice.choices(
            list(told), [math.exp(value / temperature) for value in told.values()]
        )[0]
        if (
            self.fault == "wrong-residual"
        ):  # rejected drafts are drawn again from p in place of max(p - q, 0)
            return best if dice.random() < math.exp(told[best]) else drawn
        return drawn

    def steps(self, tokens: int, prompt: list[int], warm: bool, long: bool) -> list[int]:
        """Tokens of the prefill and of each verification step."""
        dice, sizes = random.Random(f"{prompt}draft"), [1]
        fault = self.fault
        hopeless = (
            (fault == "collapse-warm" and warm)
            or (fault == "collapse-long" and long)
            or fault == "collapse"
        )
        while sum(sizes) < tokens:
            accepted = 0
            while accepted < self.drafts and dice.random() < (
                0.02 if hopeless else 0.75 - 0.1 * accepted
            ):
                accepted += 1
            accepted = 2 if fault == "forced-acceptance" else accepted
            sizes.append(min(1 + accepted, tokens - sum(sizes)))
        return sizes

    # --- the API ---

    def answer(self, body: Body, raw: bool) -> httpx.Response:
        fault = self.fault
        if self.kind == "trtllm" and ("return_token_ids" in body or "echo" in body):
            raise Refused(400, "extra fields not permitted")
        if "logprobs" in body and self.drafts:
            raise Refused(
                500, "CUDA error: log-probabilities under speculation"
            )  # and users' requests with it
        if body.get("echo"):
            return self.scored(body)
        messages = body.get("messages", [])
        if fault == "system-refused" and any(one["role"] == "system" for one in messages):
            raise Refused(400, "this template has no system messages")
        if fault == "follow-up-refused" and messages and messages[-1]["role"] == "tool":
            raise Refused(400, "messages of the role tool are not supported")
        if self.kind == "trtllm" and len(self.asked) % 50 == 9:
            raise Refused(503, "busy")
        if fault == "http-500" and zlib.crc32(repr(body).encode()) % 5 == 0:
            raise Refused(500, "an illegal memory access was encountered")
        if raw:
            prompt = body["prompt"]
        else:
            shown = [
                one for one in messages if fault != "system-dropped" or one["role"] != "system"
            ]
            variables = {"thinking": None, **body.get("chat_template_kwargs", {})}
            prompt = self.tokenizer.encode_chat(shown, body.get("tools"), **variables)[1]
            prompt = [*prompt[:1], *prompt] if fault == "other-template" else prompt
        if fault == "long-errors" and len(prompt) > 250:
            raise Refused(500, "an illegal memory access was encountered")
        if fault == "parameters-refused" and any(key.endswith("_penalty") for key in body):
            raise Refused(400, "penalties are not supported under speculation")
        if "logprobs" not in body:
            OPENINGS.add(tuple(prompt))
        if "n" in body:
            seeds = [0 if fault == "choices-equal" else n for n in range(body["n"])]
            ids = [self.generate(prompt, body | {"seed": seed}).ids for seed in seeds]
            choices = [{"text": "", "token_ids": each, "finish_reason": "length"} for each in ids]
            return httpx.Response(200, json={"choices": choices})
        made = self.generate(prompt, body)
        if "logprobs" in body:  # of one continuation
            begin = self.begin(prompt)
            told = self.target(prompt[:begin], prompt[begin:], body)
            top = {self.tokenizer.decode([token]): told[token] for token in [*told][:TOP]}
            return httpx.Response(
                200,
                json={
                    "choices": [
                        {
                            "text": "",
                            "finish_reason": "length",
                            "logprobs": {"token_logprobs": [0], "top_logprobs": [top]},
                        }
                    ]
                },
            )
        return self.sent(body, raw, prompt, made)

    def scored(self, body: Body) -> httpx.Response:
        """Probabilities of the tokens of a prompt that belong to the answer."""
        prompt, begin = body["prompt"], self.begin(body["prompt"])
        tokens: list[Any] = [None] * begin
        tops: list[Any] = [None] * begin
        for place in range(begin, len(prompt)):
            told = self.target(prompt[:begin], prompt[begin:place], {})
            # rounding tips a router in some prefills, and at one token of them
            tipped = place == len(prompt) - 3 and len(prompt) % 16 == 0
            tokens.append(told.get(prompt[place], -12.0) - 6.0 * tipped)
            tops.append({str(token): told[token] for token in [*told][:TOP]})
        logprobs = {"token_logprobs": tokens, "top_logprobs": tops}
        return httpx.Response(
            200, json={"choices": [{"text": "", "finish_reason": "length", "logprobs": logprobs}]}
        )

    def begin(self, prompt: list[int]) -> int:
        """Start of the answer: after the template's last mark or a prompt that was asked."""
        if (mark := self.tokenizer.special_tokens["</think>"]) in prompt:
            return len(prompt) - prompt[::-1].index(mark)
        return next(size for size in range(len(prompt), 0, -1) if tuple(prompt[:size]) in OPENINGS)

    def sent(self, body: Body, raw: bool, prompt: list[int], made: Made) -> httpx.Response:
        fault, streamed = self.fault, body.get("stream", False)
        text = self.tokenizer.decode(made.ids, skip_special=True)
        for word in self.stops(body):
            text = text[: text.index(word) - 5 * (fault == "stop-early")] if word in text else text
        message = parse_reply(text, prompt[-1] == self.tokenizer.special_tokens["<think>"])
        if raw:
            message = {"content": "" if body.get("detokenize") is False else text}
        calls = [
            {**call, "index": index} for index, call in enumerate(message.pop("tool_calls", []))
        ]
        finish = "tool_calls" if calls else made.finish
        if not raw:
            message, calls, finish = self.parser_fault(message, calls, finish, streamed)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(made.ids) * (1 + (fault == "usage-inflated")),
        }
        ids = (
            {"token_ids": made.ids, "prompt_token_ids": prompt}
            if body.get("return_token_ids")
            else {}
        )
        if body.get("detokenize") is False:
            ids = {
                "token_ids": made.ids[:-1]
                if made.ids[-1] == self.end and finish == "stop"
                else made.ids
            }
        if not streamed:
            named = {"text": text} if raw else {"message": {**message, "tool_calls": calls}}
            return httpx.Response(
                200, json={"choices": [{**named, **ids, "finish_reason": finish}], "usage": usage}
            )
        return httpx.Response(
            200, stream=Chunks(self.chunks(raw, message, calls, finish, usage, ids, made))
        )

    def parser_fault(
        self, message: Body, calls: list[Body], finish: str, streamed: bool
    ) -> tuple[Body, list[Body], str]:
        """What a parser makes wrong of a chat's message."""
        fault, content = self.fault, message.get("content") or ""
        if fault == "call-dropped":
            calls = calls[:1]
        if fault == "calls-as-text" and calls:
            return {"content": "<|tool_calls_section_begin|>"}, [], "stop"
        if fault == "call-without-id":
            calls = [{**call, "id": ""} for call in calls]
        if fault == "one-call-id":
            calls = [{**call, "id": "call_1"} for call in calls]
        if fault == "keys-sorted":
            for call in calls[:2]:  # the last one may be cut
                values = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(values, sort_keys=True)
        if fault == "indented":
            content = "    " + content
        if fault == "unindexed" and streamed:
            calls = [
                {key: value for key, value in call.items() if key != "index"} for call in calls[:1]
            ]
        if fault == "arguments-altered" and streamed:
            calls = [
                {**call, "function": {**call["function"], "arguments": '{"city": "Oslo"}'}}
                for call in calls
            ]
        if fault == "json-broken" and content.startswith("{"):
            content = content[:-3]
        if fault == "stream-altered" and streamed:
            content = content.replace(" the", "", 1) if " the" in content else content[:-4]
        if fault == "text-emptied":
            content = ""
        if fault == "reasoning-moved" and len(content) > 9:
            message = {**message, "reasoning_content": content[:9]}
            content = content[9:]
        if fault == "finish-wrong" and finish == "stop":
            finish = "length"
        return {**message, "content": content}, calls, finish

    def chunks(
        self,
        raw: bool,
        message: Body,
        calls: list[Body],
        finish: str,
        usage: Body,
        ids: Body,
        made: Made,
    ) -> list[bytes]:
        fault, content, events, done = self.fault, message.get("content") or "", [], 0
        for size in made.sizes:
            begin, done = done, done + size
            cut = [len(content) * place // len(made.ids) for place in (begin, done)]
            piece = content[cut[0] : cut[1]]
            delta: Body = {"content": piece}
            if not begin and message.get("reasoning_content"):
                delta["reasoning_content"] = message["reasoning_content"]
            choice: Body = {"text": piece} if raw else {"delta": delta}
            if ids:
                choice["token_ids"] = ids["token_ids"][begin:done]
                choice |= (
                    {"prompt_token_ids": ids["prompt_token_ids"]}
                    if not begin and "prompt_token_ids" in ids
                    else {}
                )
            events.append({"choices": [choice]})
        events.append({"choices": [{"delta": {"tool_calls": calls}, "finish_reason": finish}]})
        events.append({"choices": [], "usage": usage})
        if fault == "error-in-200" and len(made.ids) > 30:
            events[1:] = [{"error": {"message": "the engine died", "code": 500}}]
        if fault == "cut-stream":
            events = events[: len(events) // 2]
        sent = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
        sent.append(b"data: [DONE]\n\n")
        return [b"".join(sent)] if fault == "buffering" else sent
