"""synthesize against a real server: order, seeds, retries, resume after a kill, and refusals."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.command_line import TRTSPEC, free_port, served, trtspec, wait_for
from trtspec.checkpoint.conversations import read_conversations
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError
from trtspec.heads.synthesis import (
    AnswerSampling,
    TargetEndpoint,
    judge_answers,
    read_prompts,
    shard,
    synthesize,
)
from trtspec.heads.training.samples import read_samples


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr("trtspec.heads.synthesis.FIRST_DELAY_S", 0.01)


SERVER = Path(__file__).with_name("answering_server.py")


@contextmanager
def serving(log: Path, *options: str):
    port = free_port()
    with served(port, sys.executable, SERVER, port, log, *options) as (url, _):
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "requests.jsonl"
    with serving(log, "7", "0.002") as url:
        yield url, log


def asked(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(prompts: Path, output: Path, url: str, sampling: AnswerSampling | None = None, **endpoint):
    options = TargetEndpoint(url, **endpoint)
    chosen = read_prompts(prompts)
    return synthesize(chosen, output, options, sampling or AnswerSampling(max_tokens=8))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_come_in_the_order_of_the_prompts(tmp_path, server):
    url, log = server
    source = [
        {"prompt": f"question {'x' * (n % 7)} {n}", "category": "ab"[n % 2]} for n in range(40)
    ]
    prompts = write(tmp_path / "prompts.jsonl", source + source[:5])  # five of them twice
    outcome = run(prompts, tmp_path / "data.jsonl", url)
    made = rows(tmp_path / "data.jsonl")
    assert outcome.answered == len(made) == 40
    assert [row["conversations"][0]["content"] for row in made] == [row["prompt"] for row in source]
    assert [row["category"] for row in made] == [row["category"] for row in source]
    assert all(
        row["conversations"][1]["content"].startswith(row["conversations"][0]["content"].upper())
        for row in made
    )
    seeds = {body["messages"][0]["content"]: body["seed"] for body in asked(log)}
    assert len(set(seeds.values())) == 40
    assert len(asked(log)) > 40  # the 503s were asked again
    run(prompts, tmp_path / "again.jsonl", url, concurrency=3)
    assert rows(tmp_path / "again.jsonl") == made


def test_every_shape_of_prompt_is_read(tmp_path, server):
    url, _ = server
    shapes = [
        {"prompt": "one"},
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "two"},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "three"},
                {"from": "gpt", "value": "old answer"},
            ]
        },
        {"turns": ["four", "five"]},
    ]
    run(write(tmp_path / "prompts.jsonl", shapes), tmp_path / "data.jsonl", url.removesuffix("/v1"))
    turns = [
        [(m["role"], m["content"].split()[0]) for m in row["conversations"]]
        for row in rows(tmp_path / "data.jsonl")
    ]
    assert turns == [
        [("user", "one"), ("assistant", "ONE")],
        [("system", "be"), ("user", "two"), ("assistant", "TWO")],
        [("user", "three"), ("assistant", "THREE")],
        [("user", "four"), ("assistant", "FOUR"), ("user", "five"), ("assistant", "FIVE")],
    ]


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
WRITTEN = {"id": "functions.weather:0"}  # by the family, in place of a server's own id
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
NEMOTRON = {
    "uuid": "u", "category": "chat", "reasoning": "off", "metadata": json.dumps({"tools": [TOOL]}),
    "messages": [
        {"role": "system", "content": ""},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "and tomorrow?"},
        {"role": "assistant", "content": "old"},
    ],
}  # fmt: skip


def test_tools_and_their_results_stay_in_a_conversation(tmp_path, server, target_dir):
    """In Nemotron's layout, an empty system message is dropped, and tool calls stay as context.

    The source's tool call has its result behind it.
    """
    url, log = server
    before = len(asked(log))
    run(write(tmp_path / "prompts.jsonl", [NEMOTRON]), tmp_path / "data.jsonl", url)
    (row,) = rows(tmp_path / "data.jsonl")
    assert [message["role"] for message in row["conversations"]] == [
        "user", "assistant", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert row["conversations"][1]["tool_calls"] == [CALL | WRITTEN]
    assert row["conversations"][3]["content"].startswith("SUNNY")
    assert row["tools"] == [TOOL]
    assert row["category"] == "chat"
    assert all(body["tools"] == [TOOL] for body in asked(log)[before:])
    assert len(read_samples(tmp_path / "data.jsonl", KimiTokenizer(target_dir), 512)) == 1


def test_the_same_prompts_from_every_container(tmp_path):
    """A directory, and the datasets library (which reads hub data sets), agree with a file."""
    from collections import Counter

    from trtspec.checkpoint.conversations import conversation
    from trtspec.checkpoint.data_rows import hub_rows
    from trtspec.heads.synthesis import distinct

    source = [
        {"messages": [{"role": "user", "content": f"q{n}"}], "category": "ab"[n % 2]}
        for n in range(7)
    ]
    want = read_prompts(write(tmp_path / "p.jsonl", source))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "train.jsonl", source)
    assert read_prompts(folder) == want
    assert read_prompts(folder, limit=3) == want[:3]
    assert (
        list(distinct((conversation(row, Counter()) for row in hub_rows(str(folder), None)), set()))
        == want
    )


def spoken(message: dict, finish: str | None = "stop") -> dict:
    """A prompt that makes the server answer so."""
    return {
        "prompt": "choice:"
        + json.dumps({"message": {"role": "assistant", **message}, "finish_reason": finish})
    }


def test_what_is_written_is_what_the_reader_reads(tmp_path, server, capsys):
    """Every record is read back as written, with no field unread.

    Records hold reasoning in either name, tool calls, U+2028, NUL, no content, no finish reason.
    """
    answers = [
        {"content": "Yes.", "reasoning_content": "hm"},
        {"content": "Yes.", "reasoning": "hm", "reasoning_content": None, "refusal": None},
        {"content": None, "tool_calls": [CALL], "function_call": None, "annotations": []},
        {"content": "one\u2028two\x85three\0 and a few words more, none of them noise"},
        {"content": "hm</think>Yes."},
        {"content": None, "reasoning": "cut off while thinking"},
    ]
    prompts = [
        spoken(answer, "length" if index == 5 else "stop") for index, answer in enumerate(answers)
    ]
    prompts.append(
        {
            "messages": [{"role": "user", "content": spoken({"content": "x"}, None)["prompt"]}],
            "tools": [TOOL],
        }
    )
    run(write(tmp_path / "prompts.jsonl", prompts), tmp_path / "data.jsonl", server[0])
    made = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().split("\n")[:-1]]
    read = list(read_conversations(tmp_path / "data.jsonl"))
    assert capsys.readouterr().err == ""
    assert [list(item.messages) for item in read] == [row["conversations"] for row in made]
    assert [item.finish_reason for item in read] == [row.get("finish_reason", "") for row in made]
    assert [item.id for item in read] == [row["conversation_id"] for row in made]
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    assert read[1].messages[-1] == read[4].messages[-1] == answer
    assert read[2].messages[-1]["tool_calls"] == [CALL | WRITTEN]
    assert read[6].tools == (TOOL,)
    assert judge_answers(made)[0] == {"answers": 7, "empty": 0, "noise": 0, "loop": 0, "cut off": 1}


def test_an_answer_that_was_cut_off_ends_its_conversation(tmp_path, server):
    turns = [spoken({"content": "half an ans"}, "length")["prompt"], "never asked"]
    run(write(tmp_path / "prompts.jsonl", [{"turns": turns}]), tmp_path / "data.jsonl", server[0])
    (row,) = rows(tmp_path / "data.jsonl")
    assert [message["role"] for message in row["conversations"]] == ["user", "assistant"]
    assert row["finish_reason"] == "length"


@pytest.mark.parametrize(
    "choice", [{"message": None}, {"message": {"content": 3}}, {}, {"message": {"tool_calls": "x"}}]
)
def test_an_answer_that_is_none_fails_alone(tmp_path, server, choice):
    prompts = [{"prompt": "choice:" + json.dumps(choice)}, {"prompt": "fine"}]
    outcome = run(write(tmp_path / "prompts.jsonl", prompts), tmp_path / "data.jsonl", server[0])
    assert (outcome.answered, len(outcome.failed)) == (1, 1)


def test_degenerate_answers_are_counted_by_kind():
    def row(number: int, text: str, finish: str = "stop") -> dict:
        answer = {"role": "assistant", "content": text}
        return {"conversation_id": str(number), "conversations": [answer], "finish_reason": finish}

    made = [
        row(0, ""),
        row(1, "again and " * 60),
        row(2, "\ufffd" * 40),
        row(3, "A good answer."),
        row(4, "Cut", "length"),
    ]
    counts, found = judge_answers(made)
    assert counts == {"answers": 5, "empty": 1, "noise": 1, "loop": 1, "cut off": 1}
    assert found == {"0": "empty", "1": "loop", "2": "noise", "4": "cut off"}


def test_killed_and_run_again_asks_nothing_twice(tmp_path):
    """kill -9 of the command itself; the server's own log tells what was asked."""
    log = tmp_path / "requests.jsonl"
    texts = [f"question {n}" if n < 20 else f"hold: question {n}" for n in range(30)]
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": text} for text in texts])
    with serving(log, "0", "0.002") as url:
        command = [*TRTSPEC, "synthesize", str(prompts), "-o", str(tmp_path / "data.jsonl")]
        command += ["--base-url", url, "--concurrency", "2", "--max-tokens", "8"]
        process = subprocess.Popen(
            command, cwd=Path(__file__).parents[3], env=os.environ | {"PYTHONPATH": "."}
        )
        journal = tmp_path / ".data.jsonl.synthesize" / ".trtspec-synthesize.jsonl"
        # the header, the server and twenty answers
        wait_for(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 22)
        wait_for(lambda: len(asked(log)) == 22)  # two are held
        process.send_signal(signal.SIGKILL)
        process.wait()
        (tmp_path / "release").touch()
        subprocess.run(
            command, cwd=Path(__file__).parents[3], check=True, stdout=subprocess.DEVNULL
        )
    assert len(asked(log)) == 22 + 10
    made = rows(tmp_path / "data.jsonl")
    assert [row["conversations"][0]["content"] for row in made] == texts
    assert not journal.exists()


