"""What must not leave a machine with a proof: names of machines and people, addresses, paths and secrets, known ones
and what looks like one.

While a text is worked on, a stand-in is one private character that no rule matches, and rules are applied until nothing
changes: to redact what is redacted changes nothing.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import ipaddress
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECRET, HOST, USER, ADDRESS, MAIL, PLACE = "<secret>", "<host>", "<user>", "<ip>", "<mail>", "<path>"
STAND_INS = (SECRET, HOST, USER, ADDRESS, MAIL, PLACE, "<url>", "<gpu>", "<mac>", "<home>", "<target>", "<head>",
             "<proof>", "<dataset>")  # fmt: skip
PRIVATE = {stand_in: chr(0xE000 + n) for n, stand_in in enumerate(STAND_INS)}
PUBLIC = {private: stand_in for stand_in, private in PRIVATE.items()}
LEFT = rf"\ue000-{max(PRIVATE.values())}"  # in a character class: a stand-in
MARK = re.compile("|".join(STAND_INS))
SHOWN_MARK = re.compile(rf"(?:<|&lt;)(?:{'|'.join(s[1:-1] for s in STAND_INS)})(?:>|&gt;)")
DROPPED = ("turns_detail", "text", "reasoning", "content", "transcripts")  # answers and prompts are the user's
COMMON = {"", "root", "user", "admin", "ubuntu", "nobody", "localhost", "local", "runner", "test", "home", "main",
          "node", "server", "engine", "model", "nvidia", "none", "true", "false",
          *(stand_in[1:-1] for stand_in in STAND_INS)}  # fmt: skip
SHORT = 6  # a shorter name must stand alone: "max" is no part of max_tokens

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.IGNORECASE)  # of a variable
# of an option, key or variable in a text, where max_tokens and sort_key stand too
STRONG = re.compile(
    r"(?:secrets?|passw\w*|passphrase|pwd|credentials?|cookie|authorization|bearer)(?:_|$)"
    r"|(?:api|access|private|auth|account|signing|encryption|ssh|master|license)_?keys?(?:_id)?$"
    r"|(?:api|access|auth|refresh|session|bearer|id|hf|hub|github|gitlab|wandb)_?tokens?$"
)
WEAK = re.compile(r"(?:^|_)(?:token|key|auth|pat|sas|sig|signature)$")
HOSTLIKE = re.compile(r"(?:^|_)(?:host|hostname|addr|address|nodelist|nodename)$")
USERLIKE = re.compile(r"(?:^|_)(?:user|username|logname|login)$")
NAMES = r"key|token|secret|passw|passphrase|pwd|credential|cookie|auth|bearer|pat|sas|sig|host|addr|node|user|log"
VALUE = (
    r"(?:[bruBRU]?(?P<quote>\\*[\"'`])(?P<quoted>(?:(?!(?P=quote)).)*)(?:(?P=quote)|(?=\n)|\Z)|(?P<bare>[^\s\"'`&]+))"
)
OPTION = re.compile(
    rf"(?<![\w-])(?P<name>--?(?=[\w.-]*(?:{NAMES}))[A-Za-z][\w.-]*)"
    rf"(?P<join>\\*[\"']\s*,\s*(?=\\*[\"'])|\s*[=:]\s*|\s+(?!--)){VALUE}",
    re.IGNORECASE,
)
ASSIGNED = re.compile(
    rf"(?<![\w.-])[.-]*(?P<name>(?=[\w.-]*?(?:{NAMES}))[A-Za-z_][\w.-]*)"
    rf"(?P<join>\\*[\"']?\]?[ \t]*(?:=+>?|:(?![:/]))[ \t]*){VALUE}",
    re.IGNORECASE,
)
NUMBER = re.compile(r"[-+]?\d[\d_.,]*(?:e[-+]?\d+)?(?:[a-zµ%/]{0,4}|rc\d+)", re.IGNORECASE)
RANDOM = re.compile(r"(?=[^\d]*\d)(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/=]{16,}")
WORDS = {"is", "are", "was", "and", "or", "has", "needs", "must", "in", "to", "of", "not", "for", "from", "with", "on",
         "off", "yes", "no", "none", "null", "true", "false", "auto", "default", "enabled", "disabled", "required",
         "key", "token", "value", "file", "env", "str", "int", "bool", "localhost", "a", "an", "the",
         "set", "not set"}  # fmt: skip

HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)"
    rf"(\\*[\"']\s*,\s*b?\\*[\"']|\\*[\"']?\s*[:=]\s*b?\\*[\"']?)(?![{LEFT}])([^\"'\n\\]+)"
)
SECRETS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(
        r"\b(?:hf_(?=[A-Za-z0-9]{15})|sk-|sk_live_|gsk_|ghp_|gho_|ghs_|github_pat_|glpat-|nvapi-|xox[abps]-|xapp-"
        r"|AKIA|ASIA|AIza|ya29\.|dckr_pat_|npm_(?=[A-Za-z0-9]{20})|pypi-AgEI)[A-Za-z0-9_\-]{8,}"
    ),
    re.compile(r"\beyJ[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){1,4}"),  # a JSON web token, signed or encrypted
)
BEARER = re.compile(r"(?i)\b(Bearer\s+(?:token\s+)?)(?!(?:tokens?|auth\w*|scheme|header)\b)([A-Za-z0-9._~+/=-]{6,})")
LOGIN = re.compile(rf"(?<!\S)(-u|--user)(\s+|=)(?![{LEFT}])\S+:\S+")
PATTERNS = (
    (re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}"), "<gpu>"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5,19}[0-9a-f]{2}\b|\b(?:[0-9a-f]{4}:){3}[0-9a-f]{4}\b(?!:)", re.I), "<mac>"),
)

LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
PUBLIC_HOSTS = ("huggingface.co", "hf.co", "github.com", "pypi.org", "nvcr.io", "pytorch.org", "download.pytorch.org",
                "docs.pytorch.org", "nvidia.com", "docs.nvidia.com", "docs.vllm.ai", "docs.python.org",
                "docs.sglang.ai", "docs.pydantic.dev", "errors.pydantic.dev", "nvidia.github.io")  # fmt: skip
URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s\"'<>,;)]+")
IPV4 = re.compile(
    r"(?<![0-9A-Za-z.])(?<!==)(?<!>=)(?<!<=)(?<!~=)(?<!ersion )(?<!ersion: )(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\d)"
)
IPV6 = re.compile(r"(?<![0-9A-Fa-f:])[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?")
MADE_OF_IP = re.compile(r"\bip-\d+-\d+-\d+-\d+\b")
AT = re.compile(
    rf"(?<![\w./+-])(?![A-Z]+@[A-Z]+\b)[\w.+-]+@(?:(?=[\w.-]*[A-Za-z]){LABEL}(?:\.{LABEL})*|\[?[{LEFT}]\]?)"
)
HOST_PORT = re.compile(
    rf"(?<![\w./-])(?!\d{{4}}-?\d\d-?\d\dT)(?P<host>(?=[\w.-]*[A-Za-z]){LABEL}(?:\.{LABEL})*)"
    r":(?P<port>\d{2,5})(?!\w|\.\d)"
)
DOMAIN = re.compile(
    rf"(?<![\w./@-])(?:{LABEL}\.)+(?:com|org|edu|gov|mil|net|corp|lan|intranet|localdomain|cluster\.local|local|svc"
    r"|internal)(?![\w-]|\.\w)"
)
DIGIT_NEEDED = ("net", "local", "svc", "internal")  # self.net and google.protobuf.internal are no machines
SOURCE = re.compile(r"\.(?:py[xi]?|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|json|jsonl|ya?ml|toml|jinja|j2|sh|md|txt|log|so)$")
VERSION = re.compile(r"v?\d+(?:\.\d+)+\S*")
LABELS = {"localhost", "step", "steps", "token", "tokens", "rank", "line", "lines", "cuda", "cpu", "gpu", "batch",
          "port", "size", "length", "len", "seq", "count", "pid", "max", "min", "total", "sum", "time", "seed", "bytes",
          "sha256", "sha1", "md5", "requests", "error", "info", "warning"}  # fmt: skip
WELL_KNOWN = (22, 80, 443)
PATH = re.compile(
    rf"(?<![\w.:/<>~{LEFT}-])(?:~|\.{{1,2}})?/(?:[\w.@+~:=-]+/)+[\w.@+~=-]*|(?<![\w.:/<>{LEFT}-])~/[\w.@+~=-]+"
)
ROOTED = re.compile(
    r"(?:(?<=-[ILR])|(?<![\w./-]))/(?:home|Users|root|mnt|media|scratch|lustre|gpfs|nfs|fsx|efs|workspace|opt|var|tmp"
    r"|srv|data|usr|etc|proc|run|projects?)/[\w.@+~=-]+(?:/[\w.@+~=-]*)*"
)
API = re.compile(r"/(?:v1|health|metrics|prometheus|version|server_info|get_server_info)\b")


def hidden(name: str, value: str, prose: bool = False) -> str | None:
    """The stand-in for the value of an option, key or variable of this name; None where it may stay. `prose`: a word
    with a colon, unquoted, which may be part of a sentence."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-")).lower()
    words = re.sub(r"[.-]+", "_", words)
    if not value or all(char in PUBLIC for char in value) or value.lower() in WORDS or value[0] in "{[(":
        return None
    if STRONG.search(words):
        return SECRET
    if WEAK.search(words):
        plain = "_" not in words and (prose or words == "key")
        sound = NUMBER.fullmatch(value) or value.startswith(("<", "[")) or plain and not RANDOM.fullmatch(value)
        return None if sound else SECRET
    alone = "name" not in words and prose
    if HOSTLIKE.search(words) and not alone and re.match(r"(?!0x)[A-Za-z0-9]*[A-Za-z]\S*$", value):
        return HOST
    if USERLIKE.search(words) and not alone and value.lower() not in COMMON and re.match(r"[A-Za-z]\S*$", value):
        return USER
    return None


