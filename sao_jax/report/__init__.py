"""The paper trail of a run: metric lines, progress, curves, and one HTML page.

Metrics of every step and shown episodes enter; `metrics.jsonl`, TensorBoard events, PNG curves and one self-contained
page leave. The page needs only the files in the working directory.
"""

from __future__ import annotations

from sao_jax.report.metrics import MetricsWriter, read_metrics
from sao_jax.report.page import write_report
from sao_jax.report.run_log import RunLog
from sao_jax.report.success_rate import success

__all__ = ["MetricsWriter", "RunLog", "read_metrics", "success", "write_report"]
