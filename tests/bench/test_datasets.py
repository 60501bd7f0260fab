"""Data sets in their real fields, and files of others: a question a line, or an error with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import table
from trtspec.bench.load.measure import BenchWorkload
from trtspec.bench.questions.datasets import QuestionSource, catalogue, load_dataset, read_questions
from trtspec.client.client import RequestSampling
from trtspec.errors import UsageError

CASES = table(__file__)

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 16
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
SPEED_BENCH = (
    "coding",
    "humanities",
    "math",
    "multilingual",
    "qa",
    "rag",
    "reasoning",
    "roleplay",
    "stem",
    "summarization",
    "writing",
)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":  # as the hub has it
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mt_bench_as_its_own_file_and_as_the_hub_has_it(tmp_path: Path) -> None:
    rows = [
        {
            "question_id": 81 + i,
            "category": MT_BENCH[i // 10],
            "turns": [f"Tell me about {i}", f"And shorter, {i}"],
        }
        for i in range(80)
    ]
    own = load_dataset(f"mt-bench={write(tmp_path / 'own.jsonl', rows)}")
    hub = [
        {
            "prompt": row["turns"],
            "prompt_id": row["question_id"],
            "category": row["category"],
            "reference": [],
        }
        for row in rows
    ]
    published = load_dataset(f"mt-bench={write(tmp_path / 'hub.jsonl', hub)}")
    for found in (own, published):
        assert len(found.questions) == 80 and {q.requests for q in found.questions} == {2}
        assert {q.category for q in found.questions} == set(MT_BENCH)
        assert (
            found.questions[3].turns == ("Tell me about 3", "And shorter, 3")
            and found.questions[3].id == "84"
        )
        assert found.licence == "Apache-2.0"


@pytest.mark.parametrize("form", ["turns", "messages"])
def test_speed_bench_resolved_by_prepare_data(tmp_path: Path, form: str) -> None:
    rows = []
    for i in range(880):
        turns = [f"Explain the case number {i} to a colleague"] * (2 if i % 7 == 0 else 1)
        said = turns if form == "turns" else [{"role": "user", "content": turn} for turn in turns]
        rows.append(
            {
                "question_id": f"{i:032x}",
                "category": SPEED_BENCH[i // 80],
                "sub_category": "x",
                form: said,
                "source": "mmlu",
                "src_id": str(i),
                "difficulty": "",
                "multiturn": i % 7 == 0,
            }
        )
    found = load_dataset(f"speed-bench={write(tmp_path / 'qualitative.jsonl', rows)}")
    assert len(found.questions) == 880
    assert sorted({q.category for q in found.questions}) == sorted(SPEED_BENCH)
    assert found.questions[0].requests == 2 and found.questions[1].requests == 1
    rows[5][form] = [PLACEHOLDER] if form == "turns" else [{"role": "user", "content": PLACEHOLDER}]
    with pytest.raises(UsageError, match=r":6 holds a placeholder") as failed:
        load_dataset(f"speed-bench={write(tmp_path / 'raw.jsonl', rows)}")
    assert "prepare_data.py" in failed.value.remedy


def test_a_configuration_of_speed_bench_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [{"turns": ["Why?"]}])
    assert load_dataset(f"speed-bench:throughput_32k={file}").questions
    with pytest.raises(UsageError, match="has no configuration throughput_64k"):
        load_dataset("speed-bench:throughput_64k")


QA = CASES["questions"]


@pytest.mark.parametrize("name", QA)
def test_question_and_answer_sets(tmp_path: Path, name: str) -> None:
    row, asks, category = QA[name]
    found = load_dataset(f"{name}={write(tmp_path / 'rows.jsonl', [row, row])}")
    assert [q.turns for q in found.questions] == [(asks,), (asks,)] and found.questions[
        0
    ].category == category
    assert found.questions[0].id != found.questions[1].id, "the same id twice is two questions"
    assert found.licence and found.source == catalogue()[name].source
    broken = {
        key: value for key, value in row.items() if key not in ("question", "prompt", "problem")
    }
    with pytest.raises(UsageError, match="has no "):
        load_dataset(f"{name}={write(tmp_path / 'broken.jsonl', [broken])}")


MADE_OF = CASES["made_of"]


@pytest.mark.parametrize("name", MADE_OF)
def test_a_question_is_made_of_words_alone(tmp_path: Path, name: str) -> None:
    """A question that is null, blank, a list, an object or a truth value is refused by its line."""
    good = hub_rows_of(name)[0]
    row = {**good, "image": "https://x/a.png"} if name == "mmstar" else good
    for column in MADE_OF[name]:
        for bad in (None, "", " \n", ["a", "b"], {"a": 1}, True, 1.5):
            file = write(tmp_path / "rows.jsonl", [row, {**row, column: bad}])
            with pytest.raises(
                UsageError, match=f":2 has (no {column},|a {column} that is not)"
            ) as failed:
                load_dataset(f"{name}={file}")
            assert failed.value.code == "TS-DATA-ROW" and failed.value.remedy
        numbered = load_dataset(f"{name}={write(tmp_path / 'rows.jsonl', [{**row, column: 42}])}")
        said = numbered.questions[0].turns[0]
        said = said if isinstance(said, str) else said[0]["text"]
        assert "42" in said, "an option of C-Eval that a table keeps as a number"


def test_a_picture_is_passed_through(tmp_path: Path) -> None:
    rows = [
        {
            "index": 0,
            "question": "What is it?",
            "image": {"bytes": PNG, "path": "0.png"},
            "answer": "A",
            "category": "coarse perception",
            "l2_category": "x",
        }
    ]
    write(tmp_path / "val.parquet", rows)
    mmstar = replace(catalogue()["mmstar"], hub=str(tmp_path), configs=())
    question = read_questions(replace(mmstar, split="validation"))[0]
    text, picture = question.request(0)[0]["content"]
    assert text == {"type": "text", "text": "What is it?"} and question.has_pictures
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    parts = [
        {"type": "text", "text": "Compare"},
        {"type": "image_url", "image_url": {"url": "https://x/a.png"}},
    ]
    said = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "And?"},
    ]
    question = load_dataset(str(write(tmp_path / "own.jsonl", [{"messages": said}]))).questions[0]
    assert (
        question.opening[0]["content"] == parts
        and question.turns == ("And?",)
        and question.has_pictures
    )
    with pytest.raises(UsageError, match="neither a URL nor PNG"):
        load_dataset(f"mmstar={write(tmp_path / 'bad.jsonl', [{'question': 'x', 'image': 'zzz'}])}")


def test_a_question_about_a_picture_is_not_asked_without_it(tmp_path: Path) -> None:
    row = {"index": 0, "question": "What is it?", "category": "x"}
    for bad in ({**row, "image": None}, {**row, "image": []}, row):
        with pytest.raises(UsageError, match=":1 has no image, which rows of MMStar have"):
            load_dataset(f"mmstar={write(tmp_path / 'rows.jsonl', [bad])}")
    address = "https://x/a.png"
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": address}},
    ]
    for own in (
        {"prompt": "What is it?", "images": [address]},
        {"prompt": "What is it?", "image": address},
        {"messages": [{"role": "user", "content": parts}]},
    ):
        asked = (
            load_dataset(f"mmstar={write(tmp_path / 'own.jsonl', [own])}").questions[0].request(0)
        )
        assert asked[0]["content"] == parts, own
    with pytest.raises(UsageError, match="has no image"):
        load_dataset(f"mmstar={write(tmp_path / 'own.jsonl', [{'prompt': 'What is it?'}])}")


def hub_rows_of(name: str) -> tuple[dict[str, Any], str, str]:
    """(a row with the fields of the hub's copy, the words that are asked first, the category)"""
    more: dict[str, tuple[dict[str, Any], str, str]] = {
        "mt-bench": (
            {"prompt": ["One?", "Two?"], "prompt_id": 7, "category": "math", "reference": []},
            "One?",
            "math",
        ),
        "speed-bench": (
            {"question_id": "a", "category": "qa", "turns": ["Who?"], "multiturn": False},
            "Who?",
            "qa",
        ),
        "mmstar": (
            {
                "index": 0,
                "question": "What?",
                "image": {"bytes": PNG, "path": "0.png"},
                "category": "x",
            },
            "What?",
            "x",
        ),
    }
    return more[name] if name in more else QA[name]


def read_from_hub(name: str, known: QuestionSource, count: int) -> None:
    """Reads the set and looks at its first question."""
    _, asks, category = hub_rows_of(name)
    found = read_questions(known)
    assert len(found) == count
    said = found[0].turns[0]
    assert (said if isinstance(said, str) else said[0]["text"]) == asks
    assert found[0].category == (
        "computer_network" if name == "ceval" else category
    )  # of its configuration
    assert found[0].has_pictures == (name == "mmstar")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(catalogue()))
