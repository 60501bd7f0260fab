"""Exercises with checkable answers, from which kimi-nano learns.

    python -m tools.nano.exercises -o FILE [--each 16] [--training]

writes held-out ones, or with --training others of the training side, as JSON lines: the same number
of each kind, in mixed order, for bench, check and the demo. LEFT_OUT names the kinds that evaluate
asks and the files leave out. `exercise(seed, heldout)` gives one, always the same.

A kind is a function of a `Draw` that returns a `Task`: the question, the answer, and the steps to
it, which are written before the answer or, where the conversation has a reasoning part, there.
Steps name digits one by one, because a small model computes only what it has written down.
"""

from __future__ import annotations

import argparse
import calendar
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.nano.values import MADE_UP, TEXT, WORDS, Draw, plural
from trtspec.report import write_atomic

Message = dict[str, Any]
LEFT_OUT = (
    "results",
    "document",
)  # ends in a tool's result instead of a question; half of them wrong
LONGEST_DOCUMENT = 4400  # characters, about 1,500 tokens
COPYING = ("repeat", "sorting", "spelling", "extraction", "table")  # taught first
WEIGHTS = {  # long conversations come seldom: a few of them have as many tokens as all others
    "repeat": 2.0,
    "sorting": 2.5,
    "extraction": 2.5,
    "schema": 1.5,
    "rewriting": 1.5,
    "turns": 1.5,
    "table": 1.2,
    "tools": 0.7,
    "document": 0.5,
    "results": 0.5,
    "chat": 0.3,
}


@dataclass(frozen=True)
class Task:
    """`check`: how an answer is judged (see `is_right`); `before`: turns before the question."""

    question: str
    answer: str
    steps: str = ""
    check: str = "last"
    before: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    call: Message | None = None  # the tool call that is the answer
    after: tuple[Message, ...] = ()  # instead of a question: the result of a tool
    stop: tuple[str, ...] = ()
    schema: Message | None = None


@dataclass(frozen=True)
class Exercise:
    """One conversation with the answer last, and the keys and phrasings it is made of."""

    kind: str
    messages: list[Message]
    task: Task
    keys: tuple[str, ...]
    phrases: tuple[str, ...]
    thinking: bool

    def row(self, name: str) -> dict[str, Any]:
        """As a line of the held-out file."""
        answer = self.messages[-1]
        found: dict[str, Any] = {"id": name, "category": self.kind, "messages": self.messages[:-1]}
        if self.task.tools:
            found["tools"] = list(self.task.tools)
        if self.task.schema:
            shape = {"name": "answer", "schema": self.task.schema}
            found["response_format"] = {"type": "json_schema", "json_schema": shape}
        found |= {"stop": list(self.task.stop)} if self.task.stop else {}
        found |= {"thinking": True} if self.thinking else {}
        reference = answer["content"]
        if self.task.call:
            reference = json.dumps(self.task.call)
        for stop in self.task.stop:
            reference = reference.split(stop)[0]
        return found | {"reference": reference, "check": self.task.check}


def exercise(
    seed: str,
    heldout: bool,
    copying: float = 0.0,
    kind: str | None = None,
    made_up: float = MADE_UP,
) -> Exercise:
    """Makes an exercise from a seed.

    `copying` is how much more often the COPYING kinds come: 0 for not at all, 1 for almost always;
    `made_up` the share of a training exercise's names and things that no list has.
    """
    draw = Draw(seed, heldout, made_up)
    weights = [
        WEIGHTS.get(name, 1.0) * (1.0 if name in COPYING else 1.0 - copying) for name in KINDS
    ]
    kind = kind or draw.random.choices(list(KINDS), weights)[0]
    task = KINDS[kind](draw)
    messages = [*task.before]
    if not task.before and draw.chance(0.1):
        messages.append({"role": "system", "content": draw.free("system")})
    messages += task.after or ({"role": "user", "content": task.question},)
    answer: Message = {"role": "assistant", "content": task.answer}
    thinking = draw.chance(0.3 if task.steps else 0.06)
    if task.call:
        answer = {"role": "assistant", "content": "", "tool_calls": [tool_call(task.call)]}
    elif task.steps and not thinking:
        answer["content"] = f"{task.steps}\n{task.answer}"
    if thinking:
        answer["reasoning_content"] = (
            task.steps or f"This is a question of the kind {kind}. I can answer at once."
        )
    return Exercise(
        kind, [*messages, answer], task, tuple(draw.keys), tuple(draw.phrases), thinking
    )


