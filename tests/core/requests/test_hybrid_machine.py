"""Any order of calls on the request table with states, against a plain model of who holds what."""

import itertools

import pytest
from kvdock.errors import SlotError
from kvdock.requests import HybridReqToTokenPool

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")
torch.set_num_threads(1)

from hypothesis import stateful  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ROWS, STATES = 4, 11
NAMES = st.integers(0, 5)
BATCHES = st.lists(NAMES, max_size=3, unique=True)


def machine(make_pool, tracks, **options):
    """Return the machine of a pool whose requests begin with so many track slots."""

    class Machine(stateful.RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.pool = make_pool(HybridReqToTokenPool, ROWS, STATES, **options)
            self.live = {}
            """Request → its state slot and its set of track slots."""
            self.cached = set()
            self.fresh, self.pending = set(), set()
            """Slots that are to be cleared, and slots that are to be copied to."""
            self.device = [-1] * (STATES + 1)
            self.expected = {}
            """Values in the slots, and what the holder of each slot must find there after a step."""
            self.steps = itertools.count(1)

        @property
        def free_states(self):
            held = sum(len(own) for state, own in self.live.values()) + sum(1 for s, _ in self.live.values() if s)
            return STATES - held - len(self.cached)

        def owned(self):
            return [*(slot for state, own in self.live.values() for slot in (state, *own) if slot), *self.cached]

        def whole_track(self, name):
            """Return the track that is not being written, or the only one; 0 without any."""
            own = self.live[name][1]
            return (max(own - {int(self.pool.tracks_of([name]))}) if len(own) == 2 else max(own)) if own else 0

        def learn(self, names):
            """Read back what requests hold now, and what of it is new."""
            for name in names:
                row, old = self.pool.row_of(name), self.live.get(name, (0, set()))
                own = set() if not tracks else set(self.pool.track_slots[row].tolist()) - {0}
                state = int(self.pool.row_to_state[row])
                new = ({state} | own) - {old[0], 0} - old[1]
                self.fresh |= new
                self.expected.update(dict.fromkeys(new, 0))
                self.live[name] = (state, own)

        def forget(self, slots):
            self.fresh -= slots
            self.pending -= slots

        @stateful.rule(names=st.lists(NAMES, max_size=3))
        def admit(self, names):
            lacking = {name: (0, set()) for name in names} | {n: self.live[n] for n in names if n in self.live}
            need = sum((not state) + max(0, tracks - len(own)) for state, own in lacking.values())
            new = set(names) - self.live.keys()
            fits = need <= self.free_states and len(new) <= ROWS - len(self.live)
            rows = self.pool.alloc(names)
            assert (rows is not None) == fits
            if fits:
                self.learn(names)
                assert all(state and len(own) >= tracks for state, own in map(self.live.get, names))

        @stateful.precondition(lambda self: self.live)
        @stateful.rule(data=st.data())
        def release(self, data):
            name = data.draw(st.sampled_from(sorted(self.live)))
            self.pool.free(name)
            state, own = self.live.pop(name)
            self.forget({state} | own)

        @stateful.rule()
        def step(self):
            (due,) = self.pool.due_states()
            targets, sources = list(due.copies), list(due.copies.values())
            assert sorted(targets) == sorted(self.pending)
            read = [self.device[slot] for slot in sources]
            for target, value in zip(targets, read, strict=True):
                self.device[target] = value
            assert sorted(due.fresh) == sorted(self.fresh)
            for slot in due.fresh:
                self.device[slot] = 0
            due.copies.clear()
            due.fresh.clear()
            self.fresh.clear()
            self.pending.clear()
            for slot in self.owned():
                assert self.device[slot] == self.expected[slot]
            for slot in {slot for state, own in self.live.values() for slot in (state, *own)} - {0}:
                self.device[slot] = self.expected[slot] = next(self.steps)

        @stateful.precondition(lambda self: self.live)
        @stateful.rule(data=st.data(), replace=st.booleans(), after_a_step=st.booleans())
        def donate(self, data, replace, after_a_step):
            if after_a_step:
                self.step()
            name = data.draw(st.sampled_from(sorted(self.live)))
            state, own = self.live[name]
            whole = self.whole_track(name) if tracks else state
            if not whole or whole in self.fresh:
                with pytest.raises(SlotError):
                    self.pool.donate(name, replace)
                return
            is_snapshot = replace and not tracks
            needs_one = replace and len(own) <= tracks
            given = self.pool.donate(name, replace)
            assert (given is None) == (needs_one and not self.free_states)
            if given is not None:
                assert given == whole or is_snapshot
                assert given not in self.cached
                self.cached.add(given)
                if is_snapshot:
                    self.pending.add(given)
                    self.expected[given] = self.expected[state]
                self.learn([name])

        @stateful.precondition(lambda self: tracks and self.live)
        @stateful.rule(names=BATCHES)
        def take_second(self, names):
            names = [n for n in names if n in self.live and self.live[n][1]]
            lacking = [n for n in names if len(self.live[n][1]) == 1]
            found = self.pool.take_second_track(names)
            assert (found is not None) == (len(lacking) <= self.free_states)
            self.learn(names)
            assert found is None or all(len(self.live[n][1]) == 2 for n in names)

        @stateful.precondition(lambda self: tracks)
        @stateful.rule(names=BATCHES)
        def swap(self, names):
            names = [n for n in names if n in self.live and self.live[n][1]]
            before = self.pool.tracks_of(names).tolist()
            self.pool.swap_tracks(names)
            for name, old, new in zip(names, before, self.pool.tracks_of(names).tolist(), strict=True):
                assert new in self.live[name][1]
                assert (new != old) == (len(self.live[name][1]) == 2)

        @stateful.precondition(lambda self: self.cached)
        @stateful.rule(data=st.data(), name=NAMES, is_dropped=st.booleans())
        def admit_with_a_prefix(self, data, name, is_dropped):
            self.admit([name])
            state = self.live.get(name, (0, set()))[0]
            if state:
                cached = data.draw(st.sampled_from(sorted(self.cached)))
                assert self.pool.fork_state(name, cached)[1] == state
                self.pending.add(state)
                self.fresh.discard(state)
                self.expected[state] = self.expected[cached]
                if is_dropped:
                    self.drop_slot(cached)

        @stateful.precondition(lambda self: self.cached)
        @stateful.rule(data=st.data())
        def drop(self, data):
            self.drop_slot(data.draw(st.sampled_from(sorted(self.cached))))

        def drop_slot(self, slot):
            self.pool.free_states([slot])
            self.cached.remove(slot)
            self.forget({slot})
            with pytest.raises(SlotError):
                self.pool.free_states([slot])

        @stateful.invariant()
        def everything_adds_up(self):
            owned = self.owned()
            assert len(set(owned)) == len(owned)
            assert set(owned) <= set(range(1, STATES + 1))
            assert self.pool.available_states() == STATES - len(owned)
            assert self.pool.row_to_state[0] == 0
            rows = {self.pool.row_of(name) for name in self.live}
            assert set(self.pool.row_to_state.nonzero().flatten().tolist()) <= rows
            self.pool.check(held_states=self.cached)

    return Machine


@pytest.mark.parametrize(
    ("tracks", "options"),
    [
        (0, {}),
        (1, {"state_extra_buffer": "lazy"}),
        (2, {"state_extra_buffer": "on"}),
    ],
    ids=["no tracks", "lazy", "two tracks"],
)
def test_no_order_of_calls_breaks_the_books(make_pool, tracks, options):
    settings = hypothesis.settings(max_examples=100, stateful_step_count=30, deadline=None, print_blob=True)
    stateful.run_state_machine_as_test(machine(make_pool, tracks, **options), settings=settings)
