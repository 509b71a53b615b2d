"""Runs the tests of page arithmetic in a process of their own: how kernels run is settled on import."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

FILE = "interpreted_slots.py"


def test_page_arithmetic_holds_in_the_interpreter(passed_alone):
    assert passed_alone(FILE, TRITON_INTERPRET="1") > 0


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator that Triton compiles for")
def test_page_arithmetic_holds_on_the_device(passed_alone):
    assert passed_alone(FILE) > 0
