"""Every program of a run compiles for each kind of TPU, without one; and figures become a table and advice."""

from __future__ import annotations

import dataclasses
import io
import math
import pathlib
import subprocess
import sys

import pytest
import rich.console
from toys.paths import REPOSITORY
from toys.pod_toy import LENGTH, RUNS, compile_in_a_process
from toys.tpu_process import needs_libtpu

from configs import glm_5_2, qwen3_4b, qwen3_30b_a3b
from sao_jax.config import MeshConfig
from sao_jax.configuration.relations import validate
from sao_jax.huggingface.published import total_params
from sao_jax.models.expert_buffer import FEW_PAIRS
from sao_jax.parallel.mesh import AXES
from sao_jax.pod import measure
from sao_jax.pod.compilations import (
  PROGRAMS,
  PUBLISHED_RUNS,
  arguments_of_one,
  suite,
  topology_of_sampler,
  without_hosts,
)
from sao_jax.pod.tables import advice, tables, together, together_table


@needs_libtpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  "run, topology",
  [("dense", "v5e:2x4"), ("latent", "v5p:2x2x2"), ("many", "v6e:4x4"), ("experts", "tpu7x:2x2x1")],
)
def test_all_programs_compile_for_a_topology(run, topology):
  # Prompts with experts are read in the run of many pairs too, and on this mesh by latent attention.
  programs = ("step", "decode", "publish") + (() if run == "experts" else ("prefill",))
  figures = {each["program"]: each for each in compile_in_a_process(run, topology, programs)}
  assert all(each["fits"] and each["peak_bytes"] > 0 for each in figures.values())
  step, publish = figures["step"], figures["publish"]
  assert step["devices"] == publish["devices"] == (16 if run == "many" else 8)

  # The product of a step is at least what the model needs, and at most what it needs with all activations once more.
  needed = step["model_flops"]
  assert needed < step["flops"]["all"] < 4 * needed
  line = step["roofline"]
  assert line["seconds"] == max(line["mxu_seconds_expected"], line["hbm_seconds"], line["ici_seconds"]) > 0
  assert line["ici_seconds"] == pytest.approx(
    sum(row["wire_bytes"] / step["bandwidth"][row["axes"]] for row in step["collectives"])
  )

  # Experts are kernels of a TPU: three products, and two more for the gradient of each.
  if RUNS[run].model.num_experts:
    assert all(any(name in kernel for kernel in step["kernels"]) for name in ("gmm", "tgmm"))
  # So is sparse attention, whose kernels state what they cost.
  if RUNS[run].model.index_topk:
    assert {"selected_attention_forward", "selected_attention_backward"} <= set(step["kernels"])
    assert step["flops"]["attention kernels"] > 0
  assert {row["axes"] for row in step["collectives"]} & {"fsdp", "tensor", "expert", "context"}
  assert step["tokens"] == 16 * LENGTH
  check_attention(RUNS[run], step)
  check_experts(RUNS[run], step)


def check_attention(config, step):
  """One kernel forward and one backward per layer and pass; forward again only where nothing is kept."""
  model = config.model
  sparse = bool(model.index_topk)
  names = (
    ("selected_attention_forward", "selected_attention_backward") if sparse else ("splash_mha_fwd", "splash_mha_d")
  )
  forward, backward = (sum(runs for each, runs in step["kernels"].items() if each.startswith(name)) for name in names)
  trained = model.num_layers * (config.algorithm.value_updates + 1)  # and values are a pass without a gradient
  again = 0 if model.remat == "attention" else trained
  assert (forward, backward) == (model.num_layers + trained + again, trained)
  rematerialised = [name for name, op_name in step["attention kernels"] if "rematted_computation" in op_name]
  assert any(name.startswith(names[0]) for name in rematerialised) == bool(again)


def check_experts(config, step):
  """Where there are many pairs, experts have no more rows than half above their share of them."""
  model, shards = config.model, config.mesh.expert
  tokens = step["tokens"] // step["devices"] * shards
  pairs = tokens * model.num_experts_per_token
  if model.num_experts and pairs > FEW_PAIRS:
    rows = {shape[0] for shape, name in step["arrays"] if "experts" in name and len(shape) == 2 and shape[1] >= 128}
    assert max(rows) == 1.5 * pairs / shards > tokens


@pytest.mark.parametrize("module", [qwen3_30b_a3b, glm_5_2, qwen3_4b])
def test_published_configurations_are_valid(module):
  config = module.get_config()
  validate(without_hosts(config), training=True)
  assert config.algorithm.value_updates == 2 and config.algorithm.freeze_attention and config.algorithm.needs_critic
  assert config.rollout.batch_size == 128 == max(config.rollout.row_counts)
  assert max(config.rollout.row_lengths) == (32_768 if module is qwen3_4b else 131_072)
  run = next(each for each in PUBLISHED_RUNS if each[0] == f"{module.__name__.replace('.', '/')}.py")
  topology = run[1].removeprefix("--topology=")
  devices = math.prod(map(int, topology.partition(":")[2].split("x")))
  assert math.prod(getattr(config.mesh, axis) for axis in AXES) == devices
  assert topology_of_sampler(config, topology) in ("v6e:2x2", "v5p:2x2x1", "v5p:4x4x4")
  # fp32 parameters and two moments of both networks take less than half of what the chips have.
  assert 2 * 12 * total_params(config.model) / devices < 0.5 * 31.25 * 2**30 * (3 if "v5p" in topology else 1)


