"""Small environments for the real verifiers package: sums, in one turn or with hints, and a harness in this process."""

from __future__ import annotations

import openai
import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
  count: int = 30
  first: int = 0
  breaks: str = ""


class SumData(vf.TaskData):
  total: int
  breaks: str = ""


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
  async def setup(self, trace, runtime):
    if self.data.breaks == "setup":
      raise ValueError("no table")

  @vf.reward(weight=2.0)
  async def right(self, trace):
    if self.data.breaks == "reward":
      raise ValueError("the rubric broke")
    return float(trace.last_reply == str(self.data.total))

  @vf.metric
  async def said(self, trace):
    return float(len(trace.last_reply))


class Sums(vf.Taskset[Sum, SumsConfig]):
  def load(self):
    for number in range(self.config.first, self.config.first + self.config.count):
      prompt = f"{number}+1?"
      data = SumData(prompt=prompt, system_prompt="Add.", total=number + 1, breaks=self.config.breaks)
      yield Sum(data, self.config.task)


class Direct(vf.Harness[vf.HarnessConfig]):
  """Asks once, in this process; it goes on with what the user says."""

  APPENDS_SYSTEM_PROMPT = True
  SUPPORTS_RESUME = True
  EXECUTES_CODE = False
  NEEDS_CONTAINER = False

  async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
    system, prompt = self.resolve_prompt(data)
    messages = [{"role": "system", "content": system}] if system else []
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages += [each if isinstance(each, dict) else each.model_dump(exclude_none=True) for each in asked]
    async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
      await client.chat.completions.create(model=ctx.model, messages=messages)
    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Direct", "Sums"]
