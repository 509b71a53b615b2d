from kvdock import hookimpl


class Plugin:
    kvdock_contract = "0.1"

    @hookimpl
    def validate_plan(self, query):
        return None


hardware, pair = Plugin(), Plugin()
