"""A checkpoint's chat template, rendered by jinja2's sandbox with the same settings as transformers uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtspec import files
from trtspec.errors import TrtspecError


class ChatTemplate:
    """Renders conversations. The template is data from a checkpoint: it cannot call Python or change its arguments."""

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TrtspecError(
                f"{where}: line {error.lineno}: {error.message}", "repair or replace the chat template"
            ) from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """What a caller can set besides the conversation: the names that the template reads and does not define."""
        environment = _environment()
        read = meta.find_undeclared_variables(environment.parse(self.source))
        return frozenset(read - environment.globals.keys() - {"messages", "tools", "add_generation_prompt"})

    @staticmethod
    def from_directory(directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate:
        """chat_template.jinja when the file exists, else `chat_template` of tokenizer_config.json."""
        path = directory / "chat_template.jinja"
        if path.is_file():
            return ChatTemplate(files.read_text(path, remedy="repair or replace the chat template"), str(path))
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not source:
            raise TrtspecError(
                f"{directory}: neither chat_template.jinja nor chat_template in tokenizer_config.json",
                "copy chat_template.jinja from the original checkpoint",
            )
        return ChatTemplate(source, f"{directory / 'tokenizer_config.json'}:chat_template")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation. Raises TrtspecError with the template's own words when it refuses it."""
        try:
            return self._template.render(
                messages=list(messages), tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise TrtspecError(f"{self.where}: {error}", "check the roles and contents of the messages") from None


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model wrote, for training masks; when rendering it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
