"""A hub on this machine, as far as downloads and ranged reads need one; every byte of an answer is counted."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub(ThreadingHTTPServer):
    """Serves directories under `org/name`, at `main`, which is COMMIT, and `older` ones at their commits. `refuses` is
    the status that every request gets; `token` must come with each. `sent` counts bytes of bodies by file name."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.older: dict[str, dict[str, Path]] = {}
        self.tags = {"main": COMMIT}
        self.refuses, self.token = 0, ""
        self.sent: dict[str, int] = {}
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def at(self, name: str, revision: str) -> tuple[str, Path] | None:
        """The commit and the directory of a revision; None if the repository lacks it."""
        commits = {COMMIT: self.repositories[name], **self.older.get(name, {})}
        wanted = self.tags.get(revision, revision)
        matches = [commit for commit in commits if commit.startswith(wanted)]
        return (matches[0], commits[matches[0]]) if matches else None

    def sent_of_weights(self) -> int:
        return sum(count for name, count in self.sent.items() if name.endswith(".safetensors"))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        if hub.refuses:
            self.answer(
                hub.refuses, b"{}", {"X-Error-Code": "GatedRepo"} if hub.refuses == 403 else {}
            )
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif found := re.match(
            r"/api/(?:models|datasets)/([^/]+/[^/?]+)(?:/revision/([^/?]+))?(?:/tree/([^/?]+))?",
            self.path,
        ):
            self.listing(found[1], found[2] or found[3] or "main", tree=bool(found[3]))
        elif found := re.match(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)", self.path):
            self.file(found[1], found[2], found[3])
        else:
            self.answer(404, b"{}")

    def listing(self, name: str, revision: str, tree: bool) -> None:
        if name not in self.server.repositories:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        found = self.server.at(name, revision)
        if found is None:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, directory = found
        files = sorted(path for path in directory.iterdir() if path.is_file())
        if tree:
            entries = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0"}
                for path in files
            ]
            self.answer(200, json.dumps(entries).encode())
            return
        siblings = [
            {"rfilename": path.name, "size": path.stat().st_size, "blobId": "0"} for path in files
        ]
        body = {
            "_id": "0",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "tags": [],
            "downloads": 0,
        }
        self.answer(200, json.dumps(body | {"likes": 0, "siblings": siblings}).encode())

    def file(self, name: str, revision: str, file: str) -> None:
        found = self.server.at(name, revision) if name in self.server.repositories else None
        commit, path = (found[0], found[1] / file) if found else ("", Path("/nowhere"))
        if not path.is_file():
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": commit,
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted and int(wanted[2]) < len(data):
            begin, end = int(wanted[1]), int(wanted[2])
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            self.answer(206, data[begin : end + 1], headers, path.name)
        else:
            self.answer(200, data, headers, path.name)

    def answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, name: str = ""
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = 0
        try:
            for start in range(0, len(body), 1 << 14):
                self.wfile.write(body[start : start + (1 << 14)])
                sent += len(body[start : start + (1 << 14)])
        except OSError:  # the client has seen enough
            self.close_connection = True
        if name:
            with self.server.lock:
                self.server.sent[name] = self.server.sent.get(name, 0) + sent
