"""Each answer is learned as the row has it, after the prompt that a server would be sent."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.json_files import read_lines
from tests.tiny import FILES, make_tokenizer
from trtspec.calibrate import read_texts
from trtspec.checkpoint.chat_parser import parse_reply
from trtspec.checkpoint.conversations import read_conversations
from trtspec.checkpoint.rendering import Rendering, render
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError
from trtspec.heads.training.samples import Sample, loss_mask, read_files, read_samples, split_data
from trtspec.heads.training.train_options import TrainOptions

# a folder of published templates, to be named by whoever has them
PUBLISHED = sorted(Path(os.environ.get("KIMI_TEMPLATES", "/nowhere")).glob("*.jinja"))
TEMPLATES = [FILES / "split_template.jinja", FILES / "chat_template.jinja", *PUBLISHED]
ADD = {"name": "add", "description": "it's <a> & b \u4e2d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": ADD}
ROWS = Path(__file__).parent / "rows"
QUESTION = {"role": "user", "content": "Add 2 and 3."}


def tokenizer_with(directory: Path, template: Path) -> KimiTokenizer:
    make_tokenizer(directory)
    shutil.copy(template, directory / "chat_template.jinja")
    return KimiTokenizer(directory)


def call(arguments: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}, **fields}


def renderings(tmp_path: Path, tokenizer: KimiTokenizer, row: dict[str, Any]) -> list[Rendering]:
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (conversation,) = read_conversations(path)
    return render(conversation, tokenizer)


def answers_of(
    part: Rendering | Sample, tokenizer: KimiTokenizer
) -> Iterator[tuple[tuple[int, ...], str, dict[str, Any]]]:
    """Each learned answer: the tokens before it, its text, and the message parsed from it."""
    end = tokenizer.special_id("<|im_end|>")
    for start, written in enumerate(part.answer):
        if written and not part.answer[start - 1]:
            stop = part.tokens.index(end, start) + 1
            # the name of an end mark is an answer's text, not its end
            assert all(part.answer[start:stop]) and not any(part.answer[stop : stop + 1])
            text = tokenizer.decode(part.tokens[start : stop - 1])
            opened = tokenizer.decode(part.tokens[:start]).endswith("<think>")
            yield tuple(part.tokens[:start]), text, parse_reply(text, opened)


def five_turns(reasoning: bool) -> list[dict[str, Any]]:
    """Two of the five questions lead to a loop of calls."""
    messages: list[dict[str, Any]] = []
    calls = 0
    for turn in range(5):
        messages.append({"role": "user", "content": f"Question {turn}, {{please}} <b> & \u4e2d."})
        for step in range(2 if turn in (1, 3) else 0):
            asked = call(json.dumps({"a": calls}), id=f"functions.add:{calls}")
            messages.append(
                {"role": "assistant", "content": f"Step {step}.", "tool_calls": [asked]}
            )
            messages.append(
                {"role": "tool", "content": f"{calls} <ok>", "tool_call_id": asked["id"]}
            )
            calls += 1
        messages.append({"role": "assistant", "content": f"Answer {turn}.\n"})
    if reasoning:
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                message["reasoning_content"] = f"Thought {number}:\n as \u4e2d"
    return messages


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_each_answer_stands_behind_the_prompt_of_its_moment(
    tmp_path: Path, template: Path, thinking: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    source = template.read_text()
    reasoning = thinking and "<think>" in source
    messages = five_turns(reasoning)
    if "tool_calls" not in source:
        with pytest.raises(TrtspecError, match="does not read"):
            renderings(tmp_path, tokenizer, {"messages": messages})
        messages = [m for m in messages if m.keys() <= {"role", "content"}]

    def by_transformers(part: list[dict[str, Any]], open_turn: bool = True) -> str:
        (text,), _ = render_jinja_template(
            [part],
            tools=[TOOL],
            chat_template=source,
            add_generation_prompt=open_turn,
            thinking=thinking,
        )
        return text

    parts = renderings(tmp_path, tokenizer, {"messages": messages, "tools": [TOOL]})
    assert len(parts) == (5 if reasoning else 1)
    assert ("reads tools as" in capsys.readouterr().err) == ("tools_ts_str" in source)
    learned = [answer for part in parts for answer in answers_of(part, tokenizer)]
    asked = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    assert [message for _, _, message in learned] == [messages[index] for index in asked]
    for index, (prompt, _, _) in zip(asked, learned, strict=True):
        expected = tokenizer.encode(by_transformers(messages[:index]), allow_special=True)
        assert prompt == tuple(expected)
    whole = tokenizer.template.render(messages, [TOOL], False, thinking)
    assert whole == by_transformers(messages, open_turn=False)
    texts = read_texts(tmp_path / "row.jsonl", tokenizer, 99, 9999)
    assert texts == [tuple(part.tokens) for part in parts]


@pytest.mark.parametrize("line", read_lines(ROWS / "learned.jsonl"), ids=lambda line: line["form"])
def test_what_is_learned_is_the_row_or_the_row_is_refused(tmp_path, line):
    tokenizer = tokenizer_with(tmp_path, FILES / "split_template.jinja")
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(line["row"]) + "\n")
    if "refused" in line:
        with pytest.raises(TrtspecError, match=f"row.jsonl:1 .*{line['refused']}"):
            read_samples(path, tokenizer, 4096)
        return
    samples = read_samples(path, tokenizer, 4096)
    learned = [text for sample in samples for _, text, _ in answers_of(sample, tokenizer)]
    assert [f"{text}<|im_end|>" for text in learned] == line["learned"]


def test_calls_are_numbered_through_the_conversation_and_results_follow(tmp_path):
    tokenizer = tokenizer_with(tmp_path, FILES / "split_template.jinja")
    messages = five_turns(False)
    expected = renderings(tmp_path, tokenizer, {"messages": messages})
    for message in messages:
        for each in message.get("tool_calls", ()):
            each["id"] = "call_0"
        if message["role"] == "tool":
            message["tool_call_id"] = "call_0"
    assert renderings(tmp_path, tokenizer, {"messages": messages}) == expected
    for message in messages:
        message.pop("tool_call_id", None)
    assert renderings(tmp_path, tokenizer, {"messages": messages}) == expected
    lost = [messages[0], {"role": "tool", "content": "5"}, messages[1]]
    with pytest.raises(TrtspecError, match="result without the call"):
        renderings(tmp_path, tokenizer, {"messages": lost})


ANSWER = {"role": "assistant", "content": "It is five, of course."}
NOTHING = [
    ({"messages": [QUESTION]}, "has no answer", "trtspec synthesize"),
    ({"messages": [QUESTION, ANSWER], "status": "error"}, "has no answer: error", "leave it out"),
    ({"messages": [QUESTION, ANSWER], "error": "time out"}, "has no answer: time out", "leave"),
    (
        {"messages": [{**QUESTION, "content": "many words " * 40}, ANSWER]},
        "no answer within",
        "seq_len",
    ),
]


@pytest.mark.parametrize(("row", "reason", "remedy"), NOTHING)
def test_a_row_of_which_nothing_counts_is_refused_and_counted(tmp_path, row, reason, remedy):
    tokenizer = tokenizer_with(tmp_path, FILES / "split_template.jinja")
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(TrtspecError, match=f"data.jsonl:1 .*{reason}") as refused:
        read_samples(path, tokenizer, 256)
    assert remedy in refused.value.remedy
    path.write_text(json.dumps(row) + "\n" + json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    _, (counted,) = read_files([str(path)], tokenizer, TrainOptions(seq_len=256))
    assert (counted["conversations"], counted["refused"]) == (1, 1)
    assert reason in counted["refusals"][0]


def test_nothing_is_trained_twice_and_turns_are_held_out_together(tmp_path):
    tokenizer = tokenizer_with(tmp_path, FILES / "split_template.jinja")
    path = tmp_path / "data.jsonl"
    for number in range(12):
        messages = [{"role": "user", "content": f"{number}"}, *five_turns(True)[1:]]
        with path.open("a") as file:
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    options = TrainOptions(seq_len=4096, held_out=0.25)
    samples, (counted,) = read_files([str(path)], tokenizer, options)
    assert (counted["conversations"], len(samples)) == (12, 60)
    first = samples[0]
    for sample in samples[:5]:
        assert sum(loss_mask(sample, False)) == len(sample.tokens) - sample.repeated
        assert tokenizer.decode(sample.tokens[sample.repeated :]).startswith("<|im_user|>")
    assert first.repeated == 0
    data = split_data(samples, options)
    held = {samples[index].conversation for index in data.held}
    assert len(held) == 3 and len(data.held) == 15
    assert held.isdisjoint(samples[index].conversation for index in data.trained)