def is_right(check: str, reference: str, got: str) -> bool:
    """`json` and `call`: the same value.

    `words:a|b`: these words occur. `last`: the last lines are the same. `text`: the whole is.
    """
    if check in ("json", "call"):
        try:
            return json.loads(got) == json.loads(reference)
        except ValueError:
            return False
    if check.startswith("words:"):
        return all(word in got for word in check.removeprefix("words:").split("|"))
    if check == "last":
        return got.strip().split("\n")[-1] == reference.strip().split("\n")[-1]
    return got.strip() == reference.strip()


def tool_call(call: Message, index: int = 0) -> Message:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"id": f"functions.{call['name']}:{index}", "type": "function", "function": function}


def listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


# --- copying ---


def items(d: Draw, count: int) -> list[str]:
    """Words, names, places or order numbers."""
    make = d.pick([d.word, d.word, d.first, d.place, d.code])
    return [make() for _ in range(count)]


def repeat(d: Draw) -> Task:
    words = items(d, d.number(1, 8))
    text = d.pick([" ", ", ", ", ", "\n"]).join(words)
    if len(words) > 2 and d.chance(0.3):
        which, answer = d.pick([("first", words[0]), ("second", words[1]), ("last", words[-1])])
        return Task(d.phrase("repeat one", which=which, text=text), answer)
    return Task(d.phrase("repeat", text=text), text, check="text")


def sorting(d: Draw) -> Task:
    count = d.number(3, 5)
    if d.chance(0.35):
        down = d.chance(0.4)
        shown = d.value(lambda: ", ".join(map(str, d.random.sample(range(1, 100), count))))
        asked = d.phrase("sort down" if down else "sort up", numbers=shown)
        return Task(asked, ", ".join(sorted(shown.split(", "), key=int, reverse=down)))
    make = d.pick([d.word, d.word, d.first, d.place])
    words = [make() for _ in range(count)]
    # two letters decide nearly always, and a small model orders letters that it has written down
    steps = ", ".join(f"{'-'.join(word[:2].lower())} {word}" for word in words)
    steps += f". In order: {', '.join('-'.join(word[:2].lower()) for word in sorted(words))}."
    return Task(d.phrase("sort words", words=", ".join(words)), ", ".join(sorted(words)), steps)


def spelling(d: Draw) -> Task:
    word = d.pick([d.word, d.word, d.first])()
    letters = "-".join(word.lower())
    kind = d.number(0, 3)
    if kind < 2:
        return Task(d.phrase("spell", w=word), letters)
    if kind == 2:
        steps = " ".join(f"{i}{letter}" for i, letter in enumerate(word.lower(), 1))
        return Task(d.phrase("spell count", w=word), f"The word has {len(word)} letters.", steps)
    return Task(d.phrase("spell backwards", w=word), letters[::-1], letters)


def extraction(d: Draw) -> Task:
    text, values = record(d)
    wanted = list(values)[: d.number(2, len(values))] if d.chance(0.4) else list(values)
    asked = d.phrase("extract", fields=listed(wanted), text=text)
    return Task(asked, json.dumps({key: values[key] for key in wanted}), check="json")