def test_a_refused_prompt_is_left_out_and_a_refused_key_ends_the_run(tmp_path, server):
    url, _ = server
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "fine"}, {"prompt": "400"}])
    outcome = run(prompts, tmp_path / "data.jsonl", url)
    assert len(rows(tmp_path / "data.jsonl")) == 1
    assert "HTTP 400: too long" in next(iter(outcome.failed.values()))
    with pytest.raises(UsageError, match="HTTP 401"):
        run(write(tmp_path / "p.jsonl", [{"prompt": "401"}]), tmp_path / "data.jsonl", url)


def test_a_server_that_is_not_there_is_an_error_with_a_remedy(tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "hello"}])
    with pytest.raises(TrtspecError, match="TS-SYNTH-SERVER") as refused:
        run(prompts, tmp_path / "data.jsonl", "http://127.0.0.1:9/v1")
    assert "trtspec serve" in refused.value.remedy
    assert not (tmp_path / "data.jsonl").exists()


def test_shards_divide_the_prompts(tmp_path):
    prompts = read_prompts(
        write(tmp_path / "prompts.jsonl", [{"prompt": f"q{n}"} for n in range(50)])
    )
    parts = [shard(prompts, f"{index}/3") for index in range(3)]
    assert sorted(p.id for part in parts for p in part) == sorted(p.id for p in prompts)
    assert all(parts)
    with pytest.raises(UsageError):
        shard(prompts, "3/3")


def test_a_line_that_is_no_prompt_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n{"text": "x"}\n')
    with pytest.raises(TrtspecError, match="TS-(PROMPTS|DATA)-ROW .*:2"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("temperature", "--temperature"),
        ("max_tokens", "--max-tokens"),
        ("top_p", "--top-p"),
        ("model", "--model"),
        ("messages", "PROMPTS"),
        ("tools", "PROMPTS"),
        ("seed", "prompt's text"),
        ("stream", "not streamed"),
    ],
)
def test_an_extra_body_does_not_override_what_the_provenance_names(
    tmp_path: Path, key: str, remedy: str
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "data.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n')
    body = json.dumps({"top_k": 5, key: None})
    done = trtspec("synthesize", prompts, "-o", output, "--extra-body", body, "--dry-run")
    assert (
        done.status == 2
        and f"--extra-body must not set {key}" in done.stderr
        and remedy in done.stderr
    ), done.stderr
