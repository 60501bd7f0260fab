"""An engine's YAML ends in a value or one named error, by the oracle yaml.safe_load.

The text may be anything.
"""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.errors import UsageError
from trtspec.files import load_file
from trtspec.trtllm.nodes import MAX_VALUES, YamlError, load_text

ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
)
# each ended in a signal, a hang, or an "unexpected" error before
BAD = {
    "50,000 opening brackets": "[" * 50_000,
    "50,000 opening braces": "{a: " * 50_000,
    "50,000 nested lists": "- " * 50_000,
    "aliases of aliases": ALIAS_BOMB,
    "merges of merges": MERGE_BOMB,
    "a list within itself": "a: &a [*a]\n",
    "a mapping within itself": "a: &a {b: *a}\n",
    "a merge of itself": "a: &a {<<: *a}\n",
    "no float": "a: !!float y\n",
    "no timestamp": "a: !!timestamp x\n",
    "no day of any year": "a: 2001-99-99\n",
    "no truth value": "a: !!bool maybe\n",
    "no base64": "a: !!binary a\n",
    "no list of pairs": "a: !!omap 3\n",
    "a set": "a: !!set {x, y}\n",
    "an object of Python": "a: !!python/object/apply:os.system [x]\n",
    "a number of 5,000 digits": f"a: {'9' * 5000}\n",
    "a number to the base 60": f"a: 1{':1' * 50_000}\n",
    "a list as key": "? [a]\n: b\n",
    "a key of 10,000 characters": f"? {'k' * 10_000}\n: b\n",
    "two documents": "a: 1\n---\nb: 2\n",
    "a control character": "a: \0\n",
    "a tab as indentation": "a:\n\tb: 1\n",
    "an open bracket": "a: [1\n",
    "an alias of nothing": "a: *b\n",
    "an anchor twice": "a: &a 1\nb: &a 2\n",
    "a merge of a number": "<<: 3\n",
    "a value of an unknown tag": "a: =\n",
    "too many values": f"[{'1, ' * MAX_VALUES}]\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
@pytest.mark.clock
def test_every_malformed_text_is_a_named_error_at_once(text: str, tmp_path: Path) -> None:
    """Also where no positions are needed: there some of them are values."""
    began = time.process_time()
    with pytest.raises(YamlError) as error:
        load_text(text)
    assert error.value.message and 1 <= error.value.line <= text.count("\n") + 1
    assert len(error.value.message) < 250
    file = tmp_path / "config.yml"
    file.write_text(text)
    try:
        assert load_file(file) == yaml.safe_load(text) and "*" not in text
    except UsageError as refused:
        assert refused.code in ("TS-ERROR-YAML", "TS-ERROR-FILE") and len(refused.message) < 500
    assert time.process_time() - began < 4


GOOD = [
    "",
    "# only a comment\n",
    "a: 1e400\n",
    "a: 1.0e+400\n",
    "a: &x {b: 1}\nc: {<<: *x, d: 2, b: 3}\n",
    "<<: [{a: 1}, {a: 2, b: 3}]\nc: 1\n",
    "~: 1\ntrue: 2\n1: 3\n1.5: 4\n",
    "=: 3\n",
    "a: 0x1F\n",
    "%YAML 1.1\n---\na: 1\n...\n",
    "&k a: &v b\nc: *v\n*k : 3\n",
    "a: 190:20:30\n",
    'é: "ü" # 𝒳\nb: 𝒳\n',
    "a: b\u2028c: 2\n",
    "a: |\n  text\n\n# c\nb: >-\n  x\n  y\n",
    "a:\nb: ''\n",
    "{a, b: [c]}\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_values_are_those_of_safe_load(text: str) -> None:
    assert repr(load_text(text)) == repr(yaml.safe_load(text))


def test_mutated_texts_agree_with_safe_load() -> None:
    """A text has safe_load's value here, or is refused where safe_load refuses it."""
    rng, agreed = random.Random(0), 0
    pieces = [
        "a: ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "\n",
        "  ",
        "&x ",
        "*x",
        "<<: ",
        "!!str ",
        "1",
        "yes",
        "# c",
        '"',
        "'",
        "|\n",
        "? ",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
        try:
            wanted: Any = yaml.safe_load(text)
        except yaml.YAMLError:
            with pytest.raises(YamlError):
                load_text(text)
            continue
        except (RecursionError, ValueError, TypeError, AttributeError):
            continue
        try:
            assert repr(load_text(text)) == repr(wanted), text
            agreed += 1
        except YamlError as error:
            assert "inside the value" in error.message or "defined twice" in error.message, (
                text,
                error.message,
            )
    assert agreed > 200
    with pytest.raises(YamlError, match="surrogate"):
        load_text('a: "\\ud800"')
