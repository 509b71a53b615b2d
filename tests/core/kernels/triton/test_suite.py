"""Runs the kernel suite on Triton's kernels in a process of its own: how kernels run is settled on import."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


def test_the_suite_holds_in_the_interpreter(passed_alone):
    assert passed_alone("interpreted_suite.py", TRITON_INTERPRET="1") > 0


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator that Triton compiles for")
def test_the_suite_holds_on_the_device(passed_alone):
    assert passed_alone("interpreted_suite.py") > 0
