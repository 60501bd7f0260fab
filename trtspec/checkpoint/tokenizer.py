"""Reads Kimi's tokenizer natively: tiktoken ranks, 256 reserved tokens, a jinja2 chat template.

No code from the checkpoint runs. jinja2's sandbox renders the template with the settings that
transformers uses. The files are `tiktoken.model` (base64 token, rank), `tokenizer_config.json`
(`added_tokens_decoder`), `chat_template.jinja` and `generation_config.json`.
"""

from __future__ import annotations

import binascii
import codecs
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tiktoken
from jinja2 import meta, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtspec import files
from trtspec.errors import TrtspecError

RESERVED_SPECIAL_TOKENS = 256
# The splitting regex is slow for longer texts, and for longer runs with or without whitespace.
# These are the limits of Kimi's published tokenizer.
MAX_CHARS = 400_000
MAX_RUN_CHARS = 25_000
# The split pattern of Kimi's published tokenizer (K2 to K2.7): Han runs first, and no Han in the
# letter classes.
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Code points without a meaning (Unicode 15, section 23.5), in the basic plane and in planes 15 and
# 16. One of them marks names of special tokens in `encode_chat`.
PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
# The end of each part of a run that is too long.
_RUN_BORDERS = re.compile(rf"\s{{{MAX_RUN_CHARS}}}(?=\s)|\S{{{MAX_RUN_CHARS}}}(?=\S)")


