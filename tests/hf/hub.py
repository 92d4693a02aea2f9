"""A hub on this machine: takes the files that huggingface_hub commits, over HTTP, and keeps them in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The hub answers to paths that end so.
_CREATE, _PREUPLOAD, _COMMIT, _VALIDATE = "/api/repos/create", "/preupload/main", "/commit/main", "/api/validate-yaml"


class Hub:
    """`commits`: the files of every commit, in order. `refuses`: answer 403 to paths that end so."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.commits: list[dict[str, bytes]] = []
        self.refuses: str | None = None

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.refuses is not None and path.endswith(self.refuses):
            return 403, {"error": "no space left for you"}
        if path.endswith(_CREATE):
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path.endswith(_PREUPLOAD):
            paths = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in paths]}
        if path.endswith(_COMMIT):
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            number = len(self.commits)
            return 200, {
                "commitUrl": f"{self.url}/{_name_in(path)}/commit/{number}",
                "commitOid": f"{number:040x}",
                "hookOutput": "",
            }
        if path.endswith(_VALIDATE):
            return 200, {"errors": [], "warnings": []}
        return 404, {"error": f"nothing at {path}"}


def _name_in(path: str) -> str:
    """OWNER/NAME of /api/models/OWNER/NAME/..."""
    return "/".join(path.split("/")[3:5])


@contextmanager
def local_hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._send(*hub.answer(self.path, body))

        def do_GET(self) -> None:
            # No file is there: the client makes its own card. The code is how the hub says so.
            self._send(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound"})

        do_HEAD = do_GET

        def _send(self, status: int, content: dict[str, Any], **headers: str) -> None:
            data = b"" if self.command == "HEAD" else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(data)),
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
