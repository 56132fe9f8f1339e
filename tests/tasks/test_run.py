"""Run folders."""

from pathlib import Path

import pytest
from pytorch_lightning.utilities import rank_zero_only

from multimodal.pretrained.checkpoint import best_checkpoint
from tasks.run import create_run, find_run, read_config, read_metrics


def test_runs_that_start_together_have_folders_of_their_own(tmp_path: Path) -> None:
    assert len({create_run(tmp_path, "vit") for _ in range(20)}) == 20


def test_a_process_of_the_same_run_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(tmp_path, "vit")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert create_run(tmp_path, "vit") == run
    monkeypatch.delenv("MULTIMODAL_RUN")
    assert not create_run(tmp_path, "vit").exists()


def test_a_run_is_found_by_its_folder_and_its_checkpoints(trained: Path) -> None:
    assert find_run(str(trained)) == trained
    assert find_run(str(trained / "checkpoints" / "last.ckpt")) == trained
    assert find_run("timm:vit_tiny_patch16_224") is None


def test_the_best_checkpoint_or_else_the_last(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert best_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "last.ckpt"
    (tmp_path / "checkpoints" / "best.ckpt").touch()
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "best.ckpt"


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    for text in ("a: [", "just text"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=r"config\.yaml: "):
            read_config(tmp_path)


def test_no_metrics_are_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("row", ["0,abc", "abc,1", ",1", "0,1,2"])
def test_a_damaged_row_is_named_but_the_last_may_be_torn(tmp_path: Path, row: str) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,lr\n0,1.0\n{row}\n1,1.0\n")
    with pytest.raises(ValueError, match=r"metrics\.csv: row 2 is damaged"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.csv").write_text(f"step,lr\n0,1.0\n{row}")
    assert read_metrics(tmp_path) == [{"step": 0, "lr": 1}]