def record(d: Draw) -> tuple[str, Message]:
    """A sentence or two, and the values in it."""
    kind = d.pick(["person", "offer", "event", "order"])
    if kind == "person":
        values: Message = {"name": d.first(), "age": d.number(18, 89), "city": d.place()}
    elif kind == "offer":
        values = {"product": d.noun(), "price": d.number(2, 99), "shop": d.last()}
    elif kind == "event":
        event = d.pick(["concert", "meeting", "market", "race", "party"])
        values = {"event": event, "date": d.date().isoformat(), "place": d.place()}
    else:
        values = {"order": d.code(), "customer": d.person(), "item": d.noun()}
    return d.phrase(f"record {kind}", **values), values


def schema(d: Draw) -> Task:
    text, values = record(d)
    names = d.random.sample(list(values), d.number(1, len(values)))
    kinds = {
        name: {"type": "integer" if isinstance(values[name], int) else "string"} for name in names
    }
    wanted = {"type": "object", "properties": kinds, "required": names}
    asked = d.phrase("schema", schema=json.dumps(wanted), text=text)
    return Task(
        asked, json.dumps({name: values[name] for name in names}), check="json", schema=wanted
    )


def table(d: Draw) -> Task:
    columns = {
        "city": d.place,
        "age": lambda: str(d.number(18, 89)),
        "job": d.job,
        "pet": d.noun,
        "order": d.code,
    }
    chosen = d.random.sample(list(columns), 2)
    rows = [(d.first(), *(columns[name]() for name in chosen)) for _ in range(d.number(2, 5))]
    shown = "\n".join(
        f"| {' | '.join(row)} |" for row in [("name", *chosen), ("---", "---", "---"), *rows]
    )
    row, column = d.pick(rows), d.number(0, 1)
    asked = d.phrase("table", column=chosen[column], name=row[0], table=shown)
    return Task(asked, f"The {chosen[column]} of {row[0]} is {row[1 + column]}.")


def document(d: Draw) -> Task:
    """Facts about 2 to 42 people, and a question about one of them."""
    people, text = [], ""
    for _ in range(
        d.number(2, d.pick([4, 9, 24, 42] if d.heldout else [4, 4, 6, 6, 9, 14, 24, 42]))
    ):
        name, job, place = d.person(), d.job(), d.place()
        noun = d.thing(lambda: d.pick(WORDS["nouns"]), again=True)
        fact = d.free("fact", name=name, job=job, place=place, noun=noun)
        if len(text) + len(fact) < LONGEST_DOCUMENT:
            people.append((name, job, place))
            text += f"{fact} "
    name, job, place = d.pick(people)
    what = d.pick(["where", "job", "who"])
    asked = d.phrase(f"document {what}", name=name, place=place, text=text.strip())
    return Task(asked, f"{name} is a {job}." if what == "job" else f"{name} lives in {place}.")


# --- computing ---


def by_digits(a: int, sign: str, b: int) -> tuple[str, int]:
    """The written method, digit by digit, and the result."""
    steps, carry = [], 0
    top, low = str(a)[::-1], str(b)[::-1]
    for at, digit in enumerate(top):
        x, y = int(digit), int(low[at]) if at < len(low) else 0
        kept = f" {'-' if sign == '-' else '+'} {carry}" if carry else ""
        if sign == "*":
            value = x * b + carry
            steps.append(f"{x} * {b}{kept} = {value}")
            carry = value // 10
        elif sign == "+":
            value = x + y + carry
            steps.append(f"{x} + {y}{kept} = {value}")
            carry = value // 10
        else:
            value = x - y - carry
            borrowed = " + 10" if value < 0 else ""
            steps.append(f"{x}{borrowed} - {y}{kept} = {value % 10}")
            carry = int(value < 0)
    return ", ".join(steps), {"+": a + b, "-": a - b, "*": a * b}[sign]


def arithmetic(d: Draw) -> Task:
    sign = d.pick("+-*")
    if not d.heldout and d.chance(0.2):
        a, b = sorted((d.number(1, 9), d.number(1, 9)), reverse=True)
    else:
        a, b = d.pair(sign, 999 if d.chance(0.3) else 99)
    steps, value = by_digits(a, sign, b)
    return Task(d.phrase(f"compute {sign}", a=a, b=b), f"{a} {sign} {b} = {value}", steps)


