"""From a request body to engine requests: prompts are tokenized, templates rendered, grammars compiled and all of it
checked, beside the event loop and before an answer begins."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any

from trtspec.checkpoint.chat_parser import SECTION
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import CompletionAnswer
from trtspec.engine.engine import Engine
from trtspec.engine.protocol import MESSAGE_FIELDS, ApiError, ChatBody, CompletionBody, GenerationBody
from trtspec.engine.request import GenerationRequest, PromptTooLong, Wishes
from trtspec.engine.steering import Grammars, tool_call_grammar
from trtspec.errors import MissingDependency, TrtspecError

LONGEST_ESCAPE = 6  # characters of JSON per byte of text
SEEDS = 2**64
MAX_SCORES = 2_000_000  # log-probabilities of one request


@dataclass(frozen=True)
class ApiCall:
    """One API call: the engine requests behind its choices, and how to answer. `prompt_tokens` counts each prompt
    once; `scores` are the log-probabilities to keep until the answer is sent, at most."""

    answer: CompletionAnswer
    requests: list[GenerationRequest]
    prompt_tokens: int
    scores: int
    thinking: bool = False


class Preparation:
    """Makes the calls of one engine. Its methods raise ApiError or RequestRefused for what cannot be."""

    def __init__(self, engine: Engine, tokenizer: KimiTokenizer, model: str) -> None:
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.max_bytes = engine.max_seq_len * max(map(len, tokenizer.token_bytes), default=1)
        end_of_turn = tokenizer.special_tokens.get("<|im_end|>")
        self.grammars = Grammars(tokenizer, sorted({*engine.eos_ids, *([] if end_of_turn is None else [end_of_turn])}))

    def completion(self, asked: CompletionBody) -> ApiCall:
        tokenizer, special = self.tokenizer, asked.allow_special_tokens
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                self._require_short(len(prompt.encode()), "prompt")
        prompts = [tokenizer.encode(p, allow_special=special) if isinstance(p, str) else p for p in asked.prompts]
        if asked.truncate_prompt_tokens:
            prompts = [prompt[-asked.truncate_prompt_tokens :] for prompt in prompts]
        answer = CompletionAnswer(
            tokenizer,
            self.model,
            False,
            asked.n,
            logprobs=asked.logprobs is not None,
            top=asked.logprobs or 0,
            usage=asked.usage_wanted,
            echo=asked.echo,
            shown=bool(asked.max_tokens),
            ids=asked.return_token_ids,
        )
        common = _engine_request(asked, max(1, asked.max_tokens), answer)
        common = replace(common, wishes=self._wishes(asked, self._matcher(asked.grammar, "response_format")))
        requests = [
            request for prompt in prompts for request in self._choices(replace(common, prompt_ids=prompt), asked.n)
        ]
        return ApiCall(answer, requests, sum(map(len, prompts)), self._scores(requests))

    def chat(self, asked: ChatBody) -> ApiCall:
        text, prompt = self._rendered(asked)
        if asked.truncate_prompt_tokens:
            prompt = prompt[-asked.truncate_prompt_tokens :]
        answer = CompletionAnswer(
            self.tokenizer,
            self.model,
            True,
            asked.n,
            logprobs=asked.logprobs,
            top=asked.top_logprobs,
            usage=asked.usage_wanted,
            ids=asked.return_token_ids,
        )
        limit = asked.max_completion_tokens or asked.max_tokens or max(1, self.engine.max_seq_len - len(prompt))
        thinking = text.rstrip().endswith("<think>")
        special = self.tokenizer.special_tokens
        marks = ["<|im_end|>"] if not asked.ignore_eos else []
        if asked.offered_tools and not asked.parallel_tool_calls and not asked.demanded_tools:
            marks.append("<|tool_call_end|>")
        ends = tuple(special[mark] for mark in marks if mark in special)
        common = _engine_request(asked, limit, answer)
        common = replace(common, prompt_ids=prompt, stop_token_ids=(*common.stop_token_ids, *ends))
        after = special.get(SECTION if asked.strict_tools else "</think>" if thinking else "")
        common = replace(common, wishes=self._wishes(asked, self._chat_matcher(asked), after))
        requests = self._choices(common, asked.n)
        return ApiCall(answer, requests, len(prompt), self._scores(requests), thinking)

    def _rendered(self, asked: ChatBody) -> tuple[str, list[int]]:
        """Text and tokens of a conversation."""
        template = self.tokenizer.template
        if unknown := asked.chat_template_kwargs.keys() - template.variables:
            names = ", ".join(sorted(unknown))
            raise ApiError(f"the chat template has no {names} that could be set", param="chat_template_kwargs")
        for index, message in enumerate(asked.messages):
            if unread := message.keys() - MESSAGE_FIELDS - template.names:
                where = f"messages[{index}].{min(unread)}"
                raise ApiError(f"the chat template does not read {where}", param=where)
        variables = {"thinking": None, **asked.chat_template_kwargs}
        try:
            self._require_short(len(json.dumps([asked.messages, asked.tools])) // LONGEST_ESCAPE, "messages")
            return self.tokenizer.encode_chat(asked.messages, asked.offered_tools, **variables)
        except RecursionError:
            raise ApiError("a message or a tool is nested too deeply", param="messages") from None
        except PromptTooLong:
            raise
        except TrtspecError as error:
            reason = error.message.removeprefix(f"{template.where}: ")  # a path is nobody's business
            if reason != error.message:
                reason = f"the chat template refuses the request: {reason}"
            raise ApiError(reason, param="messages") from None

    def _scores(self, requests: list[GenerationRequest]) -> int:
        """How many log-probabilities the answers may have: of each token, and of its alternatives. Raises ApiError."""
        scores = 0
        for request in requests:
            prompt, room = len(request.prompt_ids), self.engine.max_seq_len - len(request.prompt_ids)
            tokens = min(request.max_tokens, room) + (prompt if request.prompt_logprobs else 0)
            scores += tokens * (1 + request.logprobs) if request.logprobs else 0
        if scores > MAX_SCORES:
            raise ApiError(
                f"log-probabilities of up to {scores} tokens and alternatives in one request; this server takes "
                f"{MAX_SCORES}: lower max_tokens, the alternatives, or the number of prompts or choices",
                param="logprobs",
            )
        return scores

    def _choices(self, common: GenerationRequest, count: int) -> list[GenerationRequest]:
        """The checked requests behind the choices for one prompt, each with its own seed and state of the grammar."""
        requests = []
        if common.wishes is not None and common.wishes.grammar is not None:
            common = replace(common, stop_token_ids=(*common.stop_token_ids, *self.grammars.ends))
        for choice in range(count):
            seed, wishes = common.seed, common.wishes
            if seed is not None and choice:
                seed = (seed + choice + SEEDS // 2) % SEEDS - SEEDS // 2
            if wishes is not None and wishes.grammar is not None:
                wishes = replace(wishes, grammar=wishes.grammar.deep_copy())
            requests.append(replace(common, id=uuid.uuid4().hex, seed=seed, wishes=wishes))
            self.engine.check(requests[-1])
        return requests

    def _wishes(self, asked: GenerationBody, grammar: Any, after: int | None = None) -> Wishes | None:
        """What the answer is asked to be besides likely, None where it may be anything."""
        bad = [self.tokenizer.encode(form) for word in asked.banned for form in (word, f" {word}")]
        wishes = Wishes(
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            repetition_penalty=asked.repetition_penalty,
            min_p=asked.min_p,
            min_tokens=asked.min_tokens,
            logit_bias={int(token): value for token, value in asked.logit_bias.items()},
            bad_words=tuple(map(tuple, bad)),
            grammar=grammar,
            grammar_after=None if grammar is None else after,
        )
        return None if wishes == Wishes() else wishes

    def _chat_matcher(self, asked: ChatBody) -> Any:
        """What holds the answer to its form: a call of the demanded tools, or the asked response format."""
        demanded, strict = asked.demanded_tools, asked.strict_tools
        if not demanded and not strict:
            return self._matcher(asked.grammar, "response_format")
        if asked.grammar:
            told = "a demanded tool call" if demanded else "a strict function"
            raise ApiError(f"{told} and response_format exclude each other", param="response_format")
        named = not isinstance(asked.tool_choice, str)
        several = asked.parallel_tool_calls and not named
        try:
            grammar = tool_call_grammar(demanded or strict, several, opened=not demanded)
        except ValueError as error:
            raise ApiError(f"no answer can have this form: {error}", param="tools") from None
        return self._matcher(("lark", grammar), "tools")

    def _matcher(self, grammar: tuple[str, str] | None, param: str) -> Any:
        if grammar is None:
            return None
        try:
            return self.grammars.matcher(*grammar)
        except ValueError as error:
            raise ApiError(f"no answer can have this form: {error}", param=param) from None
        except MissingDependency as error:
            raise ApiError(f"{error.message}, which this server does not have", param=param, status=501) from None

    def _require_short(self, size: int, param: str) -> None:
        """Raises PromptTooLong, before anything is tokenized, for text that cannot fit whatever its tokens are."""
        if size > self.max_bytes:
            raise PromptTooLong(f"{size} bytes of text cannot fit into the context", param=param)


def _engine_request(asked: GenerationBody, max_tokens: int, answer: CompletionAnswer) -> GenerationRequest:
    return GenerationRequest(
        id="",
        prompt_ids=[],
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        seed=asked.seed,
        stop=asked.stops,
        ignore_eos=asked.ignore_eos,
        logprobs=max(1, answer.top) if answer.logprobs else 0,
        stop_token_ids=tuple(asked.stop_token_ids),
        prompt_logprobs=answer.echo and answer.logprobs,
        include_stop=asked.include_stop_str_in_output,
        skip_special=asked.skip_special_tokens,
    )
