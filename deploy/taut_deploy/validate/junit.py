"""The verdicts as JUnit XML, one test case per limit, made from the JSON report alone.

FAIL is a ``failure`` and INCONCLUSIVE an ``error``: a CI system that reads the file then stops for
both, as the exit code does. A bound on latency that was not judged because nothing was measured and
the policy does not require it is ``skipped``. The format has no standard; what is written here are
the elements that Jenkins, GitLab and GitHub's reporters all read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ELEMENTS = {"FAIL": "failure", "INCONCLUSIVE": "error"}


def render_junit(report: Mapping[str, Any]) -> str:
    """Render a report.

    Args:
        report: the content of ``report.json``.
    """
    rules: Sequence[Mapping[str, Any]] = report["rules"]
    skipped: Sequence[Mapping[str, Any]] = report["latency"]["not_judged"]
    verdicts = [rule["verdict"] for rule in rules]
    counts = {
        "tests": str(len(rules) + len(skipped)),
        "failures": str(verdicts.count("FAIL")),
        "errors": str(verdicts.count("INCONCLUSIVE")),
        "skipped": str(len(skipped)),
        "time": str(report["wall_time_s"]),
    }
    root = ElementTree.Element("testsuites", {"name": "taut validate", **counts})
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        {"name": report["policy"]["name"], **counts, "timestamp": report["started_at"]},
    )
    for rule in rules:
        case = _case(suite, rule)
        if rule["verdict"] in _ELEMENTS:
            ElementTree.SubElement(
                case,
                _ELEMENTS[rule["verdict"]],
                {"type": rule["verdict"], "message": _clean(rule["reason"])},
            )
    for bound in skipped:
        why = f"not measured: {report['latency']['why_not']}"
        ElementTree.SubElement(_case(suite, bound), "skipped", {"message": _clean(why)})
    ElementTree.indent(root)
    encoded: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return encoded.decode() + "\n"


def _case(suite: ElementTree.Element, rule: Mapping[str, Any]) -> ElementTree.Element:
    at = "" if rule["concurrency"] is None else f" at concurrency {rule['concurrency']}"
    of = "" if rule.get("subject") is None else f"{rule['subject']} "
    name = f"{of}{rule['metric']} {rule['side']} {rule['limit']:g}{at}"
    attributes = {"classname": f"taut.validate.{rule['part']}", "name": name}
    return ElementTree.SubElement(suite, "testcase", attributes)


def _clean(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold."""
    return _NOT_IN_XML.sub("�", text)