def problems(d: Draw) -> Task:
    name, things, sign = d.first(), plural(d.noun()), d.pick("+-*")
    a, b = d.pair(sign)
    steps, value = by_digits(a, sign, b)
    asked = d.phrase(f"problem {sign}", name=name, a=a, b=b, things=things)
    rest = {"+": "in all", "-": "left", "*": "in all"}[sign]
    return Task(
        asked, f"{value} {things} {rest}.", f"{a} {sign} {b}: {steps}\n{a} {sign} {b} = {value}"
    )


UNITS = [  # so many of the small one are a large one: a digit and its zeros
    ("kilometers", "meters", 1, 3),
    ("kilograms", "grams", 1, 3),
    ("liters", "milliliters", 1, 3),
    ("meters", "centimeters", 1, 2),
    ("centimeters", "millimeters", 1, 1),
    ("hours", "minutes", 6, 1),
    ("minutes", "seconds", 6, 1),
    ("weeks", "days", 7, 0),
]


def units(d: Draw) -> Task:
    large, small, digit, zeros = d.pick(UNITS)
    number = int(d.value(lambda: f"{d.number(10, 99)} {large}").split()[0])
    steps, value = by_digits(number, "*", digit) if digit > 1 else ("", number)
    steps = f"One of the {large} is {digit}{'0' * zeros} {small}." + (f" {steps}." if steps else "")
    steps += f" {value} with {zeros} zeros." if zeros else ""
    asked = d.phrase("units", n=number, large=large, small=small)
    return Task(asked, f"{number} {large} are {value * 10**zeros} {small}.", steps)


def dates(d: Draw) -> Task:
    start, end = d.dates(1, 25)
    days = (end - start).days
    total, length = start.day + days, calendar.monthrange(start.year, start.month)[1]
    steps = f"Day {start.day} and {days} give {total}. The month has {length} days, so it is day "
    steps += f"{total} of it." if total <= length else f"{end.day} of the next one."
    asked = d.phrase("dates", days=days, start=start)
    return Task(asked, f"The date is {end.isoformat()}.", steps)


def counting(d: Draw) -> Task:
    words = items(d, d.number(2, 3))
    row = d.random.choices(words, k=d.number(4, 9))
    steps = ", ".join(f"{word} {row[: at + 1].count(words[0])}" for at, word in enumerate(row))
    asked = d.phrase("counting", word=words[0], row=", ".join(row))
    return Task(asked, f"The count is {row.count(words[0])}.", steps)


def sequence(d: Draw) -> Task:
    """A row of numbers, which a stop string may end."""

    def some_row() -> str:
        start, step = d.number(1, 60), d.pick([1, 1, 2, 3, 5, 10])
        return f"from {start} to {start + step * d.number(3, 11)} in steps of {step}"

    row = d.value(some_row)
    start, end, step = (int(word) for word in row.split() if word.isdigit())
    numbers = [str(number) for number in range(start, end + 1, step)]
    stop = (f", {numbers[-2]}",) if d.chance(0.5) else ()
    return Task(d.phrase("sequence", row=row), ", ".join(numbers), check="text", stop=stop)


# --- text ---


def code(d: Draw) -> Task:
    kind, word, n, k = d.number(0, 4), d.word(), d.number(2, 6), d.number(2, 9)
    steps = ""
    if kind == 0:
        source = f'for i in range({n}):\n    print(i * {k}, "{word}")'
        printed = "\n".join(f"{i * k} {word}" for i in range(n))
    elif kind == 1:
        source, printed, steps = f'print("{word}"[::-1])', word[::-1], "-".join(word)
    elif kind == 2:
        words, at = [word, d.word(), d.word()], d.number(0, 2)
        source, printed = f"words = {json.dumps(words)}\nprint(words[{at}])", words[at]
    elif kind == 3:
        numbers = d.random.choices(range(1, 10), k=n)
        sums = [sum(numbers[: i + 1]) for i in range(n)]
        steps = ", ".join(
            f"{total - last} and {last} is {total}"
            for last, total in zip(numbers, sums, strict=True)
        )
        source, printed = f"{word} = {numbers}\nprint(sum({word}))", str(sum(numbers))
    else:
        other, mark = d.word(), d.pick("-+/_")
        source, printed = f'print("{word}", "{other}", sep="{mark}")', f"{word}{mark}{other}"
    return Task(d.phrase("code", source=source), printed, steps, check="last" if steps else "text")


