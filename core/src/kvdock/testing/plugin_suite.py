"""What every plugin promises as a whole, as it is installed: its entry point, its hooks, the classes that it claims."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest

from kvdock.builder import build
from kvdock.builtin import BUILTINS
from kvdock.cells import cell_warnings
from kvdock.device import DeviceInfo
from kvdock.errors import BudgetError, KVDockError, PlanError, PluginError, UnsupportedCombination
from kvdock.hookspecs import CONTRACT, GROUPS
from kvdock.kernels.interface import Kernels
from kvdock.model import ModelSpec
from kvdock.options import CacheOptions, Parallelism, make_options
from kvdock.planner import CachePlan, plan_from
from kvdock.plugins import loading, resolve
from kvdock.plugins.answers import ask
from kvdock.plugins.discovery import Candidate
from kvdock.pools.storage import unique_storages
from kvdock.queries import ModelQuery
from kvdock.startup import candidates
from kvdock.testing.asking import (
    ALL_MODULES,
    CHECK_PLUGINS,
    HEAVY,
    INTERFACES,
    OTHER_CONTRACT,
    Asked,
    Watch,
    classes_of,
    environment_set_by,
    imported_with,
    lacks_of,
    run_alone,
)
from kvdock.testing.pairing import described_alike, seen_pools, without_fingerprint
from kvdock.testing.pool_data import verify_rows
from kvdock.testing.questions import DEVICE_TYPES, OPTIONS, SHAPES, device_of, with_options
from kvdock.testing.suite_base import SMALL_MODEL, Checks

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30)
UNHEARD_OF = device_of("unheard-of")
FOREIGN_CONFIG: Mapping[str, Any] = {"architectures": ["UnheardOfForCausalLM"], "model_type": "unheard_of"}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What a plugin is asked to serve: a model, or a config for the family to read, on a device with options."""

    device: DeviceInfo = CPU
    model: ModelSpec = SMALL_MODEL
    config: Mapping[str, Any] | None = None
    """Read through the hooks in place of `model`."""
    options: Mapping[str, Any] = {}
    parallel: Parallelism = Parallelism()
    budget_bytes: int = 2**22

    def planned(self, registry: Watch) -> CachePlan:
        """Return the plan, made by the plugins of a registry."""
        model = self.model
        if self.config is not None:
            model, _ = resolve.read_model(registry, ModelQuery(config=self.config))
        options = make_options(self.options)
        return plan_from((model,), self.device, options, self.parallel, registry, budget_bytes=self.budget_bytes)


