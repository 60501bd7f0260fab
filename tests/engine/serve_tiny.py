"""Runs the reference server for the tests as a process of its own: TARGET HEAD PORT [option=value ...]."""

from __future__ import annotations

import sys
from pathlib import Path

from trtspec.engine.server import ServerOptions, run

if __name__ == "__main__":
    target, head, port, *options = sys.argv[1:]
    extra = dict(option.split("=") for option in options)
    sizes = {key: int(value) for key, value in extra.items() if value.isdigit()}
    try:
        settings = ServerOptions(
            host="127.0.0.1",
            port=int(port),
            dtype="float32",
            served_model_name="tiny-kimi",
            **sizes,  # type: ignore[arg-type]
        )
        run(Path(target), None if head == "-" else Path(head), settings)
    except KeyboardInterrupt:
        sys.exit(130)
