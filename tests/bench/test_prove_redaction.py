"""What leaves a machine with a proof: generated names, addresses and secrets in every place of the evidence that holds
words, and what a reader needs, which stays."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from trtspec.bench.prove_redaction import SHOWN_MARK, STAND_INS, WORDS, Redactor, redactor
from trtspec.report import json_text

SELF = {"HOSTNAME": "b200-rack7-node3", "USER": "marguerite", "HF_TOKEN": "correct-horse"}
REDACT = redactor({"/scratch/marguerite/x": "<target>"}, SELF)
# log lines, messages, commands and settings in which a generated thing may stand
CARRIERS = (
    "{}", "peer {} refused the connection", "[{}]: timed out", "rank 3 ({}), retry 2", "error at {}.", "x={};y=2",
    "'{}', 'other'", "2026-11-23T05:54:44 INFO {}: lost", "cannot reach {}, giving up\n  try again",
    '{{"where": "{}", "n": 1}}', "RuntimeError: {}",
)  # fmt: skip
LETTERS = string.ascii_letters + string.digits


def evidence(text: str) -> dict[str, Any]:
    """An evidence with the text wherever a step can leave words."""
    return {
        "setup": {"target": "nvidia/Kimi-K2.5-NVFP4", "serve_words": ["--", "--max-seq-len", "512", text]},
        "outputs": {
            "check": {"results": [{"name": "lossless", "message": text, "table": [{"words": text}]}]},
            "lint-head": {"error": {"message": text}, "problems": [{"message": text, "remedy": f"see {text}"}]},
            "doctor": {"packages": [{"name": "torch", "detail": text}]},
        },
        "argv": ["python", "-m", "trtspec", "serve", text],
        "journal": [{"key": "bench-long-128"}, {text: 1}], "gpus": [], "nothing": [[], None],
        "serve-plain": f"the server ended with status 1; its log says:\n{text}\nTraceback:\n  File x\n{text}",
    }  # fmt: skip


def redacted(text: str) -> str:
    """The evidence with the text, redacted; once more, it is the same, also as the file that it becomes."""
    found = REDACT.value(evidence(text))
    assert REDACT.value(found) == found and found["gpus"] == [] and found["nothing"] == [[], None]
    assert found["journal"][0] == {"key": "bench-long-128"}
    assert not REDACT.left_in(json_text(found))
    return json.dumps(found, ensure_ascii=False)


labels = st.from_regex(r"[a-z][a-z0-9]{1,7}(?:-[a-z0-9]{1,5}){0,2}", fullmatch=True)
numbered = st.from_regex(r"[a-z]{3,6}[0-9]{1,2}-[a-z]{3,5}[0-9]{1,3}", fullmatch=True)
domains = st.builds("{}.{}".format, numbered, st.sampled_from(["corp.example.com", "cluster.local", "ec2.internal"]))
ports = st.integers(1024, 65535) | st.sampled_from([22, 80, 443])
carriers = st.sampled_from(CARRIERS)
secrets = st.builds(
    "{}{}".format, st.sampled_from(LETTERS), st.text(LETTERS + "+/=_-.~%", min_size=9, max_size=40)
).filter(lambda word: word.lower() not in WORDS and not word.isdigit() and any(c.isalpha() for c in word))


@settings(max_examples=30, deadline=None)
@given(numbered | domains, ports, carriers, st.sampled_from(["", "tcp://", "http://", "grpc://", "worker@", "addr="]))
@example("b200-rack7-node4", 29500, "peer {} refused the connection", "")
def test_host_names_with_ports(host: str, port: int, carrier: str, before: str) -> None:
    assert host not in redacted(carrier.format(f"{before}{host}:{port}"))


@settings(max_examples=20, deadline=None)
@given(domains | labels.map("dgx-{}".format), labels, carriers)
@example("dgx-12", "worker", "{}")
def test_users_at_hosts(host: str, user: str, carrier: str) -> None:
    found = redacted(carrier.format(f"{user}@{host}"))
    assert host not in found and f"{user}@" not in found


@pytest.mark.parametrize("form", ["--master-addr {}", "MASTER_ADDR={}", "hostname='{}'", '"host": "{}"', "--host={}"])
@pytest.mark.parametrize("host", ["dgx-12", "gpunode", "4u-node", "b200-rack9-node11", "ip-10-0-3-4"])
def test_host_names_by_what_they_are_called(form: str, host: str) -> None:
    assert host not in redacted(form.format(host))


@pytest.mark.parametrize("text", ["b200-rack7-node4 is lost", "B200-RACK12-NODE1", "ip-10-0-3-4", "a.b200-rack1-node1"])
def test_neighbours_of_this_machine_are_known_without_a_port(text: str) -> None:
    assert "rack" not in redacted(text).lower() and "10-0" not in redacted(text)


@settings(max_examples=30, deadline=None)
@given(st.ip_addresses(v=4), st.none() | ports, carriers, st.sampled_from(["", "user@", "tcp://", "host="]))
def test_ipv4_addresses(address: Any, port: int | None, carrier: str, before: str) -> None:
    assume(str(address) != "0.0.0.0")
    assert str(address) not in redacted(carrier.format(f"{before}{address}" + (f":{port}" if port else "")))


@settings(max_examples=40, deadline=None)
@given(
    st.ip_addresses(v=6, network="2000::/3") | st.ip_addresses(v=6, network="fc00::/7")
    | st.ip_addresses(v=6, network="fe80::/10"),
    st.none() | ports, st.sampled_from(["compressed", "exploded", "zone", "upper"]), carriers,
    st.sampled_from(["", "tcp://", "host=", "addr:"]),
)  # fmt: skip
def test_ipv6_addresses(address: Any, port: int | None, form: str, carrier: str, before: str) -> None:
    text = {"exploded": address.exploded, "zone": f"{address}%eth0", "upper": str(address).upper()}.get(
        form, str(address)
    )
    found = redacted(carrier.format(before + (f"[{text}]:{port}" if port else text)))
    assert text not in found and str(address) not in found


STRONG_NAMES = ("AWS_SECRET_ACCESS_KEY", "api_key", "apiKey", "api-key", "OPENAI_API_KEY", "db.password", "PGPASSWORD",
                "client_secret", "hf_token", "HUGGING_FACE_HUB_TOKEN", "access_token", "credentials", "WANDB_API_KEY",
                "private-key", "accessToken")  # fmt: skip
ASSIGNMENTS = ("{0}={1}", "{0}='{1}'", '"{0}": "{1}"', "{0}: {1}", "export {0}={1}", "?{0}={1}&x=1", "{{'{0}': '{1}'}}",
               '\\"{0}\\": \\"{1}\\"', "environ['{0}'] = '{1}'", "env=[{0}={1}]", "{0} = {1}", "-e {0}={1} -p 80",
               'unclosed {0}="{1}')  # fmt: skip
OPTIONS = ("--{0} {1}", "--{0}={1}", "['--{0}', '{1}']", '"--{0}", "{1}"', "serve --{0} {1} --port 8000", "--{0} '{1}'")


@settings(max_examples=60, deadline=None)
@given(secrets, st.sampled_from(STRONG_NAMES), st.sampled_from(ASSIGNMENTS + OPTIONS), carriers)
@example("wJalrXUtnFEMIbPxRfi", "AWS_SECRET_ACCESS_KEY", "{0}={1}", "{}")
def test_secrets_by_their_names(secret: str, name: str, form: str, carrier: str) -> None:
    assume(secret[2:-2] not in json.dumps(evidence("")))  # its own words, such as --max-seq-len, may be drawn too
    found = redacted(carrier.format(form.format(name, secret)))
    assert secret not in found and (len(secret) < 14 or secret[2:-2] not in found)


@settings(max_examples=20, deadline=None)
@given(secrets, st.sampled_from(["api-key", "token", "hf-token", "auth-token", "admin-password"]), st.booleans())
@example("s3cr3tvalue99", "api-key", False)
def test_secrets_in_lists_of_words_are_known_everywhere(secret: str, name: str, joined: bool) -> None:
    words = ["--", f"--{name}={secret}"] if joined else ["--", f"--{name}", secret]
    redact = redactor({}, {}, words)
    found = json.dumps(redact.value({"serve_words": words, "log": f"started with {secret} as its key"}))
    assert json.dumps(secret)[1:-1] not in found and not redact.left_in(found)
    assert secret not in json.dumps(Redactor({}).value({"argv": words})), "in a list, by the option before it"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(LETTERS + "_-", min_size=12, max_size=30), min_size=1, max_size=4), carriers, st.booleans())
def test_bearer_tokens_and_web_tokens(parts: list[str], carrier: str, bearer: bool) -> None:
    token = f"eyJhbGciOiJIUzI1NiJ9.{'.'.join(parts)}"
    found = redacted(carrier.format(f"Bearer {'.'.join(parts)}" if bearer else token))
    assert all(part not in found for part in parts)


NEEDED = (
    "hf_revision: {type: str}", "TensorRT-LLM 1.3.0rc20, torch 2.8.0+cpu", "nvidia/Kimi-K2.5-NVFP4", "GET /v1/models",
    "lightseekorg/kimi-k2.5-eagle3", "tokens/s", "https://github.com/NVIDIA/TensorRT-LLM/pull/1", "3.14 of 2/3 passed",
    "TS-CHECK-TOOL-CALL", "12:30:05", "1:3 and 16:9", "2026-11-23T05:54:44Z", "2026-11-23T05:54+01:00", "a::b",
    "a::b::c",
    "std::vector<int>::at", "torch::nn::Module", "dead::beef", "ace::add", "x[::2], x[1::2]", "nvidia-cublas==12.4.5.8",
    "--max-num-tokens 4096 --tokenizer auto --trust-remote-code", "max_tokens=64, num_key_value_heads: 64",
    "eos_token: <|im_end|>, bos_token_id: 1", "time_per_output_token: 12.5ms", "key: kv_cache_config.dtype",
    "kv_cache_config.free_gpu_memory_fraction: 0.9", "sampling.py:1234 in forward", "step:1000 rank:0 cuda:12",
    "release:1.3.0rc20", "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "--host 0.0.0.0 --port 8000",
    "tcp://*:5557", "acceptance 3.5 at 1,4,16", "localhost:8000", "--api-key needs a value",
    "--draft-len 3 --tp-size 4",
    "google.protobuf.internal", "self.net(x)", "os.environ, threading.local()", '"token": "set"', "x < y > z",
    "@property",    "NVIDIA B200, 183359 MiB, driver 580.95.05", "0000:17:00.0", "<secret> <host>:29500 <path>",
)  # fmt: skip


@pytest.mark.parametrize("text", NEEDED)
def test_what_a_reader_needs_stays(text: str) -> None:
    assert REDACT.text(text) == text


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(0, 23), st.integers(0, 59), st.integers(0, 59)), st.datetimes(), st.integers(1, 9999),
    st.from_regex(r"[a-z]{1,8}(?:::[a-z_]{1,8}){1,2}", fullmatch=True), st.binary(min_size=32, max_size=32),
    st.from_regex(r"[1-9]\.[0-9]{1,2}\.[0-9](?:rc[0-9]{1,2})?", fullmatch=True),
)  # fmt: skip
def test_times_ratios_names_hashes_and_versions_stay(
    clock: tuple[int, int, int], date: Any, ratio: int, name: str, digest: bytes, version: str
) -> None:
    parts = [f"{clock[0]:02}:{clock[1]:02}:{clock[2]:02}", date.isoformat(), f"1:{ratio}", digest.hex(), version]
    text = f"{', '.join(parts)}; {name}(x)"
    assert REDACT.text(text) == text


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80) | st.lists(st.sampled_from([*STAND_INS, "--api-key", "host=", ":8000", "@", "/", "Bearer ",
       " ", "a1-b2", "token", "=", ":", '"', "::1", "2001:db8::1", "\ue000"]), max_size=12).map("".join))  # fmt: skip
def test_what_is_redacted_stays_as_it_is(text: str) -> None:
    once = REDACT.text(text)
    assert REDACT.text(once) == once
    page = once.replace("<", "&lt;").replace(">", "&gt;")
    assert not REDACT.left_in(once) and not REDACT.left_in(page) and SHOWN_MARK.sub("", once) is not None


@pytest.mark.parametrize("user", ["max", "bench", "text"])
def test_a_short_name_is_no_part_of_the_proofs_own_words(user: str) -> None:
    redact = redactor({}, {"USER": user})
    value = {"setup": {"max_tokens": 64}, "outputs": {"bench-plain": {"steps": 3}}, "log": f"by {user} in full"}
    found = redact.value(value)
    assert found["setup"] == value["setup"] and found["outputs"] == value["outputs"]
    assert found["log"] == "by <user> in full" and not redact.left_in(json_text(found))


def test_a_long_text_takes_no_time() -> None:
    """Each rule looks at a character a bounded number of times, in practice: a quadratic one would take minutes."""
    for unit in ("a", "a-", "a.", "1.", "a:", "/a", "\\", '"a', "--key", "token=", "ab:cd", "x@"):
        REDACT.text(unit * (2_000 // len(unit)))
