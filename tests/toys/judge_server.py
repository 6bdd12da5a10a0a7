"""An endpoint of chat completions on this machine, which does what the model's name says, well or badly."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator


class JudgeServer(http.server.ThreadingHTTPServer):
  """Attributes:
  requests: the bodies that came, with the key of each under "key".
  over: set when the test is over, so that what hangs ends.
  most: the largest number of slow requests at a time.
  """

  daemon_threads = True

  def __init__(self):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.requests: list[dict] = []
    self.over = threading.Event()
    self.lock, self.now, self.most = threading.Lock(), 0, 0

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextlib.contextmanager
def serve() -> Iterator[JudgeServer]:
  server = JudgeServer()
  thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
  thread.start()
  try:
    yield server
  finally:
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
  server: JudgeServer
  protocol_version = "HTTP/1.1"

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["content-length"])))
    with self.server.lock:
      self.server.requests.append(body | {"key": self.headers["authorization"]})
      number = sum(each["model"] == body["model"] for each in self.server.requests)
    self._answer(body["model"], body["messages"][0]["content"], number)

  def _answer(self, model: str, message: str, number: int) -> None:
    word = re.search(r"\nScore (\w+):", message).group(1)
    wanted = re.search(r"worth (-?\d+)", message)
    verdict = f"Fine.\n\nScore {word}: {wanted.group(1) if wanted else 0}"
    kind, _, more = model.partition(":")
    if kind == "hang":
      self.server.over.wait()
    elif kind == "slow":
      with self.server.lock:
        self.server.now += 1
        self.server.most = max(self.server.most, self.server.now)
      self.server.over.wait(0.05)
      with self.server.lock:
        self.server.now -= 1
      self._say(verdict)
    elif kind == "drop":
      self.close_connection = True
      self.connection.close()
    elif kind == "status":  # refuses the first ones of so many: "status:503:2"
      status, _, times = more.partition(":")
      if times and number > int(times):
        self._say(verdict)
      else:
        self._send(int(status), json.dumps({"error": {"message": f"no, {self.headers['authorization']}"}}))
    elif kind == "raw":
      self._send(200, more)
    elif kind == "echo":  # repeats what it was given to judge, and no more
      self._say(re.search(r"<answer-\w+>\n(.*)\n</answer-\w+>", message, re.DOTALL).group(1))
    elif kind == "says":  # gives a verdict at the given time only: "says:3"
      self._say(verdict if number >= int(more) else "I think it is worth 7.")
    else:
      self._say(verdict)

  def _say(self, text: str) -> None:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
    reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "x", "choices": [choice], "usage": usage}
    self._send(200, json.dumps(reply))

  def _send(self, status: int, text: str) -> None:
    with contextlib.suppress(OSError):  # it does not wait any more
      self.send_response(status)
      self.send_header("content-type", "application/json")
      self.send_header("retry-after-ms", "1")
      self.send_header("content-length", str(len(text.encode())))
      self.end_headers()
      self.wfile.write(text.encode())

  def log_message(self, *arguments):
    pass
