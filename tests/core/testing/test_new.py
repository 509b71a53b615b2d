"""`python -m kvdock.testing new`: what it writes works, and what it refuses leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvdock.testing import new
from kvdock.testing.__main__ import main

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "kvdock-acme"
ENTRY_POINTS = {"hardware": "kvdock.hardware", "family": "kvdock.families"}


def files_of(folder):
    kept = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in kept}


def test_the_example_is_what_the_command_writes():
    """To change one, change the template, remove the folder and run the command with ``--out examples``."""
    assert files_of(EXAMPLE) == new.rendered("acme")


def pretend_to_install(site, source, name, kind):
    """Put an entry point of a source folder on a path, as an editable installation does."""
    facts = site / f"kvdock_{name}-0.1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvdock-{name}\nVersion: 0.1.0\n", encoding="utf-8")
    text = f"[{ENTRY_POINTS[kind]}]\n{name} = kvdock_{name}.hooks\n"
    (facts / "entry_points.txt").write_text(text, encoding="utf-8")
    return os.pathsep.join([str(source / "src"), str(site)])


@pytest.mark.parametrize("kind", new.KINDS)
def test_what_is_written_passes_the_kit(tmp_path, kind):
    pytest.importorskip("torch")
    done = CliRunner().invoke(main, ["new", "zeta_1", "--kind", kind, "--out", str(tmp_path / "made")])
    target = tmp_path / "made" / "kvdock-zeta_1"
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[0] == f"wrote {target} ({len(files_of(target))} files); next:"
    assert not any("acme" in text.lower() + path for path, text in files_of(target).items())
    path = pretend_to_install(tmp_path / "site", target, "zeta_1", kind)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "not 64",
        "tests",
    ]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    suites = {"hardware": 4, "family": 2}[kind]
    assert f"\n{suites} suites, " in ran.stdout
    assert "failed" not in ran.stdout


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("core", "NAME='core' is the core's own; give a name that is not one of "),
        ("cpu", "NAME='cpu' is the core's own"),
        ("llama", "NAME='llama' is the core's own"),
        (
            "Acme",
            "NAME='Acme' cannot name a package; give letters in lower case, digits and single _ between them, such as acme",
        ),
        ("cuda", "NAME='cuda' is a plugin of kvdock's own; give a name that is not one of all, any, ascend, auto, "),
        ("ascend", "NAME='ascend' is a plugin of kvdock's own"),
        ("dsv4", "NAME='dsv4' is a plugin of kvdock's own"),
        ("rocm", "NAME='rocm' is a plugin of kvdock's own"),
        ("kvdock", "NAME='kvdock' is a word of kvdock's own"),
        ("testing", "NAME='testing' is a word of kvdock's own"),
        ("none", "NAME='none' is a word of kvdock's own"),
        ("torch", "NAME='torch' is a word of kvdock's own"),
        ("npu", "NAME='npu' is a word of kvdock's own"),
        ("a_", "NAME='a_' cannot name a package"),
        ("a__b", "NAME='a__b' cannot name a package"),
        ("a\nb", "NAME='a\N{REPLACEMENT CHARACTER}b' cannot name a package"),
        ("x" * 300, f"NAME='{'x' * 40}…' has 300 letters; give at most 40, such as acme"),
        ("ac-me", "NAME='ac-me' cannot name a package"),
        ("1st", "NAME='1st' cannot name a package"),
        ("class", "NAME='class' cannot name a package"),
        ("../acme", "NAME='../acme' cannot name a package"),
        ("", "NAME='' cannot name a package"),
    ],
)
def test_a_name_that_will_not_do_is_refused(tmp_path, name, why):
    refused = refusal(name, "--out", str(tmp_path))
    assert refused.startswith(f"kvdock.testing: {why}")
    assert list(tmp_path.iterdir()) == []


def refusal(*arguments):
    """Return the one line on standard error with which a command is refused."""
    done = CliRunner().invoke(main, ["new", *arguments])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert isinstance(done.exception, SystemExit)
    return done.output


def test_the_longest_name_can_be_written_and_a_plugin_of_the_standard_librarys_name_too(tmp_path):
    for name in ("x" * new.LONGEST, "json"):
        assert (new.write(name, "hardware", tmp_path) / "src" / f"kvdock_{name}" / "hooks.py").is_file()


def test_the_name_of_an_installed_plugin_is_refused_and_its_owner_named(tmp_path, monkeypatch):
    path = pretend_to_install(tmp_path / "site", tmp_path / "source", "zeta", "hardware")
    monkeypatch.setattr(sys, "path", [*sys.path, *path.split(os.pathsep)])
    assert refusal("zeta", "--kind", "family", "--out", str(tmp_path / "made")) == (
        "kvdock.testing: NAME='zeta' is the name of an installed plugin (kvdock-zeta 0.1.0); give another NAME, or "
        "uninstall it\n"
    )
    assert not (tmp_path / "made").exists()


def test_a_folder_is_made_for_it_but_no_chain_of_folders(tmp_path):
    assert new.write("zeta", "hardware", tmp_path / "made").is_dir()
    lost = tmp_path / "not" / "here"
    assert refusal("zeta", "--out", str(lost)) == (
        f"kvdock.testing: --out {lost}: the folder {lost.parent} is not there; make it, or give another --out\n"
    )
    assert not lost.parent.exists()


def test_an_out_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(main, ["new", "zeta", "--out", str(file)])
    assert done.exit_code == 2
    assert f"Directory '{file}' is a file" in done.output
    assert file.read_text(encoding="utf-8") == "mine"


def test_what_cannot_be_written_whole_is_not_written_at_all(tmp_path, monkeypatch):
    written = []

    def write_text(self, text, **_):
        if len(written) == 2:
            raise PermissionError(13, "Permission denied")
        written.append(self)
        self.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", write_text)
    made = tmp_path / "made"
    assert refusal("zeta", "--out", str(made)) == (
        f"kvdock.testing: {made / 'kvdock-zeta'} cannot be written (Permission denied); give another --out\n"
    )
    assert len(written) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_place_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        assert "cannot be written (Permission denied); give another --out" in refusal("zeta", "--out", str(tmp_path))
    finally:
        tmp_path.chmod(0o700)


def test_an_out_with_a_name_that_no_file_can_have_is_refused(tmp_path):
    assert "cannot be written (File name too long); give another --out" in refusal(
        "zeta", "--out", str(tmp_path / ("x" * 300))
    )


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path):
    there = tmp_path / "kvdock-zeta"
    there.mkdir()
    (there / "mine").write_text("mine", encoding="utf-8")
    done = CliRunner().invoke(main, ["new", "zeta", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{there} is there already and is left as it is; remove it, or give another --out or NAME" in done.output
    assert files_of(there) == {"mine": "mine"}


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(new.PlanError, match=r"kvdock-zeta cannot be written \(Not a directory\); give another --out"):
        new.write("zeta", "hardware", tmp_path / "file")
