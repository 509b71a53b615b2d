from hypothesis import settings

# Shared machines stall now and then; what a test claims never depends on time.
settings.register_profile("kvdock", deadline=None, print_blob=True)
settings.load_profile("kvdock")
