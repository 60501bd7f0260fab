"""Runs the reference server for tests as a process: TARGET HEAD PORT [option=value ...].

SIGUSR1 kills its engine thread.
"""

import ctypes
import signal
import sys
import threading
from pathlib import Path

from trtspec.engine.server import ServerOptions, run


def kill_engine_thread(*_: object) -> None:
    thread = next(thread for thread in threading.enumerate() if thread.name == "engine")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
    )


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, kill_engine_thread)
    target, head, port, *options = sys.argv[1:]
    extra = dict(option.split("=") for option in options)
    sizes = {key: int(value) for key, value in extra.items() if value.isdigit()}
    try:
        settings = ServerOptions(
            host="127.0.0.1",
            port=int(port),
            dtype="float32",
            served_model_name="tiny-kimi",
            api_key=extra.get("api_key"),
            **sizes,  # type: ignore[arg-type]
        )
        run(Path(target), None if head == "-" else Path(head), settings)
    except KeyboardInterrupt:
        sys.exit(130)
