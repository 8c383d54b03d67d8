"""The CUDA worker's Dockerfile, whose base cannot be had here: its own steps on a stand-in.

The stand-in holds what ``taut worker`` imports and the name of vLLM, nothing of its code: that
vLLM and CUDA work in the image is NOT tested here.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest
from built_images import base_image, build_module
from container_engine import REPOSITORY, engine

pytestmark = pytest.mark.timeout(1200)
IMAGE, STAND_IN = "localhost/taut/worker-cuda-on-a-stand-in", "localhost/taut/vllm-stand-in"
PACKAGES = (
    "typer rich click shellingham markdown-it-py mdurl pygments pydantic pydantic-core filelock "
    "annotated-types annotated-doc typing-extensions typing-inspection pyyaml tqdm"
)
SITE = "/usr/local/lib/python3.11/dist-packages"
DOCKERFILE = f"""
FROM scratch AS wheelhouse
FROM {{base}}
RUN --mount=type=bind,from=wheelhouse,target=/wheelhouse python3 -m venv /tmp/venv \
    && /tmp/venv/bin/pip --quiet install --no-index --no-deps --find-links /wheelhouse \
       --target {SITE} {PACKAGES} \
    && mkdir {SITE}/vllm-0.26.0.dist-info \
    && printf 'Metadata-Version: 2.1\\nName: vllm\\nVersion: 0.26.0\\n' \
       > {SITE}/vllm-0.26.0.dist-info/METADATA
"""


def build_stand_in(base: str) -> None:
    here = engine()
    command = ["buildah", "bud", "--isolation", "chroot", "--layers", "--tag", STAND_IN]
    command += ["--build-context", f"wheelhouse={here.storage / 'wheels'}", "--file", "-"]
    subprocess.run(
        [*command, REPOSITORY / "docker"],
        input=DOCKERFILE.format(base=base),
        text=True,
        env=here.environment,
        check=True,
        timeout=600,
    )


def build_cuda(base: str) -> subprocess.CompletedProcess[str]:
    here, build = engine(), build_module()
    options = build.Options("buildah", base_image=base, wheels=here.storage / "wheels")
    *command, context = build.build_command("worker-cuda", options)
    command[command.index("--tag") + 1] = IMAGE
    command += ["--build-arg", f"BUILD_IMAGE={base_image()}", context]
    return here.run(*command, timeout_s=900, check=False)


@pytest.fixture(scope="module")
def built() -> Iterator[str]:
    here, build, base = engine(), build_module(), base_image()
    build.download_wheels(build.DEFAULT, here.storage / "wheels")
    build_stand_in(base)
    done = build_cuda(STAND_IN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    yield IMAGE
    here.podman("rmi", "--force", IMAGE, STAND_IN, check=False)


def test_steps_put_taut_beside_the_vllm_of_the_image(built: str):
    look = "from importlib.metadata import entry_points, version; import taut_deploy, json; "
    look += "(plugin,) = entry_points(group='vllm.general_plugins'); print(json.dumps("
    look += "[plugin.value, version('vllm'), taut_deploy.__file__]))"
    run = ("run", "--rm", "--read-only", "--cap-drop", "all", "--entrypoint", "python", built, "-c")
    plugin, vllm, where = json.loads(engine().podman(*run, look).stdout)
    assert plugin == "taut_kernels.vllm_plugin:register"
    assert vllm == "0.26.0"
    assert where.startswith("/opt/taut/site/")


def test_worker_runs_as_uid_10001_from_the_entry_point(built: str):
    said = engine().podman("run", "--rm", "--read-only", built).stdout
    assert "--shutdown-timeout" in said
    assert engine().inspect(built)["Config"]["User"] == "10001:10001"


def test_another_base_without_vllm_is_refused():
    done = build_cuda(base_image())
    assert done.returncode != 0
    assert "No package metadata was found for vllm" in done.stdout + done.stderr
