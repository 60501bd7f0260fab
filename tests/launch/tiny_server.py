"""The smallest server that a launch can wait for: `tiny_server.py PORT MODE`, standard library only.

MODE: serve | silent (never listens) | long-line (logs 60 MB without a line end, then serves) | tidy, deaf (load for
long; tidy takes TIDY seconds to end when it is asked, deaf does not listen)
"""

import http.server
import json
import signal
import sys
import time

TIDY = 1.0


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
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"text": "x"}]})


if __name__ == "__main__":
    port, mode = int(sys.argv[1]), sys.argv[2]
    if mode == "silent":
        time.sleep(600)
    if mode in ("tidy", "deaf"):
        signal.signal(
            signal.SIGTERM, lambda *_: (time.sleep(TIDY), sys.exit(0)) if mode == "tidy" else None
        )
        print("loading", flush=True)
        time.sleep(600)
    if mode == "long-line":
        for _ in range(60):
            sys.stdout.write("x" * 2**20)
        sys.stdout.flush()
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
