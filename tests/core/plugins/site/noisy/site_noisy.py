from kvdock import hookimpl

print("noisy is imported")
kvdock_contract = "0.1"


@hookimpl
def probe_device(selector):
    print("noisy is asked")
