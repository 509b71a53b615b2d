"""The suites catch classes that break a promise, each by the check that is meant for it."""

import pytest

CAUGHT_BY = {
    "ForgetsValues": {"test_moves_take_everything_along", "test_copies_come_back_bit_identical"},
    "WritesNextDoor": {"test_a_write_to_slot_0_is_harmless"},
    "DescribesHalf": {"test_copying_a_page_by_its_descriptors_copies_all_of_it"},
    "NeedsTorch": {"test_buffers_are_declared_without_torch"},
    "KeepsAfterClear": {"test_clear_zeroes_everything"},
    "DropsScales": {"test_scaled_reads_are_near_what_was_written"},
    "SwapsScales": {"test_scaled_reads_are_near_what_was_written"},
    "RoundsDown": {"test_scaled_reads_are_near_what_was_written"},
    "KeepsAnIndexBehind": {"test_a_transfer_takes_every_buffer_of_a_page"},
    "CutsRegionsShort": {"test_regions_are_whole_items"},
    "CallsAllTheSame": {"test_descriptors_tell_every_tensor_apart"},  # G-06
    "ListsLayersInPairs": {"test_regions_are_cut_as_the_pool_says"},
    "InventsStates": {"test_states_are_described_alike"},
    "ReadsAtOnce": {"test_reads_wait_for_their_layer"},
    "MovesItsMemory": {"test_descriptors_are_stable"},
    "WritesAnywhere": {"test_with_debug_a_write_to_a_free_slot_raises"},
    "WaitsTooLate": {"test_reads_wait_before_they_read"},
    "ReturnsCopies": {"test_buffers_are_views_of_the_storage"},
    "LooksLayersUpBarely": {"test_other_layers_are_refused"},
    "IgnoresRanks": {"test_heads_are_split_over_the_ranks"},
    "CountsLayersFromZero": {"test_a_stage_names_its_layers_by_their_global_ids"},
    "SwapsHeads": {"test_rows_are_of_the_models_shape"},
    "KeepsOneType": {"test_values_of_the_models_type_fit_other_types"},
    "LaysPagesBySize": {"test_pages_of_all_layers_hold_the_same"},
    "LooksAtSlots": {"test_nothing_waits_for_the_device"},
    "KeepsABuffer": {"test_no_memory_is_kept_beside_the_plan"},
    "LendsItsMemory": {"test_copies_are_the_callers"},
    "TakesAnyCopies": {"test_other_copies_are_refused"},
    "WritesHalf": {"test_what_does_not_fit_is_refused"},
    "HandsOutHalf": {"test_slots_of_a_page_are_consecutive"},
    "LosesPages": {"test_any_token_gives_back_its_page_once", "test_no_slot_has_two_owners"},
    "RestoresAnything": {"test_restore_takes_back_allocations", "test_restore_after_a_free_is_refused"},
    "UndoesCountsAlone": {"test_what_is_undone_never_happened"},
    "TakesBeforeItLooks": {"test_a_call_that_cannot_be_served_changes_nothing"},
    "TakesBeforeItChecks": {"test_a_refused_call_changes_nothing"},
    "TakesAPageAndFails": {"test_a_decode_that_lacks_one_page_takes_none"},
    "TakesNoneForMissing": {"test_no_slots_are_an_empty_answer"},
    "WaitsToDecode": {"test_nothing_waits_for_the_device"},
    "ForgetsTheLastPage": {"test_extends_equal_a_loop_over_the_tokens", "test_no_slot_has_two_owners"},
    "KeepsNewerStates": {"test_restoring_an_older_state_voids_newer_ones"},
    "GivesBackAtOnce": {"test_a_free_group_waits_for_its_end"},
    "WaitsForTheDevice": {"test_nothing_waits_for_the_device"},
    "CopiesItsSlots": {"test_calls_cost_what_they_hand_over"},
    "KeepsWhatItReturns": {"test_returned_slots_are_the_callers"},
    "IgnoresDebug": {"test_with_debug_a_wrong_free_raises_at_once", "test_with_debug_another_thread_is_refused"},
    "CountsTwice": {"test_a_double_free_makes_no_room"},
    "LetsTheWindowGoEarly": {"test_a_page_goes_back_with_its_last_token", "test_both_sides_stay_in_step"},
    "IgnoresTheWindow": {"test_windows_can_be_freed_by_tokens_and_by_pages"},
    "TakesTheWholeTail": {"test_only_the_tail_gets_sliding_slots"},
    "ForgetsWhatLeft": {"test_rows_are_freed_from_where_their_window_begins"},
    "TakesOneSideFirst": {"test_a_short_sliding_side_takes_nothing_of_the_full_one"},
    "LosesItsMap": {"test_only_the_tail_gets_sliding_slots"},
    "RestoresHalf": {"test_a_restore_is_for_both_sides_or_neither"},
    "ForgetsPlaces": {"test_every_slot_translates_to_one_of_its_own"},
    "AsksTheDevice": {"test_window_frees_never_wait_for_the_device"},
    "RestoresAfterAGroup": {"test_a_group_gives_back_the_pages_that_were_mapped_when_they_were_queued"},
}


@pytest.fixture(scope="module")
def failures(failures_of):
    pytest.importorskip("torch")
    return failures_of("classes.py", CAUGHT_BY)


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_broken_promise_is_caught_by_its_check(failures, name):
    assert failures[name] == CAUGHT_BY[name]
