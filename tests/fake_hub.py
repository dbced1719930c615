"""A hub of repositories on a real local socket, with the failures that networks have."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".gguf")


@dataclass
class Hub:
    """`files` by repository and name. Of the files in `cut`, a response ends after so many bytes, each number
    once; of those in `stalled`, it waits after so many bytes, once, until `released`."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    stalled: dict[str, int] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    released: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, name of a file, and range of each request for a file's content."""
    sent: dict[str, int] = field(default_factory=dict)

    def add(self, repository: str, folder: Path) -> None:
        """Offer the files of a folder."""
        self.files[repository] = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def etag_of(name: str, data: bytes) -> str:
    """As the hub names contents: large files by their sha256, others as git does."""
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def _answer(self, method: str) -> None:
        steps = unquote(urlsplit(self.path).path).strip("/").split("/")
        if steps[:2] == ["api", "models"]:
            self._about("/".join(steps[2:4]), steps[4:])
        elif len(steps) > 4 and steps[2] == "resolve":
            self._file(method, "/".join(steps[:2]), "/".join(steps[4:]))
        else:
            self._missing("EntryNotFound")

    def _about(self, repository: str, rest: list[str]) -> None:
        files = self.hub.files.get(repository)
        if files is None:
            return self._missing("RepoNotFound")
        if rest[:1] == ["tree"]:
            return self._json([_entry("path", name, data) | {"type": "file"} for name, data in files.items()])
        siblings = [_entry("rfilename", name, data) for name, data in files.items()]
        self._json({"id": repository, "sha": COMMIT, "siblings": siblings})

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, method: str, repository: str, name: str) -> None:
        data = self.hub.files.get(repository, {}).get(name)
        if data is None:
            return self._missing("EntryNotFound" if repository in self.hub.files else "RepoNotFound")
        asked = self.headers.get("Range", "")
        self.hub.asked.append((method, name, asked))
        begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked and method == "GET" else 0
        self.send_response(206 if begin else 200)
        self.send_header("ETag", f'"{etag_of(name, data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if method == "GET":
            self._send(name, bytes(len(data)) if name in self.hub.damaged else data, begin)

    def _send(self, name: str, data: bytes, begin: int) -> None:
        cuts = self.hub.cut.get(name)
        end = begin + cuts.pop(0) if cuts else len(data)
        if name in self.hub.stalled:
            at = begin + self.hub.stalled.pop(name)
            self._write(name, data[begin:at])
            self.hub.released.wait(30)
            end = at
        else:
            self._write(name, data[begin:end])
        self.close_connection = end < len(data)

    def _write(self, name: str, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()
        self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data)


def _entry(key: str, name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {key: name, "size": len(data), "oid": etag_of(name, data)}
    entry["blobId"] = entry["oid"]
    if name.endswith(LARGE):
        digest = etag_of(name, data)
        entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers at its `url` until the end of the block."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the hub's client at `hub`, with an empty cache, short waits and small pieces."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    slept = time.sleep
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: slept(0.01))
