"""A model hub on this machine: enough of the HTTP interface for the real client to commit and to fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40


@dataclass
class Hub:
    """What it holds and was told.

    Attributes:
        files: repository -> name -> content.
        tokens: of all requests.
        made: bodies of requests that made a repository.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)
    made: list[dict[str, Any]] = field(default_factory=list)
    address: str = ""


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that is up while the block runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def answer(self, status: int, value: Any = None, **headers: str) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name.replace("_", "-"), text)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def body(self) -> bytes:
            hub.tokens.add(self.headers.get("Authorization"))
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_POST(self) -> None:
            body = self.body()
            path = self.path.partition("?")[0]
            if path == "/api/repos/create":
                hub.made.append(json.loads(body))
                name = "/".join(filter(None, (hub.made[-1].get("organization"), hub.made[-1]["name"])))
                hub.files.setdefault(name, {})
                self.answer(200, {"url": f"{hub.address}/{name}", "name": name})
            elif path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in path:
                wanted = json.loads(body)["files"]
                modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in wanted]
                self.answer(200, {"files": modes})
            elif "/commit/" in path:
                name = path.removeprefix("/api/models/").partition("/commit/")[0]
                for line in body.splitlines():
                    entry = json.loads(line)
                    if entry["key"] == "file":
                        hub.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                self.answer(200, {"commitUrl": f"{hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
            else:
                self.answer(404, {"error": path})

        def do_GET(self) -> None:
            self.body()
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/"):
                rest = path.removeprefix("/api/models/")
                name = "/".join(rest.split("/")[:2])
                if name not in hub.files:
                    self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
                elif "/tree/" in rest:
                    self.answer(200, [_entry(name_, data) for name_, data in hub.files[name].items()])
                else:
                    names = [{"rfilename": one} for one in hub.files[name]]
                    self.answer(200, {"id": name, "modelId": name, "sha": COMMIT, "siblings": names, "tags": []})
                return
            owner, repo, _, _, *file = path.strip("/").split("/")
            data = hub.files.get(f"{owner}/{repo}", {}).get("/".join(file))
            if data is None:
                self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
            else:
                self.answer(200, data, ETag=f'"{_oid(data)}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
