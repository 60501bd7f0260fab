"""Kimi's tokenizer, read natively: tiktoken byte-pair ranks, 256 reserved special tokens, a jinja2 chat template.

No code from the checkpoint runs; the template is rendered by jinja2's sandbox with the same settings as transformers
uses. The files are `tiktoken.model` (base64 token, rank), `tokenizer_config.json`
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
# Longer pieces make the splitting regex slow; these are the limits of Kimi's published tokenizer.
MAX_CHARS = 400_000
MAX_RUN_CHARS = 25_000
# The split pattern of Kimi's published tokenizer (K2 to K2.7): Han runs first, Han taken out of the letter classes.
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# Ranges of characters without a meaning (Unicode 15, section 23.5): the basic plane's, then planes 15 and 16.
PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_RUN_BORDERS = re.compile(rf"\s{{{MAX_RUN_CHARS}}}(?=\s)|\S{{{MAX_RUN_CHARS}}}(?=\S)")


class KimiTokenizer:
    """Text to token ids and back for a checkpoint directory. Raises TrtspecError when a file is missing or damaged."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        path = self.directory / "tokenizer_config.json"
        ranks, self._config = read_ranks(self.directory / "tiktoken.model"), read_optional(path)
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
        """Bytes of each token id, special tokens as their names; ids beyond the vocabulary do not exist."""
        decode = self.encoding.decode_single_token_bytes
        return [decode(token) for token in range(self.vocab_size)]

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a generation: those of generation_config.json and of config.json, in that order."""
        found: list[int] = []
        model = read_optional(self.directory / "config.json")
        text = model.get("text_config")
        inner = text if isinstance(text, dict) and "eos_token_id" in text else model
        for config in (read_optional(self.directory / "generation_config.json"), inner):
            value = config.get("eos_token_id")
            found.extend(value if isinstance(value, list) else [] if value is None else [value])
        if not found:
            found = [self.special_id("[EOS]")]
        return tuple(dict.fromkeys(int(token) for token in found))

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        """Matches the names of all special tokens, longer ones first."""
        return re.compile(
            "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True)))
        )

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate.from_directory(self.directory, self._config)

    def special_id(self, name: str) -> int:
        """Id of a special token by its name, for example `<|im_end|>`."""
        try:
            return self.special_tokens[name]
        except KeyError:
            raise TrtspecError(
                f"{self.directory}: no special token is called {name!r}",
                "check added_tokens_decoder in tokenizer_config.json",
            ) from None

    def encode(
        self, text: str, allow_special: bool = False, marks: Collection[str] = ()
    ) -> list[int]:
        """Token ids of `text`; names of special tokens become their ids only when `allow_special`, or among `marks`."""
        allowed: Any = "all" if allow_special else set(marks)
        ids: list[int] = []
        for piece in _safe_pieces(text):
            ids.extend(self.encoding.encode(piece, allowed_special=allowed, disallowed_special=()))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves out turn and padding marks."""
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
        """The rendered conversation, with the assistant's turn opened unless `add_generation_prompt` is False, and its
        token ids. Anybody may have written it.

        A special token's name is the token only where the template wrote it. In the texts of users, systems and
        tools it is ordinary text; in an assistant's own turns the names that a server shows (think tags, tool calls)
        are still their tokens, so that an answer can be sent back as it came. A message's content is one text: a name
        that is spread over parts is not found.

        Raises TrtspecError where the template refuses the conversation, or no character is left to mark names with.
        """
        given = json.dumps([*messages, tools, variables], ensure_ascii=False)
        if not self._special_names.search(
            given
        ):  # every name in the rendered text is the template's own
            text = self.template.render(messages, tools, thinking=thinking, **variables)
            return text, self.encode(text, allow_special=True)
        used = set(given)
        mark = next(
            (chr(code) for code in itertools.chain(*PRIVATE_USE) if chr(code) not in used), None
        )
        if mark is None:
            raise TrtspecError(
                "the conversation holds the name of a special token and every private-use character",
                "leave out either of them",
            )
        hidden = {name for name, token in self.special_tokens.items() if token in self.hidden_ids}

        def broken(value: Any, names: Collection[str]) -> Any:
            """`value` with the mark inside each of these names."""
            if isinstance(value, str):
                return self._special_names.sub(
                    lambda m: m[0][0] + mark + m[0][1:] if m[0] in names else m[0], value
                )
            if isinstance(value, list):
                return [broken(item, names) for item in value]
            if isinstance(value, dict):
                return {broken(key, names): broken(item, names) for key, item in value.items()}
            return value

        everything = self.special_tokens.keys()
        text = self.template.render(
            [broken(m, hidden if m.get("role") == "assistant" else everything) for m in messages],
            broken(tools, everything),
            thinking=thinking,
            **broken(variables, everything),
        )
        ids: list[int] = []
        last = 0
        for match in self._special_names.finditer(text):
            ids += self.encode(text[last : match.start()].replace(mark, ""))
            ids.append(self.special_tokens[match[0]])
            last = match.end()
        ids += self.encode(text[last:].replace(mark, ""))
        return text.replace(mark, ""), ids