class PluginSuite(Checks):
    """The promises of a plugin, found through its entry point, asked through every hook that `cases` need."""

    plugin: ClassVar[str]
    """Name of the entry point."""
    group: ClassVar[str] = "kvdock.hardware"
    """Group of the entry point, which is the plugin's tier."""
    cases: ClassVar[tuple[Case, ...]]
    """What the plugin serves: one for each class that it claims."""
    foreign: ClassVar[tuple[DeviceInfo, ...]] = (CPU, UNHEARD_OF)
    """Devices of others, on which hardware answers ``None``."""
    torch_device: ClassVar[str] = "cpu"
    """Where plans are built."""
    heavy: ClassVar[tuple[str, ...]] = HEAVY
    """Modules that an import of the plugin may not bring along; add the vendor's SDK."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run what is about answers with each case."""
        super().pytest_generate_tests(metafunc)
        if "case" in metafunc.fixturenames:
            ids = [f"case={number}" for number in range(len(self.cases))]
            metafunc.parametrize("case", self.cases, ids=ids)

    @property
    def tier(self) -> str:
        """The tier of the group."""
        return GROUPS[self.group]

    @pytest.fixture
    def candidate(self) -> Candidate:
        """Give the entry point."""
        found = [one for one in candidates() if (one.name, one.group) == (self.plugin, self.group)]
        names = ", ".join(f"{one.name} in {one.group}" for one in candidates()) or "none"
        assert len(found) == 1, f"{len(found)} entry points are called {self.plugin} in {self.group}; found: {names}"
        return found[0]

    @pytest.fixture
    def watch(self, candidate: Candidate) -> Watch:
        """Give the built-ins and the plugin, with what a variant waits for, all of which must load."""
        registry = loading.load(candidates(), allow=(self.plugin, *candidate.needs), builtins=BUILTINS)
        return Watch(registry.members, self.plugin)

    @pytest.fixture
    def asked(self, watch: Watch, case: Case) -> list[Asked]:
        """Give what the plugin is asked and answers while the case is planned, as far as that goes."""
        with contextlib.suppress(KVDockError):  # test_every_case_is_planned says so
            case.planned(watch)
        return list(watch.asked)

    def test_the_entry_point_is_sound(self, candidate: Candidate) -> None:
        """One distribution offers the name, which is lower case, with a version."""
        assert (candidate.status, candidate.reason) == ("found", "")
        assert candidate.name == candidate.name.lower()
        assert candidate.distribution
        assert candidate.version

    def test_plugins_check_lists_it_as_loaded(self) -> None:
        """``kvdock plugins --check`` imports it, without a complaint."""
        rows = [row for row in json.loads(run_alone(CHECK_PLUGINS)) if row["name"] == self.plugin]
        assert [(row["tier"], row["status"], row["reason"]) for row in rows] == [(self.tier, "loaded", "")]
        assert rows[0]["contract"] == CONTRACT
        assert rows[0]["hooks"]

    def test_the_contract_is_the_present_one(self, candidate: Candidate) -> None:
        """The plugin states the contract of this kvdock."""
        stated = getattr(_imported(candidate), "kvdock_contract", None)
        assert stated == CONTRACT, f"{candidate.value} states the contract {stated!r}, this kvdock has {CONTRACT!r}"

    def test_another_contract_refuses_it(self, candidate: Candidate) -> None:
        """The contract is a text of the plugin's own: one that is read from kvdock would fit any kvdock."""
        answer = run_alone(OTHER_CONTRACT, candidate.name, "999.0")
        assert "was written for contract" in answer, (
            f"{candidate.value} loads in a kvdock of contract 999.0; write the contract out: "
            f'kvdock_contract = "{CONTRACT}"'
        )

    def test_importing_it_imports_no_torch(self, candidate: Candidate) -> None:
        """Neither torch nor an SDK is imported with the entry point."""
        module = candidate.value.partition(":")[0]
        found = imported_with(module, self.heavy)
        assert found == "", f"importing {module} imports {found}; import it inside the function that needs it"

    def test_every_module_but_kernels_imports_without_torch(self, candidate: Candidate) -> None:
        """Only modules in a package called ``kernels`` may need torch to be imported."""
        assert run_alone(ALL_MODULES, candidate.value.partition(":")[0], *self.heavy) == ""

    def test_its_hooks_are_hooks(self, watch: Watch) -> None:
        """It loads: every marked function is a hook, with the arguments that the hook gives."""
        assert watch.hooks_of(watch.member)

    def test_every_case_is_planned(self, watch: Watch, case: Case) -> None:
        """Every answer is of the type that its hook promises, and each case is served by the plugin."""
        plan = case.planned(watch)
        resolve.catalogue(watch)
        assert plan.total_bytes <= case.budget_bytes
        assert watch.asked, f"{self.plugin} was asked nothing: {plan.explain()}"

    def test_a_slot_costs_what_its_kind_costs(self, watch: Watch, case: Case) -> None:
        """No pool takes far more bytes a slot than the core's of the same kind, as one of a wrong shape would."""
        assert cell_warnings(case.planned(watch).outline) == ()

    def test_kernels_are_a_kernel_set(self, watch: Watch, case: Case) -> None:
        """What `get_kernels` gives for the device implements the interface; without the device it says so in a line."""
        pytest.importorskip("torch")
        try:
            found = resolve.kernels(watch, case.device, make_options(case.options))
        except PlanError as error:
            assert "\n" not in str(error)
            pytest.skip(str(error))
        assert found is None or lacks_of(type(found), Kernels) == []

    def test_hooks_answer_alike_each_time(self, asked: list[Asked]) -> None:
        """The same question has the same answer: plans can be made again, and compared."""
        changed = [one.hook for one in asked if any(answer != one.answer for answer in _asked_twice(one))]
        assert changed == []

    def test_hooks_change_nothing(self, asked: list[Asked]) -> None:
        """Planning is pure: no hook changes what it is given, nor the environment."""
        changed = [f"{one.hook} changes its argument {one.changed}" for one in asked if one.changed]
        changed += [f"{one.hook} sets {', '.join(names)}" for one in asked if (names := environment_set_by(one))]
        assert changed == []

    def test_devices_of_others_are_declined(self, watch: Watch, asked: list[Asked]) -> None:
        """On a device that is not the vendor's every hook answers ``None``, whatever the options."""
        if self.tier == "family":
            pytest.skip("a family serves its models on any device")
        claimed: set[str] = set()
        for device in self._foreign(watch):
            for options in OPTIONS:
                claimed.update(_claims(self.plugin, asked, device, options))
            for member, value in ask(watch, "get_kernels", self.tier, device=device, options=CacheOptions()):
                if member.name == self.plugin and value is not None:
                    claimed.add(_claim(self.plugin, "get_kernels", f"answers {value!r}", device, {}))
        assert not claimed, "\n".join(sorted(claimed)[:20])

    def test_whole_plans_for_devices_of_others_are_left_alone(self, watch: Watch) -> None:
        """The same while other models are planned for such a device: what `cases` do not bring up is asked there."""
        if self.tier == "family":
            pytest.skip("a family serves its models on any device")
        claimed: set[str] = set()
        for device in self._foreign(watch):
            for case in self._elsewhere(device):
                claimed.update(self._claims_while_planned(watch, case))
        assert not claimed, "\n".join(sorted(claimed)[:20])

    def _foreign(self, watch: Watch) -> list[DeviceInfo]:
        """Return `foreign`, and a device of each type of torch's that neither `cases` nor the plugin's profiles have."""
        own = {case.device.device_type for case in self.cases}
        listed = [pair for pairs in resolve.catalogue(watch).values() for pair in pairs]
        own |= {info.device_type for owner, info in listed if owner == self.plugin}
        own |= {device.device_type for device in self.foreign}
        return [*self.foreign, *(device_of(name) for name in DEVICE_TYPES if name not in own)]

    def _elsewhere(self, device: DeviceInfo) -> Iterator[Case]:
        """Yield what is planned for a device of somebody else: models of every shape, then a small one with options."""
        for model in SHAPES.values():
            yield Case(device=device, model=model)
        for options in OPTIONS:
            yield Case(device=device, options=options)
        yield Case(device=device, parallel=Parallelism(tp_size=2))
        for case in self.cases:
            yield msgspec.structs.replace(case, device=device)

    def _claims_while_planned(self, watch: Watch, case: Case) -> Iterator[str]:
        """Yield what the plugin claims or objects to while a case is planned."""
        watch.asked.clear()
        try:
            case.planned(watch)
        except PluginError as error:
            yield str(error)
        except KVDockError:
            pass  # the core may refuse it, or somebody object: the answers say who
        for one in watch.asked:
            if _is_about_a_device(one) and not one.declines:
                yield _claim(self.plugin, one.hook, f"answers {one.answer!r}", case.device, case.options)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_models_of_every_shape_are_kept_or_declined(self, watch: Watch, shape: str) -> None:
        """What the plugin claims of a model that `cases` do not have, it keeps; what its layout cannot hold it declines."""
        if self.tier == "family":
            pytest.skip("a family claims only the kinds that it invented")
        pytest.importorskip("torch")
        for device in {case.device.device_type: case.device for case in self.cases}.values():
            fine = msgspec.structs.replace(device, granularity_bytes=1)
            with contextlib.suppress(PlanError, BudgetError, UnsupportedCombination):
                plan = Case(device=fine, model=SHAPES[shape], budget_bytes=2**24).planned(watch)
                self._verify_rows(plan)

    def _verify_rows(self, plan: CachePlan) -> None:
        """Verify that the plugin's pools hold rows of the model's shape, and give back what is written to them."""
        cache = build(plan, device=self.torch_device, debug=False)
        for choice in plan.outline.pools:
            if choice.plugin == self.plugin:
                verify_rows(cache.pools[choice.name], random.Random(1))

    def test_models_of_others_are_declined(self, watch: Watch, case: Case) -> None:
        """A model of no family of the plugin's is planned as if the plugin were not there."""
        if self.tier == "hardware":
            pytest.skip("hardware serves the models of all families")
        for member, impl in watch.hookimpls("read_model", self.tier):
            assert member.name != self.plugin or impl.function(ModelQuery(config=FOREIGN_CONFIG)) is None
        watch.asked.clear()
        msgspec.structs.replace(case, model=SMALL_MODEL, config=None, options={}).planned(watch)
        assert [f"{one.hook} answers {one.answer!r}" for one in watch.asked if not one.declines] == []

    def test_classes_say_where_they_run(self, asked: list[Asked], case: Case) -> None:
        """`device_types` of a class holds the device (``None``: any); `features` and `options` are sets of names."""
        wrong = []
        for _, cls in classes_of(asked):
            types, known = cls.device_types, frozenset(CacheOptions.__struct_fields__)
            if types is not None and not (_is_names(types) and case.device.device_type in types):
                wrong.append(
                    f"{cls.__name__}.device_types is {types!r}; give frozenset({{'{case.device.device_type}'}})"
                )
            wrong += [
                f"{cls.__name__}.{name} is {getattr(cls, name)!r}; give a frozenset of names"
                for name in ("features", "options")
                if not _is_names(getattr(cls, name))
            ]
            if _is_names(cls.options) and not cls.options <= known:
                wrong.append(f"{cls.__name__}.options lists {sorted(cls.options - known)}, which are no options")
        assert wrong == []

    def test_no_method_of_the_interface_is_missing(self, asked: list[Asked]) -> None:
        """Every class that is claimed has all methods of its interface, with the arguments that callers give."""
        lacking = {cls.__name__: lacks_of(cls, INTERFACES[hook]) for hook, cls in classes_of(asked)}
        assert {name: lacks for name, lacks in lacking.items() if lacks} == {}

    def test_every_plan_has_a_fingerprint(self, watch: Watch, case: Case) -> None:
        """What a layer keeps is told apart by role, so that two sides of a transfer can be compared; it fits itself."""
        assert (why := without_fingerprint(case.planned(watch))) == "", why

    def test_descriptors_tell_every_tensor_apart(self, watch: Watch, case: Case) -> None:
        """Name, role and layer of what an engine's pools describe are of one tensor each, in all groups together."""
        pytest.importorskip("torch")
        fine = msgspec.structs.replace(case.device, granularity_bytes=1)
        cache = build(msgspec.structs.replace(case, device=fine).planned(watch), device=self.torch_device, debug=False)
        assert (alike := described_alike(seen_pools(cache))) == "", alike

    def test_planned_bytes_are_allocated_bytes(self, watch: Watch, case: Case) -> None:
        """What is built takes what the plan says, to the byte, and pools own no more; a device's granularity is its own."""
        pytest.importorskip("torch")
        fine = msgspec.structs.replace(case.device, granularity_bytes=1)
        plan = msgspec.structs.replace(case, device=fine).planned(watch)
        cache = build(plan, device=self.torch_device, debug=False)
        assert cache.allocated_bytes() == plan.total_bytes
        planned = sum(buffer.nbytes for group in plan.groups for buffer in group.buffers)
        owned = unique_storages([tensor for pool in cache.pools.values() for tensor in pool.storages()])
        assert sum(owned.values()) == planned, f"pools own {sum(owned.values())} bytes, of which {planned} are planned"


