from kvdock import hookimpl

kvdock_contract = "0.1"


@hookimpl
def get_pol_cls(query):
    return None
