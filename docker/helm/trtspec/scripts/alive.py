"""Liveness of a server: ends with 1 when it does not answer /health, or when for SECONDS nothing shows progress.

Progress is an answer of one token, or a counter of finished requests that moved: a busy server may leave this one
waiting. An engine that hangs still answers /health with 200.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

BASE = os.environ.get("TRTSPEC_ALIVE_URL", "http://127.0.0.1:8000")
STATE = os.environ.get("TRTSPEC_ALIVE_STATE", "/tmp/trtspec-alive.json")
PATIENCE = float(
    os.environ.get("TRTSPEC_ALIVE_PATIENCE", "25")
)  # seconds for one answer; below the probe's own timeout


def get(path, body=None, timeout=10.0):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.read().decode()


def finished():
    """Sum of the counters of /prometheus/metrics; None where the engine does not offer it."""
    try:
        lines = get("/prometheus/metrics").splitlines()
    except (OSError, ValueError):
        return None
    counts = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return sum(float(value) for name, value in counts if name.partition("{")[0].endswith(("_total", "_count")))


def answers():
    try:
        model = json.loads(get("/v1/models"))["data"][0]["id"]
        get("/v1/completions", {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}, PATIENCE)
    except urllib.error.HTTPError as error:
        return error.code in (400, 413, 422, 429)  # refused by a server that works
    except (OSError, ValueError, LookupError):
        return False
    return True


def main():
    try:
        get("/health", timeout=min(10.0, PATIENCE))
    except (OSError, ValueError) as error:
        sys.exit(f"/health: {error}")
    try:
        with open(STATE) as file:
            since, before = json.load(file)
    except (OSError, ValueError):
        since, before = time.time(), None
    count = finished()
    if answers() or (count is not None and before is not None and count != before):
        since = time.time()
    with open(STATE, "w") as file:
        json.dump([since, count], file)
    waited = time.time() - since
    if waited > float(sys.argv[1]):
        sys.exit(f"/health answers, and nothing was generated for {waited:.0f} s")


if __name__ == "__main__":
    main()
