"""Benchmarks: measurements of this code on the machine at hand, as ratios taken in one run.

A `Scale` goes in; each suite returns its figures as nested dictionaries, and `launch.benchmark` prints them.
"""
