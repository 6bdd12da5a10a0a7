"""The paper trail of a run: metric lines, progress, curves, and one HTML page.

Metrics of every step and shown episodes enter; `metrics.jsonl`, TensorBoard events, PNG curves and one self-contained
page leave. The page needs only the files in the working directory.
"""
