"""A task with a tool for the real verifiers package, whose own harness calls it through a server of tools."""

from __future__ import annotations

import verifiers.v1 as vf


class Till(vf.Toolset[vf.ToolsetConfig, vf.State]):
  @vf.tool
  def price(self, item: str) -> str:
    """The price of an item."""
    return {"pear": "3", "plum": "4"}.get(item, "unknown")


class Buy(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
  @classmethod
  def toolsets(cls, config):
    return [Till(vf.ToolsetConfig())]

  @vf.reward
  async def right(self, trace):
    return float(trace.last_reply == "7")

  @vf.metric
  async def answers(self, trace):
    return float(len(trace.tool_messages))


class Shop(vf.Taskset[Buy, vf.TasksetConfig]):
  def load(self):
    for _ in range(2):
      yield Buy(vf.TaskData(prompt="A pear and a plum?"), self.config.task)


__all__ = ["Shop"]

if __name__ == "__main__":
  Till.run()
