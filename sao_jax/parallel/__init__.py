"""Devices: the mesh, declared parameters, the one table from logical to mesh axes, publishing, process start-up.

Declarations of parameters (shape, logical axes, initialiser) enter; initial values, abstract trees and shardings leave.
After every step, a copy of the training parameters leaves for the sampler's devices.
"""
