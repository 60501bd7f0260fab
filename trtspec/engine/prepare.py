"""From a request body to engine requests: prompts are tokenized, templates rendered and all of it checked, beside the
event loop and before an answer begins."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace

from trtspec.checkpoint.chat_parser import SECTION
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import CompletionAnswer
from trtspec.engine.bodies import MESSAGE_FIELDS, ApiError, ChatBody, CompletionBody, GenerationBody
from trtspec.engine.engine import Engine
from trtspec.engine.grammars import Grammar, tool_call_grammar
from trtspec.engine.request import GenerationRequest, LogitsConstraints, PromptTooLong
from trtspec.errors import TrtspecError

LONGEST_ESCAPE = 6  # characters of JSON per byte of text
SEEDS = 2**64


@dataclass(frozen=True)
class Form:
    """What an answer must look like: `kind` and `text` as `Grammars.compiled` takes them, from the field `param`. It
    begins to count behind the token `after`, if there is one."""

    kind: str
    text: str
    param: str
    after: int | None = None


@dataclass(frozen=True)
class ApiCall:
    """One API call: the engine requests behind its choices, and how to answer. `prompt_tokens` counts each prompt once.
    A `form` is yet to be compiled."""

    answer: CompletionAnswer
    requests: list[GenerationRequest]
    prompt_tokens: int
    thinking: bool = False
    form: Form | None = None

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each choice's prompt."""
        return [request.prompt_ids for request in self.requests]

    def scores(self, max_seq_len: int) -> int:
        """How many log-probabilities the answers may have: of each token, and of its alternatives."""
        found = 0
        for request in self.requests:
            prompt = len(request.prompt_ids)
            tokens = min(request.max_tokens, max_seq_len - prompt) + (prompt if request.prompt_logprobs else 0)
            found += tokens * (1 + request.logprobs) if request.logprobs else 0
        return found

    def guided(self, grammar: Grammar, ends: list[int]) -> ApiCall:
        """The same call; each choice follows its own copy of the grammar, and `ends` end it."""
        after = self.form.after if self.form else None
        requests = []
        for request in self.requests:
            constraints = replace(
                request.constraints or LogitsConstraints(), grammar=grammar.copy(), grammar_after=after
            )
            stops = (*request.stop_token_ids, *ends)
            requests.append(replace(request, constraints=constraints, stop_token_ids=stops))
        return replace(self, requests=requests)


