from broken_plugins import get_pool_cls  # noqa: F401

kvdock_contract = "0.1"
