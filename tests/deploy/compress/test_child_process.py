"""How processes of one run begin: with one import for all where none of them computes on a card."""

from __future__ import annotations

import os

import pytest

from taut_deploy.compress.child_process import context_for

# Evaluated there: a function of this module could not be imported.
IMPORTED = "'taut_deploy.compress.driver' in __import__('sys').modules"


def test_processes_on_a_cpu_are_forks_of_one_that_imported_the_compressor():
    context = context_for(["cpu", "cpu"])
    servers = set()
    for _ in range(2):
        with context.Pool(1) as pool:
            servers.add(pool.apply(os.getppid))
            assert pool.apply(eval, (IMPORTED,))
    (server,) = servers
    assert server != os.getpid()


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cpu", "cuda"]])
def test_processes_for_cards_begin_anew(devices):
    assert context_for(devices).get_start_method() == "spawn"
