"""Services inside the sandbox, reached from outside, and the service that programs inside can ask."""

import json
import os
import socket
from urllib.parse import urlsplit

import httpx
import pytest

ORIGIN = os.environ.get("E2B_SANDBOX_URL", "")


@pytest.fixture(scope="module")
def server(sandbox):
    """An HTTP server that listens on the guest's loopback only."""
    sandbox.files.write("/home/user/site/index.html", "from inside")
    sandbox.files.write(
        "/home/user/echo.py",
        "import http.server\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    protocol_version = 'HTTP/1.1'\n"
        "    def do_GET(self):\n"
        "        if self.headers.get('Upgrade') == 'echo':\n"
        "            self.send_response(101); self.send_header('Upgrade', 'echo'); self.send_header('Connection', 'Upgrade')\n"
        "            self.end_headers(); self.close_connection = True\n"
        "            while data := self.connection.recv(4096): self.connection.sendall(data.upper())\n"
        "            return\n"
        "        self.answer(b'GET ' + self.path.encode() + b' ' + self.headers.get('X-Mine', '-').encode())\n"
        "    def do_POST(self):\n"
        "        body = self.rfile.read(int(self.headers['Content-Length']))\n"
        "        self.answer(b'POST %d ' % len(body) + body[-10:])\n"
        "    def answer(self, body):\n"
        "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()\n"
        "        self.wfile.write(body)\n"
        "    def log_message(self, *a): pass\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', 8123), H).serve_forever()\n",
    )
    handle = sandbox.commands.run("exec python3 echo.py", background=True, timeout=0)
    sandbox.commands.run("until (exec 3<>/dev/tcp/127.0.0.1/8123) 2>/dev/null; do sleep 0.1; done", timeout=20)
    yield 8123
    handle.kill()


def by_headers(sandbox, port):
    return {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": str(port)}


def test_a_loopback_server_is_reached_by_headers(sandbox, server):
    answer = httpx.get(f"{ORIGIN}/a/path?q=1", headers={**by_headers(sandbox, server), "X-Mine": "yes"})
    assert (answer.status_code, answer.text) == (200, "GET /a/path?q=1 yes")


def test_a_loopback_server_is_reached_by_host_name(sandbox, server):
    host = sandbox.get_host(server)
    assert host.startswith(f"{server}-{sandbox.sandbox_id}.")
    answer = httpx.get(f"{ORIGIN}/by-name", headers={"Host": host})
    assert (answer.status_code, answer.text) == (200, "GET /by-name -")


def test_a_large_body_passes(sandbox, server):
    body = b"x" * (3 << 20) + b"the end..."
    answer = httpx.post(f"{ORIGIN}/", headers=by_headers(sandbox, server), content=body, timeout=30)
    assert answer.text == f"POST {len(body)} the end..."


def test_an_upgraded_connection_passes_bytes_both_ways(sandbox, server):
    origin = urlsplit(ORIGIN)
    with socket.create_connection((origin.hostname, origin.port), timeout=10) as wire:
        wire.sendall(
            f"GET /ws HTTP/1.1\r\nHost: {origin.netloc}\r\nConnection: Upgrade\r\nUpgrade: echo\r\n"
            f"E2b-Sandbox-Id: {sandbox.sandbox_id}\r\nE2b-Sandbox-Port: {server}\r\n\r\n".encode()
        )
        head = b""
        while b"\r\n\r\n" not in head:
            head += wire.recv(4096)
        assert head.startswith(b"HTTP/1.1 101"), head
        wire.sendall(b"hello")
        answer = b""
        while len(answer) < 5:
            answer += wire.recv(16)
        assert answer == b"HELLO"


def test_a_closed_port_says_so(sandbox):
    answer = httpx.get(ORIGIN, headers=by_headers(sandbox, 8999), timeout=15)
    assert answer.status_code == 502
    assert "port is not open" in answer.json()["message"]
    assert answer.json()["port"] == 8999


def test_an_unknown_sandbox_says_so():
    answer = httpx.get(ORIGIN, headers={"E2b-Sandbox-Id": "a" * 20, "E2b-Sandbox-Port": "80"})
    assert answer.status_code == 502
    assert "was not found" in answer.json()["message"]


@pytest.mark.parametrize("path", ["/init", "/freeze"])
def test_host_only_calls_are_not_reachable_from_outside(sandbox, path):
    headers = {**by_headers(sandbox, 49983), "X-Access-Token": sandbox._envd_access_token or ""}
    assert httpx.post(f"{ORIGIN}{path}", headers=headers, json={}).status_code == 404


def test_programs_inside_can_ask_the_loopback_service(sandbox):
    with_token = 'curl -sf -H "X-Access-Token: $(cat /run/space/token)" http://localhost:49983/envs'
    assert json.loads(sandbox.commands.run(with_token).stdout)["GREETING"] == "hello world"
    status = "curl -s -o /dev/null -w %{http_code} http://localhost:49983"
    assert sandbox.commands.run(f"{status}/envs").stdout == "401"
    assert sandbox.commands.run(f"{status}/health").stdout == "204"
    assert sandbox.commands.run(f'{status}/init -X POST -H "X-Access-Token: $(cat /run/space/token)"').stdout == "404"


def test_the_token_of_the_guest_opens_nothing_from_outside(sandbox):
    token = sandbox.commands.run("cat /run/space/token").stdout.strip()
    assert token and token != sandbox._envd_access_token
    headers = {**by_headers(sandbox, 49983), "X-Access-Token": token}
    assert httpx.get(f"{ORIGIN}/envs", headers=headers).status_code == 401
