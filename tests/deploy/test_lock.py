"""requirements/lock.py: which files of an index a lock may name, and that ours name some."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"
PINNED = re.compile(r"\S+==\S+( ; platform_machine == \"x86_64\")?(\s+--hash=sha256:[0-9a-f]{64})+")


@pytest.fixture(scope="module")
def lock() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements_lock", FOLDER / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def listed(*names: str) -> list[dict[str, object]]:
    """An index's list; a file's sha256 is its name, here."""
    return [{"filename": name, "hashes": {"sha256": name}} for name in names]


@pytest.mark.parametrize(
    ("tags", "taken"),
    [
        ("py3-none-any", {"x86_64", "aarch64"}),
        ("py2.py3-none-any", {"x86_64", "aarch64"}),
        ("cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64", {"x86_64"}),
        ("cp311-cp311-manylinux_2_28_aarch64", {"aarch64"}),
        ("cp39-abi3-manylinux1_x86_64", {"x86_64"}),
        ("py3-none-linux_x86_64", {"x86_64"}),
        ("cp312-abi3-manylinux_2_28_x86_64", set()),
        ("cp312-cp312-manylinux_2_28_x86_64", set()),
        ("cp310-cp310-manylinux_2_28_x86_64", set()),
        ("cp311-cp311-musllinux_1_2_x86_64", set()),
        ("cp311-cp311-macosx_11_0_arm64", set()),
        ("cp311-cp311-win_amd64", set()),
        ("py312-none-any", set()),
        ("py2-none-any", set()),
    ],
)
def test_wheels_are_those_that_cpython_3_11_takes_on_linux(
    lock: ModuleType, tags: str, taken: set[str]
) -> None:
    from packaging.tags import parse_tag

    assert lock.machines(parse_tag(tags)) == taken


def test_a_source_archive_counts_where_a_machine_has_no_wheel(lock: ModuleType) -> None:
    other, source = "a-2.0-py3-none-any.whl", "a-1.0.tar.gz"
    intel, arm = (f"a-1.0-cp311-cp311-manylinux_2_28_{m}.whl" for m in ("x86_64", "aarch64"))
    assert lock.hashes_of("a", "1.0", listed(other, source, intel)) == sorted([source, intel])
    assert lock.hashes_of("a", "1.0", listed(source, intel, arm)) == sorted([intel, arm])
    assert lock.hashes_of("a", "1.0", listed(other, source)) == [source]


def test_what_images_are_made_of_has_a_wheel_for_both_machines(
    lock: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intel, arm = (f"a-1.0-cp311-cp311-manylinux_2_28_{m}.whl" for m in ("x86_64", "aarch64"))
    file = tmp_path / "service.txt"

    def locked(text: str, *files: str) -> int:
        file.write_text(text)
        return lock.main([], lambda _: listed(*files), tmp_path)

    assert locked("a==1.0\n", intel, arm) == 0
    assert locked("a==1.0\n", intel, "a-1.0.tar.gz") == 1
    assert "a==1.0: no wheel for aarch64, for which images are built" in capsys.readouterr().err
    assert locked('a==1.0 ; platform_machine == "x86_64"\n', intel, "a-1.0.tar.gz") == 0
    # Of what no image has, the source will do.
    file.unlink()
    file = tmp_path / "dev.txt"
    assert locked("a==1.0\n", intel, "a-1.0.tar.gz") == 0


def test_every_lock_of_an_image_is_held_to_that(
    lock: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = FOLDER.parent / "docker"
    monkeypatch.syspath_prepend(str(docker))
    images = runpy.run_path(str(docker / "locked_wheels.py"))["LOCKS"]
    locks = {name for names in images.values() for name in names}
    included = {
        one
        for name in locks
        for one in re.findall(r"^-r (\w+)\.txt", (FOLDER / f"{name}.txt").read_text(), re.MULTILINE)
    }
    assert locks >= {"otel", "cpu", "toolbox"}
    assert locks | included | {"build", "compile"} == lock._IN_IMAGES


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (listed("a-2.0-py3-none-any.whl", "a-1.0-1.egg"), "a==1.0: the index has no file"),
        ([{"filename": "a-1.0.tar.gz", "hashes": {"md5": "0"}}], "no sha256"),
    ],
)
def test_a_pin_without_a_hash_is_refused(
    lock: ModuleType, files: list[dict[str, object]], said: str
) -> None:
    with pytest.raises(lock.LockError, match=said):
        lock.hashes_of("a", "1.0", files)


def test_a_pin_of_one_machine_keeps_its_marker(lock: ModuleType) -> None:
    text = 'a==1.0 ; platform_machine == "x86_64" \\\n    --hash=sha256:old\n'
    made = lock.locked_text(text, lambda _: listed("a-1.0-py3-none-linux_x86_64.whl"))
    first, hashed = made.splitlines()
    assert first == 'a==1.0 ; platform_machine == "x86_64" \\'
    assert hashed == "    --hash=sha256:a-1.0-py3-none-linux_x86_64.whl"
    assert lock.locked_text(made, lambda _: listed("a-1.0-py3-none-linux_x86_64.whl")) == made


def test_check_changes_nothing_and_a_second_run_finds_nothing(
    lock: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.txt"
    text = "# Why.\n-r b.txt\na==1.0\nt==1.0+cpu --hash=sha256:kept\n"
    file.write_text(text)

    def index(name: str) -> list[dict[str, object]]:
        return listed(f"{name}-1.0-py3-none-any.whl")

    assert lock.main(["--check"], index, tmp_path) == 1
    assert file.read_text() == text
    assert lock.main([], index, tmp_path) == 0
    assert file.read_text() == (
        "# Why.\n-r b.txt\na==1.0 \\\n    --hash=sha256:a-1.0-py3-none-any.whl\n"
        "t==1.0+cpu \\\n    --hash=sha256:kept\n"
    )
    assert lock.main(["--check"], index, tmp_path) == 0
    file.write_text("a>=1.0\n")
    assert lock.main([], index, tmp_path) == 1
    assert "a.txt: 'a>=1.0': not an exact pin" in capsys.readouterr().err


def test_every_pin_of_ours_has_a_hash() -> None:
    files = sorted(FOLDER.glob("*.txt"))
    assert len(files) > 7
    for file in files:
        for line in re.sub(r"\\\n", " ", file.read_text()).splitlines():
            if line and not line.startswith(("#", "-r ")):
                assert PINNED.fullmatch(line), line
