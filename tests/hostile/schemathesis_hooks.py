"""Hooks of schemathesis (SCHEMATHESIS_HOOKS): its millions of tokens become four."""

from typing import Any

import schemathesis

MOST = 4


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name)) is int and body[name] > MOST:
            body[name] = MOST
    if "messages" in body and not body.get("max_completion_tokens"):
        body.setdefault("max_tokens", MOST)
