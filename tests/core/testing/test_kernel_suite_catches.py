"""The kernel suite catches kernel sets that get something wrong, each by the check that is meant for it."""

import pytest

EXTENDS, STORE = "test_extends_equal_a_loop_over_the_tokens", "test_store"
CAUGHT_BY = {
    "ExtendsOneTooFar": {EXTENDS},
    "ForgetsShortExtends": {EXTENDS},
    "ExtendsIn32Bits": {"test_slots_are_64_bits_wide"},
    "AnswersIn32Bits": {"test_decodes_take_pages_in_order"},
    "TakesPagesInReverse": {"test_decodes_take_pages_in_order"},
    "CountsBytesIn32Bits": {"test_offsets_are_64_bits_wide"},
    "TakesPagesForContiguous": {STORE},
    "SwapsPagesAndPlaces": {"test_gather"},
    "WritesPastTheEnd": {STORE},
    "LeavesTheTail": {STORE},
    "ClearsThePadding": {"test_store_takes_padding"},
    "ForgetsValues": {"test_store_kv"},
    "PutsRopeBehindTheLatent": {"test_store_mla"},
    "MovesOneByOne": {"test_move"},
    "ClearsTheFirstView": {"test_clear"},
    "CopiesBackwards": {"test_copy_rows"},
    "StoresTheNextStep": {"test_store_step"},
    "CommitsTheFirstStep": {"test_commit_steps"},
    "WritesRowsAsIfShort": {"test_write_rows"},
    "WritesSpansByEnds": {"test_write_spans"},
    "ReadsTheLastWord": {"test_read_pages"},
    "TranslatesMinusOne": {"test_translate"},
    "RoundsScales": {"test_quantize_blocks"},
    "SpreadsNaN": {"test_what_is_no_number_stays_in_its_block"},
    "LoadsEveryBlockAlike": {"test_store_and_load_blocks"},
    "TakesRowsForDense": {"test_rows_may_be_parts_of_wider_ones"},
    "MovesIn32Bits": {"test_offsets_are_64_bits_wide"},
    "MovesOneType": {"test_move"},
    "LooksAtSteps": {"test_nothing_waits_for_the_device"},
    "ReadsTheSlots": {"test_nothing_waits_for_the_device"},
}


@pytest.fixture(scope="module")
def failures(failures_of):
    pytest.importorskip("torch")
    return failures_of("kernels.py", CAUGHT_BY)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_wrong_kernel_is_caught_by_its_check(failures, name):
    assert failures[name] == CAUGHT_BY[name]


def test_every_check_of_the_suite_catches_something():
    from kvdock.testing.suites import KernelSuite

    checks = {name for name in vars(KernelSuite) if name.startswith("test_")}
    assert checks == set().union(*CAUGHT_BY.values())
