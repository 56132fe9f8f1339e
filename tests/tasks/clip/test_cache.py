"""Embeddings on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tasks.clip import cache
from tasks.clip.cache import Cache
from tests.tasks.commands import ROOT


def test_what_is_written_is_read(tmp_path: Path) -> None:
    kept = Cache(tmp_path / "deep" / "down")
    rows = torch.randn(3, 4)
    assert kept.read("a", 1) is None
    kept.write(rows, {"\udcff.png": [2**60, 1]}, "a", 1)
    found = kept.read("a", 1)
    assert found is not None
    assert torch.equal(found.embeddings, rows)
    assert found.table == {"\udcff.png": [2**60, 1]}
    assert kept.read("a", 2) is None


def test_a_newer_version_reads_nothing_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path).write(torch.zeros(1, 1), None, "a")
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    assert Cache(tmp_path).read("a") is None


def test_what_nobody_used_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Cache(tmp_path)
    for name in "abc":
        kept.write(torch.zeros(1000, 1), None, name)
    assert kept.read("a") is not None
    monkeypatch.setattr(cache, "LIMIT", 10_000)
    kept.write(torch.zeros(1000, 1), None, "d")
    assert [name for name in "abcd" if kept.read(name)] == ["a", "d"]


def test_processes_lose_no_rows_of_each_other(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from tasks.clip.cache import Cache
kept, name = Cache(Path(sys.argv[1])), sys.argv[2]
for number in range(30):
    with kept.lock():
        found = kept.read("rows")
        table = {**(found.table if found else {}), f"{name}{number}": number}
        kept.write(torch.ones(len(table), 2), table, "rows")
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name], cwd=ROOT, stderr=subprocess.PIPE)
        for name in "xy"
    ]
    assert [process.communicate()[1] for process in processes] == [b"", b""]
    found = Cache(tmp_path).read("rows")
    assert found is not None
    assert sorted(found.table) == sorted(f"{name}{number}" for name in "xy" for number in range(30))
    assert not list(tmp_path.glob("*.part"))
