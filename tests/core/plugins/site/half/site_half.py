from kvdock import hookimpl

kvdock_contract = "0.1"


@hookimpl
def device_catalogue():
    return {}


@hookimpl
def get_pool_cls(query, extra):
    return extra
