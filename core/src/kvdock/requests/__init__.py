"""Request pools: which slots each request holds."""

from kvdock.requests.base import RequestPool
from kvdock.requests.decode import DecodeReqToTokenPool, HybridDecodeReqToTokenPool
from kvdock.requests.hybrid import HybridReqToTokenPool
from kvdock.requests.states import StateSlots
from kvdock.requests.table import ReqToTokenPool

__all__ = [
    "DecodeReqToTokenPool",
    "HybridDecodeReqToTokenPool",
    "HybridReqToTokenPool",
    "ReqToTokenPool",
    "RequestPool",
    "StateSlots",
]
