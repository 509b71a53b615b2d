import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = Path(__file__).parent / "broken"


@pytest.fixture(scope="session")
def failures_of():
    """A function that runs checks of the suites of a file in `broken`, and returns those that failed: class → names.

    Only the checks that are meant for a class are run on it: what else it breaks is nobody's question.
    """

    def run(file, caught_by, path=()):
        checks = [f"{BROKEN / file}::Test{name}::{check}" for name, found in caught_by.items() for check in found]
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE", "--rootdir", str(BROKEN)]
        paths = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", *options, *checks]
        done = subprocess.run(command, cwd=BROKEN, env=environment, capture_output=True, text=True, check=False)
        found = re.findall(r"^(?:FAILED|ERROR) \S*::Test(\w+)::(\w+)", done.stdout, re.MULTILINE)
        assert found, done.stdout + done.stderr
        return {name: {check for owner, check in found if owner == name} for name in caught_by}

    run.folder = BROKEN
    return run
