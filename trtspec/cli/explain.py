"""`trtspec explain`: what a problem code means and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated

from trtspec.data_files import documented
from trtspec.errors import UsageError
from trtspec.records import JsonOption, argument
from trtspec.report import Result


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    code: Annotated[str, argument("Problem code, such as TS-LINT-UNKNOWN-KEY.")]
    json_: JsonOption = False


def explain(options: ExplainOptions) -> Result:
    """Say what a problem code means, why it matters and what to do."""
    codes, code = documented(), options.code.upper().strip("[]`")
    if code not in codes:
        near = get_close_matches(code, codes, n=3) or ["trtspec explain TS-ERROR-USAGE"]
        raise UsageError(f"{options.code} is not a problem code", f"close to it: {', '.join(near)}")
    found = codes[code]
    return Result(
        {"code": code, **found}, lines=[code, f"  {found['summary']}", f"  -> {found['remedy']}"]
    )
