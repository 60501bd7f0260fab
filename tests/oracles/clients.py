"""Clients as their makers published them, against one server: NAME URL [ARGUMENT ...].

Prints one JSON object.

Runs in the Python of the client, which does not have this project.
"""

import asyncio
import json
import sys
from typing import Any, Literal

MODEL = "tiny-kimi"
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Looks it up.", "parameters": PARAMETERS},
    }
    for name in ("get_weather", "get_news")
]


def use_openai(url: str) -> dict[str, Any]:
    import openai
    from pydantic import BaseModel

    class Day(BaseModel):
        city: str
        days: int

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    common: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**common).choices[0].message.content
    streamed = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            **common, stream=True, stream_options={"include_usage": True}
        )
        if chunk.choices
    )

    async def asynchronous() -> list[str | None]:
        own = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        answers = await asyncio.gather(*(own.chat.completions.create(**common) for _ in range(4)))
        return [answer.choices[0].message.content for answer in answers]

    asked = {**common, "max_tokens": 300}
    parsed = client.chat.completions.parse(**asked, response_format=Day).choices[0].message.parsed
    with client.chat.completions.stream(**asked, tools=TOOLS, tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    return {
        "models": [model.id for model in client.models.list()],
        "whole": whole,
        "same": [streamed, *asyncio.run(asynchronous())],
        "parsed": parsed.model_dump() if parsed else None,
        "calls": [
            [call.function.name, call.function.arguments] for call in message.tool_calls or []
        ],
    }


def use_litellm(url: str) -> dict[str, Any]:
    import litellm

    common = {
        "model": f"openai/{MODEL}",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": ASK,
        "temperature": 0,
    }
    whole = litellm.completion(**common, max_tokens=32).choices[0].message.content
    chunks = litellm.completion(**common, max_tokens=32, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    answer = litellm.completion(**common, max_tokens=300, tools=TOOLS, tool_choice="required")
    calls = answer.choices[0].message.tool_calls or []
    return {
        "whole": whole,
        "same": [streamed],
        "calls": [[call.function.name, call.function.arguments] for call in calls],
    }


def use_langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Day(
        BaseModel, extra="forbid"
    ):  # a small model may never end free strings and further keys
        """The weather of a city."""

        city: Literal["Paris", "Rome"]
        days: int

    model = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=300
    )
    question = ASK[0]["content"]
    structured = {
        method: model.with_structured_output(Day, method=method).invoke(question).model_dump()
        for method in ("json_schema", "function_calling")
    }
    called = model.bind_tools(TOOLS, tool_choice="required").invoke(question)
    short = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=32
    )
    return {
        "whole": short.invoke(question).content,
        "same": ["".join(str(chunk.content) for chunk in short.stream(question))],
        "structured": structured,
        "calls": [[call["name"], json.dumps(call["args"])] for call in called.tool_calls],
    }


def use_lm_eval(url: str, tokenizer: str, pairs: str) -> dict[str, Any]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    common: dict[str, Any] = {"model": MODEL, "max_length": 512, "tokenizer": tokenizer}
    model = LocalCompletionsAPI(
        f"{url}/v1/completions",
        tokenizer_backend="huggingface",
        batch_size=4,
        num_concurrent=1,
        **common,
    )
    given = json.loads(pairs)
    asked = [
        Instance("loglikelihood", {}, (context, text), number)
        for number, (context, text) in enumerate(given)
    ]
    options = {"until": ["\n\n"], "max_gen_toks": 16, "temperature": 0}
    generations = [
        Instance("generate_until", {}, (context, dict(options)), number)
        for number, (context, _) in enumerate(given)
    ]
    chat = LocalChatCompletion(
        f"{url}/v1/chat/completions", model=MODEL, batch_size=1, num_concurrent=1
    )
    turn = JsonChatStr(json.dumps(ASK))
    return {
        "loglikelihoods": model.loglikelihood(asked),
        "generations": model.generate_until(generations),
        "chat": chat.generate_until([Instance("generate_until", {}, (turn, dict(options)), 0)]),
    }


if __name__ == "__main__":
    clients = {
        "openai": use_openai,
        "litellm": use_litellm,
        "langchain": use_langchain,
        "lm_eval": use_lm_eval,
    }
    name, *arguments = sys.argv[1:]
    print(json.dumps(clients[name](*arguments)))
