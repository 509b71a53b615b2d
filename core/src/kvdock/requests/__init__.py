"""Request pools: which slots each request holds."""

from kvdock.requests.base import RequestPool
from kvdock.requests.table import ReqToTokenPool

__all__ = ["ReqToTokenPool", "RequestPool"]
