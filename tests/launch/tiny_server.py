"""The smallest server that a launch can wait for: `tiny_server.py PORT MODE`.

Standard library only. MODE is one of

- serve
- silent: never listens
- mute: never generates
- long-line: logs 60 MB without a line end, then serves
- tidy, slow, deaf: load for long; the first two take TIDY seconds to end when asked, deaf does
  not listen
"""

import http.server
import json
import os
import signal
import sys
import time

TIDY = {"tidy": 0.3, "slow": 600.0}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass

    def answer(self, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        if sys.argv[2:] == ["mute"]:
            time.sleep(600)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": "x"}]})


def end(*_: object) -> None:
    if mode in TIDY:
        os.write(1, b"tidying\n")  # it may interrupt a print
        time.sleep(TIDY[mode])
        sys.exit(0)


if __name__ == "__main__":
    port, mode = int(sys.argv[1]), sys.argv[2]
    if mode == "silent":
        time.sleep(600)
    if mode in (*TIDY, "deaf"):
        signal.signal(signal.SIGTERM, end)
        print("loading", flush=True)
        time.sleep(600)
    if mode == "long-line":
        for _ in range(60):
            sys.stdout.write("x" * 2**20)
        sys.stdout.flush()
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
