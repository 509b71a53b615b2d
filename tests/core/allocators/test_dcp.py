"""Decode-context parallelism: ranks share a request's tokens, so a page holds page_size tokens of each."""

import msgspec
import pytest
from kvdock.builtin import CorePlugin
from kvdock.errors import PlanError, SlotError
from kvdock.features import features_asked
from kvdock.layout import SizeRule, Space
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.allocators import PagedAllocator, SortedAllocator, SWAAllocator, TokenAllocator  # noqa: E402
from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.pools.storage import allocate  # noqa: E402

CPU = torch.device("cpu")


def query_of(make, page_size, ranks, names=("full",), **options):
    spaces = tuple(Space(name=name, rule=SizeRule(), page_size=page_size) for name in names)
    query = make.query(spaces, {})
    return msgspec.structs.replace(
        query, parallel=Parallelism(tp_size=ranks, dcp_size=ranks), options=CacheOptions(**options)
    )


def build(make, tokens, page_size, ranks, cls=PagedAllocator, debug=False):
    """An allocator on the tensors that a plan of `tokens` slots a rank declares."""
    query, sizes = query_of(make, page_size, ranks), {"full": tokens}
    tensors = allocate(cls.buffers(query), sizes, {"full": query.spaces[0]}, CPU)
    return cls(query, Parts(tensors=tensors, kernels=ReferenceKernels(), device=CPU, sizes=sizes, debug=debug))


def tensor(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("cls", [PagedAllocator, SortedAllocator])
def test_pages_and_capacity_count_the_tokens_of_all_ranks(make, cls):
    """64 slots a rank in pages of 4, on 2 ranks: 16 pages of 8 tokens."""
    allocator = build(make, 64, 4, 2, cls)
    assert (allocator.page_size, allocator.size, allocator.available_size()) == (8, 128, 128)
    assert allocator.alloc(16).tolist() == list(range(8, 24))
    assert allocator.pages_needed([0, 8], [8, 9]) == 2
    assert allocator.shortfall(15)[0].missing == 8


def test_bookkeeping_is_that_of_the_pages(make):
    """16 pages and 8 offsets in a page, of 8 bytes each, whatever the ranks' tokens."""
    assert build(make, 64, 4, 2).parts.tensors.nbytes() == (16 + 8) * 8
    assert build(make, 64, 4, 1).parts.tensors.nbytes() == (16 + 4) * 8


def test_a_page_of_one_slot_a_rank_is_paged(make):
    allocator = build(make, 6, 1, 4)
    assert (allocator.page_size, allocator.size) == (4, 24)
    assert allocator.alloc(24).tolist() == list(range(4, 28))
    assert allocator.alloc(4) is None


def test_extends_and_decodes_fill_pages_of_all_ranks(make):
    """Page 2 on 2 ranks: pages of 4 tokens."""
    allocator = build(make, 32, 2, 2)
    zero = tensor(0)
    assert allocator.alloc_extend(zero, [0], tensor(6), [6], tensor(-1), 6).tolist() == [4, 5, 6, 7, 8, 9]
    assert allocator.alloc_decode(tensor(7), [7], tensor(9)).tolist() == [10]
    assert allocator.alloc_decode(tensor(8), [8], tensor(10)).tolist() == [11]
    assert allocator.available_size() == 64 - 8
    assert allocator.alloc_decode(tensor(9), [9], tensor(11)).tolist() == [12]
    assert allocator.available_size() == 64 - 12


@pytest.mark.parametrize("debug", [False, True])
def test_any_token_gives_back_the_page_of_all_ranks_once(make, debug):
    allocator = build(make, 32, 2, 2, debug=debug)
    held = allocator.alloc(12)
    allocator.free(held[3:5])
    assert allocator.available_size() == 64 - 4
    table = torch.zeros(2, 8, dtype=torch.int32)
    table[1, :4] = held[8:]
    allocator.free_rows(table, [1], [0], [3])
    assert allocator.available_size() == 64
    allocator.check(held=tensor())


def test_a_resize_counts_the_tokens_of_all_ranks(make):
    allocator = build(make, 32, 2, 2)
    allocator.resize({"full": 40})
    assert (allocator.size, allocator.available_size()) == (40, 40)
    with pytest.raises(SlotError, match="size 42 is no whole number of pages of 4 slots up to 64"):
        allocator.resize({"full": 42})


def test_a_token_allocator_is_for_one_rank(make):
    with pytest.raises(PlanError, match="page_size 1, but space 'full' has 2 over 2 decode-context-parallel ranks"):
        TokenAllocator.buffers(query_of(make, 1, 2))


@pytest.mark.parametrize(
    ("page_size", "ranks", "options", "chosen"),
    [
        (1, 1, {}, TokenAllocator),
        (1, 2, {}, PagedAllocator),
        (16, 2, {}, PagedAllocator),
        (1, 2, {"role": "decode"}, SortedAllocator),
    ],
)
def test_core_claims_an_allocator_that_honours_the_ranks(make, page_size, ranks, options, chosen):
    query = query_of(make, page_size, ranks, **options)
    found = CorePlugin().get_allocator_cls(query)
    assert found is chosen
    assert features_asked(query, "allocator") <= found.features


def test_spaces_in_step_do_not_honour_the_ranks_yet(make):
    query = query_of(make, 16, 2, names=("full", "swa"))
    assert CorePlugin().get_allocator_cls(query) is SWAAllocator
    assert features_asked(query, "allocator") - SWAAllocator.features == {"dcp"}
