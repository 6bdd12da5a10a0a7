"""OpenEnv's protocol without its package, as an ASGI application that starts at once: every step is the last one."""

from __future__ import annotations

import asyncio
import json


async def app(scope, receive, send):
  if scope["type"] == "lifespan":
    for _ in range(2):
      await send({"type": f"{(await receive())['type']}.complete"})
  elif scope["type"] == "http":
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})
  else:
    await send({"type": "websocket.accept"})
    while (event := await receive())["type"] != "websocket.disconnect":
      kind = json.loads(event.get("text") or "{}").get("type")
      data = {"observation": {"told": kind}, "reward": 1.0, "done": kind == "step"}
      if kind in ("reset", "step"):
        await send({"type": "websocket.send", "text": json.dumps({"type": "observation", "data": data})})


async def silent(scope, receive, send):
  await asyncio.sleep(600)
