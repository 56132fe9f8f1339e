"""Error rates against counts by hand, and Whisper's normalizers."""

import pytest

from tasks.whisper.metrics import ErrorRates


def rates(pairs: list[tuple[str, str]], normalize: str = "none") -> dict[str, float]:
    metric = ErrorRates(normalize)  # type: ignore[arg-type]
    for said, right in pairs:
        metric.update([said], [right])
    return {name: float(value) for name, value in metric.compute().items()}


def test_rates_are_over_all_texts_together() -> None:
    found = rates([("one two", "one two three"), ("", "four"), ("five", "five")])
    assert found == pytest.approx({"wer": 2 / 5, "cer": (6 + 4) / (13 + 4 + 4)})


def test_what_is_too_much_counts_also_where_nothing_is_said() -> None:
    assert rates([("a b", ""), ("c", "c")]) == pytest.approx({"wer": 2.0, "cer": 3.0})
    assert rates([("a", "")]) == {}


def test_other_scripts() -> None:
    assert rates([("你好", "你好吗"), ("مرحبا", "مرحبا")])["cer"] == pytest.approx(1 / 8)


def test_normalizers() -> None:
    pair = [("Twenty-one colours, right?", "21 colors right")]
    assert rates(pair)["wer"] == 1.0
    assert rates(pair, "english")["wer"] == 0.0
    assert rates([("Grüße, Welt!", "grüße welt")], "basic")["cer"] == 0.0
