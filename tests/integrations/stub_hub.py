"""A Hugging Face Hub on the loopback interface: repositories in memory, commits of small files."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler

HEAD = "a" * 40


class Hub:
    """What the server has: files by repository, and the requests it got."""

    def __init__(self):
        self.repositories = {}
        self.requests = []


class Handler(BaseHTTPRequestHandler):
    """The part of the Hub's API that models need."""

    protocol_version = "HTTP/1.1"

    def answer(self, status, content=b"", **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.hub.requests.append(f"{self.command} {self.path}")
        match = re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", self.path)
        files = self.server.hub.repositories.get(match[1], {}) if match else {}
        if not match or match[2] not in files:
            code = "EntryNotFound" if match and match[1] in self.server.hub.repositories else "RepoNotFound"
            self.answer(404, b"", X_Error_Code=code, X_Repo_Commit=HEAD)
            return
        content = files[match[2]]
        self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=HEAD)

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        self.server.hub.requests.append(f"POST {self.path}")
        if "Bearer" not in self.headers.get("Authorization", ""):
            self.answer(401, {"error": "no token"})
        elif self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
            self.answer(200, {"files": files})
        elif "/commit/" in self.path:
            self.commit(body)
        else:
            self.answer(200, {})

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        self.server.hub.repositories.setdefault(name, {})
        self.answer(200, {"url": f"http://{self.headers['Host']}/{name}"})

    def commit(self, body):
        name = re.match(r"/api/models/([^/]+/[^/]+)/", self.path)[1]
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.hub.repositories[name][line["value"]["path"]] = content
        url = f"http://{self.headers['Host']}/{name}/commit/{HEAD}"
        self.answer(200, {"success": True, "commitOid": HEAD, "commitUrl": url, "hookOutput": ""})

    def log_message(self, *arguments):
        pass
