"""Hybrid sharded data parallelism for PyTorch: see `hybrid_shard`."""

from hsdp.api import accumulate, fully_shard, gathered, hybrid_shard, register_forward_method
from hsdp.clip import clip_grad_norm_
from hsdp.describe import Description, describe
from hsdp.loss import token_mean
from hsdp.mesh import init_mesh
from hsdp.module import HSDPModule
from hsdp.precision import Precision
from hsdp.replicas import check_replicas

__version__ = "0.1.0"

__all__ = [
    "Description",
    "HSDPModule",
    "Precision",
    "accumulate",
    "check_replicas",
    "clip_grad_norm_",
    "describe",
    "fully_shard",
    "gathered",
    "hybrid_shard",
    "init_mesh",
    "register_forward_method",
    "token_mean",
]
