"""Whether a server is ready: /health says so, and a real generation comes back (a hung engine still says healthy)."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

HEALTH_TIMEOUT = 2.0


def is_healthy(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=HEALTH_TIMEOUT) as response:
            return response.status == 200
    except (OSError, ValueError, HTTPException):
        return False


def generates(base_url: str, timeout: float) -> str | None:
    """None when one token comes back within `timeout` seconds, else the reason in words."""
    try:
        model = _json(f"{base_url}/v1/models", None, timeout)["data"][0]["id"]
        body = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        choices = _json(f"{base_url}/v1/completions", body, timeout)["choices"]
        return None if choices else "the answer has no choices"
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode('utf-8', 'replace')}"
    except urllib.error.URLError as error:
        timed_out = isinstance(error.reason, TimeoutError)
        return f"no answer within {timeout:g} s" if timed_out else str(error.reason)
    except HTTPException as error:  # the server went away in the middle of its answer
        return f"the answer broke off: {type(error).__name__}"
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _json(url: str, body: dict[str, Any] | None, timeout: float) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.loads(response.read())
