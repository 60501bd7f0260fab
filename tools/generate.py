"""Writes the documents of docs/reference that are made from the code.

They are cli-reference.md, problems.md (data/problems), support-matrix.md, and chart-values.md from
the chart's schema.

`python tools/generate.py` writes them; `--check` (part of `make lint`) exits 1 when one is not up
to date, and when a problem code is used without being documented or documented without being used.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "reference"
PACKAGE = ROOT / "trtspec"
NOTE = "<!-- Written by tools/generate.py; edit the code instead. -->\n\n"
CODE = re.compile(r"\bTS-[A-Z0-9]+(?:-[A-Z0-9]+)+\b")
AREAS = {
    "cli": "Failures of any command (`error.code` of its `--json`)",
    "inspect": "Checkpoints: targets, heads and their pairs (`trtspec inspect`)",
    "quantize": "Quantization (`trtspec quantize`, `trtspec inspect --against`)",
    "train": (
        "Draft heads and their training (`trtspec synthesize`, `trtspec train`, `trtspec convert`)"
    ),
    "lint": (
        "Engine configuration and launch (`trtspec build-config`, `trtspec lint`, `trtspec serve`)"
    ),
    "serve": "Several nodes and disaggregated deployments (`trtspec serve`)",
    "check": "Measurements and the gate (`trtspec bench`, `trtspec check`)",
    "doctor": "The machine (`trtspec doctor`)",
}


def cli_reference() -> str:
    """One section per command: its help text, then its arguments and options as a table."""
    from trtspec.cli.app import COMMANDS, app

    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = ["# Command reference\n"]
    lines.append(
        "Every option can also be given as a variable, `TRTSPEC_<COMMAND>_<OPTION>`; "
        "the command line wins. Underscores are accepted for dashes. "
        "`trtspec -q` silences progress.\n"
    )
    lines.append("| exit status | meaning |\n|---|---|")
    meanings = {
        0: "done",
        1: "failure",
        2: "wrong usage",
        3: "a check found problems",
        4: "something is missing",
    }
    lines += [
        f"| {status} | {meaning} |" for status, meaning in (meanings | {130: "interrupted"}).items()
    ]
    for panel, names in COMMANDS.items():
        lines.append(f"\n## {panel}")
        lines += [section(name, commands[name].load()) for name in names]
    return "\n".join(lines) + "\n"


def section(name: str, command: Any) -> str:
    from trtspec.data_files import load_yaml

    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [
        param
        for param in command.params
        if param.param_type_name == "option" and param.name != "help"
    ]
    usage = " ".join(["trtspec", name, *(metavar(argument) for argument in arguments), "[OPTIONS]"])
    lines = [
        f"\n### trtspec {name}\n",
        f"```\n{usage}\n```\n",
        inspect.cleandoc(command.help or ""),
    ]
    if arguments or options:
        lines.append("\n| | | default |\n|---|---|---|")
    lines += [row(f"`{metavar(argument)}`", argument) for argument in arguments]
    panels = list(dict.fromkeys(option.rich_help_panel for option in options))
    for panel in panels:
        lines += [f"| **{panel}** | | |"] if panel else []
        lines += [
            row(", ".join(f"`{s}`" for s in spellings(o)), o)
            for o in options
            if o.rich_help_panel == panel
        ]
    examples = load_yaml("examples.yaml").get(name, ())
    return "\n".join([*lines, *(["\n```", *examples, "```"] if examples else [])])


def metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def spellings(option: Any) -> list[str]:
    """All spellings of an option, with its choices or type after the last unless it is a flag."""
    flags = [*option.opts, *option.secondary_opts]
    if option.is_bool_flag:
        return flags
    annotation = option.type_descriptor.annotation
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    kind = (
        option.metavar
        or "|".join(map(str, choices))
        or getattr(annotation, "__name__", "value").upper()
    )
    return [*flags[:-1], f"{flags[-1]} {kind}"]


def row(label: str, param: Any) -> str:
    default = param.default
    shown = (
        ""
        if default in (None, False, (), [], "") or callable(default) or "UNSET" in repr(default)
        else f"`{default}`"
    )
    told = getattr(param, "show_default", None)
    shown = told if isinstance(told, str) else shown
    text = " ".join((param.help or "").split()).replace("|", "\\|")
    return (
        f"| {label.replace('|', chr(92) + '|')} | {text} | "
        f"{'required' if param.required else shown} |"
    )


def stub() -> str:
    """trtspec/__init__.pyi: verbs with their records' types and defaults, for editors and mypy."""
    from trtspec import COMMANDS, lint  # type: ignore[attr-defined]
    from trtspec.records import fields_of, record_of

    lines = [
        "# Written by tools/generate.py; edit the records of the commands instead.",
        "from collections.abc import Mapping, Sequence",
        "from pathlib import Path",
        "from typing import Any, Literal",
        "",
        "from trtspec.engine.engine import Engine as Engine",
        "from trtspec.errors import TrtspecError as TrtspecError",
        "from trtspec.report import Result as Result",
        "",
        "__version__: str",
    ]
    for name in COMMANDS:
        function = getattr(import_module(f"trtspec.cli.{name}"), name)
        found = [
            field for field in fields_of(record_of(function)).values() if field.name != "json_"
        ]
        needed = [
            f"{field.keyword}: {python_type(field)}"
            for field in found
            if field.default is field.empty
        ]
        more = [
            f"{f.keyword}: {python_type(f)} = {default_text(f.default)}"
            for f in found
            if f.default is not f.empty
        ]
        parts = [*needed, *(["*"] if more else []), *more]
        lines += ["", f"def {name}(", *(f"    {part}," for part in parts), ") -> Result:"]
        lines.append(f'    """{inspect.cleandoc(function.__doc__ or "").splitlines()[0]}"""')
    lines += ["", "def lint("]
    for parameter in inspect.signature(lint).parameters.values():
        star = ["    *,"] if parameter.name == "trtllm_version" else []
        lines += [*star, f"    {str(parameter).replace(chr(39), '')},"]
    lines.append(") -> Result:")
    lines.append(f'    """{inspect.cleandoc(lint.__doc__ or "").splitlines()[0]}"""')
    return "\n".join(lines) + "\n"


