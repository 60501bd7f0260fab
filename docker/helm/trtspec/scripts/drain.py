"""Before a server is stopped: waits until nobody is connected to its port, at most SECONDS.

The pod leaves the Service at the same moment as this starts, so it waits a while even where it
sees nobody: requests may still be on their way.
"""

import os
import sys
import time

PORT = int(os.environ.get("TRTSPEC_DRAIN_PORT", "8000"))
SETTLE = float(os.environ.get("TRTSPEC_DRAIN_SETTLE", "10"))
ESTABLISHED = "01"  # proc(5)


def connections():
    found = 0
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(path) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        found += sum(
            row[3] == ESTABLISHED and int(row[1].rpartition(":")[2], 16) == PORT for row in rows
        )
    return found


def main():
    limit = float(sys.argv[1])
    start = time.monotonic()
    while (waited := time.monotonic() - start) < limit and (waited < SETTLE or connections()):
        time.sleep(min(1.0, limit))


if __name__ == "__main__":
    main()
