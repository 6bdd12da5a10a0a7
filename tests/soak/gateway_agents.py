"""Agents that run by themselves: they claim episodes, talk, think for log-normal times, and are not always polite.

    python -m soak.gateway_agents URL --agents=16 --turns=50

The admin key comes in the environment. HTTP is written by hand, so that the agents take less of the machine than the
server that they load.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import math
import os
import random
import sys
import urllib.parse

ADMIN_KEY = "SAO_AGENT_KEY"  # as of sao_jax.gateway.agent, whose import would cost each process a second
WAIT = 300.0  # seconds for an episode to claim: an agent stays until the run has ended
TALK = "go on, and say what you see"


class Line:
  """One keep-alive connection."""

  def __init__(self, url: str):
    self._host, self._port = urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port
    self._reader = self._writer = None

  def drop(self) -> None:
    """Closes the connection, whatever is under way."""
    if self._writer is not None:
      self._writer.close()
    self._reader = self._writer = None

  async def send(self, path: str, key: str, body: dict, retries: int = 0) -> None:
    """Sends a request, over a new connection where there is none; `retries` before it, as clients of OpenAI say."""
    if self._writer is None:
      self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    head += f"x-stainless-retry-count: {retries}\r\n"
    self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await self._writer.drain()

  async def receive(self) -> tuple[int, dict]:
    """Reads the response: (status, JSON)."""
    head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

  async def ask(self, path: str, key: str, body: dict, retries: int = 0) -> tuple[int, dict]:
    await self.send(path, key, body, retries)
    return await self.receive()


async def play(task: dict, line: Line, options: argparse.Namespace, rng: random.Random, done: collections.Counter):
  """Plays one episode to its reward."""
  messages = [{"role": "user", "content": f"task {task['data']['number']}"}]
  for turn in range(options.turns):
    await asyncio.sleep(rng.lognormvariate(math.log(options.delay), options.sigma) if options.delay else 0)
    retries, request = 0, ("/v1/chat/completions", task["key"], {"model": task["model"], "messages": messages})
    if rng.random() < options.dropped:
      await line.send(*request)  # and the connection breaks, before the answer or just after it
      await asyncio.sleep(rng.choice([0, options.delay]))
      line.drop()
      done["dropped"] += 1
      retries = 1
    status, answer = await line.ask(*request, retries)
    done["requests"] += 1
    if status != 200:  # the episode is over, for a reason that its outcome names
      done[answer["error"]["code"]] += 1
      return
    said = answer["choices"][0]["message"]
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": f"{TALK} {turn}"}]
  status, answer = await line.ask(urllib.parse.urlsplit(task["reward_url"]).path, task["reward_key"], {"reward": 1.0})
  done["episodes" if status == 200 else answer["error"]["code"]] += 1


async def work(url: str, options: argparse.Namespace, rng: random.Random, done: collections.Counter) -> None:
  """Claims episodes and plays them, until none comes any more."""
  line = Line(url)
  while True:
    try:
      status, task = await line.ask("/sessions", os.environ[ADMIN_KEY], {"wait": WAIT})
    except (OSError, asyncio.IncompleteReadError):
      return  # the run has ended
    if status != 200:
      line.drop()
      return
    await play(task, line, options, rng, done)


async def main() -> None:
  """Runs the agents of one process; prints what they did, as JSON."""
  parser = argparse.ArgumentParser()
  parser.add_argument("url")
  for name, default in {"agents": 16, "turns": 50, "seed": 0}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  for name, default in {"delay": 0.2, "sigma": 1.0, "dropped": 0.0}.items():
    parser.add_argument(f"--{name}", type=float, default=default)
  options, done = parser.parse_args(), collections.Counter()
  rngs = [random.Random(f"{options.seed}/{i}") for i in range(options.agents)]
  await asyncio.gather(*[work(options.url, options, rng, done) for rng in rngs])
  sys.stdout.write(json.dumps(done))


if __name__ == "__main__":
  asyncio.run(main())
