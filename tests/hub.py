"""A hub on 127.0.0.1 that speaks what a download needs of the real one's API, and misbehaves on demand.

    with LocalHub({"sample/10BT/000.parquet": bytes, ...}) as hub:
        hub.misbehave("cdn", status=500, times=2)
        ... HF_ENDPOINT=hub.url ...

Information about the repository, tree listing with pages, resolve by HEAD and GET with a redirect to a second
host ("cdn"), ranges, ETag, commit and linked size. Nothing else, so a test that passes here asks nothing else
of the real hub.
"""

import hashlib
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow.parquet

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """Serves `files` ({path: bytes}) as the dataset or model `repo`; use as a context manager."""

    def __init__(self, files, repo="someone/some-texts", page=1000, port=0):
        self.files, self.repo, self.page = files, repo, page
        self.requests, self.faults, self.lock = [], [], threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def misbehave(self, where, times=10**9, method="GET", **how):
        """The next `times` requests by `method` whose path begins with /`where` go wrong:

        status=int        that status, with headers={...} if given
        cut=int           the connection ends after that many bytes of the body
        short=int         the file is that many bytes shorter than the tree says
        corrupt=True      one byte of the file is another
        pause=float       that many seconds before each 64 kB
        """
        self.faults.append({"where": where, "times": times, "method": method, **how})

    def fault(self, method, path):
        with self.lock:
            for fault in self.faults:
                if fault["times"] > 0 and fault["method"] == method and path.startswith(f"/{fault['where']}"):
                    fault["times"] -= 1
                    return fault
        return {}

    def downloads(self, name):
        """How many requests asked for bytes of the file `name`."""
        return sum(method == "GET" and path == f"/cdn/{name}" for method, path in self.requests)


def parquet(rows):
    """The bytes of a parquet file of some rows, dicts with the same keys."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream := pyarrow.BufferOutputStream())
    return stream.getvalue().to_pybytes()


def environment(hub, home):
    """Of a process that uses this hub, and whose home folder is `home`: nothing should be written there."""
    home.mkdir(exist_ok=True)
    told = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    return told | {"HF_ENDPOINT": hub.url, "HOME": str(home), "PYTHONUTF8": "1"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer("HEAD")

    def do_GET(self):
        self.answer("GET")

    def answer(self, method):
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        with hub.lock:
            hub.requests.append((method, path))
        fault = hub.fault(method, path)
        try:
            if "status" in fault:
                return self.send(fault["status"], b"no", fault.get("headers", {}))
            kinds, name = "/api/(?:datasets|models)", "([^/]+(?:/[^/]+)?)"
            info = re.fullmatch(rf"{kinds}/{name}(?:/revision/[^/]+)?", path)
            tree = re.fullmatch(rf"{kinds}/{name}/tree/[^/]+/?(.*)", path)
            resolve = re.fullmatch(rf"(?:/datasets)?/{name}/resolve/([^/]+)/(.+)", path)
            repo = (info or tree or resolve or {1: hub.repo})[1]
            if repo != hub.repo:
                return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if info:
                names = [{"rfilename": name} for name in sorted(hub.files)]
                return self.send_json({"id": repo, "sha": COMMIT, "siblings": names, "tags": []})
            if tree:
                return self.tree(tree[2])
            name = resolve[3] if resolve else path.removeprefix("/cdn/")
            if name not in hub.files:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return self.resolve(name) if resolve else self.file(name, fault)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def send(self, status, body, headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_json(self, value, headers=None):
        headers = {"Content-Type": "application/json", **(headers or {})}
        self.send(200, json.dumps(value).encode(), headers)

    def entry(self, name):
        data = self.server.hub.files.get(name)
        if data is None:
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        return {"type": "file", "oid": "0" * 40, "size": len(data), "path": name,
                "lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 130}}

    def tree(self, folder):
        hub, query = self.server.hub, parse_qs(urlsplit(self.path).query)
        names = sorted(name for name in hub.files if not folder or name.startswith(f"{folder}/"))
        if not names:
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        if query.get("recursive", [""])[0].lower() != "true":  # what is in the folder itself
            depth = folder.count("/") + 2 if folder else 1
            names = sorted({"/".join(name.split("/")[:depth]) for name in names})
        start = int(query.get("cursor", ["0"])[0])
        more = {}
        if start + hub.page < len(names):
            recursive = query.get("recursive", [""])[0]
            address = f"{hub.url}{urlsplit(self.path).path}?recursive={recursive}&cursor={start + hub.page}"
            more = {"Link": f'<{address}>; rel="next"'}
        return self.send_json([self.entry(name) for name in names[start:start + hub.page]], more)

    def resolve(self, name):
        data = self.server.hub.files[name]
        return self.send(302, b"", {
            "Location": f"http://localhost:{self.server.server_port}/cdn/{name}", "X-Repo-Commit": COMMIT,
            "X-Linked-Size": len(data), "X-Linked-ETag": f'"{sha256(data)}"', "Accept-Ranges": "bytes"})

    def file(self, name, fault):
        data = self.server.hub.files[name]
        if fault.get("corrupt"):
            data = bytes([data[0] ^ 1]) + data[1:]
        data = data[:len(data) - fault.get("short", 0)]
        start, end, headers = 0, len(data), {"ETag": f'"{sha256(data)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
            if start >= len(data):
                return self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self.send_response(206 if wanted else 200)
        for key, value in {"Content-Length": end - start, **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return None
        stop = min(end, start + fault.get("cut", len(data)))
        for place in range(start, stop, 1 << 16):
            time.sleep(fault.get("pause", 0))
            self.wfile.write(data[place:min(place + (1 << 16), stop)])
        if stop < end:
            self.close_connection = True
            self.connection.close()
        return None


def sha256(data):
    return hashlib.sha256(data).hexdigest()
