from kvdock import hookimpl

kvdock_contract = "0.1"


@hookimpl
def validate_plan(query):
    return None
