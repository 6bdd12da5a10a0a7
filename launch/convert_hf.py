"""Converts a Hugging Face folder to checkpoints, or checkpoints to a folder that transformers, vLLM and SGLang load.

python -m launch.convert_hf --hf=models/Qwen3-0.6B --output=checkpoints/qwen3 [--dtype=bfloat16]
python -m launch.convert_hf --checkpoint=runs/a/train --output=models/trained [--dtype=bfloat16] [--network=critic]
"""

from __future__ import annotations

from absl import flags

from launch import _flags
from sao_jax.errors import ConfigError
from sao_jax.huggingface import convert

_HF = flags.DEFINE_string("hf", None, "Hugging Face folder to convert to checkpoints.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Checkpoints of a phase to convert to a Hugging Face folder.")
_OUTPUT = flags.DEFINE_string("output", None, "What to write; it must be new.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of the weights; by default fp32, or as stored.")
_BASE = flags.DEFINE_string("base", None, "Folder that the model started from, if the run does not name it.")
_NETWORK = flags.DEFINE_enum("network", "policy", ["policy", "critic"], "Which network of the checkpoints.")
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint; by default the newest.")


def main() -> None:
  """Converts in the direction that --hf or --checkpoint gives."""
  if (_HF.value is None) == (_CHECKPOINT.value is None):
    raise ConfigError("--hf", "give either it or --checkpoint.", "Pass one of them: what is to be converted.")
  _flags.check_output(_OUTPUT.value)
  if _HF.value is not None:
    convert.to_checkpoint(_HF.value, _OUTPUT.value, dtype=_DTYPE.value or "float32")
  else:
    options = {"base": _BASE.value, "network": _NETWORK.value, "dtype": _DTYPE.value, "step": _STEP.value}
    convert.to_hf(_CHECKPOINT.value, _OUTPUT.value, **options)


if __name__ == "__main__":
  _flags.run_tool(main, example="--output=models/a", joins=True)