def _assigned(found: re.Match[str]) -> str:
    """A name and its value; a value that may stay can hold such a pair itself."""
    value = found["quoted"] if found["bare"] is None else found["bare"]
    tail = ""
    if found["bare"] is not None:
        value = value.rstrip(",;)}]")
        tail = found["bare"][len(value) :]
    prose = found["bare"] is not None and ":" in found["join"] and not re.search("[\"']", found["join"])
    stand_in = hidden(found["name"], value, prose)
    begin = found.start("bare") if found["bare"] is not None else found.start("quoted")
    before = found[0][: begin - found.start()]
    if stand_in is None:
        return before + _named(found[0][begin - found.start() :])
    if stand_in is HOST and (port := re.search(r":\d{2,5}$", value)):
        tail = port[0] + tail
    end = "" if found["bare"] is not None else found[0][found.end("quoted") - found.start() :]
    return before + PRIVATE[stand_in] + tail + end


def _named(text: str) -> str:
    return ASSIGNED.sub(_assigned, OPTION.sub(_assigned, text))


def _url(found: re.Match[str]) -> str:
    scheme, _, rest = found[0].partition("://")
    place = re.split(r"[/?#]", rest)[0].lower()
    stays = scheme in ("http", "https") and place in PUBLIC_HOSTS or place.startswith("*")
    return found[0] if stays else PRIVATE["<url>"]


