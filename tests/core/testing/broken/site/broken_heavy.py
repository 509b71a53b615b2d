import torch  # noqa: F401
from broken_plugins import SOUND, get_pool_cls  # noqa: F401

kvdock_contract = "0.1"
