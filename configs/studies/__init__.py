"""Studies: Python files with get_study(), for launch.study."""