PAST = {
    "sees": "saw",
    "has": "had",
    "likes": "liked",
    "wants": "wanted",
    "paints": "painted",
    "sells": "sold",
}


def rewriting(d: Draw) -> Task:
    noun, other = d.noun(), d.noun()
    text = d.free("sentence", name=d.first(), noun=noun, place=d.place(), adjective=d.adjective())
    words = text.split()
    asked, answer = d.pick(
        [
            ("replace", text.replace(noun, other)),
            ("past", " ".join([words[0], PAST[words[1]], *words[2:]])),
            ("question", f"Is it true that {text[:-1]}?"),
            ("leave out", " ".join([*words[:3], *words[4:]])),
        ]
    )
    return Task(
        d.phrase(asked, noun=noun, other=other, word=words[3], text=text), answer, check="text"
    )


def story(d: Draw) -> Task:
    values = {"name": d.first(), "friend": d.first(), "noun": d.noun(), "place": d.place()}
    others = d.random.sample([1, 3, 4, 5, 6, 7], d.number(1, 6))
    text = d.free(" ".join(TEXT["story"][at] for at in sorted([0, 2, 8, *others])), **values)
    return Task(d.phrase("story", **values), text, check="words:" + "|".join(values.values()))


def chat(d: Draw) -> Task:
    asked, answer = d.pick(TEXT["chat"])
    return Task(d.phrase(asked), answer)


# --- several turns and tools ---


def turns(d: Draw) -> Task:
    """Something told at first is asked for after other turns."""
    name, place, noun = d.first(), d.place(), d.noun()
    told = d.phrase("told", name=name, place=place, noun=noun)
    before = [
        {"role": "user", "content": told},
        {"role": "assistant", "content": f"Nice to meet you, {name}."},
    ]
    for _ in range(d.number(0, 2)):
        other = KINDS[d.pick(["arithmetic", "spelling", "repeat", "sorting", "units"])](d)
        content = f"{other.steps}\n{other.answer}" if other.steps else other.answer
        before += [
            {"role": "user", "content": other.question},
            {"role": "assistant", "content": content},
        ]
    known = {"my name": f"Your name is {name}.", "my place": f"You live in {place}."}
    known["my thing"] = d.free("You have a <noun>.", noun=noun)
    asked = d.pick(list(known))
    return Task(d.phrase(asked), known[asked], before=tuple(before))


def tool(name: str, about: str, /, **parameters: str) -> Message:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    shape = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": shape},
    }


TOOLS = {
    "get_weather": tool("get_weather", "The weather in a city.", city="string"),
    "find_person": tool("find_person", "Finds a person by name.", name="string"),
    "get_price": tool("get_price", "The price of a thing.", item="string"),
    "get_order": tool("get_order", "The state of an order.", order="string"),
    "send_message": tool("send_message", "Sends a message.", to="string", text="string"),
    "add_date": tool("add_date", "Notes a date.", date="string", title="string"),
}


def tools(d: Draw) -> Task:
    """A request that needs a call."""
    offered, question, call, _, _ = tool_use(d)
    return Task(question, "", check="call", tools=offered, call=call)


def results(d: Draw) -> Task:
    """What is said about the result of a call."""
    offered, question, call, result, answer = tool_use(d)
    asked = {"role": "assistant", "content": "", "tool_calls": [tool_call(call)]}
    returned = {
        "role": "tool",
        "tool_call_id": tool_call(call)["id"],
        "content": json.dumps(result),
    }
    return Task(
        "",
        answer,
        tools=offered,
        before=({"role": "user", "content": question}, asked),
        after=(returned,),
    )