class Preparation:
    """Makes the calls of one engine. Its methods raise ApiError or RequestRefused for what cannot be."""

    def __init__(self, engine: Engine, tokenizer: KimiTokenizer, model: str) -> None:
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.max_bytes = engine.max_seq_len * max(map(len, tokenizer.token_bytes), default=1)

    def completion(self, asked: CompletionBody) -> ApiCall:
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                self._require_short(len(prompt.encode()), "prompt")
        special = asked.allow_special_tokens
        prompts = [p if isinstance(p, list) else self.tokenizer.encode(p, allow_special=special) for p in asked.prompts]
        answer = CompletionAnswer(
            self.tokenizer,
            self.model,
            chat=False,
            n=asked.n,
            logprobs=asked.logprobs is not None,
            top=asked.logprobs or 0,
            usage=asked.usage_wanted,
            token_ids=asked.return_token_ids,
            echo=asked.echo,
            shown=bool(asked.max_tokens),
        )
        common = _engine_request(asked, max(1, asked.max_tokens), answer)
        requests = [one for prompt in prompts for one in self._choices(replace(common, prompt_ids=prompt), asked.n)]
        form = Form(*asked.grammar, "response_format") if asked.grammar else None
        return ApiCall(answer, requests, sum(map(len, prompts)), form=form)

    def chat(self, asked: ChatBody) -> ApiCall:
        text, prompt = self._rendered(asked)
        answer = CompletionAnswer(
            self.tokenizer,
            self.model,
            chat=True,
            n=asked.n,
            logprobs=asked.logprobs,
            top=asked.top_logprobs,
            usage=asked.usage_wanted,
            token_ids=asked.return_token_ids,
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
        form = self._form(asked, special.get(SECTION if asked.strict_tools else "</think>" if thinking else ""))
        return ApiCall(answer, self._choices(common, asked.n), len(prompt), thinking, form)

    def _rendered(self, asked: ChatBody) -> tuple[str, list[int]]:
        """Text and tokens of a conversation."""
        template = self.tokenizer.template
        variables = dict(asked.chat_template_kwargs)
        if unknown := variables.keys() - template.variables:
            names = ", ".join(sorted(unknown))
            raise ApiError(f"the chat template has no {names} that could be set", param="chat_template_kwargs")
        if asked.reasoning_effort:
            if "thinking" not in template.variables:
                raise ApiError("the chat template cannot switch reasoning on or off", param="reasoning_effort")
            variables["thinking"] = asked.reasoning_effort != "none"
        messages = [message.to_dict() for message in asked.messages]
        for index, message in enumerate(messages):
            if unread := message.keys() - MESSAGE_FIELDS - template.names:
                where = f"messages[{index}].{min(unread)}"
                raise ApiError(f"the chat template does not read {where}", param=where)
        tools = asked.offered_tools
        try:
            self._require_short(len(json.dumps([messages, tools])) // LONGEST_ESCAPE, "messages")
            return self.tokenizer.encode_chat(messages, tools, **{"thinking": None, **variables})
        except RecursionError:
            raise ApiError("a message or a tool is nested too deeply", param="messages") from None
        except PromptTooLong:
            raise
        except TrtspecError as error:
            reason = error.message.removeprefix(f"{template.where}: ")  # a path is nobody's business
            if reason != error.message:
                reason = f"the chat template refuses the request: {reason}"
            raise ApiError(reason, param="messages") from None

    def _choices(self, common: GenerationRequest, count: int) -> list[GenerationRequest]:
        """The checked requests behind the choices for one prompt, each with its own seed."""
        self.engine.check(common)
        requests = []
        for choice in range(count):
            seed = common.seed
            if seed is not None and choice:
                seed = (seed + choice + SEEDS // 2) % SEEDS - SEEDS // 2
            requests.append(replace(common, id=uuid.uuid4().hex, seed=seed))
        return requests

    def _form(self, asked: ChatBody, after: int | None) -> Form | None:
        """What holds the answer to its form: a call of the demanded tools, or the asked response format."""
        demanded, strict = asked.demanded_tools, asked.strict_tools
        if not demanded and not strict:
            return Form(*asked.grammar, "response_format", after) if asked.grammar else None
        if asked.grammar:
            named = "a demanded tool call" if demanded else "a strict function"
            raise ApiError(f"{named} and response_format exclude each other", param="response_format")
        several = asked.parallel_tool_calls and isinstance(asked.tool_choice, str)
        try:
            return Form("lark", tool_call_grammar(demanded or strict, several, opened=not demanded), "tools", after)
        except ValueError as error:
            raise ApiError(f"no answer can have this form: {error}", param="tools") from None

    def _require_short(self, size: int, param: str) -> None:
        """Raises PromptTooLong, before anything is tokenized, for text that cannot fit whatever its tokens are."""
        if size > self.max_bytes:
            raise PromptTooLong(f"{size} bytes of text cannot fit into the context", param=param)


def _engine_request(asked: GenerationBody, max_tokens: int, answer: CompletionAnswer) -> GenerationRequest:
    constraints = LogitsConstraints(
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        repetition_penalty=asked.repetition_penalty,
        min_p=asked.min_p,
        min_tokens=asked.min_tokens,
        logit_bias={int(token): value for token, value in asked.logit_bias.items()},
    )
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
        constraints=None if constraints == LogitsConstraints() else constraints,
        prompt_logprobs=answer.echo and answer.logprobs,
    )
