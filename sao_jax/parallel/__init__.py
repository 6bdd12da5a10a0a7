"""Mesh, axis rules, parameter declarations, publishing, processes."""
