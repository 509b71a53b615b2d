from kvdock import hookimpl


class Plugin:
    kvdock_contract = "0.1"

    @hookimpl
    def validate_plan(self, query):
        return "several objects"


a, b, shared = Plugin(), Plugin(), Plugin()