def test_sets_read_from_the_hub_by_the_datasets_library(tmp_path: Path, name: str) -> None:
    """From a repository with the set's configurations and its split."""
    known = catalogue()[name]
    configs = known.configs[:2] or ("default",)
    files = [
        {"config_name": config, "data_files": [{"split": known.split, "path": f"{config}.parquet"}]}
        for config in configs
    ]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(files)}\n---\n")
    for config in configs:
        write(tmp_path / f"{config}.parquet", [hub_rows_of(name)[0]])
    read_from_hub(name, replace(known, hub=str(tmp_path), configs=known.configs[:2]), len(configs))


def test_every_known_set_states_its_licence_and_source() -> None:
    for name, known in catalogue().items():
        assert (
            known.licence and known.source.startswith("https://") and known.hub.count("/") == 1
        ), name
    with pytest.raises(UsageError, match="no data set") as failed:
        load_dataset("mt-bensh")
    assert "mt-bench" in failed.value.remedy


@pytest.mark.parametrize(
    ("line", "says"),
    CASES["refused"],
)
def test_a_line_that_is_no_prompt_is_refused(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "Why?"}}\n{line}\n')
    with pytest.raises(UsageError, match=says):
        load_dataset(str(file))


AGENT = {
    "model": "kimi",
    "messages": [{"role": "user"}, {"role": "tool"}],
    "tools": [{"type": "function", "function": {"name": "look"}}],
}
TEXT = {"model": "kimi", "prompt": "def f("}