def python_type(field: Any) -> str:
    """What a call may pass: text and paths alike, lists in place of their texts."""
    none = " | None" if type(None) in get_args(field.type) or field.default is None else ""
    if field.many:
        return "str | Path | Sequence[str | Path]" + none
    if field.parse is not None:
        return "str | float | Sequence[float]" + none
    kinds = [one for one in (field.type, *get_args(field.type)) if one is not type(None)]
    choices = next((one for one in kinds if get_origin(one) is Literal), None)
    if choices is not None:
        return f"Literal[{', '.join(map(repr, get_args(choices)))}]" + none
    plain = next(one for one in kinds if isinstance(one, type) and not get_args(one))
    return {str: "str | Path", Path: "str | Path"}.get(plain, plain.__name__) + none


def default_text(value: Any) -> str:
    return (
        repr(value)
        if isinstance(value, (str, int, float, bool, tuple, type(None)))
        else repr(str(value))
    )


def problems() -> str:
    """The codes of each area as a list, each with an anchor: problems.md#ts-pair-width."""
    from trtspec.data_files import documented

    codes = documented()
    lines = ["# Problem codes\n"]
    lines.append(
        "A problem has a `code`, a `severity` (error, warning, info), a place, "
        "a message and a remedy. Codes are stable: scripts may test for them. "
        "`trtspec explain CODE` prints the same in a terminal.\n"
    )
    for area in dict.fromkeys(entry["area"] for entry in codes.values()):
        lines.append(f"## {AREAS.get(area, area)}\n")
        for code, entry in codes.items():
            if entry["area"] == area:
                lines.append(
                    f'<a id="{code.lower()}"></a>**`{code}`**<br>{entry["summary"]}<br>→ '
                    f"{entry['remedy']}\n"
                )
    return "\n".join(lines)