def _imported(candidate: Candidate) -> Any:
    import importlib_metadata

    point = importlib_metadata.EntryPoint(name=candidate.name, value=candidate.value, group=candidate.group)
    return point.load()


def _asked_twice(one: Asked) -> Iterator[object]:
    """Yield two answers to a question that was asked once: one that changes each time is met whatever came between."""
    for _ in range(2):
        yield one.function(*one.arguments.values())


def _claims(plugin: str, asked: list[Asked], device: DeviceInfo, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a plugin claims when it is asked everything again about another device, with other options."""
    for one in asked:
        if not _is_about_a_device(one):
            continue
        try:
            answer = one.function(with_options(one.arguments["query"], device, options))
        except Exception as error:  # whatever a hook raises is the finding
            yield _claim(plugin, one.hook, f"raises {type(error).__name__}({error})", device, options)
            continue
        if answer is not None and answer != ():
            yield _claim(plugin, one.hook, f"answers {answer!r}", device, options)


def _is_about_a_device(one: Asked) -> bool:
    return hasattr(one.arguments.get("query"), "device")


def _claim(plugin: str, hook: str, what: str, device: DeviceInfo, options: Mapping[str, Any]) -> str:
    given = f" with {', '.join(f'{name}={value}' for name, value in options.items())}" if options else ""
    return (
        f"{hook} of {plugin} {what} for the device {device.name!r} (device_type {device.device_type!r}){given}; it is "
        "somebody else's: compare query.device (get_kernels: device) first, and return None"
    )


def _is_names(value: Any) -> bool:
    return isinstance(value, frozenset) and all(isinstance(name, str) for name in value)
