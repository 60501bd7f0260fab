"""`trtspec explain`: the meaning of a problem code, its reason, its examples and its remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from trtspec.data_files import documented, load_yaml
from trtspec.errors import UsageError, did_you_mean
from trtspec.records import JsonOption, argument
from trtspec.report import Result


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    code: Annotated[str, argument("Problem code, such as TS-LINT-UNKNOWN-KEY.")]
    json_: JsonOption = False


def explain(options: ExplainOptions) -> Result:
    """Say what a problem code means, why, and what to do."""
    from trtspec.trtllm.schema import rule_files

    codes = documented()
    code = options.code.upper()
    written = re.search("TS-[A-Z0-9-]+", code)  # the code may be in a pasted line
    if written:
        code = written[0]
    if code not in codes:
        remedy = did_you_mean(code, codes, "copy the code from a message: TS- and capital letters")
        raise UsageError(f"{options.code} is not a problem code", remedy)
    entry = codes[code]
    what, _, reason = entry["summary"].partition(". ")
    lines = [code, f"  what     {what}"]
    if reason:
        lines += [f"  why      {reason}"]
    for release_line in rule_files().values():
        rules = filter(None, release_line["rules"].values())
        for rule in rules:
            if rule.get("code") == code:
                lines.append(f"  why      {rule['message']} ({rule['source']})")
    for example in load_yaml("examples.yaml").get(entry["area"], []):
        lines.append(f"  example  {example}")
    lines.append(f"  fix      {entry['remedy']}")
    return Result({"code": code, **entry}, lines=lines)