def support_matrix() -> str:
    """Engine releases from trtllm/schemas, models and pairs from data/models.yaml."""
    from trtspec.checkpoint.published import catalogue, reasoning_parser
    from trtspec.families.known import family_of

    models = catalogue()
    lines = ["# Support matrix\n", "## TensorRT-LLM releases\n"]
    lines.append(
        "Release notes do not say when most of this changed. So a date has two ends: "
        "the newest release read without the change and the oldest read with it. "
        "For a release in between, `trtspec lint` and `trtspec serve` warn and name the interval. "
        "As evidence, *verified* was read in a release's own files, pull requests or issues, "
        "or was run; *inferred* follows from snapshots or dates; *unknown* was not examined.\n"
    )
    lines += [*features(), *behaviours(), *speculation()]
    lines += vllm_releases()
    lines.append(
        "\n## Targets\n\n"
        "| hub id | format | size | parsers (reasoning, tools) | not verified |\n"
        "|---|---|---|---|---|"
    )
    for target in models.targets.values():
        size = f"{target.bytes / 1e9:,.0f} GB" if target.bytes else "not known"
        family = family_of(target.config)
        reasoning = reasoning_parser(family, target.id, "trtllm")
        parsers = f"{reasoning or 'none'}, {family.tool_parser}"
        doubts = ", ".join(target.unverified) or "nothing"
        lines.append(f"| {target.id} | {target.format} | {size} | {parsers} | {doubts} |")
    refused = "; ".join(f"{name}: {reason}" for name, reason in models.refused.items())
    lines.append(f"\nRefused: {refused}.\n\n## Eagle3 heads and their real pairs\n")
    lines.append("| hub id | attention | EAGLE | layout | published for |\n|---|---|---|---|---|")
    for head in models.heads.values():
        attention, version = "not known", "3"
        if head.config is not None:
            attention = "MLA" if head.config.get("kv_lora_rank") else "MHA"
            version = "3.1" if head.config.get("fc_norm") else "3"
        targets = ", ".join(head.targets)
        lines.append(f"| {head.id} | {attention} | {version} | {head.dialect} | {targets} |")
    return "\n".join(lines) + "\n"


def vllm_releases() -> list[str]:
    """The releases of vLLM that are known, and the weight formats that they load."""
    from trtspec.data_files import load_yaml

    data = load_yaml("vllm.yaml")
    lines = ["\n## vLLM releases\n"]
    lines.append(
        f"`trtspec serve --backend vllm` takes {data['oldest']} to {data['newest']} and judges a "
        f"newer release as {data['newest']}, with a warning. Options after `--` go to "
        "`vllm serve`, which judges them itself. "
        "Of vLLM's configuration file `trtspec lint` judges the keys alone.\n"
    )
    lines.append("| weights of the target | evidence |\n|---|---|")
    return lines + [
        f"| {name} | {row['evidence']}: {row['source']} |" for name, row in data["formats"].items()
    ]


def features() -> list[str]:
    """The first release of each feature, and the known issues, as the commands read them."""
    from trtspec.trtllm.schema import issue_rules, releases, schema_for

    lines = ["| feature | first release | source |\n|---|---|---|"]
    for rule, *_ in schema_for(str(releases()[0])).rules.values():
        if rule and rule.feature:
            dates: Any = rule.until
            lines.append(f"| {rule.feature} | {between(dates)} | {rule.source} |")
    lines.append("\n| by release notes | gone | remedy |\n|---|---|---|")
    for issue in issue_rules().values():
        lines.append(f"| {issue['message']} | {between(issue['until'])} | {issue['remedy']} |")
    return lines


def behaviours() -> list[str]:
    """What releases do that costs acceptance, memory or the server, or that changed its meaning."""
    from trtspec.trtllm.schema import rule_files

    schemas = rule_files()
    lines = [
        "\nWhat a release does with what it is given, where that changed or costs something. "
        "The names are those of the schema files; a line inherits from the one before, "
        "and *ends here* marks what it does not inherit:\n"
    ]
    lines.append("| behaviour | line | from | until | evidence |\n|---|---|---|---|---|")
    for line in schemas:
        for name, entry in (schemas[line]["behaviours"] | schemas[line]["rules"]).items():
            if entry is None:
                lines.append(f"| {name.replace('_', ' ')} | {line} | | ends here | |")
            elif "feature" not in entry and (
                "when" not in entry or {"since", "until"} & set(entry)
            ):
                ends = [between(entry.get(key)) for key in ("since", "until")]
                told = f"{entry['evidence']}: {entry['source']}"
                lines.append(
                    f"| {name.replace('_', ' ')} | {line} | {ends[0]} | {ends[1]} | {told} |"
                )
    return lines


def between(dates: dict[str, str] | None) -> str:
    if dates is None:
        return ""
    known = [f"{word} {dates[word]}" for word in ("after", "by") if dates.get(word)]
    return ", ".join(known if dates.get("by") else [*known, "release not known"])


def speculation() -> list[str]:
    """Ways to speculate, from trtllm/speculation.yaml."""
    from trtspec.trtllm.schema import read_beside

    rows = read_beside("speculation.yaml")["methods"]
    lines = [
        "\nWays to speculate:\n\n| decoding_type | draft | with a Kimi | why |\n|---|---|---|---|"
    ]
    for row in rows.values():
        kimi = row["kimi"]
        lines.append(
            f"| {', '.join(row['spellings'])} | {row['draft']} | {kimi['runs']} | {kimi['why']} |"
        )
    return lines