def test_recorded_requests_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = [AGENT, {**TEXT, "stream": True}, {"category": "code", "body": AGENT}]
    found = load_dataset(str(write(tmp_path / "bodies.jsonl", rows))).questions
    assert [question.body for question in found] == [AGENT, TEXT, AGENT]
    assert [question.category for question in found] == ["turn 1", "completions", "code"]


def test_recorded_requests_are_sent_at_the_times_of_their_rows(tmp_path: Path) -> None:
    rows = [{"timestamp": time, "body": TEXT} for time in (5000, 2000, 2500)]
    found = load_dataset(str(write(tmp_path / "bodies.jsonl", rows)))
    assert found.recorded_rate() == 1.0
    asked = list(enumerate(found.questions))
    work = BenchWorkload(found, RequestSampling(9), (), rates=(1.0,), recorded_times=True)
    assert list(work.times(asked, 1.0, 0)) == [3.0, 0.0, 0.5]
    with pytest.raises(UsageError, match="have their own messages"):
        replace(work, system="Be short.")
    with pytest.raises(UsageError, match="rows without a time"):
        load_dataset(str(write(tmp_path / "bodies.jsonl", [*rows, TEXT]))).recorded_rate()


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**AGENT, "n": 2}, "several answers"),
        ({**TEXT, "response": "Hi"}, "mixes requests"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=f":2 {says}|:2 asks for {says}"):
        load_dataset(str(write(tmp_path / "bodies.jsonl", [TEXT, row])))
