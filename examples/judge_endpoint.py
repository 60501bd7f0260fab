"""Judges a speculating endpoint against one without speculation, row by row.

The exit status is that of `trtspec check`.

python examples/judge_endpoint.py http://localhost:8000 http://localhost:8001
"""

import json
import subprocess
import sys


def main(url: str, plain_url: str, *options: str) -> int:
    command = [
        sys.executable,
        "-m",
        "trtspec",
        "check",
        url,
        "--against",
        plain_url,
        "--json",
        *options,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    verdict = json.loads(done.stdout)
    if "error" in verdict:
        print(f"{verdict['error']['message']}\n-> {verdict['error']['remedy']}")
    for row in verdict.get("results", []):
        print(f"{row['status']:11}{row['name']:14}{row['why'] or ''}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
