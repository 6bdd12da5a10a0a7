"""PyTorch with transformers' Qwen3: one update of a critic and one of a policy, all parameters training, on fixed rows.

The dense model is compiled; that with experts is not, since its loop over the experts that occur breaks the graph.
Runs in the peers' Python; see `sao_jax.benchmarks.peers`.
"""

import json
import math
import sys

import torch
import transformers
from serving import serve


def make_model(config, seed=0):
  """A random Qwen3, dense or with experts."""
  torch.manual_seed(seed)
  moe = config["num_experts"] > 0
  kind = transformers.Qwen3MoeConfig if moe else transformers.Qwen3Config
  head = transformers.Qwen3MoeForCausalLM if moe else transformers.Qwen3ForCausalLM
  model = head(kind(**config, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa"))
  return model.float().train()


def main():
  task = json.loads(sys.argv[1])
  config, rows = task["model"], task["rows"]
  policy, critic = make_model(config), make_model(config, seed=1).model
  head = torch.nn.Linear(config["hidden_size"], 1, bias=False)
  policy_optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=(0.9, 0.98), weight_decay=0.1)
  critic_parameters = [*critic.parameters(), *head.parameters()]
  critic_optimizer = torch.optim.AdamW(critic_parameters, lr=5e-6, betas=(0.9, 0.98), weight_decay=0.1)

  # The first quarter of a row is its prompt.
  generator = torch.Generator().manual_seed(0)
  ids = torch.randint(0, config["vocab_size"], (rows, task["prompt"] + task["answer"]), generator=generator)
  advantages = torch.randn((rows, task["answer"]), generator=generator)
  returns = torch.randint(0, 2, (rows, task["answer"]), generator=generator).float()
  behavior = torch.full((rows, task["answer"]), -math.log(config["vocab_size"]))
  answers = ids[:, task["prompt"] :]

  def value_loss():
    values = head(critic(input_ids=ids).last_hidden_state[:, task["prompt"] - 1 : -1])[..., 0]
    return torch.mean((values - returns) ** 2)

  def policy_loss():
    logits = policy(input_ids=ids).logits[:, task["prompt"] - 1 : -1]
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, answers[..., None])[..., 0]
    ratio = torch.exp(logprobs.detach() - behavior)
    weights = torch.where((ratio > 0.7) & (ratio < 6.0), ratio, 0.0) * advantages
    return -torch.mean(weights * logprobs)

  if not config["num_experts"]:
    value_loss, policy_loss = torch.compile(value_loss), torch.compile(policy_loss)

  def update(loss, optimizer, parameters, norm):
    optimizer.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    torch.nn.utils.clip_grad_norm_(parameters, norm)
    optimizer.step()
    assert math.isfinite(value.item())

  def run():
    update(value_loss, critic_optimizer, critic_parameters, 10.0)
    update(policy_loss, policy_optimizer, list(policy.parameters()), 1.0)

  for _ in range(2):
    serve(run)


if __name__ == "__main__":
  main()
