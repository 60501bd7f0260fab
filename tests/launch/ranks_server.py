"""A server of several processes: `ranks_server.py PORT`.

Its ranks have sessions of their own, as Open MPI's have, and one is an orphan. It loads for a
moment, prints all pids, serves, and ends with 1 when a rank has ended.
"""

import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tiny_server import Handler


def rank() -> int:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"], start_new_session=True
    ).pid


def orphan() -> int:
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, str(rank()).encode())
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))


def watch(ranks: list[int]) -> None:
    while True:
        time.sleep(0.05)
        for pid in ranks:
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                print(f"rank {pid} ended", flush=True)
                os._exit(1)


if __name__ == "__main__":
    ranks = [rank(), rank(), orphan()]
    print("pids", os.getpid(), *ranks, flush=True)
    threading.Thread(target=watch, args=(ranks,), daemon=True).start()
    time.sleep(0.1)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