class KimiTokenizer:
    """Tokenizer that converts text to token ids and back.

    base_size: number of ordinary tokens. The special tokens follow them.
    special_tokens: ids of all special tokens by name.
    hidden_ids: ids of special tokens that a server leaves out of its text.
    vocab_size: number of all tokens.
    """

    def __init__(self, directory: str | Path) -> None:
        """Reads the tokenizer of a checkpoint directory.

        Raises TrtspecError if a file is missing or damaged.
        """
        self.directory = Path(directory)
        path = self.directory / "tokenizer_config.json"
        ranks = read_ranks(self.directory / "tiktoken.model")
        self._config = read_optional(path)
        self.base_size = len(ranks)
        self.special_tokens, self.hidden_ids = _special_tokens(path, self._config, self.base_size)
        self.vocab_size = self.base_size + RESERVED_SPECIAL_TOKENS
        self.encoding = tiktoken.Encoding(
            name=self.directory.name or "kimi",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_tokens,
        )

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each token by its id. A special token's bytes are its name."""
        decode = self.encoding.decode_single_token_bytes
        return [decode(token) for token in range(self.vocab_size)]

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer.

        They come from generation_config.json and config.json. If neither states an id, it is the id
        of [EOS].
        """
        ids: list[int] = []
        model = read_optional(self.directory / "config.json")
        text = model.get("text_config")
        if isinstance(text, dict) and "eos_token_id" in text:
            model = text
        for config in (read_optional(self.directory / "generation_config.json"), model):
            stated = config.get("eos_token_id")
            if isinstance(stated, list):
                ids += stated
            elif stated is not None:
                ids.append(stated)
        if not ids:
            ids = [self.special_id("[EOS]")]
        return tuple(dict.fromkeys(int(token) for token in ids))

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        """Pattern that matches the names of all special tokens, the longest first."""
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)))

    @cached_property
    def template(self) -> ChatTemplate:
        """Chat template of the checkpoint."""
        return ChatTemplate.from_directory(self.directory, self._config)

    def special_id(self, name: str) -> int:
        """Returns the id of a special token by its name, such as `<|im_end|>`.

        Raises TrtspecError if no special token has this name.
        """
        try:
            return self.special_tokens[name]
        except KeyError:
            message = f"{self.directory}: no special token is called {name!r}"
            remedy = "check added_tokens_decoder in tokenizer_config.json"
            raise TrtspecError(message, remedy) from None

    def encode(
        self, text: str, allow_special: bool = False, marks: Collection[str] = ()
    ) -> list[int]:
        """Returns the token ids of a text.

        A special token's name in the text is ordinary text by default.

        Args:
            allow_special: whether all names become special tokens.
            marks: names that become special tokens.
        """
        allowed: Any = "all" if allow_special else set(marks)
        ids: list[int] = []
        for chunk in _safe_chunks(text):
            ids.extend(self.encoding.encode(chunk, allowed_special=allowed, disallowed_special=()))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Returns the text of token ids. Bytes that are not UTF-8 become U+FFFD.

        `skip_special`: whether turn and padding tokens are left out.
        """
        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        thinking: bool | None = False,
        **variables: Any,
    ) -> tuple[str, list[int]]:
        """Returns the text of the rendered conversation and its token ids.

        The conversation may come from anybody, so a special token's name becomes the token only if
        the template wrote it. In texts of users, systems and tools it is ordinary text. In an
        assistant's messages, the names that a server shows (think tags, tool calls) become tokens,
        so that an answer can be sent back unchanged. A name that is spread over several parts of a
        content is not recognised.

        Raises TrtspecError if the template refuses the conversation, or if the conversation uses
        every private-use character.

        Args:
            tools: tools that the template lists. None: no tools.
            thinking: value of the template's variable. None: the variable is not set.
            variables: further variables, such as add_generation_prompt, which is True by default.
        """
        written = json.dumps([*messages, tools, variables], ensure_ascii=False)
        if not self._special_names.search(written):
            # Every name in the rendered text is the template's.
            text = self.template.render(messages, tools, thinking=thinking, **variables)
            return text, self.encode(text, allow_special=True)
        # The mark splits names that the conversation holds, and is removed after the template ran.
        used = set(written)
        private_use = map(chr, itertools.chain(*PRIVATE_USE))
        mark = next((character for character in private_use if character not in used), None)
        if mark is None:
            fault = (
                "the conversation holds the name of a special token and every private-use character"
            )
            raise TrtspecError(fault, "leave out either of them")
        # An assistant may write the other names, such as think tags, as tokens.
        hidden = {name for name, token in self.special_tokens.items() if token in self.hidden_ids}

        def marked(value: Any, names: Collection[str]) -> Any:
            """Returns a copy of `value` with the mark inserted into each of these names."""
            if isinstance(value, str):
                return self._special_names.sub(
                    lambda match: (
                        match[0][0] + mark + match[0][1:] if match[0] in names else match[0]
                    ),
                    value,
                )
            if isinstance(value, list):
                return [marked(item, names) for item in value]
            if isinstance(value, dict):
                return {marked(key, names): marked(item, names) for key, item in value.items()}
            return value

        all_names = self.special_tokens.keys()
        marked_messages = []
        for message in messages:
            names = hidden if message.get("role") == "assistant" else all_names
            marked_messages.append(marked(message, names))
        text = self.template.render(
            marked_messages,
            marked(tools, all_names),
            thinking=thinking,
            **marked(variables, all_names),
        )
        return text.replace(mark, ""), self._encode_marked(text, mark)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Returns the token ids of a rendered conversation without the mark.

        Names without the mark become tokens. They are the template's and an assistant's visible
        names.
        """
        ids: list[int] = []
        position = 0
        for match in self._special_names.finditer(text):
            ids += self.encode(text[position : match.start()].replace(mark, ""))
            ids.append(self.special_tokens[match[0]])
            position = match.end()
        return ids + self.encode(text[position:].replace(mark, ""))


class Detokenizer:
    """Converter of token ids to text as they arrive.

    A character whose bytes span several tokens is returned when it is complete.
    """

    def __init__(self, tokenizer: KimiTokenizer, skip_special: bool = True) -> None:
        self._bytes = tokenizer.token_bytes
        self._hidden: frozenset[int] = tokenizer.hidden_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` complete.

        Ids outside the vocabulary (padding rows of lm_head) have no text.
        """
        table = self._bytes
        hidden = self._hidden
        size = len(table)
        visible = [table[token] for token in ids if token < size and token not in hidden]
        return self._decoder.decode(b"".join(visible))

    def flush(self) -> str:
        """Returns the remaining text at the end: U+FFFD for an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)


def _safe_chunks(text: str) -> Iterator[str]:
    """Yields a text in chunks that the splitting regex handles fast.

    A chunk has at most MAX_CHARS characters. A run of whitespace or of other characters has at most
    MAX_RUN_CHARS.
    """
    for begin in range(0, len(text), MAX_CHARS):
        chunk = text[begin : begin + MAX_CHARS]
        start = 0
        for border in _RUN_BORDERS.finditer(chunk):
            yield chunk[start : border.end()]
            start = border.end()
        yield chunk[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Reads `tiktoken.model`, which has one `base64 rank` per line. Returns the rank of each token.

    Raises TrtspecError if the file is missing, if a line is invalid, or if the ranks are not 0 to
    n-1.
    """
    try:
        words = files.read_bytes(path).split()
    except FileNotFoundError:
        remedy = (
            "copy tiktoken.model from the original checkpoint "
            "(quantization scripts often leave it behind)"
        )
        raise TrtspecError(f"{path}: there are no tokenizer ranks here", remedy) from None
    try:
        tokens = [binascii.a2b_base64(word, strict_mode=True) for word in words[::2]]
        ranks = dict(zip(tokens, map(int, words[1::2]), strict=True))
    except (ValueError, binascii.Error):
        message = f"{path}: not a tiktoken ranks file (base64 token, space, rank)"
        remedy = "download the file again, in a clone with `git lfs pull`"
        raise TrtspecError(message, remedy) from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        message = f"{path}: ranks are not 0..{len(ranks) - 1}, the file is damaged"
        raise TrtspecError(message, "download the file again")
    return ranks