def test_the_sampler_has_a_topology_of_its_own():
  config = RUNS["dense"]
  assert topology_of_sampler(config, "v5p:4x4x4") == "v5p:4x4x4"
  sampler = dataclasses.replace(config.sampler, mesh=MeshConfig(fsdp=1, tensor=4))
  assert topology_of_sampler(dataclasses.replace(config, sampler=sampler), "v5p:4x4x4") == "v5p:2x2x1"


def test_each_compilation_gets_the_arguments_of_its_own():
  whole = ["--programs", "step,decode", "--config", "a.py", "--json=x.json", "--jobs=2", "--config.mesh.fsdp", "4"]
  assert arguments_of_one(whole) == ["--config", "a.py", "--config.mesh.fsdp", "4"]


def test_the_suite_names_its_configurations_itself():
  requests = suite(PROGRAMS)
  assert len(requests) == len(PUBLISHED_RUNS) * len(PROGRAMS)
  for request in requests:
    config, *more = request.arguments
    assert pathlib.Path(config.removeprefix("--config=")).is_file() and any("topology" in flag for flag in more)


@pytest.mark.parametrize(
  ("arguments", "named"),
  [
    (["--suite", "--topology=v5p:4x4x4"], "--topology"),
    (["--suite=true", "--programs=steps"], "--programs"),
    (["-suite", "--config=a.py"], "'config'"),
  ],
)
def test_what_a_suite_cannot_use_is_refused(arguments, named):
  command = [sys.executable, "-m", "launch.compile_pod", *arguments]
  done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.startswith("error: ") and named in done.stderr.splitlines()[0]


def test_what_lies_in_a_chip_together():
  figures = lambda program, topology, peak, resident: {
    "run": "a", "program": program, "topology": topology, "peak_bytes": peak, "hbm_limit_bytes": 100, "fits": True,
    "resident_bytes": resident, "placement": "shared",
  }  # fmt: skip
  step = figures("step", "v5p:4x4x4", 70, {"policy": 10})
  decode = figures("decode", "v5p:4x4x4", 45, {"parameters": 15, "cache and slots": 20})
  (both,) = together([step, decode])
  assert both["total_bytes"] == 70 + 15 + 20 and not both["fits"]
  learner, sampler = together([each | {"placement": "split"} for each in (step, decode)])
  assert (learner["total_bytes"], sampler["total_bytes"]) == (70, 45 + 15) and learner["fits"] and sampler["fits"]
  console = rich.console.Console(file=io.StringIO(), width=150)
  console.print(together_table([both]))
  assert "peak of step" in console.file.getvalue()
  assert together([{"program": "step", "fits": False, "message": "it broke"}]) == []


TOO_LARGE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 161.00G of 95.74G hbm. Exceeded hbm capacity by 65.26G.

Largest program allocations in hbm:

  1. Size: 24.00G
     Operator: op_name="jit(step)/while/body/dot_general" source_file="a.py"
     Shape: bf16[48,131072,2048]{2,1,0:T(8,128)(2,1)}
     Unpadded size: 24.00G

  2. Size: 1.50M
     Shape: f32[8,16384,131072]{2,1,0}
"""


def test_what_does_not_fit_is_said_with_what_to_change():
  figures = measure.too_large(TOO_LARGE, lambda: "")
  assert figures["needed_bytes"] == 161 * 2**30 and not figures["fits"]
  assert [(row["array"], row["bytes"]) for row in figures["largest_arrays"]] == [
    ("bf16[48,131072,2048]", 24 * 2**30),
    ("f32[8,16384,131072]", 1.5 * 2**20),
  ]
  figures |= {"program": "step", "run": "a", "topology": "v5p:4x4x4", "devices": 64, "mesh": {"fsdp": 64}}
  figures |= {"hbm_limit_bytes": int(95.74 * 2**30), "resident_bytes": {"policy": 60 * 2**30}, "lower_seconds": 1.0}
  lines = advice(figures | {"rss_bytes": 10**9})
  assert any("60.0 GiB of each chip" in line for line in lines) and any("micro_batches" in line for line in lines)
  assert any("two axes grow with the row" in line for line in lines)

  console = rich.console.Console(file=io.StringIO(), width=150)
  for part in tables(figures | {"rss_bytes": 10**9}):
    console.print(part)
  text = console.file.getvalue()
  assert "needs 161.0 of 95.74 GiB" in text and "bf16[48,131072,2048]" in text


def test_a_message_without_arrays_falls_back_to_the_traced_program():
  message = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (3.06T) exceeds "
  )
  message += "available HBM (95.74G)."
  traced = "  %3 = stablehlo.dot_general %1, %2 : (tensor<64x8xbf16>, tensor<8x64xf32>) -> tensor<64x64xf32>\n"
  figures = measure.too_large(message, lambda: traced)
  assert figures["needed_bytes"] == pytest.approx(3.06 * 2**40)
  assert figures["largest_arrays"][0]["bytes"] == 64 * 64 * 4