class Detokenizer:
    """Turns token ids into text as they arrive: a character whose bytes span tokens comes out when it is complete."""

    def __init__(self, tokenizer: KimiTokenizer, skip_special: bool = True) -> None:
        self._bytes = tokenizer.token_bytes
        self._hidden = tokenizer.hidden_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that becomes certain with `ids`; ids outside the vocabulary (padding rows of lm_head) give nothing."""
        table, hidden = self._bytes, self._hidden
        size = len(table)
        return self._decoder.decode(
            b"".join([table[i] for i in ids if i < size and i not in hidden])
        )

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


def _safe_pieces(text: str) -> Iterator[str]:
    """Cuts text so that no piece exceeds MAX_CHARS and no run of (non-)whitespace in it exceeds MAX_RUN_CHARS."""
    for begin in range(0, len(text), MAX_CHARS):
        chunk = text[begin : begin + MAX_CHARS]
        start = 0
        for border in _RUN_BORDERS.finditer(chunk):
            yield chunk[start : border.end()]
            start = border.end()
        yield chunk[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Parses `tiktoken.model`: one `base64 rank` per line, ranks 0..n-1."""
    try:
        words = files.read_bytes(path).split()
    except FileNotFoundError:
        raise TrtspecError(
            f"{path}: there are no tokenizer ranks here",
            "copy tiktoken.model from the original checkpoint (quantization scripts often leave it behind)",
        ) from None
    try:
        tokens = [binascii.a2b_base64(word, strict_mode=True) for word in words[::2]]
        ranks = dict(zip(tokens, map(int, words[1::2]), strict=True))
    except (ValueError, binascii.Error):
        raise TrtspecError(
            f"{path}: not a tiktoken ranks file (base64 token, space, rank)",
            "download the file again, in a clone with `git lfs pull`",
        ) from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise TrtspecError(
            f"{path}: ranks are not 0..{len(ranks) - 1}, the file is damaged",
            "download the file again",
        )
    return ranks


def _special_tokens(
    path: Path, config: dict[str, Any], base_size: int
) -> tuple[dict[str, int], frozenset[int]]:
    """(name -> id of all reserved tokens, ids that never appear in text). Kimi marks tool calls and think tags
    `special: false`: a server must see them in the text."""
    declared = {
        int(token): entry for token, entry in (config.get("added_tokens_decoder") or {}).items()
    }
    if not declared:
        remedy = "copy tokenizer_config.json from the original checkpoint"
        raise TrtspecError(f"{path}: no added_tokens_decoder names the special tokens", remedy)
    ids = range(base_size, base_size + RESERVED_SPECIAL_TOKENS)
    names = {
        declared[token]["content"] if token in declared else f"<|reserved_token_{token}|>": token
        for token in ids
    }
    visible = {token for token, entry in declared.items() if not entry.get("special", True)}
    return names, frozenset(ids) - visible


def read_optional(path: Path) -> dict[str, Any]:
    """The object in `path`, {} when there is no such file."""
    try:
        return files.read_object(path, remedy="download the file again")
    except FileNotFoundError:
        return {}


class ChatTemplate:
    """Renders conversations. The template is data from a checkpoint: it cannot call Python or change its arguments."""

    def __init__(self, source: str, where: str) -> None:
        self.source = source
        self.where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TrtspecError(
                f"{where}: line {error.lineno}: {error.message}",
                "repair or replace the chat template",
            ) from None

    @cached_property
    def variables(self) -> frozenset[str]:
        """What a caller can set besides the conversation: the names that the template reads and does not define."""
        environment = _environment()
        read = meta.find_undeclared_variables(environment.parse(self.source))
        return frozenset(
            read - environment.globals.keys() - {"messages", "tools", "add_generation_prompt"}
        )

    @cached_property
    def names(self) -> frozenset[str]:
        """What the template may read of a message: every attribute and every text that it has."""
        tree = _environment().parse(self.source)
        texts = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return frozenset(texts).union(node.attr for node in tree.find_all(nodes.Getattr))

    @staticmethod
    def from_directory(directory: Path, tokenizer_config: dict[str, Any]) -> ChatTemplate:
        """chat_template.jinja when the file exists, else `chat_template` of tokenizer_config.json."""
        path = directory / "chat_template.jinja"
        if path.is_file():
            return ChatTemplate(
                files.read_text(path, remedy="repair or replace the chat template"), str(path)
            )
        source = tokenizer_config.get("chat_template")
        if not isinstance(source, str):
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
        thinking: bool | None = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation; `thinking` None leaves it to the template. Raises TrtspecError with the words of
        a template that refuses it."""
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
            raise TrtspecError(
                f"{self.where}: {error}", "check the roles and contents of the messages"
            ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = partial(
        json.dumps, ensure_ascii=False
    )  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
