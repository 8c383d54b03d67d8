"""schemathesis over the gateway's own OpenAPI document, against a gateway process.

About half of ``TAUT_FUZZ_CASES`` (default 1,000, 20,000 in full); the count is printed at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from fuzz_cases import fuzz_cases
from live_processes import call, house, report

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance"
)


async def test_schemathesis_finds_no_fault_in_any_route(tmp_path: Path) -> None:
    async with house(tmp_path, engines=2) as home:
        document = json.loads(call(home.port, "GET", "/openapi.json")[1])
        operations = sum(len(methods) for methods in document["paths"].values())
        result = tmp_path / "report.json"
        argv = ["run", f"http://127.0.0.1:{home.port}/openapi.json", "--checks", CHECKS]
        argv += ["--phases", "examples,coverage,fuzzing", "--mode", "all", "--seed", "4"]
        argv += ["--max-examples", str(max(5, fuzz_cases() // 2 // operations))]
        argv += ["--continue-on-failure", "--generation-database", "none", "--no-color"]
        argv += ["--report", "json", "--report-json-path", str(result), "--warnings", "off"]
        program = Path(sys.executable).with_name("schemathesis")
        here = str(Path(__file__).parent)
        started = await asyncio.create_subprocess_exec(
            str(program),
            *argv,
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": here},
        )
        output = (await started.communicate())[0].decode(errors="replace")
        assert result.exists(), output[-3000:]
        found = json.loads(result.read_text())
        count = found["test_cases"]["generated"]
        report(f"schemathesis: {count} cases over {operations} operations")
        assert found["errors"] == [], output[-3000:]
        assert found["test_cases"]["unique_failures"] == 0, output[-6000:]
        assert count >= fuzz_cases() // 10
        assert sum(engine.state()["started"] for engine in home.engines) > 0
        assert home.malformed() == []
        await home.quiet()
