"""A bucket of Google Cloud Storage in memory: the part of its JSON interface that gcsfs and tensorstore speak.

Objects are whole or not there, every write has a new generation, and the preconditions on generations hold.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

BUCKET = "bucket"
EPOCH = "2026-01-01T00:00:00.000Z"


class Objects(dict):
  """Name to (generation, bytes), and the uploads that have begun."""

  def __init__(self):
    super().__init__()
    self.generations, self.lock, self.uploads = itertools.count(1), threading.RLock(), {}

  def put(self, name: str, data: bytes) -> dict:
    self[name] = (next(self.generations), bytes(data))
    return self.metadata(name)

  def metadata(self, name: str) -> dict:
    generation, data = self[name]
    return {
      "kind": "storage#object",
      "id": f"{BUCKET}/{name}/{generation}",
      "name": name,
      "bucket": BUCKET,
      "generation": str(generation),
      "metageneration": "1",
      "size": str(len(data)),
      "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
      "etag": str(generation),
      "contentType": "application/octet-stream",
      "timeCreated": EPOCH,
      "updated": EPOCH,
    }

  def listed(self, query: dict[str, str]) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    items, prefixes = [], set()
    for name in sorted(self):
      beyond = query.get("endOffset") and name >= query["endOffset"]
      if not name.startswith(prefix) or name < query.get("startOffset", "") or beyond:
        continue
      head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
      if found:
        prefixes.add(prefix + head + delimiter)
      else:
        items.append(self.metadata(name))
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  wbufsize, disable_nagle_algorithm = -1, True  # head and body in one packet: no wait for an acknowledgement
  objects: Objects

  def log_message(self, *unused: object) -> None:
    pass

  def _answer(self, status: int, body: bytes | dict = b"", **headers: str) -> None:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    self.send_response(status)
    self.send_header("Content-Type", "application/json" if isinstance(body, dict) else "application/octet-stream")
    for name, value in headers.items():
      self.send_header(name.replace("_", "-"), value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    with contextlib.suppress(BrokenPipeError):  # a client that has seen enough
      self.wfile.write(data)

  def _missing(self) -> None:
    self._answer(404, {"error": {"code": 404, "message": "No such object"}})

  def _holds(self, name: str, query: dict[str, str]) -> bool:
    """Answers, and returns False, where a precondition on the object's generation does not hold."""
    now = str(self.objects[name][0]) if name in self.objects else "0"
    if query.get("ifGenerationMatch", now) != now:
      self._answer(412, {"error": {"code": 412, "message": "a precondition does not hold"}})
      return False
    if query.get("ifGenerationNotMatch") == now:
      self._answer(304)
      return False
    return True

  def _handle(self) -> None:
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
    if self.headers.get("Transfer-Encoding") == "chunked":
      while size := int(self.rfile.readline(), 16):
        body += self.rfile.read(size)
        self.rfile.readline()
      self.rfile.readline()
    parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
    with self.objects.lock:
      if parts[0] == "upload":
        self._upload(query, body)
      elif parts[-1] == "o":
        self._answer(200, self.objects.listed(query))
      elif "o" in parts:
        self._object(parts[parts.index("o") + 1 :], query)
      else:
        self._answer(200, {"kind": "storage#bucket", "name": BUCKET, "id": BUCKET})

  do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

  def _object(self, parts: list[str], query: dict[str, str]) -> None:
    name = parts[0]
    if name not in self.objects:
      self._missing()
    elif not self._holds(name, query):
      pass
    elif self.command == "DELETE":
      del self.objects[name]
      self._answer(204)
    elif len(parts) > 1:  # rewriteTo/b/BUCKET/o/NAME, copyTo/..., moveTo/o/NAME
      copy = self.objects.put(parts[-1], self.objects[name][1])
      if parts[1] == "moveTo":
        del self.objects[name]
      self._answer(200, {"done": True, "resource": copy} if parts[1] == "rewriteTo" else copy)
    elif query.get("alt") == "media":
      self._media(name)
    else:
      self._answer(200, self.objects.metadata(name))

  def _media(self, name: str) -> None:
    generation, data = self.objects[name]
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
    headers = {"x_goog_generation": str(generation), "x_goog_stored_content_length": str(len(data))}
    if not wanted:
      self._answer(200, data, **headers)
      return
    first, last = wanted[1], wanted[2]
    start = int(first) if first else max(0, len(data) - int(last))
    stop = min(len(data), int(last) + 1) if first and last else len(data)
    if start >= len(data):
      self._answer(416)
      return
    self._answer(206, data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(data)}", **headers)

  def _upload(self, query: dict[str, str], body: bytes) -> None:
    kind = query["uploadType"]
    if kind == "resumable" and "upload_id" in query:
      name, data = self.objects.uploads[query["upload_id"]]
      data += body
      if self.headers["Content-Range"].endswith("/*"):
        self._answer(308, Range=f"bytes=0-{len(data) - 1}")
        return
    elif kind == "resumable":
      name, key = json.loads(body)["name"], str(next(self.objects.generations))
      if self._holds(name, query):
        self.objects.uploads[key] = (name, bytearray())
        self._answer(200, Location=f"http://{self.headers['Host']}{self.path}&upload_id={key}")
      return
    elif kind == "multipart":
      boundary = re.search(r'boundary="?([^"]+)"?', self.headers["Content-Type"])[1]
      _, description, content, _ = body.split(boundary.encode())
      name = json.loads(description.split(b"\n\n", 1)[1].rsplit(b"--", 1)[0])["name"]
      data = content.split(b"\n\n", 1)[1].removesuffix(b"\n--")
    else:
      name, data = query["name"], body
    if self._holds(name, query):
      self._answer(200, self.objects.put(name, data))


@functools.cache
def of_this_process() -> tuple[Objects, dict[str, str]]:
  """The one server of a process, until its end: the libraries keep the first that they have spoken to."""
  stack = contextlib.ExitStack()
  atexit.register(stack.close)
  return stack.enter_context(served())


@contextlib.contextmanager
def served() -> Iterator[tuple[Objects, dict[str, str]]]:
  """Serves an empty bucket on this machine; yields its objects, and the variables under which libraries find it."""
  objects = Objects()
  handler = type("Handler", (_Handler,), {"objects": objects})
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    variables = {
      "STORAGE_EMULATOR_HOST": address,  # gcsfs
      "TENSORSTORE_GCS_HTTP_URL": address,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",  # tensorstore looks for no credentials
      "FSSPEC_GCS_TOKEN": "anon",
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask another service for the kind of bucket
    }
    try:
      yield objects, variables
    finally:
      server.shutdown()
      thread.join()
