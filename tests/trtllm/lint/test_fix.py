"""`--fix` on files of every kind makes none worse, loses no comment and comes to rest."""

import random
from collections import Counter
from typing import Any

import pytest
import yaml

from tests.cases import slow
from tests.trtllm.lint.engine_files import with_fixes, written
from trtspec.errors import Problem
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.document import CannotEdit, Document, Entry, add_key
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

VERSIONS = ("1.2.1", "1.3.0rc9", "1.3.0rc20", "1.4.0rc1")
NEW = "1.3.0rc27.dev0"  # the last release whose classes were read whole
EAGLE = (
    "speculative_config:\n  decoding_type: Eagle\n  max_draft_len: 3\n  speculative_model_dir: /h\n"
)


def errors(findings: list[Problem]) -> Counter[tuple[str, str]]:
    return Counter(
        (finding.code, finding.key) for finding in findings if finding.severity == "error"
    )


def leaves(entries: dict[str, Entry]) -> dict[str, Any]:
    return {
        path: entry.value for path, entry in entries.items() if not isinstance(entry.value, dict)
    }


def check_one(seed: int) -> int:
    """Returns how many corrections were made."""
    rng = random.Random(seed)
    deployment = Deployment(schema_for(rng.choice(VERSIONS)))
    text, comments = written(deployment.schema, rng)
    before = Document.parse(text)
    assert not before.error, (before.error, text)
    after, corrected = with_fixes(before, deployment)
    applied = [(finding.code, finding.key) for finding in corrected]
    shown = f"seed {seed}, {deployment.version}:\n{text}\n--- after {applied}\n{after.text}"
    yaml.safe_load(after.text)
    assert not errors(lint(after.text, deployment)) - errors(lint(text, deployment)), shown
    for comment in comments:
        assert after.text.count(comment) == 1, (comment, shown)
    again, nothing = with_fixes(after.text, deployment)
    assert again.text == after.text and not nothing, shown
    touched = [
        str(path)
        for f in corrected
        if f.fix
        for path in (*f.fix.keywords.values(), f.key)  # type: ignore[attr-defined]
    ]
    kept = leaves(after.entries)
    for path, value in leaves(before.entries).items():
        if not any(path == other or path.startswith(f"{other}.") for other in touched):
            assert path in kept and repr(kept[path]) == repr(value), (path, shown)
    if not corrected:
        assert after.text == text
    return len(corrected)


@pytest.mark.parametrize("part", [0, *(slow(part) for part in (1, 2, 3))])
def test_random_files(part: int) -> None:
    assert sum(check_one(seed) for seed in range(part * 50, part * 50 + 50)) > 10


@pytest.mark.parametrize("count", [60, slow(1000)])
def test_wrong_types_placeholders_and_typos_are_never_replaced(count: int) -> None:
    """What a person wrote stays, and no value appears that nobody wrote."""
    rng, schema = random.Random(34), schema_for(NEW)
    paths = [
        path
        for path in sorted(schema.fields)
        if "." not in path or path.startswith(("kv_cache", "moe_config."))
    ]
    for _ in range(count):
        values: dict[str, Any] = {"speculative_config": yaml.safe_load(EAGLE)["speculative_config"]}
        for path in rng.sample(paths, 3):
            parent, _, name = path.rpartition(".")
            place = values.setdefault(parent, {}) if parent else values
            name = name + rng.choice("xyz") if rng.random() < 0.4 else name
            if isinstance(place, dict):
                place[name] = rng.choice(
                    ["60%", "${VALUE}", "{{ value }}", "three", [{"a": 1}], 17.5]
                )
        text = yaml.safe_dump(values)
        fixed, _ = with_fixes(text, Deployment(schema))
        before, after = leaves(Document.parse(text).entries), leaves(fixed.entries)
        lost = {
            path
            for path in before
            if path not in after and repr(before[path]) not in map(repr, after.values())
        }
        assert all(path in schema.fields or schema.last_release_with(path) for path in lost), (
            lost,
            text,
        )
        invented = {
            path for path in after if path not in before and after[path] not in before.values()
        }
        assert not invented, (invented, text)


@pytest.mark.slow
def test_two_thousand_random_files() -> None:
    made = [check_one(seed) for seed in range(200, 2200)]
    print(f"{len(made)} files, {sum(made)} corrections in {sum(map(bool, made))} of them")
    assert sum(made) > 400


