"""What exists: devices, node types, clusters, models, plans and policies as typed, frozen values."""

from engine.profile.cluster import Cluster, Inlet, Network, Node, Price, Prometheus, Ssh, SshAddress, parse_address
from engine.profile.document import ProfileError
from engine.profile.hardware import Cooling, Curve, Device, NodeType
from engine.profile.model import Model
from engine.profile.plan import Optimizations, Parallelism, Plan
from engine.profile.policy import Policy
from engine.profile.stack import Stack

__all__ = [
    "Cluster",
    "Cooling",
    "Curve",
    "Device",
    "Inlet",
    "Model",
    "Network",
    "Node",
    "NodeType",
    "Optimizations",
    "Parallelism",
    "Plan",
    "Policy",
    "Price",
    "ProfileError",
    "Prometheus",
    "Ssh",
    "SshAddress",
    "Stack",
    "parse_address",
]
