import torch  # noqa: F401