def tool_use(d: Draw) -> tuple[tuple[Message, ...], str, Message, Message, str]:
    """(tools offered, question, call, result, answer)"""
    name = d.pick(list(TOOLS))
    arguments, result, answer = tool_facts(d, name)
    offered = [
        TOOLS[name],
        *d.random.sample([TOOLS[other] for other in TOOLS if other != name], d.number(0, 2)),
    ]
    d.random.shuffle(offered)
    return (
        tuple(offered),
        d.phrase(name, **arguments),
        {"name": name, "arguments": arguments},
        result,
        answer,
    )


def tool_facts(d: Draw, name: str) -> tuple[dict[str, str], Message, str]:
    """(arguments, result, answer) of a call of this tool."""
    if name == "get_weather":
        city, sky, degrees = (
            d.place(),
            d.pick(["sunny", "cloudy", "rainy", "foggy"]),
            d.number(2, 33),
        )
        return (
            {"city": city},
            {"sky": sky, "degrees": degrees},
            f"It is {sky} in {city}, with {degrees} degrees.",
        )
    if name == "find_person":
        person, city, job = d.person(), d.place(), d.job()
        return {"name": person}, {"city": city, "job": job}, f"{person} is a {job} in {city}."
    if name == "get_price":
        item, price = d.noun(), d.number(2, 99)
        return {"item": item}, {"price": price}, f"The {item} costs {price} euros."
    if name == "get_order":
        order, state, day = (
            d.code(),
            d.pick(["sent", "packed", "lost"]),
            d.pick(["Monday", "Tuesday", "Friday"]),
        )
        return (
            {"order": order},
            {"state": state, "day": day},
            f"Order {order} was {state} on {day}.",
        )
    if name == "send_message":
        to, text = d.first(), f"{d.word()} {d.word()}"
        return {"to": to, "text": text}, {"sent": True}, f"I have sent the message to {to}."
    date, title = d.date().isoformat(), f"{d.word()} {d.pick(['day', 'meeting', 'lunch'])}"
    return {"date": date, "title": title}, {"noted": True}, f"I have noted {title} for {date}."


KINDS: dict[str, Callable[[Draw], Task]] = {
    "repeat": repeat,
    "sorting": sorting,
    "spelling": spelling,
    "extraction": extraction,
    "schema": schema,
    "table": table,
    "document": document,
    "arithmetic": arithmetic,
    "problems": problems,
    "units": units,
    "dates": dates,
    "counting": counting,
    "sequence": sequence,
    "code": code,
    "rewriting": rewriting,
    "story": story,
    "turns": turns,
    "tools": tools,
    "results": results,
    "chat": chat,
}


def prompts(each: int, seed: int = 0, heldout: bool = True) -> list[dict[str, Any]]:
    """`each` exercises of every kind as rows, no question twice (of small talk there are fewer)."""
    rows, asked = [], set()
    for kind in KINDS:
        found = tries = 0
        while found < each and tries < 20 * each:
            row = exercise(f"prompts:{seed}:{kind}:{tries}", heldout, kind=kind).row(
                f"{kind}:{tries}"
            )
            tries += 1
            if (question := json.dumps(row["messages"])) not in asked:
                asked.add(question)
                rows.append(row)
                found += 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--each", type=int, default=16, help="exercises of each kind")
    parser.add_argument(
        "--training", action="store_true", help="of the training side, to train a head on"
    )
    options = parser.parse_args()
    rows = [
        row
        for row in prompts(options.each, heldout=not options.training)
        if row["category"] not in LEFT_OUT
    ]
    random.Random(0).shuffle(rows)  # the first few are of many kinds
    write_atomic(options.output, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} exercises of {len(KINDS) - len(LEFT_OUT)} kinds")


if __name__ == "__main__":
    main()
