"""Report: the paper trail of a run. Metric lines and episodes go into files; curves and one HTML page come out.

Everything shown is read back from the files in the run's directory, so a report needs no running process.
"""