def _ipv4(found: re.Match[str]) -> str:
    is_address = all(int(part) < 256 for part in found[0].split(".")) and found[0] != "0.0.0.0"  # any of them
    return PRIVATE[ADDRESS] if is_address else found[0]


def _ipv6(found: re.Match[str]) -> str:
    """Addresses among hexadecimal digits and colons. Groups before one may belong to a word ("addr:2001:db8::1"), and
    a colon after it to a sentence."""
    run, at = found[0], 0
    inside = found.start() > 0 and found.string[found.start() - 1].isalnum()  # of a word that ends in such letters
    while at < len(run):
        body = run[at:].rstrip(".")
        for end in (len(body), len(body) - 1):
            if not (inside and at == 0) and _is_address(body[:end]):
                return run[:at] + PRIVATE[ADDRESS] + run[at + end :]
        at = run.find(":", at) + 1
        if at == 0:
            break
    return run


def _is_address(text: str) -> bool:
    """Whether this is an IPv6 address (45 characters at most, and those of a zone) that can be a machine's: times are
    none; C++ names such as a::b and slices are in no range that is given out."""
    if len(text) > 61:
        return False
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    if "::" not in text or address.ipv4_mapped is not None:
        return True
    first = int(address) >> 112
    given = first >> 13 == 1 or first >> 9 == 0xFC >> 1 or first >> 6 == 0xFE80 >> 6 or first >> 8 == 0xFF  # RFC 4291
    return given and (any(char.isdigit() for char in text) or first >> 9 == 0xFC >> 1)


