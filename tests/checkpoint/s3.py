"""S3 on loopback: moto's server as a process, and between it and a client a stand-in that fails on request."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "canary-secret-9f3b"
DENIED = b"<?xml version='1.0'?><Error><Code>InvalidAccessKeyId</Code><Message>canary-secret-9f3b</Message></Error>"
_HOP_BY_HOP = {
    "connection",
    "transfer-encoding",
    "content-length",
    "server",
    "date",
    "host",
    "content-encoding",
    "expect",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextlib.contextmanager
def server() -> Iterator[str]:
    """-> the address of a store that believes every credential."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "moto's server did not start"
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


class StandIn:
    """Passes requests on to `address`. `fault(number, method, path)` says what becomes of each: None, 503, 403, "cut"
    (the connection ends), "flip" (a bit of what is uploaded) or an event, which it waits for. `range`: the header of
    the request that `fault` is asked about."""

    def __init__(self, address: str):
        self.address = address
        self.fault: Callable[[int, str, str], object] = lambda number, method, path: None
        self.requests: list[tuple[str, str]] = []
        self.faults = 0
        self.range = ""
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # a body would wait for the client to acknowledge the headers, which it puts off for 40 ms
            disable_nagle_algorithm = True

            def log_message(self, *_: object) -> None:
                """Nothing."""

            def answer(self) -> None:
                outer._answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        data = _body(handler)
        with self._lock:
            self.requests.append((handler.command, handler.path))
            self.range = handler.headers.get("Range") or ""
            fault = self.fault(len(self.requests), handler.command, handler.path)
            if fault is not None:
                self.faults += 1
        if isinstance(fault, threading.Event):
            fault.wait(60)
        if fault == "cut":
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if fault == "flip" and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        if isinstance(fault, int):
            text = DENIED if fault == 403 else b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>"
            _send(handler, fault, {"Content-Type": "application/xml"}, text)
            return
        # urllib would call it a form, of which moto reads no body
        headers = {"Content-Type": "application/octet-stream"}
        for name, value in handler.headers.items():
            # checksums of the client's are of the bytes before the flip
            if name.lower() not in _HOP_BY_HOP and "checksum" not in name.lower() and name.lower() != "content-md5":
                headers[name] = value
        request = urllib.request.Request(self.address + handler.path, data or None, headers, method=handler.command)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                _send(handler, answer.status, dict(answer.headers.items()), answer.read())
        except urllib.error.HTTPError as error:
            _send(handler, error.code, dict(error.headers.items()), error.read())


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    """What a client sends; chunks of aws-chunked are put together."""
    data = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    if "aws-chunked" not in (handler.headers.get("Content-Encoding") or ""):
        return data
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        if length == 0:
            break
        whole += data[:length]
        data = data[length + 2 :]
    return whole


def _send(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], data: bytes) -> None:
    handler.send_response(status)
    length = str(len(data))
    for name, value in headers.items():
        if name.lower() == "content-length" and handler.command == "HEAD":
            length = value
        if name.lower() not in _HOP_BY_HOP:
            handler.send_header(name, value)
    handler.send_header("Content-Length", length)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)


def environment(url: str) -> dict[str, str]:
    """What a client on this machine needs: no credentials but these, and no metadata service."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "canary-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": "1",
    }