# (what it is, version, file, file after --fix); each was made worse, or lost something, before
CASES = [
    (
        "a draft length under a wrong name is not joined by a second one",
        NEW,
        (
            "speculative_config:\n"
            "  decoding_type: Eagle\n"
            "  speculative_model_dir: /h\n"
            "  max_draft_length: 5\n"
        ),
        None,
    ),
    ("a misspelt key is left to the user", NEW, "max_batchsize: 8\nmax_batch_size: 16\n", None),
    (
        "a switch does not become a threshold and vanish",
        "1.3.0rc20",
        EAGLE + "  use_sa_spec: true\n",
        None,
    ),
    ("a value that looks like another one", NEW, "kv_cache_config: {dtype: fp4}\n", None),
    (
        "case alone is certain",
        NEW,
        "moe_config: {backend: trtllm}  # fast\n",
        "moe_config: {backend: TRTLLM}  # fast\n",
    ),
    (
        "a dotted key is nested, and its comment stays",
        NEW,
        "# top\nmoe_config.backend: TRTLLM  # fast\nstream_interval: 2\n",
        "# top\n# fast\nstream_interval: 2\nmoe_config: {backend: TRTLLM}\n",
    ),
    (
        "a dotted key whose nested form is there",
        NEW,
        "moe_config.backend: TRTLLM\nmoe_config: {backend: CUTLASS}\n",
        None,
    ),
    (
        "comments of the next key stay with it",
        NEW,
        "sampler_type: auto  # old\n\n# about the interval\nstream_interval: 2\n",
        "# old\n\n# about the interval\nstream_interval: 2\n",
    ),
    (
        "what a removed mapping holds is not dropped",
        NEW,
        "pytorch_backend_config: {use_cuda_graph: true}\n",
        None,
    ),
    *(
        (f"{value} is reported and left alone", NEW, text.replace("?", value), None)
        for value in ('"60%"', "${KV_FRACTION}", '"{{ draft }}"', "three", "0")
        for text in (
            "kv_cache_config: {free_gpu_memory_fraction: ?}\n",
            EAGLE.replace("max_draft_len: 3", "max_draft_len: ?"),
        )
    ),
    (
        "a misspelt mapping gets no second one",
        NEW,
        EAGLE + "moe_cfg: {backend: TRTLLM}\nmax_batch_size: 512\n",
        None,
    ),
    (
        "a wrapped file gets no key beside its wrapper",
        NEW,
        "llm_args:\n  kv_cache_config: {dtype: fp8}\n",
        None,
    ),
    ("both names of one key", NEW, "kv_cache_dtype: fp8\nkv_cache_config: {dtype: auto}\n", None),
    (
        "line ends of Windows",
        NEW,
        "kv_cache_dtype: fp8\r\n# c\r\n",
        "# c\r\nkv_cache_config: {dtype: fp8}\r\n",
    ),
    (
        "a key is not moved into what is no mapping",
        NEW,
        "kv_cache_dtype: fp8\nkv_cache_config: 17.5\n",
        None,
    ),
    ("anchors and aliases", NEW, "kv_cache_dtype: &d fp8\nkv_cache_config: {dtype: *d}\n", None),
    (
        "a merged key is not the file's own",
        NEW,
        "x: &x {num_eagle_layers: 3}\n" + EAGLE + "  <<: *x\n",
        None,
    ),
]


@pytest.mark.parametrize(
    ("version", "before", "after"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_each_file_that_was_made_worse(version: str, before: str, after: str | None) -> None:
    fixed, corrected = with_fixes(before, Deployment(schema_for(version)))
    assert fixed.text == (before if after is None else after)
    assert bool(corrected) == (after is not None)


def test_a_nested_key_is_added_nested() -> None:
    edit = add_key(
        Document.parse("stream_interval: 2  # two\n"),
        "kv_cache_config.block_reuse_config.policy",
        "x",
    )
    assert (
        edit.text
        == "stream_interval: 2  # two\nkv_cache_config: {block_reuse_config: {policy: x}}\n"
    )
    edit = add_key(
        Document.parse("kv_cache_config: {dtype: fp8}\n"),
        "kv_cache_config.block_reuse_config.policy",
        "x",
    )
    assert edit.text == "kv_cache_config: {dtype: fp8, block_reuse_config: {policy: x}}\n"
    edit = add_key(Document.parse("kv_cache_config: {}  # kv\n"), "kv_cache_config.dtype", "fp8")
    assert edit.text == "kv_cache_config: {dtype: fp8}  # kv\n"
    with pytest.raises(CannotEdit):  # null turns the whole off
        add_key(Document.parse("cuda_graph_config:\n"), "cuda_graph_config.max_batch_size", 8)