def _host(found: re.Match[str]) -> str:
    host, port = found["host"], int(found["port"])
    named = host.lower() in LABELS or len(host) < 3 or SOURCE.search(host) or VERSION.fullmatch(host)
    if named or host.lower() in PUBLIC_HOSTS or not (port in WELL_KNOWN or 1024 <= port < 65536):
        return found[0]
    return f"{PRIVATE[HOST]}:{found['port']}"


def _domain(found: re.Match[str]) -> str:
    name = found[0].lower()
    weak = name.rpartition(".")[2] in DIGIT_NEEDED and not re.search(r"[\d-]|cluster\.local$", name)
    return found[0] if weak or name in PUBLIC_HOSTS else PRIVATE[HOST]


def _path(found: re.Match[str]) -> str:
    return found[0] if API.match(found[0]) else PRIVATE[PLACE]


@dataclass(frozen=True)
class Redactor:
    """`names` maps what must not leave (host names, user names, directories, values of secret variables) to what stands
    for it; `neighbours` matches machines that are named as this one is."""

    names: Mapping[str, str]
    neighbours: re.Pattern[str] | None = None

    def text(self, text: str) -> str:
        """Known paths and secrets first, then what looks like one, then names, which may be parts of the former."""
        found, before = MARK.sub(lambda mark: PRIVATE[mark[0]], text), ""
        while found != before:
            before, found = found, self._once(found)
        return "".join(PUBLIC.get(char, char) for char in found)

    def _once(self, text: str) -> str:
        ordered = sorted(self.names, key=len, reverse=True)
        words = [name for name in ordered if self._is_word(name)]
        for name in ordered:
            if name not in words:
                text = re.sub(re.escape(name), PRIVATE[self.names[name]], text, flags=re.IGNORECASE)
        for secret in SECRETS:
            text = secret.sub(PRIVATE[SECRET], text)
        text = HEADER.sub(lambda found: f"{found[1]}{found[2]}{PRIVATE[SECRET]}", text)
        text = BEARER.sub(lambda found: f"{found[1]}{PRIVATE[SECRET]}", text)
        text = LOGIN.sub(lambda found: f"{found[1]}{found[2]}{PRIVATE[SECRET]}", text)
        text = URL.sub(_url, _named(text))
        for pattern, stand_in in PATTERNS:
            text = pattern.sub(PRIVATE[stand_in], text)
        text = IPV4.sub(_ipv4, IPV6.sub(_ipv6, IPV4.sub(_ipv4, text)))
        text = AT.sub(PRIVATE[MAIL], text)
        text = MADE_OF_IP.sub(PRIVATE[HOST], text)
        text = DOMAIN.sub(_domain, HOST_PORT.sub(_host, text))
        text = PATH.sub(_path, ROOTED.sub(_path, text))
        for name in words:
            text = _whole(name).sub(PRIVATE[self.names[name]], text)
        return self.neighbours.sub(PRIVATE[HOST], text) if self.neighbours else text

    def _is_word(self, name: str) -> bool:
        return re.fullmatch(r"[\w-]+", name) is not None and self.names[name] != SECRET

    def value(self, value: Any) -> Any:
        """A JSON value with every string of it redacted, keys too; keys in DROPPED go with what they hold. A string
        after an option, or under a key, that names a secret goes whatever it looks like."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(k)): self._under(str(k), v) for k, v in value.items() if k not in DROPPED}
        if isinstance(value, (list, tuple)):
            before = [None, *value][: len(value)]
            return [self._under(a, b) if _is_option(a) else self.value(b) for a, b in zip(before, value, strict=True)]
        return value

    def _under(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            text = self.text(value)
            return hidden(name, text) or text
        if isinstance(value, (list, tuple)) and hidden(name, "value of it") == SECRET:
            return [self._under(name, item) for item in value]
        return self.value(value)

    def left_in(self, text: str) -> list[str]:
        """What of the names stands in a text nevertheless, by its stand-in."""
        text = SHOWN_MARK.sub("\n", text)
        lowered, found = text.lower(), set()
        for name, stand_in in self.names.items():
            there = name.lower() in lowered if len(name) >= SHORT else _whole(name).search(text)
            found |= {stand_in} if there else set()
        return sorted(found | ({HOST} if self.neighbours and self.neighbours.search(text) else set()))


def _whole(name: str) -> re.Pattern[str]:
    edge = r"A-Za-z0-9" if len(name) >= SHORT else r"\w-"
    return re.compile(rf"(?<![{edge}]){re.escape(name)}(?![{edge}])", re.IGNORECASE)


def _is_option(word: Any) -> bool:
    return isinstance(word, str) and re.fullmatch(r"--?[A-Za-z][\w.-]*", word) is not None


def redactor(places: Mapping[str, str], environ: Mapping[str, str] = os.environ, words: Sequence[str] = ()) -> Redactor:
    """Of this machine, this user and this environment. `places` maps paths of the proof to their stand-ins; `words` are
    those of a command line, whose secrets are known by the option before them."""
    names: dict[str, str] = {}
    hosts = {socket.gethostname(), platform.node(), environ.get("HOSTNAME", "")}
    names |= dict.fromkeys((part for host in hosts for part in (host, host.split(".")[0])), HOST)
    users = {environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no entry in passwd
        users.add(getpass.getuser())
    names |= dict.fromkeys(users, USER)
    names = {name: stand_in for name, stand_in in names.items() if len(name) > 2}
    secrets = [value for name, value in environ.items() if SECRET_NAME.search(name) and len(value) >= 6]
    names |= {value: SECRET for value in secrets if not value.isdigit() and not value.startswith("/")}
    names |= {value: SECRET for value in _secrets_of(words)}
    names |= {str(Path.home()): "<home>", os.getcwd(): PLACE} if len(str(Path.home())) > 3 else {}
    for place, stand_in in [*((file, PLACE) for file in _files_among(words)), *places.items()]:
        rooted = place.startswith(("/", "~", "."))
        if rooted or place and Path(place).exists():
            path = Path(place).expanduser()
            names |= {str(path.absolute()): stand_in, str(path.resolve()): stand_in}
            names |= {place: stand_in} if rooted or "/" in place else {}  # a bare name may be any word
    left = {name: stand_in for name, stand_in in names.items() if name.lower() not in COMMON | {"/", "."}}
    return Redactor(left, _neighbours([name for name, stand_in in left.items() if stand_in == HOST]))


def _files_among(words: Sequence[str]) -> list[str]:
    """Relative paths of files that are there, among the words of a command line."""
    found = [word.partition("=")[2] if word.startswith("-") else word for word in words]
    return [word for word in found if "/" in word and Path(word).exists()]


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line, each that holds a secret as a short hash: a change is seen, the secret is not."""
    redacted = Redactor({}).value(list(words))
    return [_hashed(word) if SECRET in shown and SECRET not in word else word
            for word, shown in zip(words, redacted, strict=True)]  # fmt: skip


def _hashed(word: str) -> str:
    name = word.partition("=")[0] + "=" if word.startswith("-") and "=" in word else ""
    return f"{name}sha256 {hashlib.sha256(word.encode()).hexdigest()[:16]}"


def _secrets_of(words: Sequence[str]) -> Iterator[str]:
    """Values of six characters and more behind options that name a secret."""
    pairs = [(a, b) for a, b in zip(words, words[1:], strict=False) if _is_option(a)]
    pairs += [(name, value) for name, _, value in (word.partition("=") for word in words)]
    for name, value in pairs:
        if len(value) >= SHORT and not value.isdigit() and hidden(name, value) == SECRET:
            yield value


def _neighbours(hosts: Sequence[str]) -> re.Pattern[str] | None:
    """Names that differ from this machine's in their digits only, where there are letters enough to tell."""
    stems = {re.sub(r"\d+", r"\\d+", re.escape(host)) for host in hosts
             if re.search(r"\d", host) and len(re.sub(r"[^A-Za-z]", "", host)) >= 4}  # fmt: skip
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(sorted(stems))})(?![A-Za-z0-9])", re.I) if stems else None