CHART = ROOT / "docker" / "helm" / "trtspec"


def chart_values() -> str:
    """Every value of the Helm chart, from its schema, with its default from values.yaml."""
    import json

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    lines = ["# Values of the chart\n", "| value | what | default |\n|---|---|---|"]
    for name, part in schema["properties"].items():
        if name != "global":
            lines += value_rows(schema["definitions"], name, part, defaults[name])
    return "\n".join(lines) + "\n"


def engine_keys() -> str:
    """Every key of an engine file in any known release, for the chart.

    It says whether the keys below are known too.
    """
    from trtspec.trtllm.schema import OPTIONS, classes

    readings = [
        (owner.partition(":")[0], reading)
        for owner, listed in classes().items()
        if owner != OPTIONS
        for reading in listed
    ]
    whole = {parent for parent, reading in readings if reading.whole}
    paths = {entry.path for _, reading in readings for entry in reading.entries.values()}
    known = {path: path in whole for path in sorted(paths)}
    return json_text(known).replace(", ", ",\n") + "\n"


def schema_differences() -> str:
    """What each source says other than the sources before it."""
    from tools.snapshots import compare

    lines = [
        "# What the sources say differently\n",
        "Each line: the source's release, the class of the engine, "
        "and what a key has other than in the sources before it. "
        "`1.3.0rc27.dev0` is a commit between 1.3.0rc26 and 1.3.0rc27.\n",
    ]
    return "\n".join([*lines, *(f"- {line}" for line in compare())]) + "\n"


def value_rows(
    definitions: dict[str, Any], name: str, part: dict[str, Any], default: Any
) -> list[str]:
    """One row, and one for each value below it."""
    below = {**definitions.get(part.get("$ref", "").rpartition("/")[2], {}), **part}.get(
        "properties", {}
    )
    if not below:
        choices = ", ".join(f"`{choice}`" for choice in part.get("enum", []) if choice)
        told = f"{part['description']}{f' ({choices})' if choices else ''}".replace("|", "\\|")
        shown = "" if default in ("", None, [], {}) else f"`{json_text(default)}`"
        return [f"| `{name}` | {told} | {shown} |"]
    rows = [f"| **`{name}`** | {part['description']} | |"]
    for key, value in below.items():
        rows += value_rows(definitions, f"{name}.{key}", value, default[key])
    return rows


def json_text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def undocumented() -> list[str]:
    """Problem codes that the source uses and no fragment documents, and the other way round."""
    sources = [path for pattern in ("*.py", "*.yaml", "*.yml") for path in PACKAGE.rglob(pattern)]
    used = {
        code
        for path in sources
        if path.parent.name != "problems"
        for code in CODE.findall(path.read_text(encoding="utf-8"))
    }
    fragments = [
        yaml.safe_load(path.read_text("utf-8"))
        for path in (PACKAGE / "data" / "problems").glob("*.yaml")
    ]
    counts = Counter(code for fragment in fragments for code in fragment)
    known = set(counts)
    lines = [
        f"{code} is documented in two fragments" for code, count in counts.items() if count > 1
    ]
    lines += [
        f"{code} is used and not documented in trtspec/data/problems"
        for code in sorted(used - known)
    ]
    return lines + [f"{code} is documented and never used" for code in sorted(known - used)]


def main() -> None:
    from trtspec.bench.check.kinds import page

    check = "--check" in sys.argv[1:]
    complaints = undocumented()
    documents = {
        "cli-reference.md": cli_reference(),
        "problems.md": problems(),
        "support-matrix.md": support_matrix(),
        "schema-differences.md": schema_differences(),
        "chart-values.md": chart_values(),
        "fault-kinds.md": page(),
    }
    wanted_texts = {DOCS / name: NOTE + text for name, text in documents.items()}
    others = {PACKAGE / "__init__.pyi": stub(), CHART / "engine-keys.json": engine_keys()}
    for path, wanted in (wanted_texts | others).items():
        stale = not path.is_file() or path.read_text(encoding="utf-8") != wanted
        if stale and check:
            complaints.append(
                f"{path.relative_to(ROOT)} is not up to date: run `python tools/generate.py`"
            )
        elif stale:
            path.write_text(wanted, encoding="utf-8")
    for line in complaints:
        print(line, file=sys.stderr)
    if check and complaints:
        sys.exit(1)


if __name__ == "__main__":
    main()