def _special_tokens(
    path: Path, config: dict[str, Any], base_size: int
) -> tuple[dict[str, int], frozenset[int]]:
    """Returns the ids of all reserved tokens by name, and the ids that never appear in text.

    Kimi declares tool calls and think tags as `special: false`, because a server must show them in
    the text. Raises TrtspecError if tokenizer_config.json, at `path`, declares no tokens.
    """
    entries = config.get("added_tokens_decoder") or {}
    declared = {int(token): entry for token, entry in entries.items()}
    if not declared:
        remedy = "copy tokenizer_config.json from the original checkpoint"
        raise TrtspecError(f"{path}: no added_tokens_decoder names the special tokens", remedy)
    ids = range(base_size, base_size + RESERVED_SPECIAL_TOKENS)
    names = {}
    for token in ids:
        name = f"<|reserved_token_{token}|>"
        if token in declared:
            name = declared[token]["content"]
        names[name] = token
    visible = {token for token, entry in declared.items() if not entry.get("special", True)}
    return names, frozenset(ids) - visible


def read_optional(path: Path) -> dict[str, Any]:
    """Reads a JSON object. {} if the file does not exist."""
    try:
        return files.read_object(path, remedy="download the file again")
    except FileNotFoundError:
        return {}


class ChatTemplate:
    """Chat template of a checkpoint, which renders conversations to text.

    The template comes from a checkpoint, so it runs in a sandbox that cannot call Python or change
    its arguments.

    source: text of the template.
    where: file that it comes from, for messages.
    """

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = f"{where}: line {error.lineno}: {error.message}"
            raise TrtspecError(message, "repair or replace the chat template") from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that a caller can set.

        The template reads them and does not define them. The conversation's variables are left out.
        """
        environment = _environment()
        read = meta.find_undeclared_variables(environment.parse(self.source))
        standard = {"messages", "tools", "add_generation_prompt"}
        return frozenset(read - environment.globals.keys() - standard)

    @cached_property
    def names(self) -> frozenset[str]:
        """Every attribute and text constant of the template. It reads keys of messages by them."""
        tree = _environment().parse(self.source)
        texts = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return frozenset(texts).union(node.attr for node in tree.find_all(nodes.Getattr))

    @staticmethod
    def from_directory(directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate:
        """Reads the template of a checkpoint directory.

        chat_template.jinja has priority over chat_template in tokenizer_config.json. Raises
        TrtspecError if neither exists, or if the template is not valid.
        """
        path = directory / "chat_template.jinja"
        if path.is_file():
            text = files.read_text(path, remedy="repair or replace the chat template")
            return ChatTemplate(text, str(path))
        source = tokenizer_config.get("chat_template")
        if not isinstance(source, str):
            message = (
                f"{directory}: neither chat_template.jinja "
                "nor chat_template in tokenizer_config.json"
            )
            raise TrtspecError(message, "copy chat_template.jinja from the original checkpoint")
        return ChatTemplate(source, f"{directory / 'tokenizer_config.json'}:chat_template")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool | None = False,
        **variables: Any,
    ) -> str:
        """Returns the text of a conversation.

        Raises TrtspecError, with the template's message, if the template refuses the conversation.

        Args:
            add_generation_prompt: whether the text ends with the beginning of an answer.
            thinking: value of the template's variable. None: the variable is not set.
        """
        if thinking is not None:
            variables["thinking"] = thinking
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            remedy = "check the roles and contents of the messages"
            raise TrtspecError(f"{self.where}: {error}", remedy) from None


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns jinja2's sandbox with the settings and functions that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # jinja2's own filter escapes characters for HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    """Raises an error with the message by which a template refuses a conversation."""
    raise jinja2.TemplateError(message)
