"""Plugins that break one promise each; `SOUND` keeps them all."""

import itertools
import os

import msgspec
from kvdock import hookspecs
from kvdock.hookspecs import hookimpl
from kvdock.layout import LayerGroup
from kvdock.pools import MHAPool
from kvdock.pools.base import Pool
from kvdock.pools.indexer import IndexerPool


class BrokenPool(MHAPool):
    device_types = frozenset({"broken"})


@hookimpl
def get_pool_cls(query):
    return BrokenPool if query.device.device_type == "broken" and query.kind == "mha" else None


class Plugin:
    kvdock_contract = "0.1"

    def __init__(self, pool=BrokenPool):
        self.pool = pool

    @hookimpl
    def get_pool_cls(self, query):
        return self.pool if query.device.device_type == "broken" and query.kind == "mha" else None


class Old(Plugin):
    kvdock_contract = "0.0"


class Anyone(Plugin):
    kvdock_contract = hookspecs.CONTRACT


class Misspelt(Plugin):
    @hookimpl
    def get_pol_cls(self, query):
        return None


class WrongKernels(Plugin):
    @hookimpl
    def get_kernels(self, device):
        return "fast ones" if device.device_type == "broken" else None


class Greedy(Plugin):
    @hookimpl
    def get_option_defaults(self, query):
        return {"page_size": 16}


class GreedyKernels(Plugin):
    @hookimpl
    def get_kernels(self, device):
        from kvdock.kernels.reference import ReferenceKernels

        return ReferenceKernels()


class Fickle(Plugin):
    pages = itertools.cycle((16, 32))

    @hookimpl
    def get_option_defaults(self, query):
        return {"page_size": next(self.pages)} if query.device.device_type == "broken" else None


class Nosy(Plugin):
    """Judges pages of 8 tokens, 8-bit floats and a backend wherever they are asked for."""

    @hookimpl
    def validate_plan(self, query):
        options = query.options
        if options.page_size == 8 or options.kv_cache_dtype == "fp8_e5m2" or options.attention_backend == "fa3":
            return "not with us"
        return None


class Roaming(Plugin):
    """Claims what its cases do not bring up: sliding layers of any device."""

    @hookimpl
    def get_pool_cls(self, query):
        if query.group is not None and query.space.name == "swa":
            return BrokenPool
        return self.pool if query.device.device_type == "broken" and query.kind == "mha" else None


class Writing(Plugin):
    @hookimpl
    def get_option_defaults(self, query):
        if query.device.device_type == "broken":
            os.environ["BROKEN_PAGE"] = "1"


class SquarePool(BrokenPool):
    """Takes values to be as wide as keys, and never looks whether they are."""

    @classmethod
    def buffers(cls, query):
        keys, values = super().buffers(query)
        return keys, msgspec.structs.replace(values, shape=keys.shape)


class HomelessPool(MHAPool):
    device_types = frozenset({"elsewhere"})


class UnnamedPool(MHAPool):
    features = ("fp8",)


class HalfPool(Pool):
    """Contract 0.0 had no descriptors."""

    device_types = frozenset({"broken"})

    @classmethod
    def buffers(cls, query):
        return MHAPool.buffers(query)


class OtherArgumentsPool(BrokenPool):
    def set_kv_buffer(self, layer, slots, keys, values):
        super().set_kv_buffer(layer, slots, keys, values)


class WidePool(BrokenPool):
    """P-14: twelve heads of keys and of values where a latent would do."""

    @classmethod
    def buffers(cls, query):
        return tuple(
            msgspec.structs.replace(buffer, shape=(6 * buffer.shape[0], *buffer.shape[1:]))
            for buffer in super().buffers(query)
        )


class HoardingPool(BrokenPool):
    def storages(self):
        import torch

        return [*super().storages(), torch.zeros(1024)]


class TwinsPool(BrokenPool):
    """G-06: keys and values of a layer by one name and role, in the order in which they lie."""

    def buffer_infos(self):
        return [msgspec.structs.replace(info, name="kv", role="kv") for info in super().buffer_infos()]


class UnmarkedPool(IndexerPool):
    """G-01: an indexer's keys are said to be the keys of its layer, as those of attention are."""

    device_types = frozenset({"broken"})

    @classmethod
    def buffers(cls, query):
        return tuple(msgspec.structs.replace(buffer, role="key") for buffer in super().buffers(query))


class Unmarked:
    kvdock_contract = "0.1"

    @hookimpl
    def get_pool_cls(self, query):
        return UnmarkedPool if query.device.device_type == "broken" and query.kind == "sparse_index" else None


class Imperial:
    kvdock_contract = "0.1"

    @hookimpl
    def group_layers(self, query):
        return (LayerGroup(name="full", kind="mha", space="full", layers=query.layers, worker=query.worker),)


SOUND, LOUD, OLD, ANY, MISSPELT = Plugin(), Plugin(), Old(), Anyone(), Misspelt()
WRONG_TYPE, WRONG_KERNELS = Plugin("BrokenPool"), WrongKernels()
GREEDY, GREEDY_KERNELS, FICKLE = Greedy(), GreedyKernels(), Fickle()
HOMELESS, UNNAMED = Plugin(HomelessPool), Plugin(UnnamedPool)
HALF, OTHER_ARGUMENTS, HOARDING = Plugin(HalfPool), Plugin(OtherArgumentsPool), Plugin(HoardingPool)
WIDE, TWINS, UNMARKED = Plugin(WidePool), Plugin(TwinsPool), Unmarked()
IMPERIAL = Imperial()
NOSY, ROAMING, WRITING, SQUARE = Nosy(), Roaming(), Writing(), Plugin(SquarePool)
