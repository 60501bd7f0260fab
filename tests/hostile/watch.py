"""Asks a server for /health ten times a second and reads its memory: HOST PORT PID.

A process of its own, since the clients beside it are busy. Ends with its input; prints one JSON
object.
"""

import http.client
import json
import select
import sys
import time

import psutil

host, port, process = sys.argv[1], int(sys.argv[2]), psutil.Process(int(sys.argv[3]))
longest, failed, memory = 0.0, [], []
while not select.select([sys.stdin], [], [], 0.1)[0]:
    began = time.monotonic()
    try:
        link = http.client.HTTPConnection(host, port, timeout=30)
        link.request("GET", "/health")
        if (status := link.getresponse().status) != 200:
            failed.append(f"status {status}")
        link.close()
    except OSError as error:
        failed.append(repr(error))
    longest = max(longest, time.monotonic() - began)
    memory.append(process.memory_info().rss)
print(json.dumps({"longest": longest, "failed": failed, "memory": memory}))
