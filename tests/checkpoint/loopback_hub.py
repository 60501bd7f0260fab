"""A hub on this machine, with the downloads and ranged reads that tests need; bytes are counted."""

import hashlib
import json
import re
from pathlib import Path

from tests.command_line import LocalHandler, LocalServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub(LocalServer):
    """Serves directories under `org/name`.

    `main` is COMMIT, and `older` ones are at their commits. `refuses` is the status that every
    request gets; `token` must come with each. `sent` counts bytes of bodies by file name.
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.older: dict[str, dict[str, Path]] = {}
        self.tags = {"main": COMMIT}
        self.refuses, self.token = 0, ""
        self.sent: dict[str, int] = {}
        super().__init__(_Handler)

    def at(self, name: str, revision: str) -> tuple[str, Path] | None:
        """The commit and the directory of a revision; None if the repository lacks it."""
        commits = {COMMIT: self.repositories[name], **self.older.get(name, {})}
        wanted = self.tags.get(revision, revision)
        matches = [commit for commit in commits if commit.startswith(wanted)]
        return (matches[0], commits[matches[0]]) if matches else None

    def sent_of_weights(self) -> int:
        return sum(count for name, count in self.sent.items() if name.endswith(".safetensors"))


class _Handler(LocalHandler):
    protocol_version = "HTTP/1.1"
    server: LoopbackHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        models = (
            r"/api/(?:models|datasets)/([^/]+/[^/?]+)(?:/revision/([^/?]+))?(?:/tree/([^/?]+))?"
        )
        files = r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)"
        if hub.refuses:
            self.refuse(hub.refuses, "GatedRepo" if hub.refuses == 403 else "")
        elif hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.refuse(401, "RepoNotFound")
        elif found := re.match(models, self.path):
            self.listing(found[1], found[2] or found[3] or "main", tree=bool(found[3]))
        elif found := re.match(files, self.path):
            self.file(found[1], found[2], found[3])
        else:
            self.refuse(404, "")

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", X_Error_Code=code)

    def listing(self, name: str, revision: str, tree: bool) -> None:
        if name not in self.server.repositories:
            self.refuse(404, "RepoNotFound")
            return
        found = self.server.at(name, revision)
        if found is None:
            self.refuse(404, "RevisionNotFound")
            return
        commit, directory = found
        files = sorted(path for path in directory.iterdir() if path.is_file())
        sizes = {path.name: path.stat().st_size for path in files}
        entries = [
            {"type": "file", "path": name, "rfilename": name, "size": size, "oid": "0"}
            for name, size in sizes.items()
        ]
        body = {"_id": "0", "id": name, "sha": commit, "private": False, "tags": []}
        body |= {"downloads": 0, "likes": 0, "siblings": entries}
        self.answer(200, json.dumps(entries if tree else body).encode())

    def file(self, name: str, revision: str, file: str) -> None:
        found = self.server.at(name, revision) if name in self.server.repositories else None
        commit, path = (found[0], found[1] / file) if found else ("", Path("/nowhere"))
        if not path.is_file():
            self.refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        headers = {"ETag": tag, "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted and int(wanted[2]) < len(data):
            begin, end = int(wanted[1]), int(wanted[2])
            ranges = f"bytes {begin}-{end}/{len(data)}"
            self.answer(206, data[begin : end + 1], **headers, Content_Range=ranges)
        else:
            self.answer(200, data, **headers)

    def write(self, body: bytes) -> None:
        """Counts what the client takes of a file or a page."""
        sent = 0
        try:
            for start in range(0, len(body), 1 << 14):
                sent += self.wfile.write(body[start : start + (1 << 14)])
        except OSError:  # the client has seen enough
            self.close_connection = True
        name = self.path.partition("?")[0].rpartition("/")[2]
        with self.server.lock:
            self.server.sent[name] = self.server.sent.get(name, 0) + sent
